"""Localisation against the oracle and against scikit-learn and torchmetrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, jaccard_score
from tests.helpers import DOUBLE
from tests.metrics.common import PIXEL_KINDS, TOKEN_KINDS, Bench, a_map, bench, on_input, same, tie
from tests.oracles import curves, localization
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision, binary_jaccard_index

from vitrail.geometry import box_iou, fill_boxes
from vitrail.metrics import build_metric, list_metrics, measure
from vitrail.metrics.boxes import box_above
from vitrail.metrics.localization import average_precision

KINDS = (*PIXEL_KINDS, *TOKEN_KINDS, "constant", "peak")
SHARES = (0.0, 0.02, 0.1, 0.3, 0.49, 0.6, 1.0)
TARGET = 1


def values_of(kind: str, of: Bench, seed: int) -> Tensor:
    if kind == "constant":
        return torch.full(of.size, 2.0, dtype=DOUBLE)
    if kind == "peak":  # nothing negative, much of it zero
        return a_map("tokens", of.size, of.family.grid, seed).clamp(min=0)
    return a_map(kind, of.size, of.family.grid, seed)


def mask_of(share: float, size: tuple[int, int], seed: int) -> Tensor:
    """A region that hangs together, and some pixels about."""
    draw = np.random.default_rng(seed)
    rows, columns = (np.sqrt(share) * np.array(size)).round().astype(int)
    top, left = draw.integers(size[0] - rows + 1), draw.integers(size[1] - columns + 1)
    region = torch.zeros(size, dtype=torch.bool)
    region[top : top + rows, left : left + columns] = True
    return region ^ torch.from_numpy(draw.random(size) < (0.02 if 0 < share < 1 else 0))


def situations(name: str, count: int) -> list[tuple[Bench, Tensor, Tensor, int]]:
    """(model, map, mask, number): every kind of map with every size of mask."""
    of, result = bench(name), []
    for seed in range(count):
        kind, share = KINDS[seed % len(KINDS)], SHARES[(seed // len(KINDS) + seed) % len(SHARES)]
        result.append((of, values_of(kind, of, seed), mask_of(share, of.size, seed), seed))
    return result


def scored(metric: str, of: Bench, values: Tensor, **known: Any) -> float:
    return measure(metric, of.view, of.images[:1], values, TARGET, **known)[0].value


def test_every_localisation_metric_is_compared_here() -> None:
    known = {name: info.protocols for name, info in list_metrics().items() if info.family == "localisation"}
    plain = ("pixel_accuracy", "mean_iou", "mean_ap", "discriminativity", "box_localization")
    assert known == {
        "pointing_game": ("default", "tis", "vit_cx"),
        "energy_pointing_game": ("default", "tis"),
        "segmentation_ap": ("default", "skipplus"),
        **dict.fromkeys(plain, ("default",)),
    }
    assert all(list_metrics()[name].higher_is_better for name in known)


@pytest.mark.parametrize("name", ["timm_vit_not_square", "timm_swin"])
def test_pointing_games(name: str) -> None:
    outcomes: list[float] = []
    for of, values, mask, seed in situations(name, 30 if name != "timm_swin" else 3):
        on, ties = on_input(values, of.size), tie(of.cells, seed)
        for tolerance, largest in ((0.0, 0.5), (2.0, 0.5), (3.5, 0.2), (0.0, 1.1)):
            expected = localization.pointing_game(on, mask, ties, tolerance, largest)
            options = {"masks": mask[None], "tolerance": tolerance, "max_area": largest}
            for protocol in ("default", "vit_cx"):
                result = scored("pointing_game", of, values, **options, seed=seed, protocol=protocol)
                same(result, None if expected is None else float(expected))
            outcomes.append(result)
            first = localization.pointing_game(on, mask, None, tolerance, largest)
            result = scored("pointing_game", of, values, **options, protocol="tis")
            same(result, None if first is None else float(first))
        for protocol in ("default", "tis"):
            expected = localization.energy_pointing_game(on, mask, protocol)
            same(scored("energy_pointing_game", of, values, masks=mask[None], protocol=protocol), expected)
    if name != "timm_swin":
        assert {0.0, 1.0} < {outcome if outcome == outcome else -1.0 for outcome in outcomes}, (
            "hits, misses and images left out"
        )


def test_the_largest_of_equal_values_is_drawn() -> None:
    of = bench("timm_vit_not_square")
    values = torch.zeros(of.size, dtype=DOUBLE)
    values[0], values[-1] = 1, 1
    mask = torch.zeros(of.size, dtype=torch.bool)
    mask[0] = True
    hits = [scored("pointing_game", of, values, masks=mask[None], seed=seed) for seed in range(40)]
    assert 8 < sum(hits) < 32
    assert scored("pointing_game", of, values, masks=mask[None], protocol="tis") == 1
    assert scored("pointing_game", of, values.flip(0, 1), masks=~mask[None], protocol="tis", max_area=1.1) == 0


def literal_region(boxes: list[tuple[float, ...]], size: tuple[int, int], cut: bool = False) -> np.ndarray:
    """Pixels whose centre is in a box; TIS: corners cut to whole numbers."""
    region = np.zeros(size, dtype=bool)
    for row in range(size[0]):
        for column in range(size[1]):
            for x0, y0, x1, y1 in boxes:
                if cut:
                    region[row, column] |= int(x0) <= column < int(x1) and int(y0) <= row < int(y1)
                else:
                    region[row, column] |= x0 <= column + 0.5 < x1 and y0 <= row + 0.5 < y1
    return region


def some_boxes(seed: int, size: tuple[int, int], whole: bool = False) -> list[tuple[float, ...]]:
    draw, result = np.random.default_rng(seed), []
    for _ in range(int(draw.integers(1, 4))):
        x, y = np.sort(draw.uniform(0, size[1], 2)), np.sort(draw.uniform(0, size[0], 2))
        box = (x[0], y[0], max(x[1], x[0] + 1), max(y[1], y[0] + 1))
        result.append(tuple(float(math.floor(v)) if whole else float(v) for v in box))
    return result


def test_games_with_boxes() -> None:
    differ = 0
    for of, values, _, seed in situations("timm_vit_not_square", 20):
        boxes = some_boxes(seed, of.size)
        on, ties = on_input(values, of.size), tie(of.cells)
        region, cut = literal_region(boxes, of.size), literal_region(boxes, of.size, cut=True)
        assert np.array_equal(fill_boxes(boxes, of.size).numpy(), region)  # type: ignore[arg-type]
        for tolerance in (0.0, 1.5):
            expected = localization.pointing_game(on, region, ties, tolerance, 0.6)
            result = scored("pointing_game", of, values, boxes=[boxes], tolerance=tolerance, max_area=0.6)
            same(result, None if expected is None else float(expected))
            expected = localization.pointing_game(on, cut, None, tolerance, 0.6)
            result = scored(
                "pointing_game", of, values, boxes=[boxes], tolerance=tolerance, max_area=0.6, protocol="tis"
            )
            same(result, None if expected is None else float(expected))
        differ += not np.array_equal(region, cut)
        same(scored("energy_pointing_game", of, values, boxes=[boxes]), localization.energy_pointing_game(on, region))
    assert differ > 10


def test_an_object_of_half_the_image_is_left_out() -> None:
    of, half = bench("timm_vit_not_square"), torch.zeros(24, 40, dtype=torch.bool)
    half[:12] = True
    values = of.maps(["pixels"])[0]
    assert math.isnan(scored("pointing_game", of, values, masks=half[None]))
    half[0, 0] = False
    assert scored("pointing_game", of, values, masks=half[None]) in (0, 1)


def test_an_image_whose_boxes_were_all_cut_away_is_a_miss() -> None:
    of = bench("timm_vit_not_square")
    for protocol in ("default", "tis"):
        assert scored("pointing_game", of, of.maps(["tokens"])[0], boxes=[[]], protocol=protocol) == 0.0


def test_boxes_that_leave_the_image_are_cut_at_its_edge() -> None:
    of = bench("timm_vit_not_square")
    values = torch.zeros(of.size, dtype=DOUBLE)
    values[2, 2] = 1
    inside = {"boxes": [[(-4.0, -4.0, 10.0, 10.0), (of.size[1] - 3.0, 0.0, 999.0, 4.0)]]}
    assert scored("pointing_game", of, values, **inside) == 1
    assert scored("energy_pointing_game", of, values, **inside, protocol="tis") == 1


def test_boxes_that_leave_the_image_are_cut_at_its_edge_in_tis() -> None:
    of = bench("timm_vit_not_square")
    values = torch.zeros(of.size, dtype=DOUBLE)
    values[2, 2] = 1
    assert scored("pointing_game", of, values, boxes=[[(-4.0, -4.0, 10.0, 10.0)]], protocol="tis") == 1


def test_discriminativity() -> None:
    hits = []
    for of, values, own, seed in situations("timm_vit_not_square", 48):
        other, on = mask_of(SHARES[seed % 5], of.size, 1000 + seed), on_input(values, of.size)
        share, hit = localization.discriminativity(on, own, other, tie(of.cells, seed))
        options = {"masks": own[None], "others": other[None]}
        same(scored("discriminativity", of, values, **options), share)
        result = scored("discriminativity", of, values, **options, reading="hit", seed=seed)
        same(result, float(hit))
        hits.append(result)
    assert 0 < sum(hits) < len(hits)


def test_segmentation() -> None:
    for of, values, mask, _ in situations("timm_vit_not_square", 42):
        on = on_input(values, of.size)
        same(scored("pixel_accuracy", of, values, masks=mask[None]), localization.pixel_accuracy(on, mask))
        (result,) = measure("mean_iou", of.view, of.images[:1], values, TARGET, masks=mask[None])
        same(result.value, localization.mean_iou(on, mask))
        _, _, intersections, unions = localization.areas(localization.foreground(on), mask)
        assert result.parts == [intersections[1], unions[1], intersections[0], unions[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_average_precisions(kind: str) -> None:
    of = bench("timm_vit_not_square")
    for seed, share in enumerate(SHARES):
        values, mask, ignore = values_of(kind, of, seed), mask_of(share, of.size, seed), mask_of(0.2, of.size, 99)
        on, blocks = on_input(values, of.size), curves.nearest(values, of.size)
        close(scored("mean_ap", of, values, masks=mask[None]), localization.mean_ap(on, mask))
        expected = localization.segmentation_ap(blocks, mask)
        close(scored("segmentation_ap", of, values, masks=mask[None]), expected)
        apart = mask & ~ignore  # a data set's objects and its unknown pixels exclude each other
        known = {"masks": apart[None], "ignore": ignore[None]}
        close(scored("segmentation_ap", of, values, **known), localization.segmentation_ap(blocks, apart, ignore))
        expected = localization.segmentation_ap(blocks, apart, ignore, "skipplus")
        result = scored("segmentation_ap", of, values, **known, protocol="skipplus")
        close(result, None if float(apart.double().mean()) < 0.05 else expected)


def close(result: float, expected: float | None) -> None:
    """Equal to six digits: torchmetrics divides its counts in single precision."""
    if expected is None:
        assert math.isnan(result)
    else:
        assert abs(result - expected) < 1e-6 * max(expected, 1e-2)


def test_average_precision_is_that_of_other_libraries() -> None:
    for of, values, mask, _ in situations("timm_vit_not_square", 18):
        blocks, truth = curves.nearest(values, of.size), mask.numpy().ravel()
        result = average_precision(torch.from_numpy(blocks), mask)
        if not truth.any():
            assert math.isnan(result)
            continue
        close(result, average_precision_score(truth, blocks.ravel()))
        squeezed = torch.from_numpy(blocks).sigmoid().flatten()
        close(result, float(binary_average_precision(squeezed, mask.flatten().long())))


def test_segmentation_is_that_of_other_libraries() -> None:
    for of, values, mask, _ in situations("timm_vit_not_square", 18):
        scaled = localization.min_max(on_input(values, of.size))
        result, truth = (scaled > scaled.mean()).ravel(), mask.numpy().ravel()
        same(scored("pixel_accuracy", of, values, masks=mask[None]), accuracy_score(truth, result))
        both = jaccard_score(truth, result, labels=[False, True], average="macro", zero_division=0)
        same(scored("mean_iou", of, values, masks=mask[None]), both)
        single = [
            float(binary_jaccard_index(torch.from_numpy(a), torch.from_numpy(b)))
            for a, b in ((result, truth), (~result, ~truth))
        ]
        assert abs(float(np.nan_to_num(single).mean()) - both) < 1e-6


# --- boxes ----------------------------------------------------------------------------------------------------------


def test_boxes_above_a_threshold() -> None:
    """Regions of equal size, regions that touch at corners, none at all."""
    draw = np.random.default_rng(0)
    for seed in range(300):
        shape = tuple(draw.integers(1, 12, 2))
        values = draw.random(shape) if seed % 2 else draw.integers(0, 3, shape) / 2
        threshold = float(draw.random())
        scaled = localization.min_max(values)
        expected = localization.predicted_box(values, threshold)
        result = box_above(scaled, threshold)
        assert result == (None if expected is None else tuple(map(float, expected)))


def test_box_localization() -> None:
    outcomes: dict[str, set[float]] = {"gt_known": set(), "top1": set()}
    of = bench("timm_vit_not_square")
    top = of.top(of.images[:1])[0]
    for seed in range(30):
        values = values_of(KINDS[seed % len(KINDS)], of, seed)
        on, boxes = on_input(values, of.size), some_boxes(seed, of.size, whole=True)
        for threshold, least in ((0.5, 0.5), (0.2, 0.1), (1.0, 0.02), (0.35, 0.3)):
            label = seed % 5
            best, known, right = localization.box_localization(on, boxes, threshold, least, top, label)  # type: ignore[arg-type]
            options = {"boxes": [boxes], "threshold": threshold, "iou": least}
            result = scored("box_localization", of, values, **options)
            assert result == float(known), (best, threshold, least)
            outcomes["gt_known"].add(result)
            result = scored("box_localization", of, values, **options, label=label, kind="top1")
            assert result == float(right)
            outcomes["top1"].add(result)
    assert outcomes == {"gt_known": {0.0, 1.0}, "top1": {0.0, 1.0}}


def test_max_box_acc_of_one_image_and_of_many() -> None:
    of, maps, boxes, result = bench("timm_vit_not_square"), [], [], []
    for seed in range(5):
        values = values_of(("tokens", "tied tokens", "peak", "pixels", "constant")[seed], of, seed)
        maps.append(on_input(values, of.size))
        boxes.append(some_boxes(seed, of.size, whole=True))
        options = {"boxes": [boxes[-1]], "kind": "max_box_acc", "threshold": 0.3}
        result += measure("box_localization", of.view, of.images[:1], values, TARGET, **options)
        at = localization.best_iou(maps[-1], boxes[-1], 0.3)  # type: ignore[arg-type]
        same(result[-1].value, sum(at >= delta for delta in (0.3, 0.5, 0.7)) / 3)
        literal = [localization.best_iou(maps[-1], boxes[-1], i / 100) for i in range(100)]  # type: ignore[arg-type]
        assert np.allclose(result[-1].parts or (), literal, rtol=0, atol=1e-12)
    combined = build_metric("box_localization").combine(torch.tensor([score.parts for score in result], dtype=DOUBLE))
    same(float(combined), localization.max_box_acc(maps, boxes)[0])  # type: ignore[arg-type]


def test_max_box_acc_has_one_threshold_for_all_images() -> None:
    parts = torch.zeros(2, 100, dtype=DOUBLE)
    parts[0, 30], parts[1, 60] = 0.8, 0.6
    assert float(build_metric("box_localization").combine(parts)) == pytest.approx((0.5 + 0.5 + 0.5) / 3)
    parts[1, 30] = 0.4
    assert float(build_metric("box_localization").combine(parts)) == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_boxes_overlap_by_area() -> None:
    assert box_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert box_iou((0, 0, 2, 2), (2, 0, 3, 3)) == 0
    assert box_iou((0, 0, 2, 3), (0, 0, 2, 3)) == 1
