"""Comparing methods: cells with intervals, ranks and paired tests; how far metrics agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.metrics.statistics import (
    PERCENTILES,
    RESAMPLES,
    Combine,
    Floats,
    rank_correlations,
    resampled,
    resampled_means,
    two_sided,
)

Bools = NDArray[np.bool_]

LEVEL = 0.05
FEWEST_PAIRS = 6  # with five, even a sign test with five of five is above 0.05
FEWEST_METHODS = 3  # with two, every rank correlation is ±1
RELATIVE, ABSOLUTE = 1e-6, 1e-9  # differences below are rounding: metrics are computed in single precision


@dataclass(frozen=True)
class Cell:
    """One method by one metric: the mean, its 95 % interval, and the comparison with the best method.

    ``p`` is NaN where no test was made: for the best method itself, or with fewer than ``FEWEST_PAIRS`` common images.
    ``rank`` is 1 for the best, methods with equal means share it; 0 where nothing is ranked. ``leads`` is true for the
    best method and those not significantly worse than it, if any other is significantly worse.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float = float("nan")
    rank: int = 0
    leads: bool = False

    @property
    def best(self) -> bool:
        return self.rank == 1

    @property
    def second(self) -> bool:
        """The second-best mean, and significantly worse than the best."""
        return self.rank == 2 and self.p < LEVEL

    @property
    def tied(self) -> bool:
        """Not the best, and not significantly worse than it."""
        return not self.best and self.p >= LEVEL


@dataclass(frozen=True)
class Gap:
    """The difference of a method to a reference on the images that both have, with its 95 % interval.

    NaN with fewer than ``FEWEST_PAIRS`` common images.
    """

    mean: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True)
class Sample:
    """The values of a metric: (images, methods), NaN where it does not apply.

    ``parts`` holds (images, numbers) per method where ``combine`` computes the value of a data set from them.
    """

    values: Floats
    parts: Sequence[Floats] = ()
    combine: Combine | None = None

    def estimate(self, method: int, images: Bools) -> float:
        """The value of a method over the selected images."""
        if self.combine is None:
            return float(self.values[images, method].mean())
        return float(self.combine(torch.from_numpy(self.parts[method][images])))

    def draws(self, methods: Sequence[int], images: Bools, resamples: int, seed: int) -> Floats:
        """(resamples, methods): values over resampled images, the same images for every method."""
        if self.combine is None:
            return resampled_means(self.values[images][:, list(methods)], resamples, seed)
        columns = [resampled(self.parts[method][images], self.combine, resamples, seed) for method in methods]
        return np.stack(columns, axis=1)


def compare(sample: Sample, better: int, resamples: int = RESAMPLES, seed: int = 0) -> list[Cell]:
    """A cell per method; ``better`` is 1 where higher is better, −1 where lower is, 0 where unknown.

    Intervals are those of ``vitrail.metrics.summarise``. The test of a method against the best is a two-sided paired
    bootstrap over the images that both have; p-values are not adjusted for the number of methods.
    """
    known = ~np.isnan(sample.values)
    draws: dict[int, Floats] = {}
    for methods in _with_same_images(known):
        images = known[:, methods[0]]
        if images.any() and np.isfinite(sample.values[images][:, methods]).all():
            draws.update(zip(methods, sample.draws(methods, images, resamples, seed).T, strict=True))
    cells = [_cell(sample, method, known[:, method], draws.get(method)) for method in range(known.shape[1])]
    cells = ranked(cells, better)
    best = next((method for method, cell in enumerate(cells) if cell.best), None)
    if best is None:
        return cells
    cells = [
        cell if cell.best or method not in draws or best not in draws
        else replace(cell, p=_p_value(sample, known, draws, best, method, resamples, seed))
        for method, cell in enumerate(cells)
    ]  # fmt: skip
    separated = any(cell.p < LEVEL for cell in cells)
    return [replace(cell, leads=separated and (cell.best or cell.tied)) for cell in cells]


def gaps(sample: Sample, reference: int, resamples: int = RESAMPLES, seed: int = 0) -> list[Gap]:
    """Each method against a reference method, by a paired bootstrap over common images."""
    known = ~np.isnan(sample.values)
    common = known & known[:, [reference]]
    results = [Gap()] * known.shape[1]
    for methods in _with_same_images(common):
        images = common[:, methods[0]]
        members = [reference, *methods]
        if images.sum() < FEWEST_PAIRS or not np.isfinite(sample.values[images][:, members]).all():
            continue
        draws = sample.draws(members, images, resamples, seed)
        lows, highs = np.percentile(draws[:, 1:] - draws[:, :1], PERCENTILES, axis=0)
        base = sample.estimate(reference, images)
        for method, low, high in zip(methods, lows, highs, strict=True):
            results[method] = Gap(sample.estimate(method, images) - base, float(low), float(high))
    return results


def levels(values: Floats) -> Floats:
    """(…, n) → (…, n): 0 for the smallest, 1 for the next; values that differ by rounding only share a level."""
    order = np.argsort(values, axis=-1)
    ascending = np.take_along_axis(values, order, -1)
    steps = np.zeros(values.shape)
    steps[..., 1:] = np.cumsum(~np.isclose(ascending[..., 1:], ascending[..., :-1], RELATIVE, ABSOLUTE), axis=-1)
    unsorted = np.empty(values.shape)
    np.put_along_axis(unsorted, order, steps, -1)
    return np.where(np.isnan(values), np.nan, unsorted)


def agreement_of_means(means: Floats, better: Sequence[int]) -> Floats:
    """(methods, metrics) → (metrics, metrics): Spearman's correlation between the metrics' rankings of the methods.

    Every metric is oriented so that higher is better: 1 means the same order of methods, −1 the opposite.
    """
    return _agreement(means[None], better)[0]


def agreement_by_image(values: Floats, better: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
    """(images, methods, metrics) → the mean over images of per-image correlations, and the number of images."""
    correlations = _agreement(values, better)
    counts = (~np.isnan(correlations)).sum(0)
    with np.errstate(invalid="ignore"):
        return np.nansum(correlations, axis=0) / np.where(counts, counts, np.nan), counts


def _cell(sample: Sample, method: int, images: Bools, draws: Floats | None) -> Cell:
    count = int(images.sum())
    mean = sample.estimate(method, images) if count else float("nan")
    if draws is None:
        return Cell(mean, float("nan"), float("nan"), count)
    low, high = np.percentile(draws, PERCENTILES)
    return Cell(mean, float(low), float(high), count)


def ranked(cells: list[Cell], better: int) -> list[Cell]:
    """The cells of a metric with their ranks; as they are where nothing is to be ranked."""
    means = np.array([cell.mean for cell in cells])
    if not better or (~np.isnan(means)).sum() < 2:
        return cells
    level = levels(means * better)
    return [
        cell if np.isnan(cell.mean) else replace(cell, rank=1 + int((level > level[method]).sum()))
        for method, cell in enumerate(cells)
    ]


def _p_value(
    sample: Sample, known: Bools, draws: dict[int, Floats], best: int, method: int, resamples: int, seed: int
) -> float:
    """The p-value of a method against the best."""
    common = known[:, best] & known[:, method]
    if common.sum() < FEWEST_PAIRS:
        return float("nan")
    if (known[:, best] == known[:, method]).all():
        return two_sided(draws[best] - draws[method])
    paired = sample.draws([best, method], common, resamples, seed)
    return two_sided(paired[:, 0] - paired[:, 1])


def _with_same_images(known: Bools) -> list[list[int]]:
    """Methods grouped by the images they have values for."""
    groups: dict[bytes, list[int]] = {}
    for method in range(known.shape[1]):
        groups.setdefault(known[:, method].tobytes(), []).append(method)
    return list(groups.values())


def _agreement(values: Floats, better: Sequence[int]) -> Floats:
    """(cases, methods, metrics) → (cases, metrics, metrics), each pair over the methods that have both values."""
    oriented = values * np.array([direction or 1 for direction in better], dtype=np.float64)
    level = levels(oriented.swapaxes(1, 2))
    known = ~np.isnan(values)
    matrix = np.full((len(values), len(better), len(better)), np.nan)
    for a, b in combinations_with_replacement(range(len(better)), 2):
        enough = (known[:, :, a] & known[:, :, b]).sum(1) >= FEWEST_METHODS
        correlations = rank_correlations(level[:, a], level[:, b])
        matrix[:, a, b] = matrix[:, b, a] = np.where(enough, correlations, np.nan)
    return matrix
