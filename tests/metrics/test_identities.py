"""What must hold of curves whatever the model is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import DOUBLE, crossed
from tests.metrics.common import CLOSE, PIXEL_KINDS, TOKEN_KINDS, Bench, a_map, background, bench, on_input, tied
from torch import Tensor

from vitrail.engine import scheduler as scheduling
from vitrail.engine.maps import enlarged
from vitrail.engine.requests import Pictures, Subsets
from vitrail.engine.scheduler import Scheduler
from vitrail.methods.registry import build_method, list_methods
from vitrail.metrics import Scored, build_metric, list_metrics, measure
from vitrail.metrics.base import Case, ask_if_applicable
from vitrail.metrics.curves import _drawn, ranks

SOME = ["timm_vit", "timm_vit_gap", "timm_deit_distilled", "one_output", "timm_swin"]
FAMILIES = ("perturbation", "token masking", "agreement")
CURVES = [name for name, info in list_metrics().items() if info.family in FAMILIES]
DRAWN = [name for name in CURVES if "seed" in list_metrics()[name].params]
SMALL = {"steps": 5, "baseline": "random", "runs": 6}
TARGET = 1


def small(metric: str, **changes: Any) -> dict[str, Any]:
    """Those of a few small parameters that a metric has."""
    return {key: value for key, value in {**SMALL, **changes}.items() if key in list_metrics()[metric].params}


def points(of: Bench, metric: str, maps: Tensor, target: Any = TARGET, **params: Any) -> np.ndarray:
    return np.array([score.curve for score in measure(metric, of.view, of.images, maps, target, **params)])


def values(result: list[Scored]) -> list[float]:
    return [score.value for score in result]


@pytest.mark.parametrize("baseline", ["mean", "blur", "black", "random"])
@pytest.mark.parametrize("name", SOME)
def test_insertion_is_deletion_of_the_negated_map_backwards(name: str, baseline: str) -> None:
    of = bench(name)
    maps = of.maps(["pixels", "pixels"])
    assert all(tied(values) == 0 for values in maps)
    inserted = points(of, "insertion", maps, baseline=baseline, steps=8)
    deleted = points(of, "deletion", -maps, baseline=baseline, steps=8)
    assert np.abs(inserted - deleted[:, ::-1]).max() < CLOSE
    assert np.abs(inserted - points(of, "deletion", maps, baseline=baseline, steps=8)[:, ::-1]).max() > 1e-4


@pytest.mark.parametrize("protocol", ["default", "tis", "rise", "vit_cx"])
@pytest.mark.parametrize("name", SOME)
def test_curves_end_at_the_image_and_at_the_baseline(name: str, protocol: str) -> None:
    of = bench(name)
    maps = of.maps(TOKEN_KINDS)
    whole = of.probabilities(of.images)[:, TARGET].numpy()
    for way in ("insertion", "deletion"):
        behind = torch.cat([background(of, image[None], protocol, "mean", way) for image in of.images])
        empty = of.probabilities(behind)[:, TARGET].numpy()
        result = points(of, way, maps, protocol=protocol, steps=4)
        first, last = (empty, whole) if way == "insertion" else (whole, empty)
        assert np.abs(result[:, -1] - last).max() < CLOSE
        if protocol != "tis":  # which has no point before the first step
            assert np.abs(result[:, 0] - first).max() < CLOSE


@pytest.mark.parametrize("name", SOME)
def test_a_constant_map_is_measured_in_drawn_order(name: str) -> None:
    of = bench(name)
    for level in (0.0, -3.0, 7.0):
        maps = torch.full((2, *of.family.grid), level, dtype=DOUBLE)
        drawn = _drawn(of.cells, 6)
        order = torch.empty(of.cells, dtype=DOUBLE)
        order[drawn] = -torch.arange(of.cells, dtype=DOUBLE)
        for way in ("insertion", "deletion"):
            result = measure(way, of.view, of.images, maps, TARGET, steps=5, seed=6)
            assert all(score.extras["ties"] == 1 for score in result)
            plain = points(of, way, order.view(1, *of.size).repeat(2, 1, 1), steps=5, seed=0)
            assert np.abs(np.array([score.curve for score in result]) - plain).max() < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_patches_stay_equal_when_enlarged(dtype: torch.dtype) -> None:
    """0.1 has no exact binary form: weights that sum to one would part what is equal."""
    for grid, size in (((8, 8), (64, 64)), ((3, 5), (24, 40)), ((7, 7), (30, 31)), ((1, 4), (8, 32))):
        assert enlarged(torch.full(grid, 0.1, dtype=dtype), size).unique().tolist() == [torch.tensor(0.1, dtype=dtype)]
    halves = torch.tensor([[0.1, 0.1, 0.7], [0.1, 0.1, 0.7]], dtype=dtype)
    large = enlarged(halves, (20, 30))
    assert (large[:, :15] == halves[0, 0]).all()
    assert (large[:, 25:] == halves[0, 2]).all()


@pytest.mark.parametrize("name", SOME)
def test_negating_the_map_exchanges_positive_and_negative(name: str) -> None:
    of = bench(name)
    for kinds in (PIXEL_KINDS, TOKEN_KINDS):
        maps = of.maps(kinds)
        positive = measure("positive_auc", of.view, of.images, -maps, TARGET, steps=6)
        negative = measure("negative_auc", of.view, of.images, maps, TARGET, steps=6)
        assert [score.curve for score in positive] == [score.curve for score in negative]


def test_ranks_are_a_permutation_in_falling_order() -> None:
    for kind, seed in itertools.product(("pixels", "tied pixels"), (0, 1)):
        values = a_map(kind, (7, 9), (7, 9), seed)
        place = ranks(values, seed)
        assert sorted(place.tolist()) == list(range(63))
        ordered = values.flatten()[place.argsort()]
        assert (ordered[1:] <= ordered[:-1]).all()
    few = a_map("tied pixels", (7, 9), (7, 9))
    assert not torch.equal(ranks(few, 0), ranks(few, 1))


@pytest.mark.parametrize("metric", DRAWN)
def test_same_seed_same_value(metric: str) -> None:
    of, params, kind = bench("timm_vit_gap"), small(metric), "tokens" if metric.startswith("token") else "pixels"
    maps = of.maps([f"tied {kind}"] * 2)
    first, again = (measure(metric, of.view, of.images, maps, TARGET, seed=3, **params) for _ in range(2))
    assert first == again
    seeds = [values(measure(metric, of.view, of.images, maps, TARGET, seed=seed, **params)) for seed in range(8)]
    assert any(row != seeds[0] for row in seeds), "ties, colours and subsets are drawn by the seed"


@pytest.mark.parametrize(
    ("metric", "name"),
    crossed(
        (metric, name)
        for metric, name in itertools.product(CURVES, ["timm_vit_gap", "timm_swin"])
        if name != "timm_swin" or list_metrics()[metric].needs != "tokens"
    ),
)
def test_batched_is_one_by_one_whatever_the_chunk(metric: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, params = bench(name), small(metric, steps=3, baseline="mean")
    maps, targets = of.maps(TOKEN_KINDS), [0, 3]
    whole = measure(metric, of.view, of.images, maps, targets, **params)
    for chunk in (1, 3):
        monkeypatch.setattr(scheduling, "CPU_CHUNK", chunk)
        parts = measure(metric, of.view, of.images, maps, targets, **params)
        assert np.allclose(values(parts), values(whole), rtol=0, atol=CLOSE)
    for i in range(2):
        (alone,) = measure(metric, of.view, of.images[i], maps[i], targets[i], **params)
        assert abs(alone.value - whole[i].value) < CLOSE
    assert whole[0].value != whole[1].value or "acc" in metric or "auc" in metric


@pytest.mark.parametrize("method", ["rollout", "raw_attention", "random"])
def test_a_method_without_class_has_one_curve_per_class_that_is_read(method: str) -> None:
    of = bench("timm_vit")
    assert not list_methods(method)[method].class_specific
    built = build_method(method, of.view)
    maps = [built.attribute(of.images, target) for target in (0, 3)]
    for metric in ("insertion", "deletion", "aopc", "token_deletion_aopc"):
        params = {} if metric.startswith("token") else {"steps": 5}
        first, second = (points(of, metric, values, TARGET, **params) for values in maps)
        assert np.array_equal(first, second)
        assert not np.array_equal(first, points(of, metric, maps[0], 2, **params))


def test_a_target_is_the_predicted_class_where_none_is_given() -> None:
    of = bench("timm_vit_gap")
    maps = of.maps(TOKEN_KINDS)
    top = of.top(of.images)
    for target in (top, torch.tensor(top), np.array(top), [str(label) for label in top]):
        asked = measure("insertion", of.view, of.images, maps, target, steps=4)
        assert asked == measure("insertion", of.view, of.images, maps, steps=4)


@contextmanager
def counted(of: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many images, and how many sets of patches, went through the model."""
    recorded: list[int] = []

    def spied(logits: Any) -> Any:
        def spy(self: Any, parts: Any, *inputs: Tensor) -> Tensor:
            recorded.append(len(inputs[0]))
            return logits(self, parts, *inputs)

        return spy

    with monkeypatch.context() as patch:
        for kind in (Pictures, Subsets):
            patch.setattr(kind, "logits", spied(kind.logits))
        yield recorded


def asked_all(metrics: list[Any], *cases: Case) -> list[list[Scored]]:
    """All metrics of all cases in one go."""
    asked = [(metric, case) for case in cases for metric in metrics]
    scored = Scheduler().run([ask_if_applicable(metric, case) for metric, case in asked])
    return [scored[i : i + len(metrics)] for i in range(0, len(scored), len(metrics))]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([("insertion", {})], 225),
        ([("insertion", {}), ("insertion", {})], 225),
        ([("insertion", {}), ("deletion", {}), ("insertion_minus_deletion", {})], 450),
        ([("insertion", {"steps": 5}), ("insertion", {"steps": 6})], 13),
        ([("insertion", {"steps": 5}), ("insertion", {"steps": 5, "seed": 1})], 12),
        ([("aopc", {}), ("positive_auc", {}), ("log_odds", {})], 21),
        ([("aopc", {}), ("positive_auc", {}), ("negative_auc", {})], 42),
        ([("aopc", {}), ("aopc", {"protocol": "vtranm"}), ("aopc", {"baseline": "black"})], 42),
        ([("token_deletion_accuracy", {}), ("token_deletion_aopc", {"protocol": "skipplus"})], 10),
        ([(name, {}) for name in CURVES if name.startswith("token")], 20),
        ([("road", {}), ("road", {"order": "morf"}), ("road", {"order": "lerf"})], 14),
        ([("road", {"order": "morf"}), ("road", {"order": "morf", "seed": 1})], 14),
        ([("saco", {})], 11),
        ([("saco", {"groups": 4, "space": "tokens"})], 5),
        ([("idsds", {})], 17),
        ([("faithfulness_correlation", {})], 101),
        ([("sparseness", {})], 0),
    ],
)
def test_metrics_of_one_case_share_their_curves(
    metrics: list[tuple[str, dict[str, Any]]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = bench("timm_vit")
    built = [build_metric(name, **params) for name, params in metrics]
    case = of.case(of.maps(["tied tokens"])[0], TARGET)
    with counted(of, monkeypatch) as recorded:
        (result,) = asked_all(built, case)
    assert sum(recorded) == expected
    alone = [measure(metric, of.view, of.images[:1], case.map[None], TARGET)[0] for metric in built]
    assert [score.value for score in result] == pytest.approx([score.value for score in alone], abs=CLOSE)


def test_several_cases_do_not_share_what_they_know() -> None:
    of = bench("timm_vit_gap")
    maps = of.maps(["tokens", "tokens"])
    cases = [of.case(maps[i], target, i) for i in range(2) for target in (0, 1)]
    metrics = [build_metric("aopc", steps=4), build_metric("log_odds", steps=4)]
    result = asked_all(metrics, *cases)
    for case, (aopc, log_odds) in zip(cases, result, strict=True):
        for metric, score in zip(metrics, (aopc, log_odds), strict=True):
            (alone,) = measure(metric, of.view, case.pixels, case.map, case.target)
            assert abs(score.value - alone.value) < CLOSE


def test_a_map_measured_twice_is_not_changed() -> None:
    of = bench("timm_vit")
    maps, images = of.maps(TOKEN_KINDS), of.images
    kept, recorded = maps.clone(), images.clone()
    for metric in CURVES:
        measure(metric, of.view, images, maps, TARGET)
    assert torch.equal(maps, kept)
    assert torch.equal(images, recorded)
    assert on_input(maps[0], of.size).shape == of.size


def test_all_curves_of_an_image_are_asked_for_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    of = bench("timm_vit_gap")
    rounds: list[list[int]] = []
    answer = Scheduler._variants

    def spy(self: Scheduler, items: list[Any]) -> None:
        rounds.append(list({request.same: request.count for _, _, request in items}.values()))
        answer(self, items)

    monkeypatch.setattr(Scheduler, "_variants", spy)
    names = ("insertion", "deletion", "insertion_minus_deletion", "aopc", "log_odds", "positive_auc", "negative_auc")
    metrics = [build_metric(name, steps=4) for name in names] + [build_metric("token_deletion_aopc")]
    (result,) = asked_all(metrics, of.case(of.maps(["tokens"])[0]))
    assert [sorted(counts) for counts in rounds if counts] == [[1] * 10 + [5] * 4], (
        "insertion, deletion, two ways of removal"
    )
    assert len(result) == len(metrics)
