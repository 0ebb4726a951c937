"""Metrics over batches and data sets: ``Running``, intervals, summaries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.helpers import DOUBLE
from tests.metrics.common import CLOSE, Bench, bench, on_input, same
from tests.oracles import localization, quality
from torch import Tensor

from vitrail import VitrailError
from vitrail.methods.registry import build_method
from vitrail.metrics import Running, build_metric, interval, list_metrics, measure, statistics, summarise

TARGET, COUNT = 1, 6


def images_of(of: Bench, count: int = COUNT) -> Tensor:
    return torch.randn(count, 3, *of.size, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


def maps_of(of: Bench, count: int = COUNT) -> Tensor:
    kinds = [("tokens", "tied tokens")[i % 2] for i in range(count)]
    return of.maps(kinds)


def regions_of(of: Bench, count: int = COUNT) -> tuple[Tensor, list[list[tuple[float, ...]]]]:
    draw = np.random.default_rng(5)
    boxes, masks = [], torch.zeros(count, *of.size, dtype=torch.bool)
    for i in range(count):
        x, y = int(draw.integers(0, 20)), int(draw.integers(0, 12))
        width, height = int(draw.integers(4, 20)), int(draw.integers(4, 12))
        boxes.append([(float(x), float(y), float(x + width), float(y + height))])
        masks[i, y : y + height, x : x + width] = True
    return masks, boxes


def indices(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(2000, count))


BATCHES = ([6], [1, 1, 1, 1, 1, 1], [4, 2], [1, 5])


@pytest.mark.parametrize("sizes", BATCHES)
def test_batches_add_up_to_the_whole(sizes: list[int]) -> None:
    of = bench("timm_vit_not_square")
    images, maps, (masks, boxes) = images_of(of), maps_of(of), regions_of(of)
    for metric, params, known in (
        ("aopc", {"steps": 4}, {}),
        ("pointing_game", {"max_area": 0.2}, {"masks": masks}),
        ("energy_pointing_game", {}, {"boxes": boxes}),
        ("mean_iou", {}, {"masks": masks}),
        ("box_localization", {"kind": "max_box_acc"}, {"boxes": boxes}),
        ("sparseness", {"protocol": "tis"}, {}),
    ):
        running = Running(metric, of.view, **params)
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            running.update(images[part], maps[part], TARGET, **{name: values[part] for name, values in known.items()})
            start += size
        whole = measure(metric, of.view, images, maps, TARGET, **known, **params)
        values = [score.value for score in whole if not math.isnan(score.value)]
        result = running.compute()
        assert result["n"] == len(values) > 0
        assert result["low"] <= result["mean"] <= result["high"]
        if whole[0].parts is None:
            assert result["mean"] == pytest.approx(sum(values) / len(values), rel=CLOSE)
            assert (result["low"], result["high"]) == pytest.approx(
                quality.bootstrap_interval(values, indices(len(values))), rel=CLOSE
            )


def test_images_that_do_not_count_are_left_out() -> None:
    of = bench("timm_vit_not_square")
    masks = regions_of(of)[0]
    masks[1], masks[4] = True, True
    running = Running("pointing_game", of.view)
    running.update(images_of(of), maps_of(of), TARGET, masks=masks)
    assert running.compute()["n"] == 4
    running.reset()
    running.update(images_of(of)[1:2], maps_of(of)[1:2], TARGET, masks=masks[1:2])
    nothing = running.compute()
    assert nothing["n"] == 0
    assert all(math.isnan(nothing[name]) for name in ("mean", "low", "high"))


def test_the_value_of_a_data_set_is_that_of_the_oracle() -> None:
    of = bench("timm_vit_not_square")
    images, maps, (masks, boxes) = images_of(of), maps_of(of), regions_of(of)
    on = [on_input(values, of.size) for values in maps]
    running = Running("mean_iou", of.view)
    running.update(images, maps, masks=masks)
    result = running.compute()
    same(result["mean"], localization.segmentation_over(on, list(masks))[1])
    single = [score.value for score in measure("mean_iou", of.view, images, maps, masks=masks)]
    assert abs(result["mean"] - np.mean(single)) > 1e-4, "it is no mean of values"
    chosen = [
        localization.segmentation_over([on[i] for i in row], [masks[i] for i in row])[1] for row in indices(COUNT)[:40]
    ]
    first = [
        float(build_metric("mean_iou").combine(torch.tensor(parts_of("mean_iou", of, row, masks=masks), dtype=DOUBLE)))
        for row in indices(COUNT)[:40]
    ]
    assert first == pytest.approx(chosen, rel=CLOSE)

    running = Running("box_localization(kind=max_box_acc)", of.view)
    running.update(images, maps, boxes=boxes)
    same(running.compute()["mean"], localization.max_box_acc(on, boxes)[0])  # type: ignore[arg-type]


def parts_of(metric: str, of: Bench, row: np.ndarray, **known: Any) -> list[list[float] | None]:
    result = measure(metric, of.view, images_of(of), maps_of(of), **known)
    return [result[i].parts for i in row]


def test_the_interval_of_a_data_set_is_that_of_the_oracle() -> None:
    areas = np.random.default_rng(0).integers(1, 50, (5, 2)).astype(float)
    parts = np.concatenate([areas, areas + 9], axis=1)[:, [0, 2, 1, 3]]  # intersections below their unions
    combined = []
    for row in indices(5):
        total = parts[row].sum(0)
        combined.append((total[0] / (total[1] + localization.EPS) + total[2] / (total[3] + localization.EPS)) / 2)
    expected = quality.percentile(combined, 2.5), quality.percentile(combined, 97.5)
    assert interval(parts, build_metric("mean_iou").combine) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_intervals_are_those_of_the_oracle(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    expected = quality.bootstrap_interval(values, indices(count))
    assert interval(values) == pytest.approx(expected, rel=CLOSE)
    draws = np.random.default_rng(9).integers(count, size=(50, count))
    assert interval(values, resamples=50, seed=9) == pytest.approx(quality.bootstrap_interval(values, draws), rel=CLOSE)
    if count > 2:
        assert interval(values, seed=1) != interval(values)


@pytest.mark.parametrize("count", [7, 40, 1000])
def test_intervals_do_not_depend_on_memory(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=count)
    unchanged = interval(values, resamples=300)
    for held in (1, 13 * count, 100 * count):
        monkeypatch.setattr(statistics, "CHUNK", held)
        assert interval(values, resamples=300) == pytest.approx(unchanged, rel=CLOSE)


# --- torchmetrics' verbs --------------------------------------------------------------------------------------------


def test_reset_forgets_everything() -> None:
    of = bench("timm_vit_not_square")
    images, maps, (masks, _) = images_of(of), maps_of(of), regions_of(of)
    running = Running("mean_iou", of.view)
    running.update(images[:3], maps[:3], masks=masks[:3])
    first = running.compute()
    assert running.compute() == first
    running.update(images[3:], maps[3:], masks=masks[3:])
    assert running.compute()["n"] == COUNT
    running.reset()
    running.update(images[:3], maps[:3], masks=masks[:3])
    assert running.compute() == first


def test_calling_gives_the_value_of_the_batch() -> None:
    of = bench("timm_vit_not_square")
    images, maps = images_of(of), maps_of(of)
    running = Running("sparseness", of.view)
    batches = [running(images[:4], maps[:4]), running(images[4:], maps[4:])]
    values = [score.value for score in measure("sparseness", of.view, images, maps)]
    assert [summary["n"] for summary in batches] == [4, 2]
    assert [summary["mean"] for summary in batches] == pytest.approx([np.mean(values[:4]), np.mean(values[4:])])
    assert running.compute()["mean"] == pytest.approx(np.mean(values))


def test_running_metrics_are_built_as_measured_ones() -> None:
    of = bench("timm_vit")
    options = {"protocol": "skipplus"}
    for metric in ("token_deletion_accuracy(protocol=skipplus)", build_metric("token_deletion_accuracy", **options)):
        assert Running(metric, of.view).metric.higher_is_better
    assert Running("token_deletion_accuracy", of.module).metric.higher_is_better is False
    with pytest.raises(VitrailError, match="built already"):
        Running(build_metric("aopc"), of.view, steps=3)
    with pytest.raises(VitrailError, match="no metric"):
        Running("aopcc", of.view)
    assert {name: Running(name, of.view).metric.higher_is_better for name in list_metrics()} == {
        name: info.higher_is_better for name, info in list_metrics().items()
    }


def test_a_running_metric_of_methods() -> None:
    of = bench("timm_vit")
    method = build_method("gen_att", of.view)
    maps = method.attribute(of.images, TARGET)
    running = Running("infidelity(samples=3)", of.view)
    for i in range(2):
        running.update(of.images[i], maps[i], TARGET, method=method)
    whole = measure("infidelity", of.view, of.images, maps, TARGET, method=method, samples=3)
    assert running.compute()["mean"] == pytest.approx(np.mean([score.value for score in whole]), rel=1e-6)


def test_states_are_gathered_over_processes() -> None:
    """As torchmetrics does it: lists become one tensor each. Here two processes that saw the same."""
    of = bench("timm_vit_not_square")
    images, maps, (masks, _) = images_of(of), maps_of(of), regions_of(of)
    for metric, known in (("mean_iou", {"masks": masks}), ("sparseness", {})):
        running = Running(metric, of.view)
        running.update(images, maps, **known)
        alone = running.compute()
        running.sync(dist_sync_fn=lambda state, group: [state, state], distributed_available=lambda: True)
        both = Running.compute(running)
        assert both["n"] == 2 * COUNT
        assert both["mean"] == pytest.approx(alone["mean"], rel=CLOSE)


# --- summarise ------------------------------------------------------------------------------------------------------


def frame() -> pd.DataFrame:
    rows = []
    for i, (value, other) in enumerate([(0.1, 3.0), (0.4, math.nan), (math.nan, 5.0), (0.7, math.nan)]):
        common = {"image": str(i), "params": "{}", "explained": "predicted", "seconds": 0.1, "target": 0}
        rows.append({**common, "method": "a", "metric": "insertion", "value": value})
        rows.append({**common, "method": "b", "metric": "insertion", "value": other})
        rows.append({**common, "method": "b", "metric": "pointing_game", "value": math.nan})
    return pd.DataFrame(rows)


def test_summaries_do_not_count_what_does_not_apply() -> None:
    result = summarise(frame())
    assert result[["method", "metric", "n"]].to_numpy().tolist() == [
        ["a", "insertion", 3],
        ["b", "insertion", 2],
        ["b", "pointing_game", 0],
    ]
    assert result["mean"].tolist()[:2] == pytest.approx([0.4, 4.0])
    for line, values in ((0, [0.1, 0.4, 0.7]), (1, [3.0, 5.0])):
        expected = quality.bootstrap_interval(values, indices(len(values)))
        assert (result["low"][line], result["high"][line]) == pytest.approx(expected)
    assert result.loc[2, ["mean", "low", "high"]].isna().all()
    narrow = summarise(frame(), resamples=10, seed=3)
    draws = np.random.default_rng(3).integers(3, size=(10, 3))
    assert (narrow["low"][0], narrow["high"][0]) == pytest.approx(quality.bootstrap_interval([0.1, 0.4, 0.7], draws))


def test_summaries_keep_apart_what_differs() -> None:
    rows = frame()
    for column in ("params", "explained"):
        other = rows.assign(**{column: "other"}, value=rows["value"] + 1)
        result = summarise(pd.concat([rows, other]))
        assert len(result) == 6
        means = result[result["metric"] == "insertion"].groupby(column)["mean"].max()
        assert means["other"] == pytest.approx(5.0)
    assert len(summarise(rows.drop(columns=["params", "explained"]))) == 3
    assert len(summarise(rows[["metric", "value"]])) == 2


def test_summaries_combine_parts() -> None:
    draw = np.random.default_rng(0)
    areas = draw.integers(1, 50, (4, 2))
    parts = [[float(a), float(a + 5), float(b), float(b + 8)] for a, b in areas]
    fits = [draw.random(100).tolist() for _ in range(4)]
    rows = []
    for i in range(4):
        common = {"image": str(i), "method": "a", "value": 0.0}
        rows.append({**common, "metric": "mean_iou", "parts": parts[i]})
        rows.append({**common, "metric": "box_localization(kind=max_box_acc)", "parts": fits[i]})
        rows.append({**common, "metric": "insertion", "value": float(i), "parts": None})
    result = summarise(pd.DataFrame(rows)).set_index("metric")
    total = np.sum(parts, axis=0)
    assert result["mean"]["mean_iou"] == pytest.approx((total[0] / total[1] + total[2] / total[3]) / 2, rel=CLOSE)
    best = [max(np.mean([fit[t] >= delta for fit in fits]) for t in range(100)) for delta in (0.3, 0.5, 0.7)]
    assert result["mean"]["box_localization(kind=max_box_acc)"] == pytest.approx(np.mean(best), rel=CLOSE)
    assert result["mean"]["insertion"] == 1.5
    assert (result["low"] <= result["mean"]).all()
    assert (result["n"] == 4).all()
