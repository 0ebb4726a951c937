"""Where methods stand over several pairs of model and data: scores, who is best where, how far metrics agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitrail.calls import call_name
from vitrail.errors import VitrailError
from vitrail.methods.base import MethodInfo
from vitrail.metrics.statistics import Floats
from vitrail.report.statistics import FEWEST_PAIRS, Bools, Gap, agreement_of_means

if TYPE_CHECKING:
    import pandas as pd

CONTROL = "random"
HEADLINE = "insertion_minus_deletion"
CEILINGS = {"token_insertion_aopc": "greedy", "token_deletion_aopc": "greedy(curve=deletion)"}
FEWEST_RANKED = 6  # methods in a rank correlation
SAME, CONTRARY = 0.8, 0.0  # rank correlations
TIED, BEST = 1, 2
DIRECTIONS = {"higher": 1, "lower": -1}
NUMBERS = ("mean", "low", "high", "n", "gap", "gap_low", "gap_high")


@dataclass(frozen=True)
class Scores:
    """Per method: the mean share over the pairs it was measured on, its 95 % interval, and their number."""

    mean: Floats
    low: Floats
    high: Floats
    pairs: NDArray[np.int64]


@dataclass(frozen=True)
class Agreement:
    """Rank correlations of the methods' means between metrics, similar metrics side by side."""

    metrics: list[str]
    matrix: Floats
    groups: list[list[str]]  # metrics of which all correlate by at least ``SAME``

    def contrary(self) -> list[tuple[str, str, float]]:
        """Pairs of metrics that do not rank alike at all, the most contrary first."""
        rows, columns = np.nonzero(np.triu(self.matrix <= CONTRARY, 1))
        pairs = [
            (self.metrics[a], self.metrics[b], float(self.matrix[a, b])) for a, b in zip(rows, columns, strict=True)
        ]
        return sorted(pairs, key=lambda pair: pair[2])


@dataclass(frozen=True)
class Standings:
    """The numbers of a leaderboard, each (pairs, methods, metrics), NaN where nothing was measured."""

    pairs: list[str]
    methods: list[str]
    metrics: list[str]
    better: list[int]  # per metric: 1 where higher is better, −1 where lower is
    mean: Floats
    low: Floats
    high: Floats
    n: Floats
    gap: Floats
    gap_low: Floats
    gap_high: Floats

    @cached_property
    def rivals(self) -> Bools:
        """(methods,): False for controls, a floor or a ceiling, which stand in the table and are best nowhere."""
        return np.array([not is_control(method) for method in self.methods], bool)

    @cached_property
    def headlines(self) -> list[int | None]:
        """Per pair, the metric of the score: ``insertion_minus_deletion``, with the parameters that most pairs have."""
        known = np.isfinite(self.mean).sum(1) > 0
        calls = [k for k, call in enumerate(self.metrics) if call_name(call) == HEADLINE]
        calls.sort(key=lambda k: -known[:, k].sum())
        return [next((k for k in calls if known[p, k]), None) for p in range(len(self.pairs))]

    @cached_property
    def spans(self) -> Floats:
        """(pairs,): from the mean of ``random`` to that of the best method; NaN where there is no such distance."""
        spans = np.full(len(self.pairs), np.nan)
        for p, k in enumerate(self.headlines):
            if k is not None and CONTROL in self.methods:
                spans[p] = self._best(p, k) - self.mean[p, self.methods.index(CONTROL), k]
        return np.where(spans > 0, spans, np.nan)

    @cached_property
    def shares(self) -> Floats:
        """(pairs, methods): the share of the way from ``random``, 0, to the best method of the pair, 1."""
        best = np.array([np.nan if k is None else self._best(p, k) for p, k in enumerate(self.headlines)])
        return 1 - (best[:, None] - self._headline(self.mean)) / self.spans[:, None]

    @cached_property
    def scores(self) -> Scores:
        """The shares averaged over pairs; intervals are of the images, with pairs and spans fixed."""
        known = ~np.isnan(self.shares)
        count = known.sum(0)
        divisor = np.where(count, count, np.nan)
        mean = np.where(known, self.shares, 0).sum(0) / divisor
        value, low, high = (self._headline(cube) / self.spans[:, None] for cube in (self.mean, self.low, self.high))
        below, above = (
            np.sqrt((np.where(known, side, 0) ** 2).sum(0)) / divisor for side in (value - low, high - value)
        )
        return Scores(mean, mean - below, mean + above, count)

    @cached_property
    def attainable(self) -> Floats:
        """(methods,): the share of the way from ``random``, 0, to what ``greedy`` attains, 1, on its token curve.

        The mean over both curves and the pairs on which ``greedy`` was measured; NaN for a method that lacks any.
        """
        shares = []
        for metric, ceiling in CEILINGS.items():
            if metric in self.metrics and {CONTROL, ceiling} <= set(self.methods):
                means = self.mean[:, :, self.metrics.index(metric)]
                floor, top = (means[:, self.methods.index(method), None] for method in (CONTROL, ceiling))
                known = (np.isfinite(top - floor) & (top != floor))[:, 0]
                shares.append(((means - floor) / np.where(top == floor, np.nan, top - floor))[known])
        rows = np.concatenate(shares) if shares else np.empty((0, len(self.methods)))
        return np.asarray(rows.mean(0)) if len(rows) else np.full(len(self.methods), np.nan)

    @cached_property
    def marks(self) -> NDArray[np.int8]:
        """(pairs, methods, metrics): ``BEST`` mean, ``TIED`` = not distinguishable from it, or 0.

        A method is tied if the interval of its gap to the reference overlaps that of the best method; where a gap is
        unknown, if the intervals of the means do.
        """
        marks = np.zeros(self.mean.shape, np.int8)
        for p, k in np.ndindex(len(self.pairs), len(self.metrics)):
            means = np.where(self.rivals, self.mean[p, :, k] * self.better[k], np.nan)
            if (~np.isnan(means)).sum() > 1:
                best = int(np.nanargmax(means))
                marks[p, :, k] = (self._undecided(p, best, k) & self.rivals) * TIED
                marks[p, best, k] = BEST
        return marks

    def leads(self, method: int) -> int:
        """The number of pairs on which a method is the best by the headline metric, or tied with it."""
        return sum(k is not None and bool(self.marks[p, method, k]) for p, k in enumerate(self.headlines))

    def difference(self, method: int, other: int) -> Gap:
        """How far the score of a method is above that of another, over the pairs that both have.

        Exact where one of them is the reference; else their gaps to it are taken as independent, which is
        cautious: both vary with it.
        """
        pairs = ~np.isnan(self.shares[:, [method, other]]).any(1)
        known = not np.isnan(self._headline(self.gap)[pairs][:, [method, other]]).any()
        numbers = (self.gap, self.gap_low, self.gap_high) if known else (self.mean, self.low, self.high)
        value, low, high = (self._headline(cube) / self.spans[:, None] for cube in numbers)
        count = pairs.sum()
        if not count:
            return Gap()
        mean = float((self.shares[pairs, method] - self.shares[pairs, other]).mean())
        below = (value - low)[pairs, method] ** 2 + (high - value)[pairs, other] ** 2
        above = (high - value)[pairs, method] ** 2 + (value - low)[pairs, other] ** 2
        return Gap(mean, mean - float(np.sqrt(below.sum())) / count, mean + float(np.sqrt(above.sum())) / count)

    def agreement(self) -> Agreement:
        """Spearman's correlations, averaged over the pairs in which at least ``FEWEST_RANKED`` methods have both."""
        rivals = self.mean[:, self.rivals]
        known = (~np.isnan(rivals)).astype(np.int64)
        enough = known.swapaxes(1, 2) @ known >= FEWEST_RANKED
        matrices = np.where(enough, [agreement_of_means(means, self.better) for means in rivals], np.nan)
        counts = (~np.isnan(matrices)).sum(0)
        matrix = np.nansum(matrices, 0) / np.where(counts, counts, np.nan)
        related = ~np.isnan(matrix) & ~np.eye(len(matrix), dtype=bool)
        kept = np.flatnonzero(related.any(1))
        return _ordered([self.metrics[k] for k in kept], matrix[np.ix_(kept, kept)])

    def _best(self, p: int, k: int) -> float:
        """The highest mean of a pair, or NaN."""
        return float(np.fmax.reduce(self.mean[p, self.rivals, k], initial=np.nan))

    def _headline(self, numbers: Floats) -> Floats:
        """(pairs, methods): numbers of the headline metric."""
        rows = [
            numbers[p, :, k] if k is not None else np.full(len(self.methods), np.nan)
            for p, k in enumerate(self.headlines)
        ]
        return np.stack(rows)

    def _undecided(self, p: int, best: int, k: int) -> Bools:
        """(methods,): whether a method's interval overlaps that of the best."""
        enough = (self.n[p, :, k] >= FEWEST_PAIRS) & (self.n[p, best, k] >= FEWEST_PAIRS)
        low, high = self.gap_low[p, :, k], self.gap_high[p, :, k]
        paired = ~np.isnan(low) & ~np.isnan(low[best])
        means = _overlap(self.low[p, :, k], self.high[p, :, k], best)
        return enough & np.where(paired, _overlap(low, high, best), means)


def standings(table: pd.DataFrame, pairs: Sequence[str]) -> Standings:
    """The rows of these pairs as arrays; methods and metrics in the order of the table."""
    import pandas as pd

    rows = table[table["pair"].isin(pairs)]
    names = {"pair": [pair for pair in pairs if pair in set(rows["pair"])]}
    names |= {column: list(dict.fromkeys(rows[column])) for column in ("method", "metric")}
    places = tuple(pd.Index(values).get_indexer(rows[column]) for column, values in names.items())
    cubes = {}
    for name in NUMBERS:
        cubes[name] = np.full([len(values) for values in names.values()], np.nan)
        cubes[name][places] = rows[name]
    better = dict(zip(rows["metric"], rows["better"], strict=True))
    directions = [DIRECTIONS[better[metric]] for metric in names["metric"]]
    return Standings(names["pair"], names["method"], names["metric"], directions, **cubes)


def method_info(call: str) -> MethodInfo | None:
    """What is known of a method of the table; None if it is not registered in this process."""
    from vitrail.methods.registry import get_method

    try:
        return get_method(call_name(call)).info
    except VitrailError:
        return None


def is_control(call: str) -> bool:
    info = method_info(call)
    return info is not None and info.family == "control"


def _overlap(low: Floats, high: Floats, best: int) -> Bools:
    return (low <= high[best]) & (high >= low[best])


def _ordered(metrics: list[str], matrix: Floats) -> Agreement:
    """Metrics in the leaf order of a clustering; what is unknown counts as unrelated."""
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(metrics) < 2:
        return Agreement(metrics, matrix, [])
    distances = np.clip(1 - np.nan_to_num(matrix), 0, None)
    np.fill_diagonal(distances, 0)
    condensed = squareform(distances, checks=False)
    order = leaves_list(linkage(condensed, "average", optimal_ordering=True))
    clusters = fcluster(linkage(condensed, "complete"), 1 - SAME, "distance")[order]
    names = [metrics[k] for k in order]
    groups = [
        [name for name, cluster in zip(names, clusters, strict=True) if cluster == number]
        for number in dict.fromkeys(clusters)
    ]
    return Agreement(names, matrix[np.ix_(order, order)], [group for group in groups if len(group) > 1])
