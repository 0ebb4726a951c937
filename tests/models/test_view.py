"""A view is the model: same logits, for every family, all tokens or some, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.families import FAMILIES, HIERARCHICAL, OPAQUE
from tests.helpers import assert_same_state, batch, random_keep, relative, state_of, viewed
from tests.oracles.attention import readout
from tests.oracles.masked_forward import masked_logits
from torch import nn

import vitrail
from vitrail import VitrailError
from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture
from vitrail.core.precision import lowered
from vitrail.engine.trace import trace
from vitrail.methods.registry import build_method
from vitrail.models.black_box import BlackBox
from vitrail.models.vit import ViT

SINGLE = torch.float32


@pytest.mark.parametrize("name", [*FAMILIES, *HIERARCHICAL])
def test_logits_are_the_modules_own(name: str) -> None:
    family, module, view = viewed(name, SINGLE)
    images = batch(name, dtype=SINGLE)
    expected = families.expected_logits(family, module, images)
    tolerance = 1e-5 * max(1.0, float(expected.abs().max()))
    with torch.no_grad():
        assert (view.logits(images) - expected).abs().max() <= tolerance
        alone = torch.cat([view.logits(image[None]) for image in images])
        assert (alone - expected).abs().max() <= tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_geometry_is_read_from_the_model(name: str) -> None:
    family, _, view = viewed(name, SINGLE)
    assert (view.grid, view.num_prefix, view.size) == (family.grid, family.prefix, family.image_size)
    tokens = view.embed(batch(name, dtype=SINGLE))
    assert tokens.shape[1] == family.tokens
    assert torch.equal(view.encode(tokens), view.logits(batch(name, dtype=SINGLE)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_subset_of_tokens_is_the_same_as_masked_keys(name: str) -> None:
    family, module, view = viewed(name, SINGLE)
    images = batch(name, dtype=SINGLE)
    for kept in {1, family.patches // 2, family.patches - 1, family.patches}:
        keep = random_keep(family, len(images), kept, seed=kept)
        found = view.encode(view.embed(images), keep)
        assert (found - masked_logits(family, module, images, keep)).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_products_in_another_precision_are_the_same_network(name: str) -> None:
    family, module, view = viewed(name)
    images, keep = batch(name), random_keep(family, 3, family.patches // 2, seed=0)
    before = state_of(module)
    with torch.no_grad():
        expected = view.logits(images), view.encode(view.embed(images), keep)
        copy = lowered(view.architecture(), torch.float64)  # a copy in the same precision, q, k and v in one
        attention = copy.blocks[0].attention
        assert attention.together is not None
        assert attention.together.weight.shape[0] == sum(x.weight.shape[0] for x in
                                                         (attention.q, attention.k, attention.v))  # fmt: skip
        tokens = Walk(copy).embed(images)
        found = Walk(copy).encode(tokens), Walk(copy, keep=keep).encode(view.present(tokens, keep))
        assert lowered(view.architecture(), torch.bfloat16).blocks[0].mlp.fc1.weight.dtype == torch.bfloat16
        assert view.blocks[0].mlp.fc1.weight.dtype == torch.float64
    assert all(relative(ours, theirs) < 1e-12 for ours, theirs in zip(found, expected, strict=True))
    assert_same_state(before, state_of(module))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_patch_left_is_an_error_where_patches_are_pooled(name: str) -> None:
    family, module, view = viewed(name)
    images, none = batch(name), torch.zeros(3, 0, dtype=torch.long)
    if view.pools_patches:
        with pytest.raises(VitrailError, match="no patch is left"):
            view.encode(view.embed(images), none)
    else:
        assert relative(view.encode(view.embed(images), none), masked_logits(family, module, images, none)) < 1e-9


def test_one_embedded_image_serves_many_subsets() -> None:
    family, _, view = viewed("timm_vit")
    tokens = view.embed(batch("timm_vit", 1))
    keep = random_keep(family, 5, 4)
    together = view.encode(tokens, keep)
    apart = torch.cat([view.encode(tokens, row[None]) for row in keep])
    assert relative(together, apart) < 1e-9
    assert relative(view.encode(tokens, keep[0]), apart[:1]) < 1e-9


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.tensor([[0, 99]] * 3), "outside"),
        (torch.tensor([[-1, 0]] * 3), "outside"),
        (torch.tensor([[0.5]] * 3), "patch numbers"),
        (torch.zeros(2, 2, dtype=torch.long), "patch numbers"),
    ],
)
def test_wrong_subsets_are_errors(keep: torch.Tensor, message: str) -> None:
    _, _, view = viewed("timm_vit")
    with pytest.raises(VitrailError, match=message):
        view.encode(view.embed(batch("timm_vit", 3)), keep)


@pytest.mark.parametrize("name", FAMILIES)
def test_readout_is_what_the_head_pools(name: str) -> None:
    family, module, view = viewed(name)
    images = batch(name)
    found = view.readout(images)
    assert relative(found, readout(family, module, images)) < 1e-9
    assert torch.allclose(found.sum(1), torch.ones(3, dtype=found.dtype))


@pytest.mark.parametrize("name", OPAQUE)
def test_what_cannot_be_written_as_operations_is_a_black_box_with_the_reason(name: str) -> None:
    build, class_name = OPAQUE[name]
    module = build()
    view = vitrail.wrap(module)
    assert isinstance(view, BlackBox)
    assert not view.has_tokens
    assert view.note.startswith(f"{class_name} cannot be seen through: ")
    images = torch.randn(2, 3, *view.size)
    assert torch.equal(view.logits(images), module(images))
    with pytest.raises(VitrailError, match=class_name):
        vitrail.wrap(module, head=nn.Linear(families.WIDTH, 3), pool="avg")


FLEXIBLE = {"pos_embed_grid_size": (5, 6)}
GEMMA = {"head_dim": 16, "intermediate_size": 48, "position_embedding_size": 9}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "class attention without a class": ("cait_xxs24_224", {"img_size": (24, 32), "global_pool": "avg"}),
    "attention pool": ("naflexvit_base_patch16_map", FLEXIBLE),
    "attention pool of all tokens": (
        "naflexvit_base_patch16_map", {"pool_include_prefix": True, "pre_norm": True, "qk_norm": True},
    ),
    "positions cut out of a square": ("naflexvit_base_patch16_radio_v3", FLEXIBLE),
    "convolution": ("naflexvit_base_patch16_gap", {**FLEXIBLE, "embed_proj_type": "conv", "global_pool": "avgmax"}),
    "channels first": ("naflexvit_base_patch16_gap", {**FLEXIBLE, "patchify_channels_last": False}),
    "mixed rotations": ("naflexvit_base_patch16_gap", {"rope_type": "mixed", "pos_embed": "none"}),
    "rotations by axes": ("naflexvit_base_patch16_gap", {"rope_type": "mrope", "rope_mrope_section": (2, 3, 3)}),
    "shared keys": (
        "naflexvit_base_patch16_gap",
        {"attn_type": "rope", "num_kv_heads": 1, "attn_gated": True, "qkv_fused": False, "attn_only_layer_scale": True},
    ),
    "shared normed values": ("gemma4_vit_570m", {**GEMMA, "num_kv_heads": 1}),
    "patches that are not square": ("gemma4_vit_570m", {**GEMMA, "patch_size": (8, 4), "final_norm": False}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_networks_have_their_logits(variant: str) -> None:
    name, options = VARIANTS[variant]
    tiny = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "patch_size": 8}
    module = timm.create_model(name, **{**tiny, **options}).eval()
    families.randomize(module, seed=0)
    view = vitrail.wrap(module, img_size=None if "img_size" in options else (24, 32))
    assert isinstance(view, ViT)
    images = torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(view.logits(images), module(images)) < 1e-5


def test_a_network_of_any_shape_is_seen_at_sizes_that_divide_into_patches() -> None:
    module = timm.create_model("naflexvit_base_patch16_gap", embed_dim=32, depth=1, num_heads=2, num_classes=3)
    assert vitrail.wrap(module).size == (384, 384)
    with pytest.raises(
        VitrailError, match="16×16 pixels, which 100×96 pixels are no multiple of: give another img_size"
    ):
        vitrail.wrap(module, img_size=(100, 96))


def test_layers_that_clip_are_a_black_box_until_they_do_not() -> None:
    module = timm.create_model("gemma4_vit_167m", embed_dim=32, depth=1, num_heads=2, num_classes=3, **GEMMA).eval()
    families.randomize(module, seed=0)
    assert isinstance(vitrail.wrap(module, img_size=32), ViT), "bounds at infinity clip nothing"
    for part in module.modules():
        if hasattr(part, "input_max"):
            part.input_max.fill_(0.5)
    view = vitrail.wrap(module, img_size=32)
    assert isinstance(view, BlackBox)
    assert "set_clamp_enabled(False)" in view.note
    clipped = view.logits(torch.ones(1, 3, 32, 32))
    module.set_clamp_enabled(False)
    view = vitrail.wrap(module, img_size=32)
    assert isinstance(view, ViT)
    assert not torch.allclose(view.logits(torch.ones(1, 3, 32, 32)), clipped, atol=1e-3)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_hierarchical_models_have_features_and_no_tokens(name: str) -> None:
    _, _, view = viewed(name, SINGLE)
    images = batch(name, 2, SINGLE)
    shapes = [tuple(view.features(images, stage).shape) for stage in range(view.num_stages)]
    assert all(a[0] == 2 and a[2] == a[3] for a in shapes)
    assert shapes[-2] == tuple(view.features(images).shape)
    assert sorted(s[1] for s in shapes) == [s[1] for s in shapes], "channels grow with the stages"
    for call in (lambda: view.embed(images), lambda: view.encode(images), lambda: view.blocks):
        with pytest.raises(VitrailError, match=r"has no .*`vitrail methods --model` lists the methods that work on it"):
            call()
    with pytest.raises(VitrailError, match="no stage"):
        view.features(images, 9)


@pytest.mark.parametrize("name", ["timm_swin", "torchvision_swin", "hf_swinv2"])
def test_stage_features_are_the_outputs_of_the_last_block(name: str) -> None:
    _, module, view = viewed(name, SINGLE)
    stages = {"timm_swin": lambda: module.layers, "torchvision_swin": lambda: module.features[1::2],
              "hf_swinv2": lambda: [s.blocks for s in module.base_model.encoder.layers]}[name]()  # fmt: skip
    seen: list[torch.Tensor] = []
    last = stages[-2].blocks[-1] if hasattr(stages[-2], "blocks") else stages[-2][-1]
    hook = last.register_forward_hook(lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o))
    try:
        features = view.features(batch(name, 2, SINGLE))
    finally:
        hook.remove()
    expected = seen[0].reshape(2, *features.shape[2:], features.shape[1]).permute(0, 3, 1, 2)
    assert torch.equal(features, expected)


@pytest.mark.parametrize("name", [*FAMILIES, *HIERARCHICAL])
def test_nothing_is_changed_by_success_or_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = {**FAMILIES, **HIERARCHICAL}[name]
    module = family.build(SINGLE)
    module.train()  # the user's mode, whatever it is, comes back
    next(module.parameters()).requires_grad_(False)
    next(reversed(list(module.parameters()))).grad = torch.ones_like(next(reversed(list(module.parameters()))))
    before = state_of(module)
    options = family.wrap(module) | ({"img_size": family.image_size} if name.startswith("torchvision_swin") else {})
    view = vitrail.wrap(module, **options)
    images = batch(name, 2, SINGLE)
    method = "decompx.skipplus" if view.has_tokens else "random"
    vitrail.explain(view, images, method)
    assert_same_state(before, state_of(module))

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("vitrail.models.view.View.score", broken)
    monkeypatch.setattr("vitrail.models.view.View.class_scores", broken)
    with pytest.raises(RuntimeError, match="injected"):
        vitrail.explain(view, images, method)
    if not view.has_tokens:
        monkeypatch.setattr(type(module), "forward", broken)
        with pytest.raises(RuntimeError, match="injected"):
            view.logits(images)
    assert_same_state(before, state_of(module))


@pytest.mark.parametrize("name", ["timm_deit", "timm_dinov3", "hf_dinov3_token", "timm_rope_mixed"])
def test_training_mode_of_the_model_makes_no_difference(name: str) -> None:
    family = FAMILIES[name]
    module = family.build(SINGLE)
    view = vitrail.wrap(module, **family.wrap(module))
    images = batch(name, dtype=SINGLE)
    expected = view.logits(images)
    module.train()
    assert torch.equal(view.logits(images), expected)


def test_a_view_follows_its_models_present_weights() -> None:
    module = FAMILIES["timm_vit"].build()
    view, images = vitrail.wrap(module), batch("timm_vit", dtype=SINGLE)
    before, mark = view.logits(images), view.fingerprint()
    with torch.no_grad():
        module.blocks[0].attn.qkv.weight.mul_(0.5)
    assert not torch.allclose(view.logits(images), before)
    assert view.fingerprint() != mark
    module.double()
    assert view.logits(images).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["timm_vit", "timm_dinov2_giant", "timm_beit", "timm_siglip", "hf_dinov3_gated"])
def test_half_precision_weights_are_traced_in_single_precision(name: str, dtype: torch.dtype) -> None:
    """As a model whose weights are the same rounded numbers, in single precision."""
    module = FAMILIES[name].build(dtype)
    rounded = {"module": module, **FAMILIES[name].wrap(module)}
    widened = {
        key: value.float() if isinstance(value, nn.Module) else value for key, value in copy.deepcopy(rounded).items()
    }
    images, target = batch(name, dtype=SINGLE), torch.tensor([0, 1, 2])
    half, single = (
        trace(vitrail.wrap(**options), images, target, rule="frozen", keep={"x", "gx", "bias"})
        for options in (rounded, widened)
    )
    rounding = torch.finfo(dtype).eps if "dinov3" in name else 1e-5  # its rotary tables have the model's precision
    assert half.logits.dtype == SINGLE
    assert relative(half.logits, single.logits) < rounding
    for layer in range(half.num_layers):
        for kept in ("x", "gx"):
            assert half[kept][layer].dtype == SINGLE
            assert relative(half[kept][layer], single[kept][layer]) < 10 * rounding
    assert relative(half.bias_from(0), single.bias_from(0)) < 10 * rounding


def test_a_readout_reads_the_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view: Any = viewed("timm_vit")[2]
    describe, reads = view.describe, list[Architecture]()

    def spy() -> Architecture:
        reads.append(describe())
        return reads[-1]

    monkeypatch.setattr(view, "describe", spy)
    view.readout(batch("timm_vit", 1))
    assert len(reads) == 1


def test_wrong_image_shapes_say_what_is_expected() -> None:
    _, _, view = viewed("timm_vit_not_square")
    height, width = view.size
    with pytest.raises(VitrailError, match=rf"\(B, 3, {height}, {width}\)"):
        view.logits(torch.zeros(1, 3, width, height))


def test_other_sizes_only_where_the_network_takes_them() -> None:
    dynamic = FAMILIES["timm_dinov3"].build()
    assert dynamic.dynamic_img_size
    view = vitrail.wrap(dynamic, img_size=(48, 64))
    images = torch.randn(2, 3, 48, 64)
    assert torch.allclose(view.logits(images), dynamic(images), atol=1e-5)
    fixed = FAMILIES["timm_vit"].build()
    with pytest.raises(VitrailError, match="set_input_size"):
        vitrail.wrap(fixed, img_size=(48, 64))
    hf = FAMILIES["hf_vit"].build()
    view, images = vitrail.wrap(hf, img_size=48), torch.randn(2, 3, 48, 48)
    assert torch.allclose(view.logits(images), hf(images, interpolate_pos_encoding=True).logits, atol=1e-5)


def test_pixels_that_make_no_patch_are_no_part_of_the_input() -> None:
    """As in SigLIP with 384 pixels and patches of 14: the last six rows and columns are never looked at."""
    import timm
    import transformers

    vision = {"image_size": 39, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    siglip = transformers.SiglipConfig(vision_config=vision, text_config={"bos_token_id": 0, "eos_token_id": 1})
    for module in (
        timm.create_model("deit_tiny_patch16_224", img_size=(37, 43), patch_size=8, depth=2, num_classes=5),
        transformers.SiglipForImageClassification(siglip),
    ):
        families.randomize(module, seed=1)
        view = vitrail.wrap(module.eval())
        made = torch.randn(2, 3, *view.preprocessing.library_size)
        expected = module(made)
        expected = getattr(expected, "logits", expected)
        rows, columns = view.size
        assert (rows % 8, columns % 8) == (0, 0)
        assert (rows, columns) < view.preprocessing.library_size
        for images in (made, made[..., :rows, :columns]):
            assert torch.allclose(view.logits(images), expected, atol=1e-5)
            found = vitrail.explain(view, images[0], "gradient", target=0)
            assert found.image.size == (columns, rows)
            assert found.box == (0, 0, columns, rows)
        assert build_method("occlusion", view).attribute(made, 0).shape == (2, rows, columns)


@torch.no_grad()
def test_blocks_of_several_attentions_are_one_attention_with_all_heads() -> None:
    import timm

    module = timm.create_model("vit_small_patch16_18x2_224", num_classes=5, img_size=(24, 32), patch_size=8,
                               embed_dim=32, depth=3, num_heads=2, init_values=1e-5).eval()  # fmt: skip
    families.randomize(module, seed=3)
    module.double()
    view, images = vitrail.wrap(module), torch.randn(2, 3, 24, 32, dtype=torch.float64)
    assert relative(view.logits(images), module(images)) < 1e-12
    assert view.blocks[0].attention.heads == 4
    found = trace(view, images, torch.tensor([1, 2]), rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-12
    keep = torch.tensor([[0, 3, 7, 8], [11, 2, 5, 1]])
    seen = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    for image, kept in enumerate(keep):
        removed = [1 + patch for patch in range(12) if patch not in kept]
        seen[image, :, :, removed] = False
    masked = module.forward_head(module.forward_features(images, attn_mask=seen))
    assert relative(view.encode(view.embed(images), keep), masked) < 1e-12
    for method in ("decompx.skipplus", "trans_att", "alti", "vtranm", "tis"):
        assert vitrail.explain(view, images[0], method).map.isfinite().all()
    assert [len(layer) for layer in view.layers()[:-1]] == [len(list(b.parameters())) for b in module.blocks]


def test_deepseeks_encoder_with_a_classifier() -> None:
    """Its norms compute in single precision whatever the input is."""
    import timm

    module = timm.create_model("deepseek_vit_412m", num_classes=5, img_size=(24, 32), patch_size=8, embed_dim=32,
                               depth=3, num_heads=2).eval()  # fmt: skip
    families.randomize(module, seed=3)
    view, images = vitrail.wrap(module), torch.randn(2, 3, 24, 32)
    assert view.grid == (3, 4)
    torch.testing.assert_close(view.logits(images), module(images).detach(), atol=1e-5, rtol=1e-5)
    other = vitrail.wrap(module, img_size=(32, 24))
    torch.testing.assert_close(other.logits(images.mT), module(images.mT).detach(), atol=1e-5, rtol=1e-5)
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5
    for method in ("decompx.skipplus", "vtranm", "tis"):
        assert vitrail.explain(view, images[0], method).map.isfinite().all()


def test_eva_attention_pool_sees_its_prefix_tokens() -> None:
    import timm

    module = timm.create_model("vit_pe_core_tiny_patch16_384", num_classes=5, img_size=32, patch_size=8, embed_dim=32,
                               depth=2, num_heads=2, attn_pool_num_heads=2).eval()  # fmt: skip
    families.randomize(module, seed=3)
    view, images = vitrail.wrap(module), torch.randn(2, 3, 32, 32)
    assert torch.allclose(view.logits(images), module(images), atol=1e-5)
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5
    assert found.readout.shape[1] == module.patch_embed.num_patches + module.num_prefix_tokens


def test_head_and_pool_go_together() -> None:
    backbone = FAMILIES["hf_dinov3_token"].build()
    with pytest.raises(VitrailError, match="head= and pool="):
        vitrail.explain(backbone, torch.zeros(3, 24, 32))
    with pytest.raises(VitrailError, match='pool="token"'):
        vitrail.wrap(backbone, head=nn.Linear(32, 5))
    with pytest.raises(VitrailError, match="pool= goes with head="):
        vitrail.wrap(FAMILIES["timm_vit"].build(), pool="avg")


def _backbone(name: str, pool: str) -> tuple[nn.Module, nn.Linear]:
    """A headless backbone, and a linear probe for what it pools."""
    import transformers

    if name in ("ViT", "DeiT"):
        sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
        config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=2, pooler_output_size=20)
        backbone, width = getattr(transformers, f"{name}Model")(config), 20 if pool == "pooler" else 32
        families.randomize(backbone, seed=5)
    else:
        module = FAMILIES[name].build()
        inner = module if name.startswith(("timm", "torchvision", "hf_dinov3")) else module.base_model
        backbone, width = getattr(module, "vision_model", inner), 32
    head = nn.Linear(width, 5)
    families.randomize(head, seed=6)
    return backbone.eval(), head


@pytest.mark.parametrize(
    ("name", "pool"),
    [("ViT", "pooler"), ("DeiT", "pooler"), ("hf_clip", "pooler"), ("hf_clip", "token"), ("hf_siglip", "map"),
     ("hf_siglip", "pooler"), ("hf_beit_mean", "pooler"), ("hf_beit_token", "pooler"), ("hf_dinov2", "pooler"),
     ("hf_dinov3_avg", "pooler")],
)  # fmt: skip
def test_what_a_backbone_pools_can_be_probed(name: str, pool: str) -> None:
    backbone, head = _backbone(name, pool)
    images = torch.randn(3, 3, *(24, 32) if name == "hf_dinov3_avg" else (32, 32))
    view = vitrail.wrap(backbone, head=head, pool=pool)
    out = backbone(images)
    expected = head(out.last_hidden_state[:, 0] if pool == "token" else out.pooler_output)
    assert torch.allclose(view.logits(images), expected, atol=1e-5)
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5, "the pooler is an operation like any other"
    for method in ("gradient", "decompx", "occlusion", "rollout"):
        assert vitrail.explain(view, images[0], method).map.isfinite().all()


@pytest.mark.parametrize("pool", ["map", "avg"])
def test_an_attention_pool_of_timm_can_be_probed(pool: str) -> None:
    module, head = FAMILIES["timm_siglip"].build(), nn.Linear(32, 5)
    images = batch("timm_siglip", dtype=SINGLE)
    view = vitrail.wrap(module, head=head, pool=pool)
    tokens = module.forward_features(images)
    pooled = module.attn_pool(tokens) if pool == "map" else tokens.mean(1)
    assert torch.allclose(view.logits(images), head(module.fc_norm(pooled)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pool", "message"),
    [
        ("timm_vit_gap", "token", "VisionTransformer has no class token"),
        ("timm_siglip", "token", "VisionTransformer has no class token"),
        ("hf_siglip", "token", "SiglipVisionModel has no class token"),
        ("timm_vit", "map", "VisionTransformer has no attention pool"),
        ("timm_vit", "pooler", "VisionTransformer has no pooler"),
        ("torchvision_vit", "map", "VisionTransformer has no attention pool"),
        ("hf_clip", "map", "CLIPVisionModel has no attention pool"),
        ("hf_vit", "pooler", "ViTModel has no pooler"),
    ],
)
def test_a_pooling_that_a_backbone_does_not_have_is_refused(name: str, pool: str, message: str) -> None:
    backbone, head = _backbone(name, pool)
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(backbone, head=head, pool=pool)


def test_registers_are_no_class_token() -> None:
    import timm

    module = timm.create_model("vit_medium_patch16_reg4_gap_256", img_size=32, patch_size=8, embed_dim=32, depth=2,
                               num_heads=2, num_classes=0).eval()  # fmt: skip
    with pytest.raises(VitrailError, match="has no class token"):
        vitrail.wrap(module, head=nn.Linear(32, 5), pool="token")
    assert vitrail.wrap(module, head=nn.Linear(32, 5), pool="avg").num_prefix == 4
