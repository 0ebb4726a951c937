"""``vitrail reproduce``: a paper's table or figure, measured and printed beside the published numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.codes import FAILED
from vitrail.cli.options import Device, Json, Retry, comma_separated
from vitrail.cli.outputs import print_json
from vitrail.errors import VitrailError
from vitrail.papers.catalogue import targets
from vitrail.progress import counted

if TYPE_CHECKING:
    from vitrail.bench.plan import ModelSpec
    from vitrail.bench.run import Step
    from vitrail.models.view import View
    from vitrail.papers.cells import PaperCell
    from vitrail.papers.claims import Verdict
    from vitrail.papers.reproduction import Reproduction

ARROWS = {1: " ↑", -1: " ↓", 0: ""}


def reproduce(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="Table or figure; see --list.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    data: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="Location of a required data set; repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="[KEY=]NAME", help="Replace the paper's model; repeatable."),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Number of images; default: the paper's.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEYS", help="Only the columns of these models or data sets, by key (vit, boxes, …)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("vitrail-papers"),
    quick: Annotated[bool, typer.Option("--quick", help="Use few steps and masks, for a trial run.")] = False,
    retry: Retry = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Reproduce a paper's table or figure and print it beside the published numbers."""
    if listing or target is None:
        show_targets(list_targets(target or "*"), as_json)
        return
    from vitrail.bench.run import load_model
    from vitrail.papers.reproduction import reproduce as measure

    console = Console(highlight=False, stderr=as_json)

    def load(spec: ModelSpec) -> View:
        return load_model(spec if device == "auto" else replace(spec, options={"device": device, **spec.options}))

    result = measure(
        target,
        parse_data(data or []),
        model,
        images,
        out,
        only=comma_separated(only),
        quick=quick,
        retry=retry,
        load=load,
        tell=lambda text: console.print(escape(text), soft_wrap=True),
        watch=Bar().see,
    )
    if as_json:
        print_json({**result.as_dict(), "table": result.folder / "table.csv"})
    else:
        show_result(result, console)
    if result.failed:
        raise typer.Exit(FAILED)


def list_targets(pattern: str = "*") -> list[dict[str, Any]]:
    """Every table and figure: what it compares, on which models, and which data it needs."""
    return [
        {
            "target": name,
            "what": target.title,
            "models": "; ".join(model.label for model in target.models.values()),
            "data": ", ".join(f"[{need.name}]" if need.optional else need.name for need in target.needs()),
            "methods": len(target.methods),
            "paper": target.paper,
        }
        for name, target in targets().items()
        if fnmatchcase(name, pattern)
    ]


def show_targets(rows: Sequence[Mapping[str, Any]], as_json: bool = False) -> None:
    """Prints a table, or JSON."""
    if as_json:
        print_json(list(rows))
        return
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("target", no_wrap=True)
    for name in ("what", "models", "data"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(row[name])) for name in ("target", "what", "models", "data")))
    Console(highlight=False).print(table)


def parse_data(assignments: Sequence[str]) -> dict[str, str]:
    """``NAME=PATH`` → name and path."""
    paths: dict[str, str] = {}
    for text in assignments:
        name, equals, path = text.partition("=")
        if not equals or not name.isidentifier() or not path:
            raise VitrailError(f"--data is given as NAME=PATH, but got {text!r}.")
        paths[name] = path
    return paths


class Bar:
    """One bar per run."""

    def __init__(self) -> None:
        self.bar: Any = None

    def see(self, step: Step) -> None:
        if self.bar is None or step.done < self.bar.n or self.bar.n == self.bar.total:
            self.bar = counted(step.total, step.model, "image")
        self.bar.update(step.done - self.bar.n)
        if step.done == step.total:
            self.bar.close()


def show_result(result: Reproduction, console: Console) -> None:
    """Prints the tables, the verdicts on the paper's claims, and the notes."""
    console.print(f"\n[bold]{escape(result.target.name)}[/] {escape(result.target.title)}", soft_wrap=True)
    console.print(f"[dim]{escape(result.target.paper)}. Cells: measured / published, difference.[/]", soft_wrap=True)
    for table in draw(result, console.width):
        console.print(table)
    for verdict in result.verdicts:
        console.print(_judged(verdict), soft_wrap=True)
    for note in result.notes:
        console.print(f"[dim]· {escape(note)}[/]", soft_wrap=True)
    for cell in result.failed[:5]:
        reason = cell.error or "no image counts"
        console.print(f"[red]{escape(cell.row)}, {escape(cell.column)}: {escape(reason)}[/]", soft_wrap=True)
    console.print(f"Table: [bold]{escape(str(result.folder / 'table.csv'))}[/]", soft_wrap=True)


def draw(result: Reproduction, width: int) -> Iterator[Table]:
    """Splits the columns into tables that fit the width, each with the rows that have a cell in it."""
    texts = _texts(result)
    first = max(len(row) for row in result.rows()) + 2
    remaining = list(texts)
    while remaining:
        columns, room = remaining[:1], width - first - _width(texts[remaining[0]])
        for label in remaining[1:]:
            room -= _width(texts[label])
            if room < 0:
                break
            columns.append(label)
        remaining = remaining[len(columns) :]
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("", no_wrap=True)
        for label in columns:
            table.add_column(escape(result.headings[label]) + ARROWS[result.directions[label]], justify="right")
        for row in result.rows():
            if any(row in texts[label] for label in columns):
                table.add_row(escape(row), *(texts[label].get(row, "") for label in columns))
        yield table


def _texts(result: Reproduction) -> dict[str, dict[str, str]]:
    """Column → row → text of the cell."""
    digits = {column.label: column.digits for column in result.target.columns}
    texts: dict[str, dict[str, str]] = {label: {} for label in digits}
    for cell in result.cells:
        texts[cell.column][cell.row] = as_text(cell, digits[cell.column])
    return texts


def _width(texts: Mapping[str, str]) -> int:
    return max((len(text) for text in texts.values()), default=0) + 2


def as_text(cell: PaperCell, digits: int) -> str:
    """0.53 / 0.52† +0.01"""
    measured = "–" if math.isnan(cell.measured) else f"{cell.measured:.{digits}f}"
    if cell.published is None:
        return measured
    published = f"{measured} / {cell.published:.{digits}f}{cell.mark}"
    return published if math.isnan(cell.measured) else f"{published} {cell.difference:+.{digits}f}"


def _judged(verdict: Verdict) -> str:
    text, columns = escape(verdict.claim.text), [column for column in verdict.tests if column]
    holding = f"holds in {sum(verdict.decided)} of {len(columns)} columns"
    if verdict.holds:
        return f"[green]✓[/] {text}"
    if verdict.holds is None:
        reasons = ", or ".join(dict.fromkeys(verdict.reasons.values()))
        where = f"; {holding}" if verdict.decided else ""
        return f"? {text} [dim](undecided: {escape(reasons + where)})[/]"
    wrong = [column for column, outcome in verdict.tests.items() if outcome is False and column]
    where = f" ({holding}; not in {', '.join(wrong)})" if wrong else ""
    return f"[red]✗[/] {text}[dim]{escape(where)}[/]"
