"""Running a paper's table: what is missing is told first, then each plan is run and its rows become cells."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.bench.run import Loader, ModelRun, Outcome, Step, load_model
from vitrail.bench.store import Store, environment
from vitrail.data.base import DataSet, read_indices
from vitrail.files import write_together
from vitrail.models.view import View
from vitrail.papers.catalogue import Target, find_target
from vitrail.papers.cells import Cell, Rows, make_cell
from vitrail.papers.claims import Values, Verdict, judge
from vitrail.papers.figures import draw_figure
from vitrail.papers.jobs import Asked, Job, ask, make_jobs, prepare
from vitrail.papers.metrics import paper_metrics

if TYPE_CHECKING:
    import pandas as pd

Told = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The table: cells, what became of the paper's statements, and what to know about both."""

    target: Target
    cells: Sequence[Cell]
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    folder: Path
    directions: Mapping[str, int]  # of the columns: 1 where higher is better, −1 where lower is, 0 where neither

    @property
    def failed(self) -> list[Cell]:
        """Cells without a value, or with images that could not be measured."""
        return [cell for cell in self.cells if cell.error or not cell.n]

    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def cell(self, row: str, column: str) -> Cell | None:
        return next((one for one in self.cells if (one.row, one.column) == (row, column)), None)

    def as_dict(self) -> dict[str, Any]:
        claims = [{"text": v.claim.text, "holds": v.holds, "tests": v.found} for v in self.verdicts]
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
    load: Loader = load_model,
    tell: Told = lambda text: None,
    watch: Callable[[Step], None] | None = None,
) -> Result:
    """Measures a paper's table; what ``out`` holds already is not measured again.

    Args:
        name: the target, "tis-table1".
        data: requirement → path, or in place of a data set's path a complete specification ("scenes:100").
        model: in place of the paper's models: a name, which stands for the first of them alone, or KEY=NAME for each;
            with options after a question mark (NAME?checkpoint=FILE&num_classes=10). They keep their own preprocessing.
        images: so many, instead of the paper's number.
        only: keys of models and data; the columns of others are left out.
        quick: few steps, masks and samples, to try things out: the numbers mean nothing.
        retry: tries again what failed before.
        load: makes the view of a model.
        tell: is told what happens.
        watch: is told of every step.
    """
    with paper_metrics():
        asked = ask(find_target(name), data, model, images, only, quick)
        found = prepare(asked, load)
        folder, jobs = Path(out) / asked.target.name, make_jobs(asked, found.views)
        frames: dict[str, pd.DataFrame] = {}
        for number, job in enumerate(jobs, 1):
            view, pictures = found.views[job.model.key], found.pictures[job.data.key]
            tell(f"{number}/{len(jobs)} {describe(job, len(pictures))}")
            frames[job.name] = rows_of(job, folder / job.name, view, pictures, watch, retry)
        return save(make_result(asked, jobs, frames, folder))


def rows_of(
    job: Job, out: Path, view: View, data: DataSet, watch: Callable[[Step], None] | None = None, retry: bool = False
) -> pd.DataFrame:
    """Runs a plan and gives the stored rows of its model and its images."""
    (spec,), store = job.plan.models, Store(out)
    with store.locked():
        worker = ModelRun(job.plan, spec.name, view, data, store, Outcome(), watch, retry)
        store.begin(job.plan, environment(view.device))
        worker.go(None, store.done(job.plan.maps))
    rows = store.rows()
    rows = rows[(rows["model_hash"] == worker.model_hash) & rows["image"].isin(data.ids)]
    # the store also keeps what older versions of a method gave
    about = ["image", "method", "params", "metric", "explained"]
    return rows.drop_duplicates(about, keep="last").reset_index(drop=True)


def make_result(asked: Asked, jobs: Sequence[Job], frames: Mapping[str, pd.DataFrame], folder: Path) -> Result:
    """All cells of the target, in the order of its rows and columns."""
    import pandas as pd

    target, cells = asked.target, list[Cell]()
    for job in jobs:
        model = asked.models[job.model.key].name
        # which images are wrong is known only where both classes were explained
        beside = [frames[j.name] for j in jobs if (j.model.key, j.data.key) == (job.model.key, job.data.key)]
        rows = Rows.of(pd.concat(beside))
        for one in job.wanted:
            cell = make_cell(target, one, rows, model, job.plan.data)
            reason = job.refused.get((one.row, one.column.label))
            cells.append(replace(cell, error=reason) if reason else cell)
    order = {label: i for i, label in enumerate(column.label for column in target.columns)}
    rows_in_order = {row: i for i, row in enumerate(dict.fromkeys(cell.row for cell in cells))}
    cells.sort(key=lambda cell: (rows_in_order[cell.row], order[cell.column]))
    values = measured_values(target, cells)
    verdicts = [judge(claim, values) for claim in target.claims]
    notes = [*unread(frames), *remarks(asked)]
    return Result(target, cells, verdicts, notes, folder, values.directions)


def unread(frames: Mapping[str, pd.DataFrame]) -> list[str]:
    """Images that could not be read: in the store they are rows without a method."""
    found = {name: rows.loc[rows["method"] == "", "error"].tolist() for name, rows in frames.items()}
    return [f"{name}: {len(own)} images could not be read; the first: {own[0]}" for name, own in found.items() if own]


def measured_values(target: Target, cells: Sequence[Cell]) -> Values:
    """The cells that have a value, for the tests of claims."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        if cell.n:
            found.setdefault(cell.column, {})[cell.row] = cell.measured
    return Values(found, {column.label: column.direction() for column in target.columns})


def describe(job: Job, images: int) -> str:
    plan = job.plan
    counts = f"{len(plan.methods)} methods × {len(plan.metrics)} metrics × {images} images"
    return f"{plan.models[0].name} on {plan.data}, {plan.target} class: {counts}"


def remarks(asked: Asked) -> list[str]:
    """What a reader of the table should know."""
    target, found = asked.target, list[str]()
    for key, model in target.models.items():
        if key in asked.swapped:
            found.append(f"{model.label}: measured on {asked.models[key].name}, published for {model.name}.")
        elif model.note:
            found.append(f"{model.label}: {model.note}")
    for key, data in target.data.items():
        if data.replaced(asked.data):
            found.append(f"Data {key}: measured on {data.filled(asked.data)}, which is not the paper's.")
        elif data.sha256 is not None and "indices" in asked.data:
            same = _digest(asked.data["indices"]) == data.sha256
            found.append(f"The list of positions is {'the paper’s own' if same else 'not the paper’s'}.")
        elif data.note:
            found.append(f"Data {key}: {data.note}")
    if asked.quick:
        found.append("Quick: few steps, masks and samples. These numbers mean nothing.")
    shown = [one for one in target.doubts if any(one.covers(one.row, column.label) for column in target.columns)]
    found += [f"{one.mark} {one.row} ({', '.join(one.columns)}): {one.note}" for one in shown]
    return list(dict.fromkeys([*found, *target.notes]))


def _digest(indices: str) -> str:
    return hashlib.sha256(" ".join(map(str, read_indices(indices))).encode()).hexdigest()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def save(result: Result) -> Result:
    """Writes the table as CSV, with claims and notes as JSON, and the figure of a target that is one."""
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
