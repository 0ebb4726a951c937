"""Generated images with a known answer: every pixel belongs to one object, to clutter or to the background.

An explanation of a class ought to fall on the object of that class, so here it can be marked right or wrong.
Everything is drawn with integer arithmetic from the raw bits of PCG64, whose stream numpy guarantees: a scene
depends on its seed and index alone and has the same pixels on every platform.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.base import DataSet, Example, Mask, Object
from vitrail.data.drawing import SHAPES, SIZE, Canvas, Dice, place_shape
from vitrail.geometry import tight_box


@dataclass(frozen=True, eq=False)
class SceneObject:
    """One object: its class, the pixels that show it, and the tight box around them (x1 and y1 exclusive)."""

    label: int
    mask: Mask
    box: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Scene:
    """One image (uint8, height × width × 3), its objects, and the pixels that show clutter."""

    image: NDArray[np.uint8]
    objects: tuple[SceneObject, ...]
    clutter: Mask


class Scenes(Sequence[Scene]):
    """`n` scenes of one or two objects of different classes; `objects=1` or `objects=2` fixes the number.

    Scenes are drawn on access. The class decides the shape of an object and nothing else: size, place,
    rotation, colour and texture are independent of it.
    """

    labels: tuple[str, ...] = tuple(SHAPES)

    def __init__(self, n: int, seed: int = 0, objects: int | None = None) -> None:
        if n < 0 or seed < 0:
            raise ValueError(f"Scenes needs n ≥ 0 and seed ≥ 0, got n={n} and seed={seed}")
        if objects not in (None, 1, 2):
            raise ValueError(f"Scenes draws objects=1, objects=2 or, with None, either; got objects={objects!r}")
        self.n, self.seed, self.objects = n, seed, objects

    def __repr__(self) -> str:
        return f"Scenes({self.n}, seed={self.seed}, objects={self.objects})"

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Scene]:
        return (draw_scene(self.seed, index, self.objects) for index in range(self.n))

    @overload
    def __getitem__(self, index: int) -> Scene: ...
    @overload
    def __getitem__(self, index: slice) -> list[Scene]: ...
    def __getitem__(self, index: int | slice) -> Scene | list[Scene]:
        if isinstance(index, slice):
            return [draw_scene(self.seed, i, self.objects) for i in range(self.n)[index]]
        try:
            position = range(self.n)[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range: there are {self.n} scenes") from None
        return draw_scene(self.seed, position, self.objects)


class SceneData(DataSet):
    """One example for each object of each scene; its label is that object's class, its objects are all of the scene.

    A scene of two objects gives two examples of the same image: an explanation of either class must find its own.
    Ids are the scene's number, the object's number and its class: "12-0-star".
    """

    name = "scenes"
    labels = Scenes.labels

    def __init__(self, scenes: int | Sequence[Scene], seed: int = 0, objects: int | None = None) -> None:
        """Uses the given scenes, or draws some.

        Args:
            scenes: scenes, or how many to draw.
            seed: of the scenes to draw.
            objects: number of objects in each scene to draw, 1 or 2; None = either.
        """
        self.scenes: Sequence[Scene] = Scenes(scenes, seed, objects) if isinstance(scenes, int) else scenes

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """(scene, object, label) of every example; scenes that are drawn are drawn once for this."""
        return [
            (number, place, item.label)
            for number, scene in enumerate(self.scenes)
            for place, item in enumerate(scene.objects)
        ]

    @property
    def ids(self) -> list[str]:
        return [self._id(*place) for place in self._places]

    def _id(self, number: int, place: int, label: int) -> str:
        return f"{number}-{place}-{self.labels[label].removeprefix('a ').replace(' ', '-')}"

    def __len__(self) -> int:
        return len(self._places)

    def load(self, position: int) -> Example:
        number, place, label = self._places[position]
        scene = self.scenes[number]
        # as floats: the text of a box is part of the keys of stored rows
        boxes = [
            (float(x0), float(y0), float(x1), float(y1)) for x0, y0, x1, y1 in (item.box for item in scene.objects)
        ]
        objects = tuple(Object(item.label, box, item.mask) for item, box in zip(scene.objects, boxes, strict=True))
        return Example(self._id(number, place, label), Image.fromarray(scene.image), label, objects)


def draw_scene(seed: int, index: int, objects: int | None = None) -> Scene:
    """Scene `index` of `seed`, with one or two objects as the dice say unless `objects` fixes the number."""
    dice = Dice(seed, index)
    drawn_count = 1 + dice.below(2)
    count = drawn_count if objects is None else objects
    canvas = Canvas(dice)
    clutter = canvas.scatter_clutter(dice)
    drawn = []
    for label, (x, y, radius) in zip(_different_labels(dice, count), _separate_places(dice, count), strict=True):
        mask = place_shape(Scenes.labels[label], dice, x, y, radius)
        canvas.paint_object(dice, mask, x, y, radius)
        box = tight_box(mask)
        assert box is not None
        x0, y0, x1, y1 = map(int, box)
        drawn.append(SceneObject(label, mask, (x0, y0, x1, y1)))
        clutter &= ~mask
    return Scene(canvas.pixels.astype(np.uint8), tuple(drawn), clutter)


def _different_labels(dice: Dice, count: int) -> list[int]:
    first = dice.below(len(SHAPES))
    return [first, (first + 1 + dice.below(len(SHAPES) - 1)) % len(SHAPES)][:count]


def _separate_places(dice: Dice, count: int) -> list[tuple[int, int, int]]:
    """Centre and radius, in pixels, of circles that lie inside the image and do not touch."""
    smallest, largest = (10, 20) if count == 1 else (9, 15)
    while True:
        radii = [dice.between(smallest, largest) for _ in range(count)]
        places = [(dice.between(r, SIZE - r), dice.between(r, SIZE - r), r) for r in radii]
        if count == 1:
            return places
        (x, y, r), (other_x, other_y, other_r) = places
        if (x - other_x) ** 2 + (y - other_y) ** 2 > (r + other_r + 1) ** 2:
            return places
