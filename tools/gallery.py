"""Draws the strips of the leaderboard: `python tools/gallery.py [--again] METHOD…` into `docs/pictures/leaderboard/`.

A strip shows one method on six pictures: the samples of the web page and the collage of the README, each explained for
the class that an embedded model predicts. Without methods, all those of the leaderboard are drawn. Strips that exist
are kept unless --again is given.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.models.view import View
from vitrail.report.leaderboard import shipped_table, strip_name

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "pictures" / "leaderboard"
SAMPLES = Path(str(files("vitrail.data") / "samples"))
PICTURES = {  # file → embedded model
    SAMPLES / "cat.jpg": "photo",
    SAMPLES / "coffee.jpg": "photo",
    SAMPLES / "rocket.jpg": "photo",
    DOCS / "pictures" / "cat_and_cup.jpg": "photo",
    SAMPLES / "star-and-heart.png": "scenes",
    SAMPLES / "ring-and-hourglass.png": "scenes",
}
SIDE = 96
EMPTY = "#d0d0d0"
MOST = 8_000  # bytes of a strip
QUALITIES = (82, 74, 66, 58, 50, 40, 30)


@dataclass(frozen=True)
class Subject:
    """A picture, square and small, and the model that explains it."""

    picture: Image.Image
    view: View

    def explained(self, call: str) -> Image.Image:
        name, params = split_call(call)
        explanation = vitrail.explain(self.view, self.picture, name, **params)
        return explanation.overlay().convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the strips of the leaderboard.")
    parser.add_argument(
        "methods", nargs="*", help="calls such as 'gen_att(rule=frozen)'; default: all of the leaderboard"
    )
    parser.add_argument("--again", action="store_true", help="draw strips that exist, too")
    options = parser.parse_args()
    calls = split_list(options.methods) or measured()
    missing = [call for call in calls if options.again or not (FOLDER / strip_name(call)).exists()]
    print(f"{len(calls)} strips, {len(calls) - len(missing)} exist")
    subjects = open_subjects() if missing else []
    FOLDER.mkdir(parents=True, exist_ok=True)
    for place, call in enumerate(missing, 1):
        start = time.monotonic()
        cells, errors = zip(*(explained(subject, call) for subject in subjects), strict=True)
        for error in dict.fromkeys(filter(None, errors)):
            print(f"[{place}/{len(missing)}] {call}: {error}", flush=True)
        if all(errors):
            continue
        content = encoded(strip(cells))
        (FOLDER / strip_name(call)).write_bytes(content)
        spent = time.monotonic() - start
        print(f"[{place}/{len(missing)}] {call}: {len(content) / 1000:.1f} kB, {spent:.1f} s", flush=True)


def measured() -> list[str]:
    """The methods of the leaderboard."""
    return list(dict.fromkeys(shipped_table()["method"]))


def open_subjects() -> list[Subject]:
    views = {name: vitrail.load(name) for name in dict.fromkeys(PICTURES.values())}
    return [Subject(square(Image.open(path).convert("RGB")), views[name]) for path, name in PICTURES.items()]


def square(picture: Image.Image) -> Image.Image:
    """The middle of a picture, so that strips need no margins."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


def explained(subject: Subject, call: str) -> tuple[Image.Image, str]:
    """A cell of a strip; an empty one, and why, where the method cannot explain the model."""
    try:
        return subject.explained(call), ""
    except vitrail.VitrailError as error:
        return Image.new("RGB", (SIDE, SIDE), EMPTY), str(error)


def strip(cells: Sequence[Image.Image]) -> Image.Image:
    page = Image.new("RGB", (SIDE * len(cells), SIDE))
    for place, cell in enumerate(cells):
        page.paste(cell, (SIDE * place, 0))
    return page


def encoded(picture: Image.Image) -> bytes:
    """As WebP, with the best quality that is small enough."""
    for quality in QUALITIES:
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=quality, method=6)
        if buffer.tell() <= MOST:
            break
    return buffer.getvalue()


if __name__ == "__main__":
    main()
