"""``vitrail explain``: pictures, their explanations, a contact sheet and a table."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vitrail.errors import VitrailError
from vitrail.explaining import default_method, explain_each
from vitrail.explanation import Explanation
from vitrail.files import save_atomically, write_together
from vitrail.images import image_files
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.models.view import View
from vitrail.show.figure import contact_sheet, side_by_side, thumbnail

LONG = 10.0  # seconds from which an estimate is printed
COLUMNS = ("image", "class", "label", "probability", "method", "picture", "seconds", "error")


@dataclass
class Report:
    """What a run has done so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    thumbnails: list[tuple[Any, str]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(bool(row["error"]) for row in self.rows)


def run(
    view: View,
    sources: list[str],
    method_name: str | None,
    target: str | None,
    against: str | None,
    top: int,
    out: Path,
    params: dict[str, Any],
    as_json: bool,
) -> int:
    """Explains every picture and says where the results are; returns how many pictures failed."""
    told = Console(stderr=as_json, highlight=False)
    method = build_method(method_name or default_method(view), view, **params)
    paths = image_files(sources)
    _check_classes(view, method, target, against)
    _introduce(told, view)
    _estimate(told, view, method, len(paths) * top)
    names = _output_names(paths, method.info.name)
    report = Report()
    try:
        for path, name in zip(paths, names, strict=True):
            _explain_one(told, method, path, out / name, target, against, top, report, alone=len(paths) == 1)
    finally:
        if len(paths) > 1 and report.rows:
            _finish_folder(told, out, report)
    if as_json:
        print(json.dumps(report.results, ensure_ascii=False, indent=1, default=str))  # noqa: T201
    return report.failures


def _explain_one(
    told: Console,
    method: Method,
    path: Path,
    stem: Path,
    target: str | None,
    against: str | None,
    top: int,
    report: Report,
    alone: bool,
) -> None:
    """One picture; in a folder a bad picture is noted and the others go on."""
    try:
        found = list(_explanations(method, path, target, against, top))
        picture = _save(found, stem)
    except VitrailError as error:
        if alone:
            raise
        told.print(f"[red]{path.name}[/]: {error}", soft_wrap=True, markup=True)
        report.rows.append(dict.fromkeys(COLUMNS, "") | {"image": str(path), "error": str(error)})
        report.results.append({"image": {"path": str(path)}, "error": str(error)})
        return
    first = found[0]
    if alone:
        _show_top(told, first)
    told.print(f"{first.title} → [bold]{picture}[/]" + _gap(first), soft_wrap=True)
    for explanation in found:
        report.rows.append(_row(path, explanation, picture))
        report.results.append({"picture": str(picture), **explanation.to_dict()})
    report.thumbnails.append((thumbnail(first.overlay()), f"{path.name}: {first.title}"))


def _explanations(
    method: Method, path: Path, target: str | None, against: str | None, top: int
) -> Iterator[Explanation]:
    if top == 1:
        yield from explain_each(method, [str(path)], target, against)
        return
    first = next(explain_each(method, [str(path)], None, against if against is None else [against]))
    rivals = [index for index, _, _ in first.top] if top <= len(first.top) else _likeliest(method.model, first, top)
    yield first
    others = rivals[1:top]
    if others:
        yield from explain_each(method, [str(path)] * len(others), others, against)


def _likeliest(view: View, first: Explanation, count: int) -> list[int]:
    with torch.no_grad():
        logits = view.logits(view.preprocess(first.image)[None])
    return view.class_scores(logits)[0].argsort(descending=True, stable=True)[:count].tolist()


def _save(found: list[Explanation], stem: Path) -> Path:
    """One picture with its JSON file; for several classes one of each, and all side by side."""
    if len(found) == 1:
        return found[0].save(stem.with_name(stem.name + ".png"))
    for rank, explanation in enumerate(found, 1):
        explanation.save(stem.with_name(f"{stem.name}.{rank}.png"))
    sheet = side_by_side([explanation.picture() for explanation in found])
    return save_atomically(stem.with_name(f"{stem.name}.top{len(found)}.png"), lambda file: sheet.save(file, "PNG"))


def _check_classes(view: View, method: Method, target: str | None, against: str | None) -> None:
    """A wrong class is an error before any work."""
    for name in (target, against):
        if name is not None:
            view.class_index(name)
    if against is not None and not method.info.class_specific:
        raise VitrailError(f"{method.info.name} is the same for every class: --against has no meaning for it.")


def _introduce(told: Console, view: View) -> None:
    told.print(f"Model [bold]{view.name}[/]: {view.num_classes} classes, {view.size[0]}×{view.size[1]} pixels.")
    if view.note:
        told.print(f"[dim]{view.note}[/]", soft_wrap=True)


def _estimate(told: Console, view: View, method: Method, count: int) -> None:
    """Says how long it will take, if it will take long: from the time of one forward pass and the method's cost."""
    blank = torch.zeros(1, 3, *view.size)
    with torch.no_grad():
        view.logits(blank)
        begin = time.perf_counter()
        view.logits(blank)
    forwards, backwards = method.info.cost
    seconds = (time.perf_counter() - begin) * (forwards + 2 * backwards + 1) * count
    if seconds > LONG:
        told.print(f"{count} × {method.info.name}: about {_duration(seconds)}. Ctrl-C keeps what is done.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _show_top(told: Console, explanation: Explanation) -> None:
    table = Table("class", "name", "probability", box=None, header_style="dim")
    for index, label, probability in explanation.top:
        style = "bold" if index == explanation.target else None
        table.add_row(str(index), label, f"{probability:.1%}", style=style)
    told.print(table)


def _gap(explanation: Explanation) -> str:
    gap = explanation.extras.get("completeness_gap")
    return "" if gap is None else f" [dim](completeness gap {gap:.1e})[/]"


def _row(path: Path, explanation: Explanation, picture: Path) -> dict[str, Any]:
    values = (
        str(path), explanation.target, explanation.label, f"{explanation.probability:.6f}", explanation.method,
        str(picture), f"{explanation.seconds:.3f}", "",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def _finish_folder(told: Console, out: Path, report: Report) -> None:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows(report.rows)
    files: dict[str | os.PathLike[str], bytes] = {out / "explanations.csv": buffer.getvalue().encode()}
    if report.thumbnails:
        sheet = io.BytesIO()
        contact_sheet(report.thumbnails).save(sheet, "PNG")
        files[out / "contact-sheet.png"] = sheet.getvalue()
    write_together(files)
    told.print("Overview: " + " and ".join(f"[bold]{path}[/]" for path in files), soft_wrap=True)
    if report.failures:
        told.print(f"[red]{report.failures} pictures could not be explained[/]; the table says why.")


def _output_names(paths: list[Path], method: str) -> list[str]:
    """``cat.decompx.skipplus``; pictures of the same name in other folders get a number."""
    used: dict[str, int] = {}
    names = []
    for path in paths:
        used[path.stem] = used.get(path.stem, 0) + 1
        number = f"-{used[path.stem]}" if used[path.stem] > 1 else ""
        names.append(f"{path.stem}{number}.{method}")
    return names
