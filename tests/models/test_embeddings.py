"""Backbones without a head: their output is an embedding, which images are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from tests import families
from tests.common import noise
from tests.families import WIDTH
from tests.helpers import assert_same_state, state_of
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.models.loading import load_embedder
from vitrail.models.questions import embed
from vitrail.targets import Box, Callable, Class, Contrast, Group, Region, Similarity, Text

DOUBLE = torch.float64
TINY = {"embed_dim": WIDTH, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}


def randomized(module: nn.Module) -> nn.Module:
    families.randomize(module, seed=0)
    return module.eval().double()


def of_timm(name: str, **options: Any) -> nn.Module:
    return randomized(timm.create_model(name, **{**TINY, "num_classes": 0, **options}))


def of_transformers(kind: str, config: str, **options: Any) -> nn.Module:
    tiny = {"image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        return randomized(getattr(transformers, kind)(getattr(transformers, config)(**tiny, **options)))


def of_torchvision() -> nn.Module:
    module = families._torchvision_vit()
    module.heads = nn.Identity()
    return randomized(module)


def own_token(module: Any, pixels: Tensor) -> Tensor:
    return module(pixels).last_hidden_state[:, 0]


def own_pooler(module: Any, pixels: Tensor) -> Tensor:
    return module(pixels).pooler_output


def whole(module: Any, pixels: Tensor) -> Tensor:
    return module(pixels)


BACKBONES: dict[str, tuple[Any, Any]] = {
    "timm dinov2": (lambda: of_timm("vit_small_patch14_dinov2"), whole),
    "timm mean": (lambda: of_timm("vit_base_patch16_224", global_pool="avg"), whole),
    "timm attention pool": (lambda: of_timm("vit_base_patch16_siglip_224"), whole),
    "timm eva": (lambda: of_timm("eva02_tiny_patch14_224"), whole),
    "timm clip": (lambda: of_timm("vit_base_patch16_clip_224.openai", num_classes=512), whole),
    "torchvision": (of_torchvision, whole),
    "hf vit": (lambda: of_transformers("ViTModel", "ViTConfig", intermediate_size=64), own_token),
    "hf dinov2": (lambda: of_transformers("Dinov2Model", "Dinov2Config", mlp_ratio=2), own_pooler),
    "hf dinov3": (lambda: of_transformers("DINOv3ViTModel", "DINOv3ViTConfig", intermediate_size=64), own_pooler),
    "hf beit": (lambda: of_transformers("BeitModel", "BeitConfig", intermediate_size=64), own_pooler),
    "hf clip": (lambda: of_transformers("CLIPVisionModel", "CLIPVisionConfig", intermediate_size=64), own_pooler),
    "hf siglip": (lambda: of_transformers("SiglipVisionModel", "SiglipVisionConfig", intermediate_size=64), own_pooler),
}


QUICK = ("timm dinov2", "timm clip", "torchvision", "hf vit", "hf siglip")


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in BACKBONES])
def test_the_output_is_the_embedding_of_the_module(name: str) -> None:
    make, own = BACKBONES[name]
    module, pixels = make(), images()
    before = state_of(module)
    with torch.no_grad():
        expected = own(module, pixels)
    view = vitrail.wrap(module)
    assert torch.allclose(view.logits(pixels), expected, rtol=0, atol=1e-10 * max(1.0, float(expected.abs().max())))
    assert torch.allclose(embed(view, "dot", pixels), expected, rtol=0, atol=1e-10)
    assert (view.output, view.labels, view.num_classes) == ("score", None, expected.shape[1])
    cosine = float(torch.cosine_similarity(*expected, dim=0))
    alike = vitrail.similar(view, *pixels, pairs=False)
    assert alike.score == pytest.approx(cosine, abs=1e-6)
    made = trace(alike.first.model, pixels[:1], rule="frozen", keep=("x", "gx", "bias"), layers=[0])
    assert float((made["x"][0] * made["gx"][0]).sum() + made.bias_from(0)) == pytest.approx(cosine, abs=1e-10)
    assert_same_state(before, state_of(module))


def test_similar_takes_a_module_and_the_pairs_add_up() -> None:
    module, pixels = of_timm("vit_small_patch14_dinov2").float(), images().float()
    alike = vitrail.similar(module, *pixels, "decompx")
    assert alike.pairs is not None
    extras = alike.first.extras
    assert extras["score_pairs"] + extras["score_pairs_rest"] == pytest.approx(alike.score, abs=1e-5)


def test_another_pooling_is_chosen() -> None:
    module, pixels = of_timm("vit_small_patch14_dinov2"), images()
    view = vitrail.wrap(module, pool="avg")
    with torch.no_grad():
        expected = module.forward_features(pixels)[:, 1:].mean(1)
    assert torch.allclose(view.logits(pixels), expected, atol=1e-10)
    with pytest.raises(VitrailError, match="is for a head that reads every patch"):
        vitrail.wrap(module, pool="patches")
    with pytest.raises(VitrailError, match="has no classes, which labels= and output= are about: give head="):
        vitrail.wrap(module, labels=["a"] * WIDTH)
    with pytest.raises(VitrailError, match="has no classes, which labels= and output= are about: give head="):
        vitrail.wrap(module, output="sigmoid")


def test_a_fine_tuned_clip_tower_is_a_classifier() -> None:
    view = vitrail.wrap(of_timm("vit_base_patch16_clip_224.openai", num_classes=7))
    assert (view.output, view.is_embedding) == ("softmax", False)


def test_a_channel_and_a_function_are_explained() -> None:
    view, pixels = vitrail.wrap(of_timm("vit_small_patch14_dinov2")), images(1)
    channel = float(view.logits(pixels)[0, 17])
    made = vitrail.explain(view, pixels[0], "decompx", target=17)
    assert made.label == "channel 17"
    assert made.split["score"] == pytest.approx(channel, abs=1e-6)
    made = vitrail.explain(view, pixels[0], "decompx", target=Callable(lambda tokens, pooled, logits: logits[:, 17]))
    assert made.split["score"] == pytest.approx(channel, abs=1e-6)
    made = vitrail.explain(view, pixels[0], target=Similarity(images(2)[1]), against=Similarity(images(3)[2], name="b"))
    assert made.map.isfinite().all()


NO_CLASSES = "has no classes, but an embedding: ask how similar images are"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, NO_CLASSES),
        ("cat", NO_CLASSES),
        (Class("cat"), NO_CLASSES),
        (Contrast(None, 3), NO_CLASSES),
        (Group([1, 2]), NO_CLASSES),
        (WIDTH, f"there is no class {WIDTH} in"),
        (Text("a cat"), "reads no texts"),
        (Region(torch.ones(32, 32) > 0), "has no output per patch"),
        (Box(0), "detects no boxes"),
    ],
)
def test_wrong_questions_get_one_sentence(target: Any, message: str) -> None:
    view = vitrail.wrap(of_timm("vit_small_patch14_dinov2"))
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(view, images(1)[0], target=target)


def test_classes_of_an_embedding_cannot_be_evaluated() -> None:
    view, photos = vitrail.wrap(of_timm("vit_small_patch14_dinov2").float()), [noise(40, 40, 0), noise(40, 40, 1)]
    with pytest.raises(VitrailError, match=NO_CLASSES):
        vitrail.evaluate(view, photos, ["decompx"], ["deletion(steps=4)"])
    with pytest.raises(VitrailError, match=r"a channel of an embedding is not: .* lambda .*: logits\[:, 3\]"):
        vitrail.evaluate(view, photos, ["decompx"], ["deletion(steps=4)"], target=3)
    rows = vitrail.evaluate(view, photos, ["decompx"], ["deletion(steps=4)"], target=Similarity(noise(40, 40, 2)))
    assert rows["value"].notna().all()


# Loading


def test_a_name_without_classes_is_loaded_to_compare_images(tmp_path: Path) -> None:
    name, options = "vit_small_patch14_dinov2", {"pretrained": False, **TINY}
    with pytest.warns(UserWarning, match="has random weights"):
        view = load_embedder(name, **options)
    assert view.is_embedding
    noise(40, 40, 0).save(tmp_path / "a.png")
    made = vitrail.explain(view, tmp_path / "a.png", "decompx", target=Similarity(noise(40, 40, 1)))
    assert made.model is not None
    assert made.model.spec == {"name": name, "embedding": True, "pretrained": False, **TINY}
    with pytest.warns(UserWarning, match="has random weights"):
        projecting = load_embedder("vit_base_patch16_clip_224.openai", **options)
    assert (projecting.is_embedding, projecting.num_outputs) == (True, 512)
    with pytest.warns(UserWarning, match="has random weights"):
        assert not load_embedder("vit_base_patch16_224", **options).is_embedding


def test_the_head_is_left_out_on_request() -> None:
    with pytest.warns(UserWarning, match="has random weights"):
        view = vitrail.load("vit_base_patch16_224", pretrained=False, embedding=True, **TINY)
    assert (view.is_embedding, view.num_outputs) == (True, WIDTH)
    for options in ({"num_classes": 3}, {"head": "h.safetensors", "checkpoint": "w.safetensors"}):
        with pytest.raises(VitrailError, match=r"leaves the head out|no checkpoint file"):
            vitrail.load("vit_base_patch16_224", pretrained=False, embedding=True, **options)

    for name in ("torchvision:vit_b_16", "hf:google/vit-base-patch16-224"):
        with pytest.raises(VitrailError, match="embedding= is for timm models"):
            vitrail.load(name, embedding=True)


@pytest.mark.parametrize("name", ["hf vit", "hf dinov2"])
def test_a_saved_backbone_is_loaded_without_a_head(name: str, tmp_path: Path) -> None:
    make, own = BACKBONES[name]
    module, pixels = make().float(), images().float()
    if name == "hf vit":
        module.pooler = None  # as of masked autoencoders
    module.save_pretrained(tmp_path)
    view = vitrail.load(f"hf:{tmp_path}")
    with torch.no_grad():
        expected = own(module, pixels)
    assert view.is_embedding
    assert torch.allclose(view.logits(pixels), expected, atol=1e-5)
