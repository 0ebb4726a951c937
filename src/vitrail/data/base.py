"""Data sets and their examples: an image, its class, and the objects annotated in it."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.geometry import Box, box_area

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Object:
    """One annotated thing, in pixels of the upright original image.

    Attributes:
        label: class index of the data set; None = unknown, counts as the image's own class.
        box: (x0, y0, x1, y1), x1 and y1 exclusive.
        mask: the pixels that show it, bool (height, width).
    """

    label: int | None
    box: Box | None = None
    mask: Mask | None = None


@dataclass(frozen=True, eq=False)
class Example:
    """One image to explain and what is known about it.

    Attributes:
        id: unique within the data set and the same on every machine.
        image: upright, RGB.
        label: class index of the data set; None where it has no classes.
        objects: what is annotated in the image, of any class.
        ignore: pixels whose class is unknown, bool (height, width).
        by_area: the label is the class with the largest area. A model that sees a part of the image is asked about
            the class with the largest area there.
    """

    id: str
    image: Image.Image
    label: int | None = None
    objects: tuple[Object, ...] = ()
    ignore: Mask | None = None
    by_area: bool = False

    def __post_init__(self) -> None:
        expected = (self.image.height, self.image.width)
        for mask in (self.ignore, *(item.mask for item in self.objects)):
            if mask is not None and (mask.shape != expected or mask.dtype != np.bool_):
                raise VitrailError(
                    f"a mask of example {self.id!r} has shape {mask.shape} and type {mask.dtype}, expected "
                    f"(height, width) = {expected} of its image, bool."
                )


class DataSet(Sequence[Example], ABC):
    """A sequence of examples. Images are loaded lazily; a broken one raises an error that names its file.

    Attributes:
        name: short name of the data set.
        labels: class names, index = label, "" = no name is known; None where the classes have no names.
        skipped: files of its folder that are no examples, and why.
        numbered: labels are the user's own class numbers, and names only describe them.
        concurrent: `load` may run in several threads at once; else it runs in the caller's thread alone.
    """

    name: str = "data"
    labels: Sequence[str] | None = None
    numbered: bool = False
    skipped: Mapping[str, str] = MappingProxyType({})
    concurrent: bool = False

    @property
    @abstractmethod
    def ids(self) -> list[str]:
        """Ids of all examples, without decoding an image."""

    @abstractmethod
    def load(self, position: int) -> Example:
        """Reads the example at a position from 0 to len − 1."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Example]:
        return (self.load(position) for position in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> DataSet: ...
    def __getitem__(self, index: int | slice) -> Example | DataSet:
        if isinstance(index, slice):
            return Subset(self, range(len(self))[index])
        try:
            position = range(len(self))[operator.index(index)]
        except IndexError:
            raise IndexError(f"index {index} is out of range: {self.name} has {len(self)} examples") from None
        return self.load(position)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}': {len(self)} examples>"

    def subset(self, n: int | None = None, seed: int = 0, indices: Sequence[int] | str | Path | None = None) -> DataSet:
        """Part of the data set, in this order.

        Args:
            n: draw that many examples at random; they come in index order. A smaller draw of the same seed is part
                of a larger one.
            seed: of the draw: the first n of `numpy.random.default_rng(seed).permutation(len(self))`.
            indices: instead of a draw, these positions in the given order, or a file of them (see `read_indices`).
        """
        if (n is None) == (indices is None):
            raise VitrailError("a subset needs either n (examples drawn at random) or indices, and not both.")
        if indices is not None:
            return Subset(self, read_indices(indices) if isinstance(indices, str | Path) else indices)
        count = operator.index(n)  # type: ignore[arg-type]
        if not 0 <= count <= len(self):
            raise VitrailError(f"cannot draw a subset of n={count}: {self.name} has {len(self)} examples.")
        return Subset(self, np.sort(np.random.default_rng(seed).permutation(len(self))[:count]).tolist())


class Listed(DataSet):
    """A data set that keeps the list of its ids."""

    _ids: list[str]

    @property
    def ids(self) -> list[str]:
        return self._ids


class Subset(DataSet):
    """Some examples of a data set, in a given order. Each at most once, so that ids stay unique."""

    def __init__(self, data: DataSet, indices: Sequence[int]) -> None:
        self.data, self.name, self.labels, self.numbered = data, data.name, data.labels, data.numbered
        self.skipped, self.concurrent = dict(data.skipped), data.concurrent
        self.indices = [operator.index(index) for index in indices]
        wrong = [index for index in self.indices if not 0 <= index < len(data)]
        if wrong:
            raise VitrailError(f"index {wrong[0]} is outside {data.name}, which has {len(data)} examples from 0.")
        if len(set(self.indices)) != len(self.indices):
            raise VitrailError("the indices of a subset contain an example twice: list each only once.")

    @property
    def ids(self) -> list[str]:
        ids = self.data.ids
        return [ids[index] for index in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, position: int) -> Example:
        return self.data.load(self.indices[position])


class Joined(Listed):
    """The examples of several data sets, one after another, without labels and objects: their classes may differ.

    Ids begin with the number of the data set where two would agree.
    """

    def __init__(self, parts: Sequence[DataSet]) -> None:
        self.parts, self.name = list(parts), " + ".join(part.name for part in parts)
        self.skipped = {name: reason for part in parts for name, reason in part.skipped.items()}
        self.concurrent = all(part.concurrent for part in parts)
        self._places = [(part, position) for part in parts for position in range(len(part))]
        self._ids = [name for part in parts for name in part.ids]
        if len(set(self._ids)) != len(self._ids):
            self._ids = [f"{number}/{name}" for number, part in enumerate(parts) for name in part.ids]

    def load(self, position: int) -> Example:
        part, place = self._places[position]
        return Example(self._ids[position], part.load(place).image)


def read_indices(path: str | Path) -> list[int]:
    """Reads positions from a file: integers separated by white space or commas, or a JSON list of them."""
    from vitrail.data.paths import read_text

    text = read_text(path, "the index file").strip()
    words = text.removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
    if wrong is not None or not words:
        content = "nothing" if wrong is None else repr(wrong[:40])
        raise VitrailError(f"the index file '{path}' holds {content}, expected integers from 0, or a JSON list.")
    return [int(word) for word in words]


def largest_class(objects: Sequence[Object]) -> int | None:
    """The class that covers most of the image: by the pixels of its masks, else by its boxes' area."""
    areas: dict[int, float] = {}
    for item in objects:
        if item.label is not None:
            areas[item.label] = areas.get(item.label, 0.0) + _area(item)
    # The first of equals in order of labels, so that the answer does not depend on the order of the annotations.
    return max(sorted(areas), key=areas.__getitem__, default=None)


def _area(item: Object) -> float:
    if item.mask is not None:
        return float(item.mask.sum())
    return 0.0 if item.box is None else box_area(item.box)
