"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

LABELS = ["ant", "bee", "cat [/]", "dog", "elk"]
OVERVIEW = {"contact-sheet.png", "explanations.csv"}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def files_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def results_in(place: Path) -> set[str]:
    return {path.name for path in (place / "vitrail-out").rglob("*")}


def error_line(result: Result) -> str:
    """The error message, which must be a single line."""
    assert result.code == 1
    assert result.err.startswith("Error: ")
    assert "Traceback" not in result.err
    assert result.err.count("\n") == 1
    return result.err
