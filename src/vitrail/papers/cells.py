"""The cells of a paper's table, from stored rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.metrics.base import build_metric
from vitrail.metrics.statistics import PERCENTILES, Floats, combined, numbers_of, resampled, stacked
from vitrail.papers.catalogue import PaperColumn, PaperTarget
from vitrail.report.results import normalised

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CellSpec:
    """A cell to measure: row, column, and the calls of its stored rows."""

    row: str
    column: PaperColumn
    method: str
    metric: str


@dataclass(frozen=True)
class PaperCell:
    """A measured cell beside the published one.

    ``keys`` identify the stored rows it was computed from; ``draws`` are its values over resampled images.
    """

    row: str
    column: str
    model: str
    data: str
    explained: str
    method: str
    metric: str
    measured: float
    low: float
    high: float
    n: int
    published: float | None
    mark: str = ""
    doubt: str = ""
    error: str = ""
    keys: tuple[str, ...] = ()
    draws: Floats = field(default_factory=lambda: np.empty(0), repr=False, compare=False)

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.measured - self.published

    def as_dict(self) -> dict[str, Any]:
        """For tables; without keys and draws."""
        values = {name: value for name, value in asdict(self).items() if name not in ("keys", "draws")}
        return {**values, "difference": self.difference}


def identity(call: str) -> tuple[str, str]:
    """The values of the columns ``method`` and ``params`` for a method call."""
    name, params = normalised(call)
    return name, json.dumps(params, sort_keys=True)


def metric_identity(call: str) -> str:
    """The value of the column ``metric`` for a metric call."""
    name, params = split_call(call)
    return build_metric(name, **params).call


def make_cell(target: PaperTarget, spec: CellSpec, rows: Rows, model: str, data: str) -> PaperCell:
    """A cell from the rows of its model, data and class."""
    column = spec.column
    members = rows.select(spec)
    good = members[members["error"].isna()].sort_values("image", kind="stable")  # cells are resampled alike
    measured, low, high, n, draws = aggregate(good, column.reading)
    errors = members["error"].dropna()
    doubt = target.doubt(spec.row, column.label)
    return PaperCell(
        row=spec.row,
        column=column.label,
        model=model,
        data=data,
        explained=column.explained,
        method=spec.method,
        metric=spec.metric,
        measured=measured * column.scale,
        low=low * column.scale,
        high=high * column.scale,
        n=n,
        published=target.value(spec.row, column.label),
        mark=doubt.mark if doubt else "",
        doubt=doubt.note if doubt else "",
        error=str(errors.iloc[0]) if len(errors) else "",
        keys=tuple(good["key"]),
        draws=draws * column.scale,
    )


@dataclass(frozen=True)
class Rows:
    """The stored rows of a model on some data, grouped by method and metric."""

    frame: pd.DataFrame
    groups: Mapping[tuple[str, ...], pd.DataFrame]
    wrong: frozenset[str]  # images whose predicted class is not their label

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Rows:
        groups = dict(iter(frame.groupby(["method", "params", "metric", "explained"], sort=False)))
        known = frame[(frame["explained"] == "predicted") & frame["target"].notna() & frame["label"].notna()]
        return cls(frame, groups, frozenset(known.loc[known["target"] != known["label"], "image"]))

    def select(self, spec: CellSpec) -> pd.DataFrame:
        """The rows of one cell."""
        column = spec.column
        key = (*identity(spec.method), metric_identity(spec.metric), column.explained)
        rows = self.groups.get(key, self.frame.iloc[:0])
        if column.image:
            rows = rows[rows["image"].str.startswith(column.image)]
        return rows[rows["image"].isin(self.wrong)] if column.where == "wrong" else rows


def aggregate(rows: pd.DataFrame, reading: str) -> tuple[float, float, float, int, Floats]:
    """Value, interval, number of images, and the values over resampled images; NaN and empty if there are none.

    Rows of the same images in the same order are resampled alike.
    """
    known, (name, _, argument) = rows[rows["value"].notna()], reading.partition(":")
    if name not in ("mean", *READINGS):
        raise VitrailError(f"there is no reading {reading!r}: expected mean, {', '.join(READINGS)}.")
    numbers, combine = np.empty(0), None
    if not known.empty:
        numbers, combine = numbers_of(known) if name == "mean" else (READINGS[name](known, argument), None)
    if not len(numbers):
        return math.nan, math.nan, math.nan, 0, np.empty(0)
    if name in DEVIATIONS:
        numbers, combine = numbers[:, None], _deviation
    draws = resampled(numbers, combine)
    low, high = np.percentile(draws, PERCENTILES)
    return combined(numbers, combine), float(low), float(high), len(numbers), draws


def _deviation(numbers: Tensor) -> Tensor:
    """(…, n, 1) → (…,): the standard deviation."""
    return numbers.squeeze(-1).std(-1, correction=int(numbers.shape[-2] > 1))


def _values(rows: pd.DataFrame, argument: str = "") -> Floats:
    return rows["value"].to_numpy(np.float64)


def _point(rows: pd.DataFrame, argument: str) -> Floats:
    """The value of the curve: first, last, or after a number of steps ("50/224")."""
    curves = stacked(rows["curve"])
    if argument in ("first", "last"):
        return curves[:, 0 if argument == "first" else -1]
    taken, steps = (int(word) for word in argument.split("/"))
    return curves[:, max(round(taken / steps * curves.shape[1]), 1) - 1]


def _tail(rows: pd.DataFrame, argument: str) -> Floats:
    """The share of a histogram over 0…1 at or above a threshold."""
    shares = stacked(rows["curve"])
    return shares[:, round(float(argument) * shares.shape[1]) :].sum(1)


# One number per image; the cell is their mean, or their deviation. The variance is the second part of a row.
DEVIATIONS = ("deviation", "seconds_deviation")
READINGS: dict[str, Callable[[pd.DataFrame, str], Floats]] = {
    "deviation": _values,
    "seconds_deviation": lambda rows, _: rows["seconds"].to_numpy(np.float64),
    "point": _point,
    "tail": _tail,
    "share_above": lambda rows, threshold: (_values(rows) > float(threshold)).astype(np.float64),
    "variance_above": lambda rows, threshold: stacked(rows["parts"])[_values(rows) > float(threshold), 1],
    "seconds": lambda rows, _: rows["seconds"].to_numpy(np.float64),
}
