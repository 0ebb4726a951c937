"""``vitrail reproduce``: a paper's table measured again, beside the published one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.bench.plan import ModelSpec
from vitrail.bench.run import Loader, Step, load_model
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.papers.catalogue import PaperTarget, targets
from vitrail.papers.cells import PaperCell
from vitrail.papers.claims import Verdict
from vitrail.papers.reproduction import Reproduction, reproduce
from vitrail.progress import counted

ARROWS = {1: " ↑", -1: " ↓", 0: ""}


def list_targets(pattern: str = "*") -> list[dict[str, Any]]:
    """Every table and figure: what it compares, on which models, and what it needs."""
    from fnmatch import fnmatchcase

    return [_about(one) for name, one in targets().items() if fnmatchcase(name, pattern)]


def _about(target: PaperTarget) -> dict[str, Any]:
    data = [f"[{one.name}]" if one.optional else one.name for one in target.needs()]
    return {
        "target": target.name,
        "what": target.title,
        "models": "; ".join(one.label for one in target.models.values()),
        "data": ", ".join(data),
        "methods": len(target.methods),
        "paper": target.paper,
    }


def show_targets(rows: Sequence[Mapping[str, Any]], as_json: bool = False) -> None:
    """A table for people, or JSON for programs."""
    if as_json:
        print(json.dumps(list(rows), indent=1))  # noqa: T201
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("target", no_wrap=True)
    for name in ("what", "models", "data"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(row[name])) for name in ("target", "what", "models", "data")))
    Console(highlight=False).print(table)


def parse_data(given: Sequence[str]) -> dict[str, str]:
    """``NAME=PATH`` words."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name.isidentifier() or not path:
            raise VitrailError(f"--data is given as NAME=PATH, but got {text!r}.")
        found[name] = path
    return found


def run(
    target: str,
    data: Mapping[str, str],
    model: str | Sequence[str] | None,
    images: int | None,
    out: Path,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    retry: bool = False,
    device: str = "auto",
    as_json: bool = False,
    load: Loader = load_model,
) -> int:
    """Measures a target, prints measured beside published, and returns how many cells have no value."""
    told, bar = Console(highlight=False, stderr=as_json), Bar()

    def load_there(spec: ModelSpec) -> View:
        return load(replace(spec, options={"device": device, **spec.options}))

    found = reproduce(
        target,
        data,
        model,
        images,
        out,
        only=only,
        quick=quick,
        retry=retry,
        load=load if device == "auto" else load_there,
        tell=lambda text: told.print(escape(text), soft_wrap=True),
        watch=bar.see,
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))  # noqa: T201
    else:
        show_result(found, told)
    return len(found.failed)


class Bar:
    """One bar per run."""

    def __init__(self) -> None:
        self.bar: Any = None

    def see(self, step: Step) -> None:
        if self.bar is None or step.done <= self.bar.n:
            self.bar = counted(step.total, step.model, "image")
        self.bar.update(step.done - self.bar.n)
        if step.done == step.total:
            self.bar.close()


def show_result(result: Reproduction, told: Console) -> None:
    """Tables, then the paper's statements, then what one should know."""
    told.print(f"\n[bold]{escape(result.target.name)}[/] {escape(result.target.title)}", soft_wrap=True)
    told.print(f"[dim]{escape(result.target.paper)}. Cells: measured / published, difference.[/]", soft_wrap=True)
    for table in draw(result, told.width):
        told.print(table)
    for verdict in result.verdicts:
        told.print(_judged(verdict), soft_wrap=True)
    for note in result.notes:
        told.print(f"[dim]· {escape(note)}[/]", soft_wrap=True)
    for cell in result.failed[:5]:
        reason = cell.error or "no image counts"
        told.print(f"[red]{escape(cell.row)}, {escape(cell.column)}: {escape(reason)}[/]", soft_wrap=True)
    told.print(f"Table: [bold]{escape(str(result.folder / 'table.csv'))}[/]", soft_wrap=True)


def draw(result: Reproduction, width: int) -> Iterator[Table]:
    """As many columns at a time as fit, with the rows that have a cell there."""
    texts = _texts(result)
    first = max(len(row) for row in result.rows()) + 2
    waiting = list(texts)
    while waiting:
        some, room = waiting[:1], width - first - _width(texts[waiting[0]])
        for label in waiting[1:]:
            room -= _width(texts[label])
            if room < 0:
                break
            some.append(label)
        waiting = waiting[len(some) :]
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("", no_wrap=True)
        for label in some:
            table.add_column(escape(label) + ARROWS[result.directions[label]], justify="right")
        for row in result.rows():
            if any(row in texts[label] for label in some):
                table.add_row(escape(row), *(texts[label].get(row, "") for label in some))
        yield table


def _texts(result: Reproduction) -> dict[str, dict[str, str]]:
    """Column → row → what its cell says."""
    digits = {column.label: column.digits for column in result.target.columns}
    texts: dict[str, dict[str, str]] = {label: {} for label in digits}
    for cell in result.cells:
        texts[cell.column][cell.row] = as_text(cell, digits[cell.column])
    return texts


def _width(texts: Mapping[str, str]) -> int:
    return max((len(text) for text in texts.values()), default=0) + 2


def as_text(cell: PaperCell, digits: int) -> str:
    """0.53 / 0.52† +0.01"""
    own = "–" if math.isnan(cell.measured) else f"{cell.measured:.{digits}f}"
    if cell.published is None:
        return own
    published = f"{own} / {cell.published:.{digits}f}{cell.mark}"
    return published if math.isnan(cell.measured) else f"{published} {cell.difference:+.{digits}f}"


def _judged(verdict: Verdict) -> str:
    text, told = escape(verdict.claim.text), verdict.decided
    if verdict.holds is None:
        return f"? {text} [dim](not to be told from these cells)[/]"
    if verdict.holds:
        return f"[green]✓[/] {text}"
    wrong = [column for column, held in verdict.tests.items() if held is False and column]
    where = f" ({sum(told)} of {len(told)} columns; not {', '.join(wrong)})" if wrong else ""
    return f"[red]✗[/] {text}[dim]{escape(where)}[/]"
