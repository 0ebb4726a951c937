"""Complexity and robustness against the oracle and against captum."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from captum import metrics as captum
from tests.helpers import DOUBLE
from tests.metrics.common import CLOSE, PIXEL_KINDS, TOKEN_KINDS, Bench, bench, on_input, same
from tests.oracles import quality
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.methods.registry import build_method
from vitrail.metrics import list_metrics, measure
from vitrail.metrics.complexity import gini

TARGETS = [1, 3]
METHODS = [
    ("timm_vit", "gen_att", {}),
    ("timm_vit", "rollout", {}),
    ("timm_vit_gap", "input_x_gradient", {}),
    ("timm_deit_distilled", "decompx.skipplus", {}),
    ("timm_vit_not_square", "rise", {"masks": 8}),
    ("one_output", "gen_att", {}),
    ("timm_swin", "grad_cam", {}),
]


def test_every_metric_of_complexity_and_robustness_is_compared_here() -> None:
    info = list_metrics()
    assert {n: i.protocols for n, i in info.items() if i.family == "complexity"} == {"sparseness": ("default", "tis")}
    assert {n for n, i in info.items() if i.family == "robustness"} == {"max_sensitivity", "infidelity"}
    assert info["sparseness"].higher_is_better
    assert not info["max_sensitivity"].higher_is_better
    assert not info["infidelity"].higher_is_better
    families = {"perturbation", "token masking", "agreement", "localisation", "complexity", "robustness", "sanity"}
    assert {description.family for description in info.values()} == families, "a family that no test here compares"


# --- sparseness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["default", "tis"])
@pytest.mark.parametrize("name", ["timm_vit_not_square", "timm_swin"])
def test_sparseness(name: str, protocol: str) -> None:
    of = bench(name)
    for kinds in (PIXEL_KINDS, TOKEN_KINDS):
        for maps in (of.maps(kinds), of.maps(kinds).abs(), of.maps(kinds).clamp(min=0), of.maps(kinds) * 1e-12):
            result = measure("sparseness", of.view, of.images, maps, protocol=protocol)
            for scored, values in zip(result, maps, strict=True):
                same(scored.value, quality.gini(on_input(values, of.size), protocol))


def test_gini_of_known_maps() -> None:
    of, n = bench("timm_vit_not_square"), bench("timm_vit_not_square").cells
    one_hot = torch.zeros(of.size, dtype=DOUBLE)
    one_hot[3, 5] = 0.7
    ramp = torch.arange(n, dtype=DOUBLE).view(of.size)
    maps = torch.stack([one_hot, -one_hot, ramp, torch.full(of.size, 4.0), torch.full(of.size, -4.0), 0 * ramp])
    images = of.images[:1].repeat(len(maps), 1, 1, 1)
    expected = [1 - 1 / n, 1 / n, (n + 1) / (3 * n), 0, 0, 0]
    result = [scored.value for scored in measure("sparseness", of.view, images, maps)]
    assert result == pytest.approx(expected, rel=CLOSE, abs=1e-12)
    published = [scored.value for scored in measure("sparseness", of.view, images, maps, protocol="tis")]
    assert published == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert published[0] != result[0]
    assert gini(torch.tensor([1.0, 3.0])) == pytest.approx(0.25)
    assert gini(5 * ramp) == pytest.approx(gini(ramp), rel=CLOSE)


# --- max_sensitivity ------------------------------------------------------------------------------------------------


def moved(of: Bench, samples: int, radius: float, seed: int) -> list[Tensor]:
    """(1, 3, H, W) each: what is added to the image."""
    drawn = noise("uniform", (3, *of.size), range(samples), seed, torch.device("cpu")).double()
    return [(2 * values[None] - 1) * radius for values in drawn]


@pytest.mark.parametrize(("name", "method", "params"), METHODS)
def test_max_sensitivity(name: str, method: str, params: dict[str, Any]) -> None:
    of, samples = bench(name), 4
    built = build_method(method, of.view, **params)
    maps, targets = built.attribute(of.images, [1, 0]), [1, 0]
    for radius, seed in ((0.02, 0), (0.3, 7)):
        options = {"radius": radius, "seed": seed, "samples": samples}
        result = measure("max_sensitivity", of.view, of.images, maps, targets, method=built, **options)
        for i, target in enumerate(targets):
            shifts = moved(of, samples, radius, seed)

            def explain(images: Tensor, target: int = target) -> Any:
                return built.attribute(images, target)[0].numpy()

            expected = quality.max_sensitivity(explain, of.images[i : i + 1], shifts)
            assert expected > 0
            assert abs(result[i].value - expected) <= 1e-8 * expected
            waiting = iter(shifts)
            theirs = captum.sensitivity_max(
                lambda images, target=target: built.attribute(images, target),
                of.images[i : i + 1],
                perturb_func=lambda images: images + next(waiting),  # noqa: B023
                n_perturb_samples=samples,
                max_examples_per_batch=1,
            )
            assert abs(result[i].value - float(theirs)) <= 1e-8 * expected


def test_max_sensitivity_is_the_largest_of_its_samples() -> None:
    of = bench("timm_vit")
    built = build_method("gen_att", of.view)
    maps = built.attribute(of.images, TARGETS)
    result = [
        measure("max_sensitivity", of.view, of.images, maps, TARGETS, method=built, samples=samples, radius=0.2)
        for samples in (1, 4, 12)
    ]
    first, more, most = ([scored.value for scored in each] for each in result)
    rounding = 1 + CLOSE
    assert all(a <= b * rounding and b <= c * rounding for a, b, c in zip(first, more, most, strict=True))
    assert max(b / a for a, b in zip(first, most, strict=True)) > 1.001, "each sample is another noise"


def test_the_seed_draws_the_noise() -> None:
    of = bench("timm_vit")
    built = build_method("gen_att", of.view)
    maps = built.attribute(of.images, TARGETS)
    runs = [
        measure("max_sensitivity", of.view, of.images, maps, TARGETS, method=built, samples=2, seed=seed)
        for seed in (0, 1)
    ]
    assert [scored.value for scored in runs[0]] != [scored.value for scored in runs[1]]


def test_max_sensitivity_of_a_method_that_does_not_look(constant_method: str) -> None:
    of = bench("timm_vit")
    built = build_method(constant_method, of.view)
    result = measure("max_sensitivity", of.view, of.images, built.attribute(of.images), method=built, samples=3)
    assert [scored.value for scored in result] == [0, 0]


# --- infidelity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("name", "method", "params"), METHODS)
def test_infidelity(name: str, method: str, params: dict[str, Any], normalize: bool) -> None:
    of, samples, targets = bench(name), 5, [1, 0]
    built = build_method(method, of.view, **params)
    maps = built.attribute(of.images, targets)
    spread = build_method(method, of.view, **params, shape="input")
    for sigma, seed in ((0.1, 0), (0.7, 3)):
        options = {"sigma": sigma, "seed": seed, "samples": samples, "normalize": normalize}
        result = measure("infidelity", of.view, of.images, maps, targets, method=built, **options)
        drawn = noise("normal", (3, *of.size), range(samples), seed, torch.device("cpu")).double() * sigma
        for i, target in enumerate(targets):
            image = of.images[i : i + 1]

            def score(images: Tensor, target: int = target) -> Tensor:
                return of.logits(images)[:, target]

            weights = spread.attribute(image, target)
            expected = quality.infidelity(score, weights, image, [values[None] for values in drawn], normalize)
            assert expected > 0
            assert abs(result[i].value - expected) <= 1e-8 * expected
            waiting = iter(drawn)

            def disturb(images: Tensor, waiting: Any = waiting) -> tuple[Tensor, Tensor]:
                shift = next(waiting)[None]
                return shift, images - shift

            theirs = captum.infidelity(
                score, disturb, image, weights, n_perturb_samples=samples, max_examples_per_batch=1, normalize=normalize
            )
            assert abs(result[i].value - float(theirs)) <= 1e-8 * expected


def test_infidelity_scaled_to_fit_does_not_know_units(constant_method: str) -> None:
    """A map of zeros explains nothing: what is left is the mean square of the score's changes."""
    of = bench("timm_vit")
    built = build_method(constant_method, of.view, level=0.0)
    result = measure("infidelity", of.view, of.images, built.attribute(of.images), TARGETS, method=built, samples=4)
    drawn = noise("normal", (3, *of.size), range(4), 0, torch.device("cpu")).double() * 0.1
    for i, target in enumerate(TARGETS):
        image = of.images[i : i + 1]
        changes = of.logits(image)[0, target] - of.logits(image - drawn)[:, target]
        same(result[i].value, float(changes.square().mean()))
    maps = build_method("gen_att", of.view).attribute(of.images, TARGETS)
    scaled = [measure("infidelity", of.view, of.images, k * maps, TARGETS, samples=4) for k in (1.0, 1000.0)]
    for zero, scored, other in zip(result, *scaled, strict=True):
        assert math.isclose(scored.value, other.value, rel_tol=1e-8)
        assert scored.value < zero.value, "the best factor is no worse than none"


def test_metrics_of_methods_run_under_inference_mode() -> None:
    of = bench("timm_vit")
    built = build_method("gen_att", of.view)
    for metric in ("max_sensitivity", "infidelity"):
        unchanged = measure(
            metric, of.view, of.images, built.attribute(of.images, TARGETS), TARGETS, method=built, samples=2
        )
        with torch.inference_mode():
            maps = built.attribute(of.images, TARGETS)
            result = measure(metric, of.view, of.images, maps, TARGETS, method=built, samples=2)
        assert result == unchanged
