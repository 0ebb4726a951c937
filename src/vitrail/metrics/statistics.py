"""From rows to statements: means with bootstrap intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2000
GROUP = ["method", "params", "metric", "explained"]
_NUMBERS = 2**24  # held at once


def interval(
    values: NDArray[np.floating[Any]], combine: Any = None, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean of values (n,), or of ``combine`` of parts (n, k)."""
    draw = np.random.default_rng(seed)
    step = max(1, _NUMBERS // max(values.size, 1))
    means = []
    for start in range(0, resamples, step):
        chosen = values[draw.integers(len(values), size=(min(step, resamples - start), len(values)))]
        means.append(chosen.mean(1) if combine is None else combine(torch.from_numpy(chosen)).numpy())
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def summarise(rows: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """One line per method and metric: mean, 95 % bootstrap interval, number of images it applies to.

    Of metrics whose value for a data set is no mean of values (``mean_iou``, ``box_localization`` as MaxBoxAcc), that.
    """
    import pandas as pd

    group = [name for name in GROUP if name in rows]
    lines = []
    for key, own in rows.groupby(group, sort=False, dropna=False):
        known = own[own["value"].notna()]
        line = dict(zip(group, key, strict=True))
        line.update(_summary(known, resamples, seed))
        lines.append({**line, "n": len(known)})
    return pd.DataFrame(lines)


def _summary(rows: pd.DataFrame, resamples: int, seed: int) -> dict[str, float]:
    from vitrail.calls import split_call
    from vitrail.metrics.base import get_metric

    if rows.empty:
        return {"mean": float("nan"), "low": float("nan"), "high": float("nan")}
    if "parts" in rows and rows["parts"].notna().all():
        combine = get_metric(split_call(str(rows["metric"].iloc[0]))[0]).combine
        parts = np.stack([np.asarray(one, dtype=np.float64) for one in rows["parts"]])
        low, high = interval(parts, combine, resamples, seed)
        return {"mean": float(combine(torch.from_numpy(parts))), "low": low, "high": high}
    values = rows["value"].to_numpy(dtype=np.float64)
    low, high = interval(values, None, resamples, seed)
    return {"mean": float(values.mean()), "low": low, "high": high}


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ, equal values sharing their mean rank; 0 where a map is constant."""
    first, second = (_mean_ranks(m) for m in (a, b))
    deviation = first.std(correction=0) * second.std(correction=0)
    if deviation == 0:
        return 0.0
    return float(((first - first.mean()) * (second - second.mean())).mean() / deviation)


def _mean_ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.flatten().double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]
