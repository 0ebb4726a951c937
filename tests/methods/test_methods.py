"""Each method against a literal version of it, the identities of its paper, and the sweep of methods × families."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from tests.families import FAMILIES, HIERARCHICAL, few
from tests.helpers import (
    DOUBLE,
    batch,
    close,
    crossed,
    in_both_precisions,
    refusals,
    relative,
    required_parameters,
    viewed,
)
from tests.oracles.attention import attention_maps, pool_map, readout, rollout
from tests.oracles.decompx import decompose

import vitrail
from vitrail import VitrailError
from vitrail.methods.registry import build_method, get_method, list_methods, supported_methods

TARGET = torch.tensor([0, 3, 1])
ROWS = torch.arange(3)
QUICK = {"steps": 4, "samples": 8, "masks": 12}
LAYERWISE = ("decompx", "input_x_gradient", "raw_attention")


def explained(name: str, method: str, **params: object) -> torch.Tensor:
    _, _, view = viewed(name)
    return build_method(method, view, **params).attribute(batch(name), TARGET)


def on_grid(name: str, scores: torch.Tensor) -> torch.Tensor:
    family = FAMILIES[name]
    return scores[:, family.prefix :].reshape(-1, *family.grid)


def agrees(name: str, dtype: torch.dtype, scores: torch.Tensor, method: str, **params: object) -> None:
    """The map is the literal one."""
    built = build_method(method, viewed(name, dtype)[2], **params)
    maps, expected = built.attribute(batch(name, dtype=dtype), TARGET).to(DOUBLE), on_grid(name, scores)
    assert maps.shape == expected.shape
    assert relative(maps, expected) < (1e-9 if dtype == DOUBLE else 1e-4), method


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(few([*FAMILIES], 3)))
def test_decompx_and_its_sums_against_the_literal_decomposition(name: str, dtype: torch.dtype) -> None:
    family, module, view = viewed(name)
    depth = view.num_layers
    layers = [decompose(family, module, batch(name), l)[0][ROWS, :, TARGET] for l in range(depth)]
    agrees(name, dtype, layers[0], "decompx")
    agrees(name, dtype, layers[1], "decompx", start_layer=1)
    agrees(name, dtype, sum(layers), "decompx.plus")
    agrees(name, dtype, sum(layers[-(-depth // 2) :]), "decompx.skipplus")


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(few([*FAMILIES], 3)))
def test_attention_methods_against_the_literal_maps(name: str, dtype: torch.dtype) -> None:
    family, module, _ = viewed(name)
    images = batch(name)
    maps, pool, row = (
        attention_maps(family, module, images),
        pool_map(family, module, images),
        readout(family, module, images),
    )
    rows = [torch.einsum("bi,bij->bj", row, m.mean(1)) for m in maps]
    if pool is not None:  # an attention pool is the last attention layer, and its row starts the rollout
        rows.append(F.pad(pool.mean(1)[:, 0], (family.prefix, 0)))
    agrees(name, dtype, rows[-1], "raw_attention")
    agrees(name, dtype, sum(rows), "raw_attention.plus")
    agrees(name, dtype, rollout(maps[1:], row), "rollout")
    agrees(name, dtype, rollout(maps, row), "rollout", protocol="rollout")
    agrees(name, dtype, rollout(maps, row), "rollout", start_layer=0)
    agrees(name, dtype, rollout(maps, row), "raw_attention.rollout")


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_avg", "timm_deit_distilled", "timm_siglip", "hf_dinov2"])
def test_input_x_gradient_by_autograd_of_the_view(name: str) -> None:
    _, _, view = viewed(name)
    tokens = view.embed(batch(name)).detach().requires_grad_()
    y = view.encode(tokens).gather(1, TARGET[:, None]).sum()
    (gradient,) = torch.autograd.grad(y, tokens)
    expected = on_grid(name, (tokens * gradient).sum(-1).detach())
    assert relative(explained(name, "input_x_gradient"), expected) < 1e-9


@pytest.mark.parametrize("name", ["timm_vit", "timm_dinov2_giant", "timm_siglip"])
def test_frozen_input_x_gradient_is_decompx(name: str) -> None:
    for suffix in ("", ".plus", ".skipplus"):
        frozen = explained(name, f"input_x_gradient{suffix}", rule="frozen")
        assert relative(frozen, explained(name, f"decompx{suffix}")) < 1e-9
    plain = explained(name, "input_x_gradient")
    assert relative(plain, explained(name, "decompx")) > 1e-2, "plain and frozen gradients must differ"


@pytest.mark.parametrize("base", LAYERWISE)
@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_avgmax", "timm_siglip"])
def test_identities_of_plus(name: str, base: str) -> None:
    _, _, view = viewed(name)
    depth = view.num_layers
    sums = [explained(name, f"{base}.plus", start_layer=l) for l in range(depth)]
    assert torch.equal(explained(name, f"{base}.skipplus", start_layer=0), explained(name, f"{base}.plus"))
    assert torch.equal(explained(name, f"{base}.skipplus"), sums[-(-depth // 2)])
    for layer in range(depth - 1):
        if base != "raw_attention":
            single = explained(name, base, start_layer=layer)
            assert relative(sums[layer] - sums[layer + 1], single) < 1e-9


def test_contrast_is_the_difference_of_two_explanations() -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit")
    for method in ("decompx.skipplus", "input_x_gradient"):
        result = build_method(method, view)
        first, second = (result.attribute(images, target) for target in (0, 4))
        assert relative(result.attribute(images, 0, against=4), first - second) < 1e-9
    with pytest.raises(VitrailError, match="same for every class"):
        build_method("rollout", view).attribute(images, 0, against=1)


def test_attention_is_the_same_for_every_class_and_decompx_is_not() -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit", 1)
    for name, info in list_methods().items():
        quick = {key: value for key, value in QUICK.items() if key in info.params}
        method = build_method(name, view, **quick, **required_parameters(name, view))
        same = torch.equal(method.attribute(images, 0), method.attribute(images, 1))
        assert same == (not info.class_specific), name


def test_readout_of_the_class_token_on_request() -> None:
    family, module, view = viewed("timm_eva")  # it pools the patches, and still has a class token
    images = batch("timm_eva")
    first = attention_maps(family, module, images)[-1].mean(1)[:, 0]
    result = build_method("raw_attention", view, readout="cls").attribute(images, 0)
    assert relative(result, on_grid("timm_eva", first)) < 1e-9
    assert relative(result, build_method("raw_attention", view).attribute(images, 0)) > 1e-2
    _, _, siglip = viewed("timm_siglip")
    with pytest.raises(VitrailError, match="no class token"):
        build_method("raw_attention", siglip, readout="cls").attribute(batch("timm_siglip"), 0)
    with pytest.raises(VitrailError, match="readout"):
        build_method("raw_attention", view, readout="nonsense").attribute(images, 0)


def test_random_depends_on_the_image_and_the_seed_alone() -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit")
    result = build_method("random", view).attribute(images, 0)
    alone = torch.cat([build_method("random", view).attribute(image[None], 1) for image in images])
    assert torch.equal(result, alone)
    assert not torch.equal(result[0], result[1])
    assert not torch.equal(result, build_method("random", view, seed=1).attribute(images, 0))


def test_probability_output_is_not_a_rescaled_logit() -> None:
    logit = explained("timm_vit", "input_x_gradient")
    probability = explained("timm_vit", "input_x_gradient", output="probability")
    assert relative(F.normalize(probability.flatten(1)), F.normalize(logit.flatten(1))) > 1e-2


def refusal(method: str, name: str) -> str | None:
    """Why a method refuses a family, by tests/methods/refusals.csv."""
    kind = "hierarchical" if name in HIERARCHICAL else "any"
    return refusals().get((method, kind)) or refusals().get((method, name))


@pytest.mark.parametrize("name", [*FAMILIES, *HIERARCHICAL])
def test_a_family_is_refused_as_the_table_says_and_not_otherwise(name: str) -> None:
    """A new refusal is a visible change."""
    view = viewed(name)[2]
    reasons = {method: reason for method in list_methods() if (reason := refusal(method, name))}
    assert set(supported_methods(view)) == set(list_methods()) - set(reasons)
    for method, reason in reasons.items():
        with pytest.raises(VitrailError, match=re.escape(reason)):
            build_method(method, view).attribute(batch(name, 2))


@pytest.mark.parametrize(
    ("method", "name"),
    crossed(((m, n) for m in list_methods() for n in [*HIERARCHICAL, *FAMILIES] if not refusal(m, n)), each=2),
)
def test_a_batch_is_its_images_one_by_one(method: str, name: str) -> None:
    family, _, view = viewed(name)
    images, info = batch(name, 2), get_method(method).info
    built = build_method(method, view, **{key: value for key, value in QUICK.items() if key in info.params})
    maps = built.attribute(images, [2, 1])
    grid = view.size if info.level == "pixel" else family.grid if name in FAMILIES else maps.shape[1:]
    assert maps.shape == (2, *grid)
    assert maps.isfinite().all()
    assert float(maps.std()) > 0, "a constant map"
    assert close(maps, torch.cat([built.attribute(images[i : i + 1], 2 - i) for i in range(2)]), 1e-8)


def test_parameters_are_checked_and_listed() -> None:
    _, _, view = viewed("timm_vit")
    for call, message in (
        (lambda: build_method("decompx", view, nonsense=1), "start_layer=0"),
        (lambda: build_method("decomp", view), "Did you mean decompx"),
        (lambda: build_method("decompx.nonsense", view), "plus, skipplus, rollout"),
        (lambda: build_method("rollout.plus", view), "aggregation itself"),
        (lambda: build_method("random.plus", view), "no layers"),
        (lambda: build_method("decompx.rollout", view), "not token-to-token maps"),
        (lambda: build_method("att_cat.plus", view), "one aggregation at a time"),
        (lambda: build_method("decompx.", view), "ends with a dot"),
        (lambda: build_method("grad_cam.plus", view, layer=1), "no parameter layer"),
        (lambda: build_method("attn_cam.plus", view, protocol="authors"), "as released"),
        (lambda: build_method("trans_att.rollout", view, protocol="authors"), "as released"),
        (lambda: build_method("grad_cam", view, layer=9).attribute(batch("timm_vit")), "layer 9 does not fit"),
        (lambda: build_method("att_ixg", view, start_layer=3).attribute(batch("timm_vit")), "does not fit"),
        (lambda: build_method("decompx", view, start_layer="1"), "an integer"),
        (lambda: build_method("gradient", view, reduce="max"), "'sum' or 'l2'"),
        (lambda: build_method("decompx", view, start_layer=99).attribute(batch("timm_vit")), "does not fit"),
        (lambda: build_method("decompx.plus", view, start_layer=-1).attribute(batch("timm_vit")), "does not fit"),
        (lambda: build_method("decompx", view, shape="nonsense"), "shape"),
        (lambda: build_method("decompx", view).attribute(batch("timm_vit"), [0, 1]), "2 classes for 3 images"),
        (lambda: build_method("decompx", view).attribute((batch("timm_vit"),) * 2), "one tensor"),
    ):
        with pytest.raises(VitrailError, match=message):
            call()


def test_a_method_can_be_registered_in_a_few_lines() -> None:
    @vitrail.method("brightness_test", class_specific=False)
    def brightness(model, images, target, power: float = 1.0):  # type: ignore[no-untyped-def]
        """Mean brightness of each patch."""
        return F.adaptive_avg_pool2d(images.mean(1, keepdim=True), model.grid)[:, 0] * power

    _, _, view = viewed("timm_vit")
    images = batch("timm_vit")
    info = list_methods("brightness*")["brightness_test"]
    assert info.params == {"power": 1.0}
    assert info.summary == "Mean brightness of each patch."
    once, twice = (build_method("brightness_test", view, power=p).attribute(images) for p in (1.0, 2.0))
    assert torch.equal(twice, 2 * once)
    assert vitrail.explain(view, images, "brightness_test")[0].map.shape == view.grid
    with pytest.raises(VitrailError, match="already"):
        vitrail.method("decompx")(lambda model, images, target: images)
    with pytest.raises(VitrailError, match="lower-case"):
        vitrail.method("Not A Name")(lambda model, images, target: images)


def test_shape_input_keeps_the_total() -> None:
    _, _, view = viewed("timm_vit_not_square")
    images = batch("timm_vit_not_square")
    small = build_method("decompx", view).attribute(images, 0)
    large = build_method("decompx", view, shape="input").attribute(images, 0)
    assert large.shape == images.shape
    assert torch.allclose(large.sum((1, 2, 3)), small.sum((1, 2)))
    assert torch.equal(large[0, 0, :8, :8], large[0, 0, 0, 0].expand(8, 8)), "spread evenly inside a patch"


def test_completeness_gap_is_measured() -> None:
    _, _, view = viewed("timm_vit")
    result = build_method("decompx.plus", view).explain(batch("timm_vit"), TARGET)
    assert result.extras["completeness_gap"].shape == (3,)
    assert result.extras["completeness_gap"].max() < 1e-12


def test_composed_classes_carry_their_own_info() -> None:
    cls = get_method("decompx.skipplus")
    assert cls.info.name == "decompx.skipplus"
    assert cls == get_method("DecompX.SkipPLUS"), "names are not case-sensitive"
    assert cls.info.params == {"start_layer": None, "precision": "auto"}
    changed = get_method("globenc")
    assert get_method("globenc.plus").version == changed.version, "a method and its sums are defined anew together"
    for name in ("attn_cam", "grad_cam"):
        assert get_method(f"{name}.plus").version < get_method(name).version, "its default changed, its sums did not"
