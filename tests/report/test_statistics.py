"""The statistics of a report against pandas, scipy and plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from vitrail.metrics.base import get_metric
from vitrail.metrics.statistics import interval, resampled_means, summarise, two_sided
from vitrail.report.gallery import worst_first
from vitrail.report.statistics import (
    FEWEST_PAIRS,
    Sample,
    agreement_by_image,
    agreement_of_means,
    compare,
    levels,
)


def values(images: int = 40, methods: int = 4, missing: float = 0.0, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    found = draw.normal(size=(images, 1)) + 0.3 * draw.normal(size=(images, methods)) + 0.1 * np.arange(methods)
    found[draw.random(found.shape) < missing] = np.nan
    return found


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_cells_are_those_of_summarise(missing: float) -> None:
    found = values(missing=missing)
    rows = pd.DataFrame(
        [
            {"method": f"m{m}", "metric": "insertion", "value": found[i, m]}
            for m in range(found.shape[1])
            for i in range(len(found))
        ]
    )
    expected = summarise(rows)
    cells = compare(Sample(found), 1)
    for cell, line in zip(cells, expected.itertuples(), strict=True):
        assert cell.n == line.n
        assert (cell.mean, cell.low, cell.high) == pytest.approx((line.mean, line.low, line.high), abs=1e-12)


def test_cells_of_combined_metrics_are_those_of_summarise() -> None:
    draw, combine = np.random.default_rng(0), get_metric("mean_iou").combine
    parts = [draw.random((30, 4)) * 100 for _ in range(2)]
    found = np.stack([own[:, 0] / own.sum(1) for own in parts], axis=1)
    cells = compare(Sample(found, parts, combine), 1)
    for m, cell in enumerate(cells):
        assert cell.mean == pytest.approx(float(combine(torch.from_numpy(parts[m]))))
        assert (cell.low, cell.high) == pytest.approx(interval(parts[m], combine))
    worse = next(m for m, cell in enumerate(cells) if not cell.best)
    draws = np.random.default_rng(0).integers(30, size=(2000, 30))
    differences = [
        float(combine(torch.from_numpy(parts[1 - worse][own])) - combine(torch.from_numpy(parts[worse][own])))
        for own in draws
    ]
    assert cells[worse].p == pytest.approx(two_sided(np.array(differences)))


def test_resampled_means_are_means_of_drawn_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = values(17, 3)
    draws = np.random.default_rng(5).integers(17, size=(50, 17))
    expected = np.stack([found[own].mean(0) for own in draws])
    np.testing.assert_allclose(resampled_means(found, 50, seed=5), expected, atol=1e-12)
    monkeypatch.setattr("vitrail.metrics.statistics.CHUNK", 40)  # in chunks: the same
    np.testing.assert_allclose(resampled_means(found, 50, seed=5), expected, atol=1e-12)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_p_is_a_paired_bootstrap_over_common_images(missing: float) -> None:
    found = values(60, 5, missing, seed=3)
    cells = compare(Sample(found), 1)
    best = next(m for m, cell in enumerate(cells) if cell.best)
    for m, cell in enumerate(cells):
        if m == best:
            assert np.isnan(cell.p)
            continue
        common = found[~np.isnan(found[:, best]) & ~np.isnan(found[:, m])]
        draws = np.random.default_rng(0).integers(len(common), size=(2000, len(common)))
        differences = np.array([(common[own, best] - common[own, m]).mean() for own in draws])
        rarer = min((differences <= 0).sum(), (differences >= 0).sum())
        assert cell.p == pytest.approx(min(1, 2 * (rarer + 1) / 2001))


def test_p_agrees_with_scipy() -> None:
    draw = np.random.default_rng(1)
    shared = draw.normal(size=200)
    for shift in (0.0, 0.02, 0.05, 0.2):
        found = np.stack([shared + 0.3 * draw.normal(size=200) + shift, shared + 0.3 * draw.normal(size=200)], axis=1)
        cells = compare(Sample(found), 1)
        p = next(cell.p for cell in cells if not cell.best)
        assert p == pytest.approx(stats.ttest_rel(found[:, 0], found[:, 1]).pvalue, abs=0.03)
        differences = (found[:, 0] - found[:, 1],)
        between = stats.bootstrap(differences, np.mean, method="percentile", rng=0).confidence_interval
        assert (p < 0.05) == (not between.low <= 0 <= between.high)


def test_p_is_below_its_level_as_often_as_it_says() -> None:
    draw, below = np.random.default_rng(2), 0
    for _ in range(300):
        shared = draw.normal(size=(60, 1))
        cells = compare(Sample(shared + draw.normal(size=(60, 2))), 1, resamples=300)
        below += any(cell.p < 0.05 for cell in cells)
    assert 0.02 <= below / 300 <= 0.10


def test_equal_methods_share_the_first_place() -> None:
    own = np.random.default_rng(0).random(20)
    cells = compare(Sample(np.stack([own, own, own - 0.5, own - 0.2], axis=1)), 1)
    assert [cell.rank for cell in cells] == [1, 1, 4, 3]
    assert not any(cell.second for cell in cells)
    assert [cell.tied for cell in cells] == [False] * 4


def test_means_that_differ_by_rounding_are_equal() -> None:
    assert levels(0.075 + np.array([0.0, 1e-17, 1e-9, 1e-3])).tolist() == [0, 0, 0, 1]
    assert levels(np.array([[2.0, np.nan, 1.0, np.inf, 1.0 + 1e-16]])).tolist()[0][2:] == [0, 2, 0]
    cells = compare(Sample(np.tile([0.075, 0.07500000000000001, 0.07], (8, 1))), 1)
    assert [cell.rank for cell in cells] == [1, 1, 3]
    assert [cell.leads for cell in cells] == [True, True, False]
    rounded = agreement_of_means(np.array([[0.1, 1.0], [0.1 + 1e-17, 1.0], [0.1 - 1e-16, 1.0], [0.2, 2.0]]), [1, 1])
    assert rounded[0, 1] == 1


def test_methods_lead_only_where_another_is_significantly_worse() -> None:
    ease = np.random.default_rng(0).normal(size=(40, 1))
    noise = 0.2 * np.random.default_rng(1).normal(size=(40, 3))
    for shifts, leading in (([0, 0, 0], 0), ([1, 1, 0], 2), ([1, 0.5, 0], 1)):
        cells = compare(Sample(ease + noise + np.array(shifts)), 1)
        assert sum(cell.leads for cell in cells) == leading
        assert all(cell.best or cell.tied for cell in cells if cell.leads)
        assert sum(cell.second for cell in cells) == (leading == 1)
        few = compare(Sample((ease + noise + np.array(shifts))[: FEWEST_PAIRS - 1]), 1)
        assert not any(cell.leads or cell.second for cell in few)


def test_less_may_be_better() -> None:
    cells = compare(Sample(values()), -1)
    assert [cell.rank for cell in cells] == list(1 + np.argsort(np.argsort(values().mean(0))))


def test_nothing_is_best_alone_or_where_nobody_knows_which_way_is_better() -> None:
    assert [cell.rank for cell in compare(Sample(values()[:, :1]), 1)] == [0]
    assert {cell.rank for cell in compare(Sample(values()), 0)} == {0}


def test_few_images_are_not_tested() -> None:
    cells = compare(Sample(values(FEWEST_PAIRS - 1)), 1)
    assert all(np.isnan(cell.p) and not cell.tied for cell in cells)
    cells = compare(Sample(values(FEWEST_PAIRS)), 1)
    assert not all(np.isnan(cell.p) for cell in cells)


def test_missing_and_infinite_values() -> None:
    found = values()
    found[:, 1] = np.nan
    found[3, 2] = -np.inf
    cells = compare(Sample(found), 1)
    assert cells[1].n == 0
    assert np.isnan(cells[1].mean)
    assert cells[2].mean == -np.inf
    assert np.isnan([cells[2].low, cells[2].high, cells[2].p]).all()
    assert cells[3].best


def test_agreement_of_means_is_spearmans() -> None:
    draw = np.random.default_rng(0)
    means = draw.normal(size=(9, 4)).round(1)  # with ties
    means[2, 1] = means[5, 3] = np.nan
    better = [1, -1, 1, -1]
    expected = pd.DataFrame(means * better).corr(method="spearman").to_numpy()
    np.testing.assert_allclose(agreement_of_means(means, better), expected, atol=1e-12)


def test_agreement_by_image_is_the_mean_of_spearmans() -> None:
    draw = np.random.default_rng(1)
    found = draw.normal(size=(30, 6, 3)).round(1)
    found[draw.random(found.shape) < 0.1] = np.nan
    found[4, :, 1] = 0.5  # an image on which all methods are equal says nothing
    better = [1, 1, -1]
    matrix, counts = agreement_by_image(found, better)
    for a, b in itertools.combinations(range(3), 2):
        own = []
        for image in found:
            both = image[~np.isnan(image[:, a]) & ~np.isnan(image[:, b])]
            if len(both) >= 3 and np.ptp(both[:, a]) and np.ptp(both[:, b]):
                own.append(stats.spearmanr(both[:, a] * better[a], both[:, b] * better[b]).statistic)
        assert counts[a, b] == len(own) < 31
        assert matrix[a, b] == matrix[b, a] == pytest.approx(np.mean(own))
    assert matrix[0, 0] == pytest.approx(1)


def test_agreement_needs_three_methods() -> None:
    assert np.isnan(agreement_of_means(np.array([[1.0, 2.0], [3.0, 4.0]]), [1, 1])).all()


def test_worst_images_come_first_by_each_metric_in_turn() -> None:
    found = np.zeros((5, 2, 2))
    found[:, :, 0] = np.array([3.0, 1, 2, 5, 4])[:, None]  # more is better: worst is 1, then 2
    found[:, :, 1] = np.array([0.0, 1, 2, 9, 8])[:, None]  # less is better: worst is 3, then 4
    assert worst_first(found, [1, -1], range(5), 3) == [1, 3, 2]
    assert worst_first(found, [1, -1], [0, 2, 4], 2) == [2, 4]
    assert worst_first(found, [0, 0], range(5), 2) == [0, 1]
