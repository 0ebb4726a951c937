"""Pictures that vitrail itself wrote: a folder of images is read without them."""

from __future__ import annotations

import re
from pathlib import Path

_SHEET = re.compile(r"\.(top\d+|curves)$")
_HEADER = re.compile(rb'\s*(\[\s*)?\{\s*"vitrail"')


def is_result(path: Path) -> bool:
    """Whether vitrail wrote this picture or its values: its JSON file, or the table of a folder, is beside it."""
    if path.suffix.lower() not in (".png", ".tif"):
        return False
    if path.name == "contact-sheet.png":
        return path.with_name("explanations.csv").is_file()
    stem = _SHEET.sub("", path.stem)
    return any(is_explanation(path.with_name(f"{name}.json")) for name in (path.stem, stem, f"{stem}.1"))


def is_explanation(path: Path) -> bool:
    """Whether a file is the JSON file of one or several explanations."""
    try:
        with open(path, "rb") as file:
            return _HEADER.match(file.read(64)) is not None
    except OSError:
        return False
