"""Data sets from lists in memory: paths, images, arrays, with or without labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from vitrail.data.base import Example, Listed
from vitrail.data.images import ImageSource, read_image
from vitrail.errors import VitrailError
from vitrail.files import printable

Item: TypeAlias = ImageSource | tuple[ImageSource, int | str | None] | Example


class InMemory(Listed):
    """Given items: each an image (path, PIL image or uint8 array), a pair (image, label), or an Example.

    Ids are the names of files, the ids of examples and the numbers of others; all are numbers where two would agree.
    """

    concurrent = True

    def __init__(self, items: Sequence[Item], labels: Sequence[str] | None = None, name: str = "images") -> None:
        """Keeps the items; paths are read lazily.

        Args:
            items: the images.
            labels: class names, index = label; needed where pairs have a name for a label.
            name: of the data set.
        """
        self.name, self.labels = name, None if labels is None else tuple(labels)
        self._items = [self._checked(item, number) for number, item in enumerate(items)]
        numbers = [str(number) for number in range(len(self._items))]
        ids = list(map(_id, self._items, numbers))
        self._ids = ids if len(set(ids)) == len(ids) else numbers

    def load(self, position: int) -> Example:
        item = self._items[position]
        if isinstance(item, Example):
            return replace(item, id=self._ids[position])
        source, label = item
        return Example(self._ids[position], read_image(source), label)

    def _checked(self, item: Item, number: int) -> Example | tuple[ImageSource, int | None]:
        if isinstance(item, Example):
            return item
        source, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        if isinstance(source, tuple | list):
            raise VitrailError(f"item {number} is a {type(source).__name__}, expected an image or (image, label).")
        return source, self._index(label, number)

    def _index(self, label: int | str | None, number: int) -> int | None:
        if label is None:
            return None
        if isinstance(label, str):
            if self.labels is None or label not in self.labels:
                raise VitrailError(f"item {number} has the label {label!r}, which is not among labels=.")
            return list(self.labels).index(label)
        index = int(label)
        if index < 0 or (self.labels is not None and index >= len(self.labels)):
            count = "…" if self.labels is None else f"…{len(self.labels) - 1}"
            raise VitrailError(f"item {number} has the label {index}, expected 0{count}.")
        return index


def _id(item: Example | tuple[ImageSource, int | None], number: str) -> str:
    if isinstance(item, Example):
        return item.id
    return printable(Path(item[0]).name) if isinstance(item[0], str | os.PathLike) else number
