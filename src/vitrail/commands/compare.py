"""``vitrail compare``: one figure of what many methods say of one picture."""

from __future__ import annotations

import io
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from vitrail.commands.explain import estimate, introduce, show_top
from vitrail.errors import VitrailError
from vitrail.explaining import explain_each
from vitrail.explanation import Explanation
from vitrail.files import write_together
from vitrail.methods.registry import build_method, get_method, list_methods, supported_methods
from vitrail.models.view import View
from vitrail.show.figure import contact_sheet, labelled, thumbnail

COLUMNS = 6


def run(view: View, path: Path, wanted: list[str], targets: list[str], out: Path, params: dict[str, Any]) -> Path:
    """Draws the figure, writes it with its JSON file and says where it is."""
    told = Console(highlight=False)
    names = choose(view, wanted)
    unknown = [key for key in params if not any(key in get_method(name).info.params for name in names)]
    if unknown:
        raise VitrailError(f"none of these methods has a parameter {', '.join(unknown)}.")
    classes: list[int | None] = [view.class_index(target) for target in targets] or [None]
    introduce(told, view)
    view.known_fingerprint = view.fingerprint()  # hashed once, not for every method
    passes = [build_method(name, view).passes() for name in names]
    estimate(told, view, f"{len(names)} methods", sum(f + 2 * b + 1 for f, b in passes) * len(classes))
    rows: list[list[Explanation]] = []
    for target in classes:
        rows.append([])
        for name in track(names, description="methods", console=told, transient=True):
            own = {key: value for key, value in params.items() if key in get_method(name).info.params}
            method = build_method(name, view, **own)
            rows[-1] += explain_each(method, [str(path)], target, None)
    show_top(told, rows[0][0])
    figure = draw(rows)
    buffer = io.BytesIO()
    figure.save(buffer, "PNG")
    text = json.dumps([ex.to_dict() for row in rows for ex in row], ensure_ascii=False, indent=1, default=str)
    target_path = out / f"{path.stem}.compare.png"
    write_together({target_path: buffer.getvalue(), target_path.with_suffix(".json"): text.encode()})
    told.print(f"{len(names)} methods → [bold]{escape(str(target_path))}[/]", soft_wrap=True)
    return target_path


def choose(view: View, wanted: list[str]) -> list[str]:
    """The methods to draw: those named or fitting a glob, else every bare one that needs few passes."""
    able = supported_methods(view)
    if not wanted:
        return [name for name in able if "." not in name and get_method(name).info.family != "mask"]
    names: list[str] = []
    for pattern in wanted:
        fits = [name for name in able if fnmatchcase(name, pattern)] if any(c in pattern for c in "*?[") else [pattern]
        if not fits:
            raise VitrailError(
                f"no method that {view.name} supports fits {pattern!r}; there are {len(list_methods())}."
            )
        names += fits
    return list(dict.fromkeys(names))


def draw(rows: list[list[Explanation]]) -> Image.Image:
    """The photo first, then the maps; with several classes a row of maps for each."""
    first = rows[0][0]
    width = len(rows[0]) + 1 if len(rows) > 1 else min(COLUMNS, len(rows[0]) + 1)
    cells = []
    for row in rows:
        cells.append((thumbnail(first.image), row[0].title))
        cells += [(ex.overlay(), ex.method) for ex in row]
    sheet = contact_sheet(cells, width)
    title = first.title if len(rows) == 1 else " / ".join(row[0].title for row in rows)
    return labelled(sheet, title, f"{len(rows[0])} methods on {first.model_name}")
