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
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.api import Seen, explain_each, see
from vitrail.cli.outputs import class_part, file_stems, join_parts, own_results, params_part, several
from vitrail.data.images import image_files
from vitrail.engine.requests import check_finite
from vitrail.errors import VitrailError
from vitrail.evaluation import default_method
from vitrail.explanation import Explanation
from vitrail.files import printable, write_together
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.models.view import View
from vitrail.show.figure import contact_sheet, side_by_side, thumbnail

SCORED = 450  # forward passes of insertion and deletion
LONG = 10.0  # seconds from which an estimate is printed
COLUMNS = ("image", "class", "label", "probability", "against", "method", "params", "picture", "seconds", "error")


@dataclass
class Report:
    """What a run has done so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    thumbnails: list[tuple[Any, str]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(bool(row["error"]) for row in self.rows)


def find_pictures(sources: list[str], out: Path) -> list[Path]:
    """The pictures to explain, once it is sure that results can be written; earlier results are not among them."""
    there = next(place for place in (out, *out.parents) if os.path.lexists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise VitrailError(f"cannot write into --out {out}: {there} is not a folder that can be written.")
    folders, place = [Path(source).resolve() for source in sources if Path(source).is_dir()], out.resolve()
    if place in folders:
        raise VitrailError(f"--out {out} is the folder of the pictures: choose another, or results mix with them.")
    inside = any(folder in place.parents for folder in folders)
    named = {Path(source) for source in sources}  # asked for one by one, whatever they are
    found = [
        path
        for path in image_files(sources)
        if not (inside and place in path.resolve().parents) and (path in named or not own_results(path))
    ]
    if not found:
        raise VitrailError(f"there are no pictures in {', '.join(sources)} besides earlier results of vitrail.")
    return found


def run(
    view: View,
    paths: list[Path],
    method_name: str | None,
    target: str | None,
    against: str | None,
    top: int,
    out: Path,
    params: dict[str, Any],
    as_json: bool,
    score: bool = False,
    curves: bool = False,
) -> int:
    """Explains every picture and says where the results are; returns how many pictures failed."""
    told = Console(stderr=as_json, highlight=False)
    method = _build(view, method_name, params)
    _check_classes(view, method, target, against, top)
    introduce(told, view)
    forwards, backwards = method.passes()
    count = len(paths) * top
    scored = SCORED if score or curves else 0
    estimate(told, view, f"{count} × {method.info.name}", (forwards + 2 * backwards + 1 + scored) * count)
    view.known_fingerprint = view.fingerprint()  # hashed once, not for every picture
    stems = file_stems(paths, out, _ending(method, target, against))
    report = Report()
    try:
        for path, stem in zip(paths, stems, strict=True):
            one = Wanted(path, stem, target, against, top, score or curves, curves)
            _explain_one(told, method, one, report, alone=len(paths) == 1)
    finally:
        if len(paths) > 1 and report.rows:
            _finish_folder(told, out, report)
    if as_json:
        print(json.dumps(report.results, indent=1, default=str))  # noqa: T201
    return report.failures


def _build(view: View, called: str | None, params: dict[str, Any]) -> Method:
    """The method by its name or as a call, ``rise(masks=32)``, with the parameters given beside it."""
    from vitrail.calls import split_call

    name, own = split_call(called or default_method(view))
    twice = [key for key in params if key in own]
    if twice:
        raise VitrailError(f"{twice[0]} is given in {called!r} and with -p: give it once.")
    return build_method(name, view, **own, **params)


def _ending(method: Method, target: str | None, against: str | None) -> str:
    """What follows the picture's name: the method, and what else was asked for."""
    view = method.model
    chosen = "" if target is None else class_part(view, view.class_index(target))
    rival = "" if against is None else "not-" + class_part(view, view.class_index(against))
    return f".{method.info.name}" + join_parts([params_part(method.given()), chosen, rival])


@dataclass(frozen=True)
class Wanted:
    """What is wanted of one picture."""

    path: Path
    stem: Path
    target: str | None
    against: str | None
    top: int
    score: bool
    curves: bool


def _explain_one(told: Console, method: Method, wanted: Wanted, report: Report, alone: bool) -> None:
    """One picture; in a folder a bad picture is noted and the others go on."""
    path = wanted.path
    try:
        found = list(_explanations(method, path, wanted.target, wanted.against, wanted.top))
        if wanted.score:
            for explanation in found:
                explanation.score()
        small = thumbnail(found[0].overlay())
        picture = _save(found, wanted.stem, wanted.curves)
    except VitrailError as error:
        if alone:
            raise
        told.print(f"[red]{escape(path.name)}[/]: {escape(str(error))}", soft_wrap=True)
        report.rows.append(dict.fromkeys(COLUMNS, "") | {"image": str(path), "error": str(error)})
        report.results.append({"image": {"path": str(path)}, "error": str(error)})
        return
    first = found[0]
    # noted at once: a picture that is there is also in the table, should Ctrl-C come now
    report.rows += [_row(path, explanation, picture) for explanation in found]
    report.thumbnails.append((small, f"{printable(path.name)}: {first.title}"))
    report.results += [{"picture": str(picture), **explanation.to_dict()} for explanation in found]
    if alone:
        show_top(told, first)
    told.print(f"{escape(first.title)} → [bold]{escape(str(picture))}[/]" + _remark(first), soft_wrap=True)
    if wanted.score:
        for explanation in found:
            told.print(f"  {escape(explanation.label)}: " + _scores(explanation), soft_wrap=True)


def _explanations(
    method: Method, path: Path, target: str | None, against: str | None, top: int
) -> Iterator[Explanation]:
    view = method.model
    picture = see(view, path)
    if top == 1:
        yield from explain_each(method, [picture], target, against)
        return
    rival = None if against is None else view.class_index(against)
    classes = [index for index in _ranked(view, picture) if index != rival][:top]
    yield from explain_each(method, [picture] * len(classes), classes, against)


def _ranked(view: View, picture: Seen) -> list[int]:
    with torch.no_grad():
        logits = view.logits(picture.pixels[None])
    check_finite(view, logits)
    return view.class_scores(logits)[0].argsort(descending=True, stable=True).tolist()


def _save(found: list[Explanation], stem: Path, curves: bool) -> Path:
    """One picture with its JSON file; for several classes one of each, and all side by side; their curves if wanted."""
    files: dict[str | os.PathLike[str], bytes] = {}
    if curves:
        drawn = side_by_side([explanation.curve_picture() for explanation in found])
        files[stem.with_name(stem.name + ".curves.png")] = _png(drawn)
    if len(found) == 1:
        picture = stem.with_name(stem.name + ".png")
        write_together({**files, **found[0].files(picture)})
        return picture
    for rank, explanation in enumerate(found, 1):
        files |= explanation.files(stem.with_name(f"{stem.name}.{rank}.png"))
    together = stem.with_name(f"{stem.name}.top{len(found)}.png")
    write_together({**files, together: _png(side_by_side([explanation.picture() for explanation in found]))})
    return together


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _check_classes(view: View, method: Method, target: str | None, against: str | None, top: int) -> None:
    """A wrong class is an error before any work."""
    chosen, rival = (None if name is None else view.class_index(name) for name in (target, against))
    if rival is not None and chosen == rival:
        raise VitrailError(f"--target and --against are both {view.label(rival)}: nothing is left to explain.")
    for option, given in (("--against", against is not None), ("--top", top > 1)):
        if given and not method.info.class_specific:
            raise VitrailError(f"{method.info.name} is the same for every class: {option} has no meaning for it.")


def introduce(told: Console, view: View) -> None:
    size = f"{view.size[0]}×{view.size[1]}"
    told.print(f"Model [bold]{escape(view.name)}[/]: {view.num_classes} classes, {size} pixels.", soft_wrap=True)
    if view.note:
        told.print(f"[dim]{escape(view.note)}[/]", soft_wrap=True)


def estimate(told: Console, view: View, what: str, passes: float) -> None:
    """Says how long it will take, if it will take long: from the time of one forward pass."""
    blank = torch.zeros(1, 3, *view.size)
    with torch.no_grad():
        view.logits(blank)
        begin = time.perf_counter()
        float(view.logits(blank).sum())  # waits for the device
    seconds = (time.perf_counter() - begin) * passes
    if seconds > LONG:
        told.print(f"{what}: about {_duration(seconds)}. Ctrl-C keeps what is done.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def show_top(told: Console, explanation: Explanation) -> None:
    table = Table("class", "name", "probability", box=None, header_style="dim")
    for index, label, probability in explanation.top:
        style = "bold" if index == explanation.target else None
        table.add_row(str(index), escape(label), f"{probability:.1%}", style=style)
    told.print(table)


def _remark(explanation: Explanation) -> str:
    gap = explanation.extras.get("completeness_gap")
    told = [] if gap is None else [f"completeness gap {gap:.1e}"]
    told += [] if explanation.class_specific else [f"{explanation.method} is the same for every class"]
    return f" [dim]({', '.join(told)})[/]" if told else ""


def _scores(explanation: Explanation) -> str:
    told = [f"{name} {value:.3f} {'↑' if name == 'insertion' else '↓'}" for name, value in explanation.scores.items()]
    return ", ".join(told) + " [dim](arrows: which way is better)[/]"


def _row(path: Path, explanation: Explanation, picture: Path) -> dict[str, Any]:
    values = (
        str(path), explanation.target, explanation.label, f"{explanation.probability:.6f}",
        explanation.against_label or "", explanation.method, json.dumps(explanation.params, default=str),
        str(picture), f"{explanation.seconds:.3f}", "",
    )  # fmt: skip
    scores = {name: f"{value:.6f}" for name, value in explanation.scores.items()}
    return {**dict(zip(COLUMNS, values, strict=True)), **scores}


def _finish_folder(told: Console, out: Path, report: Report) -> None:
    buffer = io.StringIO()
    scored = dict.fromkeys(name for row in report.rows for name in row if name not in COLUMNS)
    writer = csv.DictWriter(buffer, [*COLUMNS[:-1], *scored, COLUMNS[-1]])
    writer.writeheader()
    writer.writerows(report.rows)
    files: dict[str | os.PathLike[str], bytes] = {out / "explanations.csv": printable(buffer.getvalue()).encode()}
    if report.thumbnails:
        files[out / "contact-sheet.png"] = _png(contact_sheet(report.thumbnails))
    write_together(files)
    told.print("Overview: " + " and ".join(f"[bold]{escape(str(path))}[/]" for path in files), soft_wrap=True)
    if report.failures:
        told.print(f"[red]{several(report.failures, 'picture')} could not be explained[/]; the table says why.")
