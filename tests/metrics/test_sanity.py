"""Randomised models and completeness: what a map owes to the weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from tests import families
from tests.families import FAMILIES
from tests.helpers import DOUBLE, assert_same_state, state_of
from tests.metrics.common import CLOSE, Bench, a_map, bench, same, two_classes
from tests.oracles import quality
from torch import Tensor
from torch.nn.functional import interpolate

import vitrail
from vitrail.engine.scheduler import Scheduler
from vitrail.methods.registry import build_method
from vitrail.metrics import build_metric, list_metrics, measure
from vitrail.metrics.base import ask_if_applicable
from vitrail.metrics.sanity import randomised, similarity
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.view import View

# The layers from the head down, each by how its parameters' names begin or what they contain.
LAYERS: dict[str, list[tuple[str, ...]]] = {
    "timm_vit": [("head.", "norm."), ("blocks.2.",), ("blocks.1.",), ("blocks.0.",)],
    "timm_vit_avg": [("head.", "fc_norm."), ("blocks.1.",), ("blocks.0.",)],
    "timm_deit_distilled": [("head_dist.", "head.", "norm."), ("blocks.1.",), ("blocks.0.",)],
    "timm_siglip": [("head.", "attn_pool.", "norm."), ("blocks.1.",), ("blocks.0.",)],
    "torchvision_vit": [("heads.head.", "encoder.ln."), ("encoder_layer_1.",), ("encoder_layer_0.",)],
    "hf_vit": [("classifier.", "vit.layernorm."), ("layers.1.",), ("layers.0.",)],
    "hf_clip": [("classifier.",), ("layers.1.",), ("layers.0.",)],
    "hf_siglip": [("classifier.", "post_layernorm."), ("encoder.layers.1.",), ("encoder.layers.0.",)],
    "hf_clip_text": [
        ("visual_projection.", "vision_model.post_layernorm."),
        ("vision_model.encoder.layers.1.",),
        ("vision_model.encoder.layers.0.",),
    ],
    "hf_siglip_text": [
        ("vision_model.head.", "vision_model.post_layernorm."),
        ("vision_model.encoder.layers.1.",),
        ("vision_model.encoder.layers.0.",),
    ],
    "hf_deit_teacher": [
        ("distillation_classifier.", "cls_classifier.", "deit.layernorm."),
        ("layers.1.",),
        ("layers.0.",),
    ],
    "timm_swin": [("head.fc.", "norm."), ("layers.1.",), ("layers.0.",)],
    "hf_swinv2": [("classifier.", "swinv2.layernorm."), ("encoder.layers.1.",), ("encoder.layers.0.",)],
}
TARGETS = [1, 3]


def changed(view: View, twin: View) -> set[str]:
    own, other = view.module.state_dict(), twin.module.state_dict()
    assert own.keys() == other.keys()
    return {name for name in own if not torch.equal(own[name], other[name])}


def of_layer(view: View, parts: tuple[str, ...]) -> set[str]:
    """The parameters of a layer by its names."""
    known, result = [name for name, _ in view.module.named_parameters()], set[str]()
    for part in parts:
        own = {name for name in known if name.startswith(part)} or {name for name in known if part in name}
        assert own
        result |= own
    return result


def test_every_sanity_metric_is_compared_here() -> None:
    sane = {name: info for name, info in list_metrics().items() if info.family == "sanity"}
    assert set(sane) == {"model_randomization", "completeness"}
    assert not any(info.higher_is_better for info in sane.values())


@pytest.mark.parametrize("way", ["cascading", "independent"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_drawn_anew_from_the_head_down(name: str, way: str) -> None:
    of = bench(name)
    before, drawn = state_of(of.module), set[str]()
    twins = list(randomised(of.view, way, 0))  # all stand side by side
    for twin, parts in zip(twins, LAYERS[name], strict=True):
        own = of_layer(of.view, parts)
        drawn = drawn | own if way == "cascading" else own
        assert changed(of.view, twin) == drawn
        assert twin.module is not of.module
    assert_same_state(before, state_of(of.module))


def test_a_layer_keeps_the_size_of_its_weights_and_is_drawn_by_the_seed() -> None:
    of = bench("timm_vit_patch8")
    states = []
    for seed in (0, 0, 1):
        *_, last = randomised(of.view, "cascading", seed)
        states.append({name: value.clone() for name, value in last.module.state_dict().items()})
    name = "blocks.0.mlp.fc1.weight"
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][name], states[2][name])
    before = of.module.state_dict()[name]
    assert states[0][name].dtype == DOUBLE
    assert float(states[0][name].std() / before.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(torch.corrcoef(torch.stack([states[0][name].flatten(), before.flatten()]))[0, 1])) < 0.05


def test_both_ways_draw_the_same_weights() -> None:
    of, pairs = bench("timm_vit"), []
    for way in ("cascading", "independent"):
        pairs.append([copy.deepcopy(twin.module.state_dict()) for twin in randomised(of.view, way, 5)])
    for parts, cascading, independent in zip(LAYERS["timm_vit"], *pairs, strict=True):
        for name in of_layer(of.view, parts):
            assert torch.equal(cascading[name], independent[name])


def test_a_copy_sees_its_own_weights_and_fingerprint() -> None:
    of = bench("timm_vit")
    with torch.no_grad():
        unchanged = of.view.logits(of.images)
        for twin in randomised(of.view, "independent", 0):
            assert twin.fingerprint() != of.view.fingerprint()
            theirs = twin.module(of.images)
            assert torch.allclose(twin.logits(of.images), theirs, atol=1e-9)
            assert not torch.allclose(theirs, unchanged, atol=1e-3)


def literal(of: Bench, method: str, params: dict[str, Any], maps: Tensor, way: str, reading: str, seed: int) -> Any:
    """(images, layers): maps of modules wrapped anew with the drawn weights."""
    likeness = []
    for twin in randomised(of.view, way, seed):
        module = of.family.build(DOUBLE)
        module.load_state_dict(twin.module.state_dict())
        again = build_method(method, vitrail.wrap(module), **params).attribute(of.images, TARGETS)
        likeness.append([alike(a, b, of.size, reading) for a, b in zip(maps, again, strict=True)])
    return np.array(likeness).T


def alike(a: Tensor, b: Tensor, size: tuple[int, int], reading: str) -> float:
    if reading == "rank":
        return quality.rank_correlation(a.abs(), b.abs())
    up = [
        interpolate(saliency[None, None].double(), size, mode="bilinear", align_corners=False)[0, 0]
        for saliency in (a, b)
    ]
    return quality.ssim(*up)


@pytest.mark.parametrize("way", ["cascading", "independent"])
@pytest.mark.parametrize(
    ("name", "method", "reading"),
    [
        ("timm_vit", "gen_att", "rank"),
        ("timm_vit_not_square", "input_x_gradient", "ssim"),
        ("timm_swin", "grad_cam", "rank"),
        ("hf_vit", "raw_attention", "ssim"),
    ],
)
def test_model_randomization(name: str, method: str, reading: str, way: str) -> None:
    of = bench(name)
    built = build_method(method, of.view)
    maps = built.attribute(of.images, TARGETS)
    before = state_of(of.module)
    options = {"way": way, "reading": reading, "seed": 2}
    result = measure("model_randomization", of.view, of.images, maps, TARGETS, method=built, **options)
    assert_same_state(before, state_of(of.module))
    expected = literal(of, method, {}, maps, way, reading, 2)
    for score, points in zip(result, expected, strict=True):
        assert len(score.curve or ()) == len(points)
        assert np.allclose(score.curve or (), points, rtol=0, atol=1e-7 if reading == "ssim" else CLOSE)
        same(score.value, float(np.mean(score.curve or ())))


def test_the_parameters_of_the_method_are_kept() -> None:
    of = bench("timm_vit")
    params = {"start_layer": 0}
    built = build_method("rollout", of.view, **params)
    maps = built.attribute(of.images)
    result = measure("model_randomization", of.view, of.images, maps, TARGETS, method=built)
    expected = literal(of, "rollout", params, maps, "cascading", "rank", 0)
    assert np.allclose([score.curve for score in result], expected, atol=CLOSE)
    assert not np.allclose(expected, literal(of, "rollout", {}, maps, "cascading", "rank", 0), atol=1e-3)


def test_cascading_and_independent_part_after_the_head() -> None:
    of = bench("timm_vit")
    built = build_method("gen_att", of.view)
    maps = built.attribute(of.images, TARGETS)
    cascading, independent = (
        measure("model_randomization", of.view, of.images, maps, TARGETS, method=built, way=way)
        for way in ("cascading", "independent")
    )
    for score, other in zip(cascading, independent, strict=True):
        assert (score.curve or ())[0] == (other.curve or ())[0], "the head alone"
        assert all(a != b for a, b in zip((score.curve or ())[1:], (other.curve or ())[1:], strict=True))


@pytest.mark.parametrize("reading", ["rank", "ssim"])
@pytest.mark.parametrize("name", ["timm_vit", "timm_swin"])
def test_a_method_that_ignores_the_model_stays_as_it_is(name: str, reading: str, picture_method: str) -> None:
    of = bench(name)
    for method in ("random", picture_method):
        built = build_method(method, of.view)
        maps = built.attribute(of.images)
        for way in ("cascading", "independent"):
            options = {"way": way, "reading": reading}
            result = measure("model_randomization", of.view, of.images, maps, TARGETS, method=built, **options)
            for score in result:
                assert (score.curve or ()) == pytest.approx([1.0] * len(LAYERS[name]), abs=1e-6)
                assert score.value == pytest.approx(1.0, abs=1e-6)


def test_another_seed_of_the_random_method_has_nothing_in_common() -> None:
    of = bench("timm_vit")
    maps = build_method("random", of.view, seed=1).attribute(of.images)
    result = measure("model_randomization", of.view, of.images, maps, method=build_method("random", of.view))
    assert all(-0.7 < score.value < 0.7 for score in result)
    assert all(len(set(score.curve or ())) == 1 for score in result)


def test_constant_maps_correlate_with_nothing(constant_method: str) -> None:
    of = bench("timm_vit")
    built = build_method(constant_method, of.view)
    maps = built.attribute(of.images)
    result = measure("model_randomization", of.view, of.images, maps, method=built)
    assert [score.value for score in result] == [0, 0]
    alike = measure("model_randomization", of.view, of.images, maps, method=built, reading="ssim")
    assert [score.value for score in alike] == pytest.approx([1, 1])


def test_maps_measured_together_are_those_measured_alone() -> None:
    of = bench("timm_vit_not_square")
    built = build_method("gen_att", of.view)
    maps = built.attribute(of.images, TARGETS)
    whole = measure("model_randomization", of.view, of.images, maps, TARGETS, method=built)
    for i in range(2):
        (alone,) = measure("model_randomization", of.view, of.images[i], maps[i], TARGETS[i], method=built)
        assert alone.curve == pytest.approx(whole[i].curve, abs=CLOSE)


def test_rank_correlation_is_that_of_scipy() -> None:
    for kind in ("pixels", "tied pixels"):
        for seed in range(5):
            a, b = (a_map(kind, (6, 7), (6, 7), seed + i) for i in (0, 50))
            result = rank_correlation(a, b)
            same(result, float(scipy.stats.spearmanr(a.flatten(), b.flatten()).statistic))
            same(result, quality.rank_correlation(a, b))
            same(rank_correlation(a, 3 * a + 1), 1.0)
            same(rank_correlation(a, -a), -1.0)


def test_similarity_does_not_know_units() -> None:
    a, b = (a_map("pixels", (20, 30), (4, 4), seed) for seed in (0, 1))
    assert similarity(a, b, (20, 30)) == pytest.approx(quality.ssim(a, b), abs=1e-7)
    assert similarity(a, 3 * b - 2, (20, 30)) == pytest.approx(similarity(a, b, (20, 30)), abs=1e-9)
    assert similarity(a, a, (40, 60)) == pytest.approx(1)


# --- completeness ---------------------------------------------------------------------------------------------------


def test_completeness_is_what_the_method_measured() -> None:
    of = bench("timm_vit")
    result = build_method("integrated_gradients", of.view, steps=4).explain(of.images, TARGETS)
    gaps = result.extras["completeness_gap"]
    cases = [of.case(result.map[i], TARGETS[i], i, extras={"completeness_gap": float(gaps[i])}) for i in range(2)]
    scored = Scheduler().run([ask_if_applicable(build_metric("completeness"), case) for case in cases])  # type: ignore[arg-type]
    with torch.no_grad():
        zero = torch.zeros_like(of.images[:1])
        for i, (score, target) in enumerate(zip(scored, TARGETS, strict=True)):
            assert score.value == float(gaps[i])
            gained = of.logits(of.images[i : i + 1])[0, target] - of.logits(zero)[0, target]
            whole = max(1.0, abs(float(of.logits(of.images[i : i + 1])[0, target])))  # the gap is relative to the score
            same(score.value, quality.completeness_gap(result.map[i], float(gained)) / whole)
    (nothing,) = Scheduler().run([ask_if_applicable(build_metric("completeness"), of.case(result.map[0]))])  # type: ignore[arg-type]
    assert np.isnan(nothing.value), "a method that promises nothing is not measured"


# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm_headless_token", "hf_dinov3_avg"])
def test_a_head_of_ones_own_is_randomised_first(name: str) -> None:
    of = bench(name)
    before = of.view.architecture().head.linears[0].weight.clone()  # type: ignore[attr-defined]
    first = next(iter(randomised(of.view, "independent", 0)))
    assert not torch.equal(first.architecture().head.linears[0].weight, before)  # type: ignore[attr-defined]
    assert torch.equal(of.view.architecture().head.linears[0].weight, before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["hf_clip", "hf_siglip", "timm_siglip", "timm_beit", "timm_swin", "torchvision_swin"])
def test_every_layer_is_one_that_the_model_uses(name: str) -> None:
    of = bench(name)
    with torch.no_grad():
        unchanged = of.view.logits(of.images)
        for twin in randomised(of.view, "independent", 0):
            assert not torch.allclose(twin.logits(of.images), unchanged, atol=1e-3)
        assert torch.equal(of.view.logits(of.images), unchanged)


def test_no_weight_belongs_to_two_layers() -> None:
    for name in ("timm_siglip", "timm_vit", "timm_swin"):
        pointers = [weight.data_ptr() for layer in bench(name).view.layers() for weight in layer]
        assert len(pointers) == len(set(pointers))


def test_a_model_of_one_block() -> None:
    family = replace(FAMILIES["timm_vit"], make=lambda: families._timm("vit_base_patch16_224", img_size=32, depth=1))
    view = vitrail.wrap(family.build(DOUBLE))
    assert len(list(randomised(view, "cascading", 0))) == 2


def unused_or_embedding(of: Bench) -> set[str]:
    """Parameters before the first block, and those whose gradient is always zero."""
    module = copy.deepcopy(of.module)
    two_classes(raw(module, of)).square().sum().backward()
    still = {name for name, weight in module.named_parameters() if weight.grad is None or not weight.grad.any()}
    first = ("embed", "conv_proj", "features.0.", "patch", "_token", "pre_lay")
    return still | {name for name in still.union(dict(module.named_parameters())) if any(w in name for w in first)}


def raw(module: Any, of: Bench) -> Tensor:
    out = module(of.images)
    return out.logits if hasattr(out, "logits") else out


@pytest.mark.parametrize(
    "name",
    [
        *("timm_vit", "timm_deit_distilled", "timm_siglip", "timm_dinov2", "hf_vit", "torchvision_vit", "hf_clip"),
        "timm_beit",
        "timm_eva02_tiny",
        "hf_beit_mean",
        "timm_swin",
        "torchvision_swin",
        "hf_swin",
    ],
)
def test_in_the_end_every_weight_was_drawn_anew(name: str) -> None:
    of = bench(name)
    *_, last = randomised(of.view, "cascading", 0)
    left = {key for key, _ in of.module.named_parameters()} - changed(of.view, last) - unused_or_embedding(of)
    assert left == set()
