"""The numbers of a report: cells of all settings and classes, number formats, agreement, mean curves, legend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vitrail.metrics.base import SCALED
from vitrail.metrics.statistics import PERCENTILES, Floats, resampled_means
from vitrail.report.results import Results, Setting
from vitrail.report.statistics import (
    FEWEST_METHODS,
    FEWEST_PAIRS,
    Bools,
    Cell,
    agreement_by_image,
    agreement_of_means,
    compare,
)

ABSENT = "–"
BOLD = "the best mean and those not significantly worse, where another method is significantly worse"
UNDERLINED = "the second-best mean, significantly worse than the best"
NO_LEADER = "no method is significantly worse than the best"
CURVE_POINTS = 65
CURVE_RESAMPLES = 1000
CLASS_CELLS = 20_000  # of single classes, in all
FEWEST_OF_CLASS = 2

Cells = list[list[list[Cell]]]  # setting, method, metric


@dataclass(frozen=True)
class MetricAgreement:
    """Rank correlations (metrics, metrics) of the methods' means, and the mean of per-image correlations."""

    setting: Setting
    metrics: list[str]  # those that are comparable with another
    of_means: Floats
    by_image: Floats

    @property
    def merged(self) -> Floats:
        """One matrix from two symmetric ones, with an empty diagonal."""
        merged = np.triu(self.of_means, 1) + np.tril(self.by_image, -1)
        np.fill_diagonal(merged, math.nan)
        return merged


@dataclass(frozen=True)
class MeanCurve:
    """The mean curve of a method with its 95 % band, over the share of the image that was changed."""

    shares: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass
class Summary:
    """All numbers of a report."""

    results: Results
    cells: Cells
    decimals: list[int | None]  # per metric; None = scientific
    agreement: list[MetricAgreement]  # of the settings that have one
    classes: dict[str, Cells] = field(default_factory=dict)

    def present(self, metric: int) -> list[int]:
        """The settings in which a metric has any value: only these get a column."""
        return [s for s, rows in enumerate(self.cells) if any(row[metric].n for row in rows)]

    @cached_property
    def columns(self) -> list[int]:
        """The metrics with a value in any setting."""
        return [k for k in range(len(self.results.metrics)) if self.present(k)]

    def text(self, value: float, metric: int) -> str:
        return format_number(value, self.decimals[metric])

    def interval(self, cell: Cell, metric: int) -> str:
        return format_interval(cell.low, cell.high, self.decimals[metric])

    def partial(self, cell: Cell, setting: int) -> str:
        """The number of images of a cell, if it is not all of its setting."""
        return f"n = {cell.n}" if 0 < cell.n < len(self.results.settings[setting].images) else ""

    def drawn_methods(self, setting: int, most: int) -> list[int]:
        """At most ``most`` methods, those with the best mean rank, in table order."""
        means = [[cell.rank or math.nan for cell in row] for row in self.cells[setting]]
        present = [m for m, row in enumerate(self.cells[setting]) if any(cell.n for cell in row)]
        ranks = {m: float(np.nanmean(means[m])) if np.isfinite(means[m]).any() else math.inf for m in present}
        return sorted(sorted(present, key=lambda m: ranks[m])[:most])

    def legend(self) -> list[str]:
        """How to read the table."""
        results = self.results
        lines = ["Means with 95 % bootstrap intervals over images; ↑ higher is better, ↓ lower is better."]
        lines.append(
            "“≈”: not the best mean, but not significantly worse (paired two-sided bootstrap over common images, "
            f"p ≥ 0.05; not adjusted for the number of methods; requires {FEWEST_PAIRS} images)."
        )
        lines += [f"Nothing is bold where {reason}: {', '.join(names)}." for reason, names in self._unmarked().items()]
        if any(row[k].n == 0 for k in self.columns for s in self.present(k) for row in self.cells[s]):
            lines.append(f"“{ABSENT}”: not applicable or not measured.")
        inapplicable = [column.call for k, column in enumerate(results.metrics) if k not in self.columns]
        if inapplicable:
            lines.append(f"Not applicable to any image: {', '.join(inapplicable)}.")
        undirected = [column.call for column in results.metrics if not column.better]
        if undirected:
            lines.append(f"Unknown direction, hence no best method: {', '.join(undirected)}.")
        if scaled := [column.call for column in results.metrics if column.scaled]:
            lines.append(f"Of scores that are no probabilities, {SCALED}: {', '.join(scaled)}.")
        if results.replaced:
            lines.append(f"{results.replaced} older rows of the same image, method and metric are ignored.")
        if results.stale:
            lines.append(
                f"{results.stale} rows of methods, metrics or versions that are not in the plan are left out: "
                "vitrail report --stale shows them."
            )
        if results.damaged:
            lines.append(f"Skipped because they are damaged: {', '.join(results.damaged)}.")
        return lines

    def _unmarked(self) -> dict[str, list[str]]:
        """Columns in which no method leads, by the reason."""
        reasons: dict[str, list[str]] = {}
        for k in self.columns:
            for s in self.present(k):
                cells = [row[k] for row in self.cells[s] if row[k].rank]
                if not cells or any(cell.leads for cell in cells):
                    continue
                few = max(cell.n for cell in cells) < FEWEST_PAIRS
                reason = f"fewer than {FEWEST_PAIRS} images were measured" if few else NO_LEADER
                names = filter(None, [self.results.metrics[k].call, self.results.settings[s].label])
                reasons.setdefault(reason, []).append(" · ".join(names))
        return reasons


def summarise_results(results: Results, with_classes: bool = True) -> Summary:
    """All numbers of a report."""
    cells = [_cells(results, setting) for setting in results.settings]
    decimals = [decimals_for([row[k].mean for rows in cells for row in rows]) for k in range(len(results.metrics))]
    agreement = [_agreement(results, setting, rows) for setting, rows in zip(results.settings, cells, strict=True)]
    summary = Summary(results, cells, decimals, list(filter(None, agreement)))
    if with_classes:
        summary.classes = {name: _class_cells(results, name) for name in _large_classes(results)}
    return summary


def format_number(value: float, decimals: int | None) -> str:
    """A number as in the tables."""
    if math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.1e}" if decimals is None else f"{value:.{decimals}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def rounded(value: float, digits: int = 4) -> float | None:
    """A number for a script, to so many significant digits; None where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def format_interval(low: float, high: float, decimals: int | None) -> str:
    """An interval in brackets; empty if there is none."""
    return "" if math.isnan(low) else f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"


def mean_curve(summary: Summary, setting: int, method: int, metric: int) -> MeanCurve | None:
    """The mean over images; None if the metric has no curve."""
    results = summary.results
    points = results.settings[setting].curves.get((method, metric))
    if points is None:
        return None
    points = points[~np.isnan(points).any(1)]
    if not len(points):
        return None
    shares = results.metrics[metric].shares(points.shape[1])
    points, shares = thinned(points, CURVE_POINTS), thinned(shares[None], CURVE_POINTS)[0]
    low, high = np.percentile(resampled_means(points, CURVE_RESAMPLES), PERCENTILES, axis=0)
    return MeanCurve(shares, points.mean(0), low, high)


def thinned(points: Floats, most: int) -> Floats:
    """(n, points) reduced to at most ``most`` points, including the first and the last."""
    count = points.shape[1]
    return points if count <= most else points[:, np.linspace(0, count - 1, most).round().astype(int)]


def _cells(results: Results, setting: Setting, images: Bools | None = None) -> list[list[Cell]]:
    """Cells by method and metric."""
    columns = [compare(setting.sample(k, column, images), column.better) for k, column in enumerate(results.metrics)]
    return [list(row) for row in zip(*columns, strict=True)]


def _agreement(results: Results, setting: Setting, cells: list[list[Cell]]) -> MetricAgreement | None:
    better = [column.better for column in results.metrics]
    if len(better) < 2 or sum(any(cell.n for cell in row) for row in cells) < FEWEST_METHODS:
        return None
    of_means = agreement_of_means(np.array([[cell.mean for cell in row] for row in cells]), better)
    by_image, _ = agreement_by_image(setting.values, better)
    known = ~np.isnan(of_means) | ~np.isnan(by_image)
    np.fill_diagonal(known, False)
    metrics = np.flatnonzero(known.any(1))
    calls, block = [results.metrics[k].call for k in metrics], np.ix_(metrics, metrics)
    return MetricAgreement(setting, calls, of_means[block], by_image[block]) if calls else None


def _large_classes(results: Results) -> list[str]:
    """The classes with the most images, as many as fit into a report, sorted by name."""
    counts = Counter(name for setting in results.settings for name in setting.classes)
    room = CLASS_CELLS // max(1, len(results.settings) * len(results.methods) * len(results.metrics))
    enough = [name for name, count in counts.most_common(room) if count >= FEWEST_OF_CLASS]
    return sorted(enough) if len(counts) > 1 else []


def _class_cells(results: Results, name: str) -> Cells:
    masks = [np.array(setting.classes) == name for setting in results.settings]
    return [_cells(results, setting, mask) for setting, mask in zip(results.settings, masks, strict=True)]


def decimals_for(means: Sequence[float]) -> int | None:
    """Enough for three significant digits of the largest mean; None = scientific."""
    largest = max((abs(mean) for mean in means if math.isfinite(mean)), default=0.0)
    if 0 < largest < 0.01:
        return None
    return 3 if largest < 10 else 2 if largest < 100 else 1
