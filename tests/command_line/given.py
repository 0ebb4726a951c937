"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

LABELS = ["ant", "bee", "cat [/]", "dog", "elk"]
OVERVIEW = {"contact-sheet.png", "explanations.csv"}


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Said]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def left(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def written(place: Path) -> set[str]:
    return {path.name for path in (place / "vitrail-out").rglob("*")}


def one_line(said: Said) -> str:
    """The error, if it is told as it should be."""
    assert said.code == 1
    assert said.err.startswith("Error: ")
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1
    return said.err
