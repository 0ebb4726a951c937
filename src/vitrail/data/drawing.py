"""Integer drawing for `scenes`: dice, shapes, textures and the canvas they are painted on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vitrail.data.base import Mask

SIZE = 64
UNIT = 1024  # a shape is described in coordinates where its circumscribed circle has this radius
TURN = 4096  # sines and cosines are integers out of this

Ints = NDArray[np.int64]
Shape = Callable[[Ints, Ints], Mask]

ROWS, COLUMNS = np.mgrid[0:SIZE, 0:SIZE].astype(np.int64)


class Dice:
    """Integers from the raw bits of PCG64 (numpy may change how its distributions use them, not the bits)."""

    def __init__(self, seed: int, index: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, index]))

    def below(self, limit: int) -> int:
        return int(self._bits.random_raw()) % limit

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.below(high - low + 1)

    def grid(self, side: int, limit: int) -> Ints:
        return (self._bits.random_raw(side * side) % np.uint64(limit)).astype(np.int64).reshape(side, side)

    def direction(self) -> tuple[int, int]:
        """Cosine and sine of an angle, times TURN; rational points of the circle need no libm."""
        run, rise, sign = 64, self.between(-63, 64), 1 - 2 * self.below(2)
        square = run * run + rise * rise
        return sign * (run * run - rise * rise) * TURN // square, sign * 2 * run * rise * TURN // square


def _polygon(*corners: tuple[int, int]) -> Shape:
    def inside(u: Ints, v: Ints) -> Mask:
        odd = np.zeros(u.shape, dtype=bool)
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if y0 == y1:
                continue
            (x0, y0), (x1, y1) = sorted([(x0, y0), (x1, y1)], key=lambda corner: corner[1])
            odd ^= (v >= y0) & (v < y1) & ((u - x0) * (y1 - y0) < (x1 - x0) * (v - y0))
        return odd

    return inside


def _disc(radius: int, x: int = 0, y: int = 0) -> Shape:
    return lambda u, v: (u - x) ** 2 + (v - y) ** 2 <= radius**2


def _union(*shapes: Shape) -> Shape:
    return lambda u, v: np.logical_or.reduce([shape(u, v) for shape in shapes])


def _without(shape: Shape, hole: Shape) -> Shape:
    return lambda u, v: shape(u, v) & ~hole(u, v)


SHAPES: dict[str, Shape] = {
    "disc": _disc(940),
    "ring": _without(_disc(1000), _disc(520)),
    "square": _polygon((-720, -720), (720, -720), (720, 720), (-720, 720)),
    "triangle": _polygon((0, -1024), (887, 512), (-887, 512)),
    "cross": _polygon(
        (-300, -970), (300, -970), (300, -300), (970, -300), (970, 300), (300, 300),
        (300, 970), (-300, 970), (-300, 300), (-970, 300), (-970, -300), (-300, -300),
    ),
    "star": _polygon(
        (0, -1024), (253, -348), (974, -316), (409, 133), (602, 828),
        (0, 430), (-602, 828), (-409, 133), (-974, -316), (-253, -348),
    ),
    "crescent": _without(_disc(1000), _disc(800, 520, 0)),
    "heart": _union(
        _disc(470, -440, -330), _disc(470, 440, -330),
        _polygon((-860, -120), (-440, -420), (0, -420), (440, -420), (860, -120), (0, 960)),
    ),
    "arrow": _polygon((0, -1024), (780, -120), (270, -120), (270, 960), (-270, 960), (-270, -120), (-780, -120)),
    "hourglass": _polygon((-720, -720), (720, -720), (110, 0), (720, 720), (-720, 720), (-110, 0)),
}  # fmt: skip


def place_shape(name: str, dice: Dice, x: int, y: int, radius: int) -> Mask:
    """Pixels of a shape centred on the corner of pixels (x, y), turned by an angle the dice choose."""
    cosine, sine = dice.direction()
    window = np.s_[max(y - radius, 0) : y + radius, max(x - radius, 0) : x + radius]
    right, down = 2 * (COLUMNS[window] - x) + 1, 2 * (ROWS[window] - y) + 1
    half_pixels = 2 * radius * TURN
    u = (cosine * right + sine * down) * UNIT // half_pixels
    v = (cosine * down - sine * right) * UNIT // half_pixels
    mask = np.zeros((SIZE, SIZE), dtype=bool)
    mask[window] = SHAPES[name](u, v)
    return mask


def _hue(position: int) -> Ints:
    """The fully saturated colour at `position` of 1536 around the wheel."""
    sector, step = divmod(position, 256)
    up, down = step, 255 - step
    wheel = [(255, up, 0), (down, 255, 0), (0, 255, up), (0, down, 255), (up, 0, 255), (255, 0, down)]
    return np.array(wheel[sector], dtype=np.int64)


def _colour(hue: int, saturation: int, value: int) -> Ints:
    """Saturation and value out of 255."""
    return (255 * 255 - saturation * (255 - _hue(hue % 1536))) * value // (255 * 255)


def _any_pair(dice: Dice) -> tuple[Ints, Ints]:
    """A light and a dark colour of hues that may differ."""
    hue, saturation, value = dice.below(1536), dice.between(90, 235), dice.between(120, 250)
    light = _colour(hue, saturation, value)
    return light, _colour(hue + dice.between(-220, 220), saturation * dice.between(40, 100) // 100, value * 3 // 5)


def _pair_of_hue(dice: Dice, hue: int) -> tuple[Ints, Ints]:
    """A light and a dark colour that a name of the hue fits."""
    saturation, value = dice.between(190, 250), dice.between(190, 250)
    light = _colour(hue + dice.between(-40, 40), saturation, value)
    return light, _colour(hue + dice.between(-40, 40), saturation, value * 3 // 5)


def _plain(dice: Dice, across: Ints, along: Ints) -> Ints:
    return np.full_like(across, dice.below(256))


def _stripes(dice: Dice, across: Ints, along: Ints) -> Ints:
    return 255 * (across // (TURN * dice.between(2, 5)) & 1)


def _checks(dice: Dice, across: Ints, along: Ints) -> Ints:
    side = TURN * dice.between(3, 5)
    return 255 * ((across // side + along // side) & 1)


def _dots(dice: Dice, across: Ints, along: Ints) -> Ints:
    pitch = dice.between(5, 8)
    u, v = (across * 8 // TURN) % (8 * pitch) - 4 * pitch, (along * 8 // TURN) % (8 * pitch) - 4 * pitch
    return 255 * (9 * (u * u + v * v) < 49 * pitch * pitch).astype(np.int64)


def _gradient(dice: Dice, across: Ints, along: Ints) -> Ints:
    return np.clip(across * dice.between(4, 8) // TURN + 128, 0, 255)


def _noise(dice: Dice, across: Ints, along: Ints) -> Ints:
    return cloud(dice, dice.between(3, 6))


TEXTURES = (_plain, _stripes, _checks, _dots, _gradient, _noise)


def cloud(dice: Dice, cell: int) -> Ints:
    """Smooth noise, 0 to 255: random heights on a grid of `cell` pixels, interpolated between."""
    heights = dice.grid(SIZE // cell + 2, 256)
    row, column, down, right = ROWS // cell, COLUMNS // cell, ROWS % cell, COLUMNS % cell
    upper = heights[row, column] * (cell - right) + heights[row, column + 1] * right
    lower = heights[row + 1, column] * (cell - right) + heights[row + 1, column + 1] * right
    return (upper * (cell - down) + lower * down) // (cell * cell)


def textured(dice: Dice, first: Ints, second: Ints, x: int, y: int) -> Ints:
    """An image that mixes two colours in a texture of random kind, scale and direction around (x, y)."""
    texture = TEXTURES[dice.below(len(TEXTURES))]
    cosine, sine = dice.direction()
    across = cosine * (COLUMNS - x) + sine * (ROWS - y)
    along = cosine * (ROWS - y) - sine * (COLUMNS - x)
    weight = texture(dice, across, along)[..., None]
    return first + (second - first) * weight // 255


class Canvas:
    """Pixels (int64 while painting) that start as a textured background."""

    def __init__(self, dice: Dice) -> None:
        hue, dark = dice.below(1536), dice.below(2)
        value = dice.between(50, 110) if dark else dice.between(170, 235)
        saturation = dice.between(20, 110)
        near = _colour(hue, saturation, value)
        far = _colour(hue + dice.between(-200, 200), saturation, value + dice.between(-45, 20))
        self.palette = [near, far]
        self.pixels = textured(dice, near, far, dice.below(SIZE), dice.below(SIZE))
        self._speckle(dice, np.ones((SIZE, SIZE), dtype=bool), 36)

    def _speckle(self, dice: Dice, where: Mask, strength: int) -> None:
        """Uneven light, so that no texture is perfectly regular."""
        light = (cloud(dice, dice.between(5, 12)) - 128) * strength // 128 + dice.grid(SIZE, 17) - 8
        self.pixels[where] = np.clip(self.pixels[where] + light[where][:, None], 0, 255)

    def scatter_clutter(self, dice: Dice) -> Mask:
        """Strokes and lumps too small or too thin to be any of the shapes."""
        everything = np.zeros((SIZE, SIZE), dtype=bool)
        for _ in range(dice.between(3, 8)):
            mark = self._stroke(dice) if dice.below(2) else self._lump(dice)
            self.pixels[mark] = self._standing_out(dice, 2)[0]
            everything |= mark
        self._speckle(dice, everything, 24)
        return everything

    def _stroke(self, dice: Dice) -> Mask:
        cosine, sine = dice.direction()
        x, y = dice.below(SIZE), dice.below(SIZE)
        along = cosine * (COLUMNS - x) + sine * (ROWS - y)
        across = cosine * (ROWS - y) - sine * (COLUMNS - x) + along * along // (TURN * dice.between(12, 80))
        return (abs(along) < TURN * dice.between(4, 8)) & (2 * abs(across) < TURN * dice.between(2, 3))

    def _lump(self, dice: Dice) -> Mask:
        x, y = dice.below(SIZE), dice.below(SIZE)
        lump = np.zeros((SIZE, SIZE), dtype=bool)
        for _ in range(3):
            dx, dy = COLUMNS - x - dice.between(-2, 2), ROWS - y - dice.between(-2, 2)
            lump |= dx * dx + dy * dy <= dice.between(2, 6)
        return lump

    def _standing_out(self, dice: Dice, tries: int, hue: int | None = None) -> tuple[Ints, Ints]:
        """A pair of colours, of one hue if given: of several drawn, the pair farthest from the background's."""
        pairs = [_any_pair(dice) if hue is None else _pair_of_hue(dice, hue) for _ in range(tries)]
        return max(pairs, key=lambda pair: min(int(abs(a - b).sum()) for a in pair for b in self.palette))

    def paint_object(self, dice: Dice, mask: Mask, x: int, y: int, radius: int, hue: int | None = None) -> None:
        light, dark = self._standing_out(dice, 6, hue)
        if dice.below(2):
            light, dark = dark, light
        paint = textured(dice, light, dark, x, y)
        glow = 30 * (x - COLUMNS + y - ROWS) // radius
        self.pixels[mask] = np.clip(paint + glow[..., None], 0, 255)[mask]
        self._speckle(dice, mask, 16)
