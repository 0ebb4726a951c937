"""A paper's figure from measured cells, for targets that are a radar chart in the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitrail.papers.catalogue import PaperTarget
from vitrail.papers.cells import PaperCell
from vitrail.report import figures
from vitrail.report.results import Column, Results, Setting, as_column
from vitrail.report.statistics import Cell, ranked
from vitrail.report.summary import Summary

Measured = Mapping[tuple[str, str], PaperCell]  # row, column


def draw_figure(target: PaperTarget, cells: Sequence[PaperCell]) -> dict[str, bytes]:
    """File name → content; empty if the target is not a figure, or too few of its columns were measured."""
    if target.figure is None:
        return {}
    measured = {(cell.row, cell.column): cell for cell in cells}
    return figures.draw_all(_summary(target, measured), figures.FORMATS, only=[target.figure])


def _summary(target: PaperTarget, measured: Measured) -> Summary:
    """One setting per model, one metric per kind of column."""
    axes: dict[str, Column] = {}
    digits: dict[str, int] = {}
    labels: dict[tuple[str, str], str] = {}  # model and axis → column
    for column in target.columns:
        axis = column.label.removeprefix(target.models[column.model].label).strip()
        axes.setdefault(axis, Column(axis, as_column(column.metric).metric))
        digits.setdefault(axis, column.digits)
        labels[column.model, axis] = column.label
    rows = list(dict.fromkeys(row for row, _ in measured))
    by_model = []
    for model in target.models:
        cells = {axis: [_cell(measured.get((row, labels.get((model, axis), "")))) for row in rows] for axis in axes}
        columns = [ranked(cells[axis], column.better) for axis, column in axes.items()]
        by_model.append([list(row) for row in zip(*columns, strict=True)])
    names = {model: measured[row, label].model for (model, _), label in labels.items() for row in rows
             if (row, label) in measured}  # fmt: skip
    settings = [
        _setting(model.label if names.get(key) in (None, model.name) else names[key], (len(rows), len(axes)))
        for key, model in target.models.items()
    ]
    results = Results(settings, rows, list(axes.values()), [], {}, 0)
    return Summary(results, by_model, list(digits.values()), [])


def _cell(cell: PaperCell | None) -> Cell:
    if cell is None or not cell.n or math.isnan(cell.measured):
        return Cell(math.nan, math.nan, math.nan, 0)
    return Cell(cell.measured, cell.low, cell.high, cell.n)


def _setting(label: str, shape: tuple[int, int]) -> Setting:
    """A setting for the figures, without images."""
    empty = np.full((0, *shape), np.nan)
    return Setting("", Path(), "", label, "", "", [], [], empty, np.full(shape[0], np.nan), label=label)
