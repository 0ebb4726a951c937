"""Insertion, deletion and removal curves over pixels against the oracle, in double precision."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from tests.families import FULL
from tests.helpers import crossed
from tests.metrics.common import (
    CLOSE,
    PIXEL_KINDS,
    TOKEN_KINDS,
    Bench,
    agrees,
    background,
    bench,
    on_input,
    same,
    tie,
    tied,
)
from tests.oracles import curves
from torch import Tensor

from vitrail.metrics import list_metrics, measure

SOME = ["timm_vit", "timm_vit_gap", "timm_deit_distilled", "timm_vit_not_square", "timm_siglip",
        "torchvision_vit", "one_output", "multi_label", "timm_swin", *(["hf_swinv2"] if FULL else [])]  # fmt: skip
BASELINES = ("mean", "blur", "black", "random")
AREAS = ("insertion", "deletion", "insertion_minus_deletion")
REMOVALS = ("positive_auc", "negative_auc", "aopc", "log_odds")
TARGET = 1


def area(
    of: Bench, image: Tensor, values: Tensor, way: str, protocol: str, baseline: str, steps: int, seed: int
) -> curves.Curve:
    behind = background(of, image, protocol, baseline, way, seed)
    reading = {"vit_cx": "rise"}.get(protocol, protocol)
    steps = math.ceil(of.cells / steps) if reading == "rise" else steps
    ties = tie(of.cells, seed)
    on = on_input(values, of.size)
    return curves.insertion_deletion(of.probabilities, image, behind, on, TARGET, ties, way, steps, reading)


def check_areas(of: Bench, kinds: tuple[str, ...], protocol: str, baseline: str | None, steps: int, seed: int) -> None:
    images, maps = of.images[: len(kinds)], of.maps(kinds)
    options: dict[str, Any] = {"protocol": protocol, "steps": steps, "seed": seed}
    if baseline is not None:
        options["baseline"] = baseline
    result = {name: measure(name, of.view, images, maps, TARGET, **options) for name in AREAS}
    for i, values in enumerate(maps):
        image = images[i : i + 1]
        literal = {way: area(of, image, values, way, protocol, baseline or "mean", steps, seed) for way in AREAS[:2]}
        for way in AREAS[:2]:
            agrees(result[way][i], literal[way])
            assert result[way][i].extras["ties"] == pytest.approx(tied(on_input(values, of.size)))
        difference = result["insertion_minus_deletion"][i].value
        assert abs(difference - (literal["insertion"][1] - literal["deletion"][1])) <= CLOSE


def test_every_perturbation_metric_is_compared_here() -> None:
    perturbing = {name: info for name, info in list_metrics().items() if info.family == "perturbation"}
    assert perturbing.pop("road").higher_is_better, "compared in test_imputation.py"
    assert set(perturbing) == {*AREAS, *REMOVALS}
    for name, info in perturbing.items():
        assert info.protocols == (("default", "tis", "rise", "vit_cx") if name in AREAS else ("default", "vtranm"))
        assert info.higher_is_better == (name in ("insertion", "insertion_minus_deletion", "negative_auc", "aopc"))


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_not_square", "timm_dinov2", "timm_swin"])
def test_token_maps_are_bilinear_on_the_input(name: str) -> None:
    of = bench(name)
    for values in of.maps(TOKEN_KINDS):
        literal = curves.bilinear(values, of.size)
        assert abs(of.case(values).on_input.numpy() - literal).max() < 1e-14 * 10
        assert abs(on_input(values, of.size) - literal).max() < 1e-14 * 10
    if of.size[0] // of.family.grid[0] == 8:  # sixteenths: nothing is rounded
        assert (
            of.case(of.maps(["tied tokens"])[0]).on_input.numpy()
            == curves.bilinear(of.maps(["tied tokens"])[0], of.size)
        ).all()


@pytest.mark.parametrize("kinds", [PIXEL_KINDS, TOKEN_KINDS], ids=["pixels", "tokens"])
@pytest.mark.parametrize("protocol", ["default", "tis", "rise", "vit_cx"])
def test_areas_of_every_protocol_and_baseline(protocol: str, kinds: tuple[str, ...]) -> None:
    for baseline in (None, *BASELINES) if protocol in ("default", "tis") else (None,):
        check_areas(bench("six_patches"), kinds, protocol, baseline, steps=5, seed=3)


@pytest.mark.parametrize(("name", "protocol"), crossed(itertools.product(SOME, ["default", "tis", "rise"])))
def test_areas_of_every_family(name: str, protocol: str) -> None:
    kinds = PIXEL_KINDS[1:] if protocol == "tis" else TOKEN_KINDS
    few = slice(1 if "swin" in name else 2)  # Swin is slow
    check_areas(bench(name), kinds[few], protocol, None if protocol == "rise" else "random", steps=4, seed=0)


@pytest.mark.parametrize("steps", [1, 30, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("protocol", ["default", "tis", "rise"])
def test_areas_with_few_and_many_steps(protocol: str, steps: int) -> None:
    """More steps than pixels, one step, a number of steps that does not divide the pixels (16 × 16)."""
    check_areas(bench("four_patches"), PIXEL_KINDS[1:], protocol, None, steps, seed=1)


def test_the_usual_number_of_steps_is_224() -> None:
    of = bench("six_patches")
    result = measure("deletion", of.view, of.images[:1], of.maps(["tied tokens"]), TARGET)[0]
    agrees(result, area(of, of.images[:1], of.maps(["tied tokens"])[0], "deletion", "default", "mean", 224, 0))
    assert len(result.curve or ()) == 225


def removal(
    of: Bench, image: Tensor, values: Tensor, name: str, kind: str, truth: int, steps: int, seed: int
) -> curves.Curve:
    """By the oracle's own function for 20 steps, by its parts for others."""
    behind, ties, on = background(of, image, "default", kind, seed=seed), tie(of.cells, seed), on_input(values, of.size)
    sign = "negative" if name == "negative_auc" else "positive"
    softmax = of.softmax_logits(of.logits(image), TARGET)[1]

    def logits(images: Tensor) -> Tensor:
        return of.softmax_logits(of.logits(images), TARGET)[0]

    if steps == 20:
        if name == "aopc":
            return curves.aopc(of.probabilities, image, behind, on, TARGET, ties)
        if name == "log_odds":
            return curves.log_odds(logits, image, behind, on, softmax, ties)
        return curves.perturbation(of.probabilities, image, behind, on, truth, ties, sign)
    cells, counts = curves.ranked(on, ties, sign), curves.default_counts(of.cells, steps)
    if name in ("positive_auc", "negative_auc"):
        hits = curves.hits(of.probabilities, image, behind, cells, counts, truth)
        return hits, curves.trapezoid(hits, [t / (len(counts) - 1) for t in range(len(counts))])
    reading = of.probabilities if name == "aopc" else lambda images: logits(images).log_softmax(1)
    points = curves.curve(reading, image, behind, cells, counts, TARGET if name == "aopc" else softmax)
    changes = [points[0] - p if name == "aopc" else p - points[0] for p in points]
    return changes, sum(changes) / len(changes)


def check_removals(
    of: Bench, kinds: tuple[str, ...], label: int | None, steps: int = 20, seed: int = 0, **options: Any
) -> None:
    images, maps = of.images[: len(kinds)], of.maps(kinds)
    kind = options.get("baseline") or ("black" if options.get("protocol") == "vtranm" else "mean")
    for name in REMOVALS:
        result = measure(name, of.view, images, maps, TARGET, label=label, steps=steps, seed=seed, **options)
        for i, values in enumerate(maps):
            image = images[i : i + 1]
            truth = of.top(image)[0] if label is None else label
            agrees(result[i], removal(of, image, values, name, kind, truth, steps, seed))


@pytest.mark.parametrize(("name", "protocol"), crossed(itertools.product(SOME, ["default", "vtranm"])))
def test_removal_of_every_family(name: str, protocol: str) -> None:
    of, few = bench(name), slice(1 if "swin" in name else 2)
    if protocol == "default":
        check_removals(of, TOKEN_KINDS[few], label=None, steps=4)
    else:
        check_removals(of, PIXEL_KINDS[1:], label=1, steps=3, protocol="vtranm", seed=2)


@pytest.mark.parametrize("name", ["timm_vit_gap", "multi_label"])
def test_removal_in_the_usual_steps(name: str) -> None:
    check_removals(bench(name), PIXEL_KINDS[1:], label=None)
    check_removals(bench(name), TOKEN_KINDS[:1], label=1, protocol="vtranm")


@pytest.mark.parametrize(("protocol", "baseline"), [*itertools.product(["default", "vtranm"], [None, *BASELINES])])
def test_removal_of_every_protocol_and_baseline(protocol: str, baseline: str | None) -> None:
    """A baseline that is given goes before that of the protocol."""
    check_removals(bench("six_patches"), TOKEN_KINDS, label=2, steps=5, protocol=protocol, baseline=baseline)


@pytest.mark.parametrize("steps", [1, 7, pytest.param(300, marks=pytest.mark.full)])
def test_removal_with_other_numbers_of_steps(steps: int) -> None:
    check_removals(bench("four_patches"), PIXEL_KINDS[1:], label=None, steps=steps, seed=5)


def test_accuracy_curves_see_both_outcomes() -> None:
    """Otherwise the comparisons above could not fail."""
    of = bench("timm_deit_distilled")
    for name in ("positive_auc", "negative_auc"):
        for score in measure(name, of.view, of.images, of.maps(TOKEN_KINDS), TARGET):
            assert set(score.curve or ()) == {0.0, 1.0}


def test_log_odds_survive_a_probability_that_vanishes() -> None:
    of = bench("timm_vit")
    module = copy.deepcopy(of.module)
    with torch.no_grad():
        module.head.weight.mul_(1e4)
    result = measure("log_odds", module, of.images, of.maps(PIXEL_KINDS), TARGET)
    for score in result:
        assert score.curve is not None
        assert max(abs(change) for change in score.curve) > 745, "exp(−745) is the least number there is"
        same(score.value, sum(score.curve) / 21)
