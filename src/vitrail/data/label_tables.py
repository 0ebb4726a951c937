"""Tables of labels (.csv or .tsv): one line per image with its class and, if it has them, boxes and a mask."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from vitrail.data.imagenet import imagenet_classes
from vitrail.data.paths import broken, read_box, read_text, require_unique
from vitrail.geometry import Box
from vitrail.models.labels import plain_name, plain_names

_WHAT = "table"
_COLUMNS = {
    "file": ("file", "filename", "file_name", "image", "path"),
    "label": ("label", "index", "class", "target"),
    "name": ("name", "names", "class_name", "breed"),
    "wnid": ("wnid",),
    "boxes": ("boxes", "box"),
    "mask": ("mask",),
}
_KIND_OF = {word: kind for kind, words in _COLUMNS.items() for word in words}
_NUMBER = r"-?\d+(\.\d*)?"
_BOXES = re.compile(rf"{_NUMBER}(,{_NUMBER}){{3}}(;{_NUMBER}(,{_NUMBER}){{3}})*")
_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Row:
    """An image as the table describes it; paths as written."""

    file: str
    label: int | None
    boxes: tuple[Box, ...]
    mask: str | None


@dataclass(frozen=True)
class Table:
    """The lines of a table, and the class names it gives, index = label; "" = no name is given.

    ``numbered``: the labels are numbers in the table, so names only describe them.
    """

    rows: list[Row]
    labels: tuple[str, ...] | None
    numbered: bool


def read_table(path: Path) -> Table:
    """Reads a table: tabs or commas between the columns.

    With a header, its columns may be file, label or index (a number or a name), name, wnid, boxes and mask; others
    are ignored. Without one, the first is the file, the second the label, and others are recognised by their content.
    Boxes are written `x0,y0,x1,y1;…`. Where labels are names, classes are numbered in sorted order. A wnid of ImageNet
    stands for its class's name.
    """
    lines = _split(path)
    kinds = [_KIND_OF.get(cell.strip().lower(), "") for cell in lines[0]]
    if kinds[0] == "file" or {"file", "label"} <= set(kinds):
        cells = _headed_cells(kinds, lines[1:], path)
    else:
        cells = _headerless_cells(lines)
    files = require_unique(list(cells["file"]), path)
    labels, names, numbered = _labels(cells, path)
    boxes, masks = cells.get("boxes", [""] * len(files)), cells.get("mask", [""] * len(files))
    rows = [
        Row(file, label, tuple(read_box(box.split(","), _WHAT, path) for box in text.split(";") if box), mask or None)
        for file, label, text, mask in zip(files, labels, boxes, masks, strict=True)
    ]
    return Table(rows, names, numbered)


def _split(path: Path) -> list[list[str]]:
    """The cells of every line that is not blank."""
    text = read_text(path, _WHAT)
    tabs = path.suffix.lower() == ".tsv" or "\t" in text.partition("\n")[0]
    try:
        if tabs:
            lines = [line.split("\t") for line in text.splitlines()]
        else:
            lines = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise broken(_WHAT, path, str(error)) from None
    lines = [[cell.strip() for cell in line] for line in lines if any(cell.strip() for cell in line)]
    if not lines:
        raise broken(_WHAT, path, "it is empty")
    return lines


def _headed_cells(kinds: list[str], lines: list[list[str]], path: Path) -> dict[str, Sequence[str]]:
    """The columns that a header names."""
    known = [kind for kind in kinds if kind]
    if len(set(known)) != len(known):
        raise broken(_WHAT, path, f"two columns of its header mean the same, they are: {', '.join(known)}")
    if not lines:
        raise broken(_WHAT, path, "it has a header and no line")
    return {kind: column for kind, column in zip(kinds, zip_longest(*lines, fillvalue=""), strict=False) if kind}


def _headerless_cells(lines: list[list[str]]) -> dict[str, Sequence[str]]:
    """The columns of a table without a header; those after the second are recognised by their content."""
    columns = list(zip_longest(*lines, fillvalue=""))
    cells: dict[str, Sequence[str]] = dict(zip(("file", "label"), columns, strict=False))
    for column in columns[2:]:
        filled = [cell for cell in column if cell]
        if all(map(_BOXES.fullmatch, filled)):
            kind = "boxes" if filled else ""
        else:
            kind = "wnid" if all(map(_WNID.fullmatch, filled)) else "name"
        cells.setdefault(kind, column)
    return cells


def _labels(cells: dict[str, Sequence[str]], path: Path) -> tuple[list[int | None], tuple[str, ...] | None, bool]:
    """The label of each line, the names of the classes, and whether the table has numbers."""
    values = next((cells[kind] for kind in ("label", "wnid", "name") if kind in cells), None)
    if values is None or not any(values):
        return [None] * len(cells["file"]), None, False
    if not all(value.isascii() and value.isdecimal() for value in values if value):
        keys = sorted(set(filter(None, values)))
        place = {key: index for index, key in enumerate(keys)}
        return [place.get(value) for value in values], tuple(_names(keys)), False
    labels = [int(value) if value else None for value in values]
    class_names: dict[int, str] = {}
    for label, name in zip(labels, _names(cells.get("name", cells.get("wnid", []))), strict=False):
        if label is not None and name and class_names.setdefault(label, name) != name:
            raise broken(_WHAT, path, f"class {label} is named both {class_names[label]!r} and {name!r}")
    if not class_names:
        return labels, None, True
    count = max(label for label in labels if label is not None) + 1
    if count > 1_000_000:
        raise broken(_WHAT, path, f"it has the class number {count - 1}, expected numbers from 0")
    return labels, tuple(class_names.get(label, "") for label in range(count)), True


def _names(keys: Sequence[str]) -> Sequence[str]:
    """Names as they are, and ImageNet's in place of its wnids, by which models do not know their classes."""
    if not any(map(_WNID.fullmatch, keys)):
        return keys
    names = _imagenet_names()
    return [names.get(key, key) for key in keys]


@lru_cache(maxsize=1)
def _imagenet_names() -> dict[str, str]:
    """wnid → the first of the synonyms of its class, or all of them where another class is called like the first."""
    wnids, names = imagenet_classes()
    classes_called = Counter(synonym for synonyms in plain_names(names) for synonym in set(synonyms))
    known = dict(zip(wnids, names, strict=True))
    for wnid, name in known.items():
        first = name.partition(",")[0]
        if classes_called[plain_name(first)] == 1:
            known[wnid] = first
    return known
