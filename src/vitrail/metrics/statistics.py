"""Means with bootstrap intervals, resampling, and correlations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Combine = Callable[[Any], Any]  # parts (..., n, k) → the value of a data set (...)

RESAMPLES = 2000
GROUP = ["method", "params", "metric", "explained"]
PERCENTILES = [2.5, 97.5]
CHUNK = 2**22  # numbers held at once


def interval(
    values: NDArray[np.floating[Any]], combine: Combine | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean of values (n,), or of ``combine`` of parts (n, k)."""
    low, high = np.percentile(resampled(values, combine, resamples, seed), PERCENTILES)
    return float(low), float(high)


def resampled(
    values: NDArray[np.floating[Any]], combine: Combine | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Floats:
    """(resamples,): means of values (n,), or ``combine`` of parts (n, k), over rows drawn with replacement."""
    results = []
    for rows in _draws(len(values), resamples, seed, values.size):
        drawn = values[rows]
        results.append(drawn.mean(1) if combine is None else combine(torch.from_numpy(drawn)).numpy())
    return np.concatenate(results)


def resampled_means(values: Floats, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """(n, k) → (resamples, k): the means of ``resampled`` for each column of finite values, in one product."""
    n, means = len(values), []
    for rows in _draws(n, resamples, seed, n):
        places = rows + n * np.arange(len(rows))[:, None]
        counts = np.bincount(places.ravel(), minlength=rows.size).reshape(rows.shape)
        means.append(counts.astype(np.float64) @ values / n)
    return np.concatenate(means)


def _draws(n: int, resamples: int, seed: int, numbers: int) -> Iterator[NDArray[np.int64]]:
    """Row indices (count, n), ``resamples`` in all; ``numbers`` are what the caller gathers per resample."""
    generator, step = np.random.default_rng(seed), max(1, CHUNK // max(numbers, 1))
    for start in range(0, resamples, step):
        yield generator.integers(n, size=(min(step, resamples - start), n))


def two_sided(differences: Floats) -> float:
    """The p-value of resampled differences: twice the rarer side of zero, never zero itself."""
    rarer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (1 + rarer) / (1 + len(differences)))


def summarise(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """One line per method and metric: mean, 95 % bootstrap interval, number of images it applies to.

    Metrics whose value for a data set is not a mean of values (``mean_iou``, ``box_localization`` as MaxBoxAcc) give
    that value instead.
    """
    import pandas as pd

    group = [name for name in GROUP if name in rows]
    lines = []
    for key, members in rows.groupby(group, sort=False, dropna=False):
        known = members[members["value"].notna()]
        mean, low, high = mean_with_interval(known, resamples, seed)
        lines.append({**dict(zip(group, key, strict=True)), "mean": mean, "low": low, "high": high, "n": len(known)})
    return pd.DataFrame(lines)


def mean_with_interval(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) of the rows of one metric, all with a value; NaN where there are none."""
    if rows.empty:
        return float("nan"), float("nan"), float("nan")
    numbers, combine = numbers_of(rows)
    return combined(numbers, combine), *interval(numbers, combine, resamples, seed)


def numbers_of(rows: pd.DataFrame) -> tuple[Floats, Combine | None]:
    """The values (n,) of the rows of one metric, or their parts (n, k) and what combines them."""
    from vitrail.calls import split_call
    from vitrail.metrics.base import get_metric

    if "parts" in rows and rows["parts"].notna().all():
        return stacked(rows["parts"]), get_metric(split_call(str(rows["metric"].iloc[0]))[0]).combine
    return rows["value"].to_numpy(dtype=np.float64), None


def combined(numbers: Floats, combine: Combine | None) -> float:
    """The mean of values (n,), or ``combine`` of parts (n, k)."""
    return float(numbers.mean() if combine is None else combine(torch.tensor(numbers)))


def stacked(lists: pd.Series[Any]) -> Floats:
    """(n, k): a column of lists of equal length."""
    return np.stack([np.asarray(numbers, dtype=np.float64) for numbers in lists])


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's r of two vectors; 0 where one is constant."""
    if len(a.unique()) < 2 or len(b.unique()) < 2:
        return 0.0
    x, y = ((values - values.mean()) / values.std() for values in (a.double(), b.double()))
    return float(((x * y).sum() / (len(x) - 1)).clamp(-1, 1))


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ of two maps; 0 where one is constant."""
    flat = [values.detach().flatten()[None].double().cpu().numpy() for values in (a, b)]
    return float(np.nan_to_num(rank_correlations(*flat)[0]))


def rank_correlations(a: Floats, b: Floats) -> Floats:
    """(cases, n) twice → (cases,): Spearman's ρ over the places where neither is NaN; NaN where one is constant.

    Equal values share their mean rank.
    """
    from scipy.stats import rankdata

    both = ~np.isnan(a) & ~np.isnan(b)
    centre = (both.sum(1, keepdims=True) + 1) / 2
    x, y = (
        np.where(both, rankdata(np.where(both, values, np.nan), axis=1, nan_policy="omit") - centre, 0.0)
        for values in (a, b)
    )
    spread = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 0, np.clip((x * y).sum(1) / spread, -1, 1), np.nan)
