"""Reproducing a paper's table: each plan is run, and its rows are aggregated into cells."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.bench.run import Loader, ModelRun, Step, load_model
from vitrail.bench.shard import Shard
from vitrail.bench.store import Store, environment
from vitrail.data.base import DataSet, read_indices
from vitrail.files import write_together
from vitrail.metrics.statistics import Floats
from vitrail.models.view import View
from vitrail.papers.catalogue import PaperTarget, find_target
from vitrail.papers.cells import PaperCell, Rows, make_cell
from vitrail.papers.claims import TableValues, Verdict, judge
from vitrail.papers.figures import draw_figure
from vitrail.papers.metrics import paper_metrics
from vitrail.papers.plans import PlannedRun, Selection, plan_runs, prepare, select
from vitrail.report.statistics import FEWEST_PAIRS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Reproduction:
    """The measured table: cells, the outcomes of the paper's claims, and notes."""

    target: PaperTarget
    cells: Sequence[PaperCell]
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    folder: Path
    directions: Mapping[str, int]  # column → 1 where higher is better, −1 where lower is, 0 where neither
    headings: Mapping[str, str]  # column → its label, with the model that was measured

    @property
    def failed(self) -> list[PaperCell]:
        """Cells without a value, or with failed images."""
        return [cell for cell in self.cells if cell.error or not cell.n]

    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def cell(self, row: str, column: str) -> PaperCell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def as_dict(self) -> dict[str, Any]:
        claims = [
            {
                "text": verdict.claim.text,
                "holds": verdict.holds,
                "tests": verdict.tests,
                "undecided": verdict.reasons,
                "quantities": {
                    column: [_plain(asdict(quantity)) for quantity in quantities]
                    for column, quantities in verdict.quantities.items()
                },
            }
            for verdict in self.verdicts
        ]
        return {
            "target": self.target.name,
            "title": self.target.title,
            "paper": self.target.paper,
            "cells": [_plain(cell.as_dict()) for cell in self.cells],
            "claims": claims,
            "notes": list(self.notes),
        }


def reproduce(
    name: str,
    data: Mapping[str, str],
    model: str | Sequence[str] | None = None,
    images: int | None = None,
    out: str | Path = "vitrail-reproduce",
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    retry: bool = False,
    shard: Shard | None = None,
    load: Loader = load_model,
    tell: Callable[[str], None] = lambda text: None,
    watch: Callable[[Step], None] | None = None,
) -> Reproduction:
    """Measures a paper's table; rows that ``out`` holds already are not measured again.

    Args:
        name: the target, "tis-table1".
        data: requirement → path, or a complete data specification ("scenes:100") instead of a path.
        model: replacements for the paper's models: a name, which replaces the first and drops the others, or KEY=NAME
            for each; with options after a question mark (NAME?checkpoint=FILE&num_classes=10). They keep their own
            preprocessing.
        images: number of images; None = as in the paper.
        only: keys of models and data; other columns are left out.
        quick: few steps, masks and samples, for trying things out: the numbers are meaningless.
        retry: retry what failed before.
        shard: measure only every n-th image, while other processes measure the others into the same folder; the table
            is that of the rows which are there, and is not written.
        load: builds the view of a model.
        tell: called with progress messages.
        watch: called after every step.
    """
    with paper_metrics():
        selection = select(find_target(name), data, model, images, only, quick)
        views, data_sets = prepare(selection, load)
        folder, runs = Path(out) / selection.target.name, plan_runs(selection, views)
        frames: dict[str, pd.DataFrame] = {}
        for number, run in enumerate(runs, 1):
            view, examples = views[run.model.key], data_sets[run.data.key]
            tell(f"{number}/{len(runs)} {describe(run, len(examples))}")
            frames[run.name] = run_plan(run, folder / run.name, view, examples, watch, retry, shard)
        result = make_result(selection, runs, frames, folder)
        return save(result) if shard is None else result


def run_plan(
    run: PlannedRun,
    out: Path,
    view: View,
    data: DataSet,
    watch: Callable[[Step], None] | None = None,
    retry: bool = False,
    shard: Shard | None = None,
) -> pd.DataFrame:
    """Runs a plan and returns the stored rows of its model and images."""
    (spec,), store = run.plan.models, Store(out)
    with store.locked(None if shard is None else str(shard)):
        model_run = ModelRun(run.plan, spec.name, view, data, store=store, watch=watch, retry=retry)
        store.begin(run.plan, environment(view))
        positions = None if shard is None else shard.of(range(len(data)))
        model_run.measure(positions, store.done(run.plan.maps))
    rows = store.rows()
    rows = rows[(rows["model_hash"] == model_run.model_hash) & rows["image"].isin(data.ids)]
    # the store may also hold rows of older versions of a method
    identity = ["image", "method", "params", "metric", "explained"]
    return rows.drop_duplicates(identity, keep="last").reset_index(drop=True)


def make_result(
    selection: Selection, runs: Sequence[PlannedRun], frames: Mapping[str, pd.DataFrame], folder: Path
) -> Reproduction:
    """All cells of the target, in the order of its rows and columns."""
    import pandas as pd

    target, cells = selection.target, list[PaperCell]()
    for run in runs:
        model = selection.models[run.model.key].name
        # misclassified images are known only if both classes were explained
        siblings = [frames[r.name] for r in runs if (r.model.key, r.data.key) == (run.model.key, run.data.key)]
        rows = Rows.of(pd.concat(siblings))
        for spec in run.cells:
            cell = make_cell(target, spec, rows, model, run.plan.data)
            reason = run.unsupported.get((spec.row, spec.column.label))
            cells.append(replace(cell, error=reason) if reason else cell)
    column_order = {label: i for i, label in enumerate(column.label for column in target.columns)}
    row_order = {row: i for i, row in enumerate(dict.fromkeys(cell.row for cell in cells))}
    cells.sort(key=lambda cell: (row_order[cell.row], column_order[cell.column]))
    values = measured_values(target, cells)
    verdicts = [judge(claim, values) for claim in target.claims]
    notes = [*unreadable(frames), *remarks(selection)]
    headings = {column.label: selection.heading(column) for column in target.columns}
    return Reproduction(target, cells, verdicts, notes, folder, values.directions, headings)


def unreadable(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Notes on images that could not be read: in the store they are rows without a method."""
    errors = {name: rows.loc[rows["method"] == "", "error"].tolist() for name, rows in frames.items()}
    return [f"{name}: {len(e)} images could not be read; the first: {e[0]}" for name, e in errors.items() if e]


def measured_values(target: PaperTarget, cells: Sequence[PaperCell]) -> TableValues:
    """The cells with enough images, for the tests of claims; each with its values over resampled images."""
    values: dict[str, dict[str, float | Floats]] = {}
    for cell in cells:
        if cell.n >= FEWEST_PAIRS:
            values.setdefault(cell.column, {})[cell.row] = np.concatenate([[cell.measured], cell.draws])
    return TableValues(values, {column.label: column.direction() for column in target.columns})


def describe(run: PlannedRun, images: int) -> str:
    plan = run.plan
    counts = f"{len(plan.methods)} methods × {len(plan.metrics)} metrics × {images} images"
    return f"{plan.models[0].name} on {plan.data}, {plan.target} class: {counts}"


def remarks(selection: Selection) -> list[str]:
    """Notes for readers of the table."""
    target, notes = selection.target, list[str]()
    for key, model in target.models.items():
        if key in selection.replaced:
            notes.append(f"{model.label}: measured on {selection.models[key].name}, published for {model.name}.")
        elif model.note:
            notes.append(f"{model.label}: {model.note}")
    for key, data in target.data.items():
        if data.replaced(selection.data):
            notes.append(f"Data {key}: measured on {data.filled(selection.data)}, which is not the paper's.")
        elif data.sha256 is not None and "indices" in selection.data:
            same = _digest(selection.data["indices"]) == data.sha256
            notes.append(f"The list of positions is {'the paper’s own' if same else 'not the paper’s'}.")
        elif data.note:
            notes.append(f"Data {key}: {data.note}")
    if selection.quick:
        notes.append("Quick: few steps, masks and samples. These numbers are meaningless.")
    labels = [column.label for column in target.columns]
    doubts = [doubt for doubt in target.doubts if any(doubt.covers(doubt.row, label) for label in labels)]
    notes += [f"{doubt.mark} {doubt.row} ({', '.join(doubt.columns)}): {doubt.note}" for doubt in doubts]
    return list(dict.fromkeys([*notes, *target.notes]))


def _digest(indices: str) -> str:
    return hashlib.sha256(" ".join(map(str, read_indices(indices))).encode()).hexdigest()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def save(result: Reproduction) -> Reproduction:
    """Writes the table as CSV, everything as JSON, and the figure, if the target has one."""
    import pandas as pd

    table = pd.DataFrame([cell.as_dict() for cell in result.cells]).to_csv(index=False)
    text = json.dumps(result.as_dict(), indent=1, ensure_ascii=False)
    files = {
        "table.csv": table.encode(),
        "result.json": text.encode(errors="backslashreplace"),
        **draw_figure(result.target, result.cells),
    }
    write_together({result.folder / name: content for name, content in files.items()})
    return result
