"""Which method is better, and is the difference more than chance: intervals, paired tests, agreement of metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.metrics.statistics import RESAMPLES

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Combine = Callable[[Any], Any]

LEVEL = 0.05
FEWEST_PAIRS = 6  # with five, even a sign test that finds five of five is above 0.05
FEWEST_METHODS = 3  # two methods are ranked alike or opposite: a correlation of ±1 that says nothing
_NUMBERS = 2**22  # held at once


@dataclass(frozen=True)
class Cell:
    """One method by one metric: the mean, its 95 % interval, and how it stands against the best method.

    ``p`` is NaN where no test was made: of the best itself, or with fewer than ``FEWEST_PAIRS`` images in common.
    ``rank`` is 1 for the best, methods of equal means share it; 0 where there is nothing to rank.
    """

    mean: float
    low: float
    high: float
    n: int
    p: float = float("nan")
    rank: int = 0

    @property
    def best(self) -> bool:
        return self.rank == 1

    @property
    def second(self) -> bool:
        return self.rank == 2

    @property
    def tied(self) -> bool:
        """Not the best, and not significantly worse than it."""
        return not self.best and self.p >= LEVEL


@dataclass(frozen=True)
class Sample:
    """What a metric found: (images, methods), NaN where it does not apply.

    ``parts`` holds (images, numbers) per method where ``combine`` makes the value of a data set from them.
    """

    values: Floats
    parts: Sequence[Floats] = ()
    combine: Combine | None = None

    def estimate(self, method: int, images: Bools) -> float:
        """The value of a method over some images."""
        if self.combine is None:
            return float(self.values[images, method].mean())
        return float(self.combine(torch.from_numpy(self.parts[method][images])))

    def draws(self, methods: Sequence[int], images: Bools, resamples: int, seed: int) -> Floats:
        """(resamples, methods): the values of images drawn again, the same images for every method."""
        if self.combine is None:
            return resampled_means(self.values[images][:, list(methods)], resamples, seed)
        own = [resampled(self.parts[method][images], self.combine, resamples, seed) for method in methods]
        return np.stack(own, axis=1)


def compare(sample: Sample, better: int, resamples: int = RESAMPLES, seed: int = 0) -> list[Cell]:
    """A cell per method; ``better`` is 1 where higher is better, −1 where lower is, 0 where nobody knows.

    Intervals are those of ``vitrail.metrics.summarise``. The test of a method against the best is a two-sided paired
    bootstrap over the images that both have; p-values are not adjusted for the number of methods.
    """
    known = ~np.isnan(sample.values)
    draws: dict[int, Floats] = {}
    for methods in _alike(known):
        images = known[:, methods[0]]
        if images.any() and np.isfinite(sample.values[images][:, methods]).all():
            found = sample.draws(methods, images, resamples, seed)
            draws.update(zip(methods, found.T, strict=True))
    cells = [_cell(sample, method, known[:, method], draws.get(method)) for method in range(known.shape[1])]
    cells = _ranked(cells, better)
    best = next((method for method, cell in enumerate(cells) if cell.best), None)
    if best is None:
        return cells
    return [
        cell if cell.best or method not in draws or best not in draws
        else replace(cell, p=_against(sample, known, draws, best, method, resamples, seed))
        for method, cell in enumerate(cells)
    ]  # fmt: skip


def resampled_means(values: Floats, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """(n, k) → (resamples, k): means of rows drawn again; the draws are those of ``statistics.interval``."""
    draw, rows = np.random.default_rng(seed), len(values)
    step = max(1, _NUMBERS // rows)
    means = []
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        chosen = draw.integers(rows, size=(count, rows)) + rows * np.arange(count)[:, None]
        # How often each row was drawn: one product then serves all columns.
        times = np.bincount(chosen.ravel(), minlength=count * rows).reshape(count, rows)
        means.append(times.astype(np.float64) @ values / rows)
    return np.concatenate(means)


def resampled(parts: Floats, combine: Combine, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """(n, numbers) → (resamples,): the same draws, combined."""
    draw, rows = np.random.default_rng(seed), len(parts)
    step = max(1, _NUMBERS // parts.size)
    found = []
    for start in range(0, resamples, step):
        chosen = parts[draw.integers(rows, size=(min(step, resamples - start), rows))]
        found.append(combine(torch.from_numpy(chosen)).numpy())
    return np.concatenate(found)


def two_sided(differences: Floats) -> float:
    """The p-value of resampled differences: twice the rarer side of zero, never zero itself."""
    rarer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (1 + rarer) / (1 + len(differences)))


def agreement_of_means(means: Floats, better: Sequence[int]) -> Floats:
    """(methods, metrics) → (metrics, metrics): Spearman's correlation of how the metrics rank the methods.

    Every metric is turned so that more is better: 1 means the same order of methods, −1 the opposite.
    """
    return _spearman(means[None], better)[0]


def agreement_by_image(values: Floats, better: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
    """(images, methods, metrics) → the mean over images of each image's own correlations, and of how many images."""
    own = _spearman(values, better)
    counts = (~np.isnan(own)).sum(0)
    with np.errstate(invalid="ignore"):
        return np.nansum(own, axis=0) / np.where(counts, counts, np.nan), counts


def _cell(sample: Sample, method: int, images: Bools, draws: Floats | None) -> Cell:
    count = int(images.sum())
    mean = sample.estimate(method, images) if count else float("nan")
    if draws is None:
        return Cell(mean, float("nan"), float("nan"), count)
    low, high = np.percentile(draws, [2.5, 97.5])
    return Cell(mean, float(low), float(high), count)


def _ranked(cells: list[Cell], better: int) -> list[Cell]:
    means = [cell.mean * better for cell in cells if not np.isnan(cell.mean)]
    if not better or len(means) < 2:
        return cells
    return [
        cell if np.isnan(cell.mean) else replace(cell, rank=1 + sum(other > cell.mean * better for other in means))
        for cell in cells
    ]


def _against(
    sample: Sample, known: Bools, draws: dict[int, Floats], best: int, method: int, resamples: int, seed: int
) -> float:
    """The p-value of a method against the best."""
    common = known[:, best] & known[:, method]
    if common.sum() < FEWEST_PAIRS:
        return float("nan")
    if (known[:, best] == known[:, method]).all():
        return two_sided(draws[best] - draws[method])
    found = sample.draws([best, method], common, resamples, seed)
    return two_sided(found[:, 0] - found[:, 1])


def _alike(known: Bools) -> list[list[int]]:
    """Methods that have values for the same images, together."""
    groups: dict[bytes, list[int]] = {}
    for method in range(known.shape[1]):
        groups.setdefault(known[:, method].tobytes(), []).append(method)
    return list(groups.values())


def _spearman(values: Floats, better: Sequence[int]) -> Floats:
    """(cases, methods, metrics) → (cases, metrics, metrics), each pair over the methods that have both values."""
    count, metrics = len(values), values.shape[2]
    turned = values * np.array([one or 1 for one in better], dtype=np.float64)
    found = np.full((count, metrics, metrics), np.nan)
    step = max(1, _NUMBERS // max(1, values.shape[1] ** 2))
    for start in range(0, count, step):
        part = slice(start, start + step)
        for a in range(metrics):
            for b in range(a, metrics):
                both = ~np.isnan(turned[part, :, a]) & ~np.isnan(turned[part, :, b])
                found[part, a, b] = found[part, b, a] = _correlation(turned[part, :, a], turned[part, :, b], both)
    return found


def _correlation(a: Floats, b: Floats, both: Bools) -> Floats:
    """(cases,): the correlation of ranks among the methods in ``both``; NaN where all are equal or too few."""
    x, y = (_centred_ranks(np.where(both, one, np.nan), both) for one in (a, b))
    spread = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    usable = (both.sum(1) >= FEWEST_METHODS) & (spread > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(usable, np.clip((x * y).sum(1) / spread, -1, 1), np.nan)


def _centred_ranks(values: Floats, known: Bools) -> Floats:
    """Ranks less their mean, equal values sharing theirs; zero where nothing is known."""
    left, right = values[:, :, None], values[:, None, :]
    below, same = (right < left).sum(2), (right == left).sum(2)  # NaN is neither
    ranks = below + (same + 1) / 2
    mean = (known.sum(1, keepdims=True) + 1) / 2
    return np.where(known, ranks - mean, 0.0)
