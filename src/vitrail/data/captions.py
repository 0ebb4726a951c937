"""Generated images with captions: scenes in which only colour and shape together tell an object from the others.

A caption is about one object, "a red star"; the picture may also show a blue star and a red ring. A model that answers
for the right reason looks at the red star, and the masks, which are exact, tell whether an explanation says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, overload

from vitrail.data.base import Mask
from vitrail.data.drawing import SHAPES, SIZE, Canvas, Dice, place_shape
from vitrail.data.scenes import Scene, SceneData, SceneObject
from vitrail.geometry import tight_box

Shared = Literal["colour", "shape"]

COLOURS = {"red": 0, "yellow": 256, "green": 512, "cyan": 768, "blue": 1024, "magenta": 1280}  # place on the wheel
SIZES = {"small": (9, 10), "large": (13, 15)}  # radius in pixels
ACROSS, DOWN = ("left", "right"), ("top", "bottom")
ANYTHING = "object"  # instead of a shape
MARGIN = 4  # pixels from the middle within which an object is on neither side
CAPTIONS = tuple(f"a {colour} {shape}" for colour, shape in product(COLOURS, SHAPES))
SHARED: tuple[Shared, ...] = ("colour", "shape")


@dataclass(frozen=True, eq=False)
class CaptionedObject(SceneObject):
    """One object and what captions say of it; its class is its colour and shape, an index of ``CAPTIONS``."""

    colour: str
    shape: str
    size: str
    places: tuple[str, ...]  # sides of the picture on which it clearly is: "left", "top"

    @property
    def caption(self) -> str:
        return CAPTIONS[self.label]


@dataclass(frozen=True, eq=False)
class CaptionedScene(Scene):
    """A scene whose objects are told apart by colour and shape together."""

    objects: tuple[CaptionedObject, ...]


def describe(shape: str, colour: str = "", size: str = "", place: str = "") -> str:
    """A caption: "a large red star on the left"; what is empty is not mentioned."""
    words = " ".join(filter(None, [size, colour, shape]))
    article = "an" if words.startswith(("a", "o", "hour")) else "a"
    preposition = "on" if place in ACROSS else "at"
    return f"{article} {words}" + (f" {preposition} the {place}" if place else "")


class CaptionedScenes(Sequence[CaptionedScene]):
    """`n` scenes of two or three objects; `objects=2` or `objects=3` fixes the number.

    The second object shares its colour or its shape with the first, and the third shares the other of the two; or
    all differ in both. `shared="colour"` or `shared="shape"` fixes what the second shares. No two objects have the
    same caption. Scenes are drawn when asked for, from their seed and index alone.
    """

    labels: tuple[str, ...] = CAPTIONS

    def __init__(self, n: int, seed: int = 0, objects: int | None = None, shared: Shared | None = None) -> None:
        if n < 0 or seed < 0:
            raise ValueError(f"CaptionedScenes needs n ≥ 0 and seed ≥ 0, got n={n} and seed={seed}")
        if objects not in (None, 2, 3):
            raise ValueError(f"CaptionedScenes draws objects=2, objects=3 or, with None, either; got {objects!r}")
        if shared not in (None, *SHARED):
            raise ValueError(f'objects share "colour", "shape" or, with None, either or neither; got {shared!r}')
        self.n, self.seed, self.objects, self.shared = n, seed, objects, shared

    def __repr__(self) -> str:
        return f"CaptionedScenes({self.n}, seed={self.seed}, objects={self.objects}, shared={self.shared!r})"

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[CaptionedScene]:
        return (self._draw(index) for index in range(self.n))

    @overload
    def __getitem__(self, index: int) -> CaptionedScene: ...
    @overload
    def __getitem__(self, index: slice) -> list[CaptionedScene]: ...
    def __getitem__(self, index: int | slice) -> CaptionedScene | list[CaptionedScene]:
        if isinstance(index, slice):
            return [self._draw(position) for position in range(self.n)[index]]
        try:
            position = range(self.n)[index]
        except IndexError:
            raise IndexError(f"scene {index} asked for, there are {self.n}") from None
        return self._draw(position)

    def _draw(self, index: int) -> CaptionedScene:
        return draw_captioned(self.seed, index, self.objects, self.shared)


def draw_captioned(seed: int, index: int, objects: int | None = None, shared: Shared | None = None) -> CaptionedScene:
    """Scene `index` of `seed`; the dice decide what `objects` and `shared` leave open."""
    dice = Dice(seed, index)
    drawn_count, drawn_shared = 2 + dice.below(2), (*SHARED, None)[dice.below(3)]
    count, shared = objects or drawn_count, shared or drawn_shared
    canvas = Canvas(dice)
    clutter = canvas.scatter_clutter(dice)
    drawn = []
    for (colour, shape), (x, y, radius) in zip(_looks(dice, shared)[:count], _places(dice, count), strict=True):
        mask = place_shape(shape, dice, x, y, radius)
        canvas.paint_object(dice, mask, x, y, radius, COLOURS[colour])
        drawn.append(_captioned(mask, colour, shape, x, y, radius))
        clutter &= ~mask
    return CaptionedScene(canvas.pixels.astype("uint8"), tuple(drawn), clutter)


def _captioned(mask: Mask, colour: str, shape: str, x: int, y: int, radius: int) -> CaptionedObject:
    box = tight_box(mask)
    assert box is not None
    x0, y0, x1, y1 = map(int, box)
    size = next(name for name, (_, largest) in SIZES.items() if radius <= largest)
    places = _sides(x, ACROSS) + _sides(y, DOWN)
    return CaptionedObject(CAPTIONS.index(describe(shape, colour)), mask, (x0, y0, x1, y1), colour, shape, size, places)


def _sides(position: int, names: tuple[str, str]) -> tuple[str, ...]:
    distance = 2 * position - SIZE
    return () if abs(distance) < 2 * MARGIN else (names[distance > 0],)


def _looks(dice: Dice, shared: Shared | None) -> list[tuple[str, str]]:
    """Colour and shape of three objects: the second is like the first in what is shared, the third in the other."""
    colours, shapes = _three_of(dice, [*COLOURS]), _three_of(dice, [*SHAPES])
    if shared is None:
        return list(zip(colours, shapes, strict=True))
    first, same_colour, same_shape = (colours[0], shapes[0]), (colours[0], shapes[1]), (colours[1], shapes[0])
    return [first, same_colour, same_shape] if shared == "colour" else [first, same_shape, same_colour]


def _three_of(dice: Dice, names: list[str]) -> list[str]:
    return [names.pop(dice.below(len(names))) for _ in range(3)]


def _places(dice: Dice, count: int) -> list[tuple[int, int, int]]:
    """Centre and radius, in pixels, of circles that lie inside the image and do not touch."""
    sizes = [*SIZES.values()]
    while True:
        radii = [dice.between(*sizes[dice.below(len(sizes))]) for _ in range(count)]
        places = [(dice.between(r, SIZE - r), dice.between(r, SIZE - r), r) for r in radii]
        if all(
            (x - other_x) ** 2 + (y - other_y) ** 2 > (r + other_r + 1) ** 2
            for place, (x, y, r) in enumerate(places)
            for other_x, other_y, other_r in places[:place]
        ):
            return places


class CaptionedSceneData(SceneData):
    """One example for each object of each captioned scene; its label is the caption of that object.

    The other objects of a scene share a colour or a shape with it: an explanation of a caption must find the object
    that has both. Ids are the scene's number, the object's number and its look: "12-0-red-star".
    """

    name = "scenes_text"
    labels = CaptionedScenes.labels

    def __init__(
        self,
        scenes: int | Sequence[CaptionedScene],
        seed: int = 0,
        objects: int | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Uses the given scenes, or draws some.

        Args:
            scenes: scenes, or how many to draw.
            seed: of the scenes to draw.
            objects: number of objects in each scene to draw, 2 or 3; None = either.
            shared: what the first two objects share, "colour" or "shape"; None = either or neither.
        """
        self.scenes = CaptionedScenes(scenes, seed, objects, shared) if isinstance(scenes, int) else scenes
