"""``vitrail compare``: one figure of what many methods say of one picture."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from vitrail.api import explain_each, see
from vitrail.calls import join_call, split_call
from vitrail.cli.explain import estimate, introduce, show_top
from vitrail.cli.outputs import class_part, file_stems, join_parts, params_part, several
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation
from vitrail.files import write_together
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method, get_method, list_methods, supported_methods
from vitrail.models.view import View
from vitrail.show.figure import contact_sheet, labelled, thumbnail

COLUMNS = 6


def run(view: View, path: Path, wanted: list[str], targets: list[str], out: Path, params: dict[str, Any]) -> Path:
    """Draws the figure, writes it with its JSON file and says where it is; after Ctrl-C, of what is done."""
    told = Console(highlight=False)
    methods = build(view, choose(view, wanted), params)
    classes = [view.class_index(target) for target in targets]
    introduce(told, view)
    view.known_fingerprint = view.fingerprint()  # hashed once, not for every method
    passes = [method.passes() for method in methods]
    many = several(len(methods), "method")
    estimate(told, view, many, sum(f + 2 * b + 1 for f, b in passes) * max(1, len(classes)))
    (stem,) = file_stems([path], out, _ending(methods, params, classes))
    rows: list[list[Explanation]] = []
    stopped = None
    try:
        _explain(told, path, methods, classes or [None], rows)
    except KeyboardInterrupt as stop:
        stopped = stop
        rows = [row for row in rows if row]
        if not rows:
            raise
        done, asked = sum(map(len, rows)), len(methods) * max(1, len(classes))
        many = f"Stopped: {done} of {several(asked, 'map')}"
    picture = stem.with_name(stem.name + ".png")
    _write(picture, rows)
    show_top(told, rows[0][0])
    told.print(f"{many} → [bold]{escape(str(picture))}[/]", soft_wrap=True)
    if stopped:
        raise stopped
    return picture


def _explain(
    told: Console, path: Path, methods: list[Method], classes: Sequence[int | None], rows: list[list[Explanation]]
) -> None:
    """Fills the rows map by map, so that they hold what is done at any time."""
    picture = see(methods[0].model, path)  # read once: all explanations share it
    for target in classes:
        rows.append([])
        for method in track(methods, description="methods", console=told, transient=True):
            rows[-1] += explain_each(method, [picture], target, None)


def _write(picture: Path, rows: list[list[Explanation]]) -> None:
    buffer = io.BytesIO()
    draw(rows).save(buffer, "PNG")
    text = json.dumps([ex.to_dict() for row in rows for ex in row], ensure_ascii=False, indent=1, default=str)
    content = text.encode(errors="backslashreplace")  # JSON's own escapes for a path that is not UTF-8
    write_together({picture: buffer.getvalue(), picture.with_suffix(".json"): content})


def _ending(methods: list[Method], params: dict[str, Any], classes: list[int]) -> str:
    """What follows the picture's name."""
    asked = [class_part(methods[0].model, index) for index in classes]
    return ".compare" + join_parts([*_params_parts(methods, params), *asked])


def _params_parts(methods: list[Method], shared: dict[str, Any]) -> Iterator[str]:
    """For the name of the file: the shared parameters, then those of single methods, ``rise.masks-32``."""
    yield params_part({key: shared[key] for key in shared if any(key in method.given() for method in methods)})
    for method in methods:
        own = {name: value for name, value in method.given().items() if name not in shared or value != shared[name]}
        if own:
            yield f"{method.info.name}.{params_part(own)}"


def build(view: View, calls: list[str], shared: dict[str, Any]) -> list[Method]:
    """The methods of names and calls, each once; each takes those of the shared parameters that it has."""
    built: dict[str, Method] = {}
    used: set[str] = set()
    for name, own in map(split_call, calls):
        known = get_method(name).parameters()
        used |= known.keys() & shared.keys()
        method = build_method(name, view, **{**{key: value for key, value in shared.items() if key in known}, **own})
        built.setdefault(join_call(method.info.name, method.given()), method)
    unknown = [key for key in shared if key not in used]
    if unknown:
        raise VitrailError(f"none of these methods has a parameter {', '.join(unknown)}.")
    return [*built.values()]


def choose(view: View, wanted: list[str]) -> list[str]:
    """The methods to draw: those named, called or fitting a glob, else every bare one that needs few passes."""
    able = supported_methods(view)
    if not wanted:
        return [name for name in able if "." not in name and get_method(name).info.family != "mask"]
    calls: list[str] = []
    for text in wanted:
        pattern, bracket, params = text.partition("(")
        fits = [name for name in able if fnmatchcase(name, pattern)] if any(c in pattern for c in "*?[") else [pattern]
        if not fits:
            raise VitrailError(
                f"no method that {view.name} supports fits {pattern!r}; there are {len(list_methods())}."
            )
        calls += [name + bracket + params for name in fits]
    return calls


def draw(rows: list[list[Explanation]]) -> Image.Image:
    """The photo first, then the maps; with several classes a row of maps for each."""
    first = rows[0][0]
    width = len(rows[0]) + 1 if len(rows) > 1 else min(COLUMNS, len(rows[0]) + 1)
    cells = []
    for row in rows:
        cells.append((thumbnail(first.image), row[0].title))
        cells += [(ex.overlay(), ex.call) for ex in row]
    sheet = contact_sheet(cells, width)
    title = first.title if len(rows) == 1 else " / ".join(row[0].title for row in rows)
    return labelled(sheet, title, f"{several(len(rows[0]), 'method')} on {first.model_name}")
