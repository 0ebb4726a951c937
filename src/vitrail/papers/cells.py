"""From stored rows to the cells of a paper's table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.metrics.base import build_metric, get_metric
from vitrail.metrics.statistics import interval
from vitrail.papers.catalogue import Column, Target

if TYPE_CHECKING:
    import pandas as pd

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Wanted:
    """A cell that is to be measured: a row, a column, and the calls whose stored rows make it."""

    row: str
    column: Column
    method: str
    metric: str


@dataclass(frozen=True)
class Cell:
    """A measured cell beside the published one; ``keys`` are those of the stored rows that it comes from."""

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

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.measured - self.published

    def as_dict(self) -> dict[str, Any]:
        """For tables; without the keys."""
        told = {name: value for name, value in asdict(self).items() if name != "keys"}
        return {**told, "difference": self.difference}


def identity(call: str) -> tuple[str, str]:
    """The columns ``method`` and ``params`` of the rows that a method call leads to."""
    from vitrail.methods.registry import get_method

    name, params = split_call(call)
    cls = get_method(name)
    given = {key: params[key] for key, usual in cls.parameters().items() if params.get(key, usual) != usual}
    return cls.info.name, json.dumps(given, sort_keys=True)


def metric_identity(call: str) -> str:
    """The column ``metric`` of the rows that a metric call leads to."""
    name, params = split_call(call)
    return build_metric(name, **params).call


def make_cell(target: Target, wanted: Wanted, rows: Rows, model: str, data: str) -> Cell:
    """A cell from the rows of its model, data and class."""
    column = wanted.column
    own = rows.choose(wanted)
    good = own[own["error"].isna()]
    measured, low, high, n = read(good, column.reading)
    errors = own["error"].dropna()
    doubt = target.doubt(wanted.row, column.label)
    return Cell(
        wanted.row,
        column.label,
        model,
        data,
        column.explained,
        wanted.method,
        wanted.metric,
        measured * column.scale,
        low * column.scale,
        high * column.scale,
        n,
        target.value(wanted.row, column.label),
        doubt.mark if doubt else "",
        doubt.note if doubt else "",
        str(errors.iloc[0]) if len(errors) else "",
        tuple(good["key"]),
    )


@dataclass(frozen=True)
class Rows:
    """The stored rows of a model on some data, method by method and metric by metric."""

    whole: pd.DataFrame
    groups: Mapping[tuple[str, ...], pd.DataFrame]
    wrong: frozenset[str]  # images whose predicted class is not their label

    @classmethod
    def of(cls, whole: pd.DataFrame) -> Rows:
        groups = dict(iter(whole.groupby(["method", "params", "metric", "explained"], sort=False)))
        known = whole[(whole["explained"] == "predicted") & whole["target"].notna() & whole["label"].notna()]
        return cls(whole, groups, frozenset(known.loc[known["target"] != known["label"], "image"]))

    def choose(self, wanted: Wanted) -> pd.DataFrame:
        """The rows of one cell."""
        column = wanted.column
        own = self.groups.get(
            (*identity(wanted.method), metric_identity(wanted.metric), column.explained), self.whole.iloc[:0]
        )
        if column.image:
            own = own[own["image"].str.startswith(column.image)]
        return own[own["image"].isin(self.wrong)] if column.where == "wrong" else own


def read(rows: pd.DataFrame, reading: str) -> tuple[float, float, float, int]:
    """Value, interval and number of images; NaN where there are none."""
    known, (name, _, argument) = rows[rows["value"].notna()], reading.partition(":")
    if known.empty:
        return math.nan, math.nan, math.nan, 0
    if name == "mean":
        return *_mean(known), len(known)
    if name in ("deviation", "seconds_deviation"):
        values = known["value" if name == "deviation" else "seconds"].to_numpy(np.float64)
        return float(values.std(ddof=int(len(values) > 1))), math.nan, math.nan, len(values)
    if name not in READINGS:
        raise VitrailError(f"there is no reading {reading!r}: expected mean, deviation, {', '.join(READINGS)}.")
    numbers = READINGS[name](known, argument)
    if not len(numbers):
        return math.nan, math.nan, math.nan, 0
    low, high = interval(numbers)
    return float(numbers.mean()), low, high, len(numbers)


def _mean(rows: pd.DataFrame) -> tuple[float, float, float]:
    """As ``summarise`` has it: a metric may make the value of a data set from more than values."""
    if rows["parts"].isna().any():
        values = _values(rows)
        return float(values.mean()), *interval(values)
    combine, parts = get_metric(split_call(rows["metric"].iloc[0])[0]).combine, _parts(rows)
    return float(combine(torch.from_numpy(parts))), *interval(parts, combine)


def _values(rows: pd.DataFrame) -> Numbers:
    return rows["value"].to_numpy(np.float64)


def _parts(rows: pd.DataFrame) -> Numbers:
    return np.stack([np.asarray(one, dtype=np.float64) for one in rows["parts"]])


def _curves(rows: pd.DataFrame) -> Numbers:
    return np.stack([np.asarray(one, dtype=np.float64) for one in rows["curve"]])


def _point(rows: pd.DataFrame, argument: str) -> Numbers:
    """The height of the curve: first, last, or after so many steps of all ("50/224")."""
    curves = _curves(rows)
    if argument in ("first", "last"):
        return curves[:, 0 if argument == "first" else -1]
    taken, steps = (int(word) for word in argument.split("/"))
    return curves[:, max(round(taken / steps * curves.shape[1]), 1) - 1]


def _tail(rows: pd.DataFrame, argument: str) -> Numbers:
    """The share of a histogram over 0…1 at or above a number."""
    shares = _curves(rows)
    return shares[:, round(float(argument) * shares.shape[1]) :].sum(1)


def _share_above(rows: pd.DataFrame, argument: str) -> Numbers:
    return (_values(rows) > float(argument)).astype(np.float64)


def _variance_above(rows: pd.DataFrame, argument: str) -> Numbers:
    """The second part of the rows whose value is above a number."""
    return _parts(rows)[_values(rows) > float(argument), 1]


def _seconds(rows: pd.DataFrame, argument: str) -> Numbers:
    return rows["seconds"].to_numpy(np.float64)


# Each gives one number per image; the cell is their mean.
READINGS: dict[str, Callable[[pd.DataFrame, str], Numbers]] = {
    "point": _point,
    "tail": _tail,
    "share_above": _share_above,
    "variance_above": _variance_above,
    "seconds": _seconds,
}
