"""A picture of a data set, with the annotations that were made on its stored pixels turned upright with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from vitrail.data.base import Box, Mask
from vitrail.data.images import read_image
from vitrail.data.paths import broken
from vitrail.errors import VitrailError

# EXIF orientation → how the stored picture becomes upright: swap x and y, then flip x, then flip y.
_TURNS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True, eq=False)
class Picture:
    """An upright picture. The loaders of the published data sets ignore the EXIF orientation, so boxes and masks are
    given for the pixels as stored; `box` and `mask` turn them along with the picture.
    """

    path: Path
    image: Image.Image
    stored_size: tuple[int, int]
    orientation: int

    def box(self, box: Box) -> Box | None:
        """Turn a box upright and clip it to the picture; None when nothing of it remains."""
        (width, height), (swap, flip_x, flip_y) = self.image.size, _TURNS[self.orientation]
        x0, y0, x1, y1 = box
        if swap:
            x0, y0, x1, y1 = y0, x0, y1, x1
        if flip_x:
            x0, x1 = width - x1, width - x0
        if flip_y:
            y0, y1 = height - y1, height - y0
        return clipped((x0, y0, x1, y1), self.image.size)

    def mask(self, values: NDArray[np.generic], source: str | Path) -> NDArray[np.generic]:
        """Turn an array (height, width) of the stored pixels upright.

        Args:
            values: A mask, or numbers of classes.
            source: Where it came from, for errors.
        """
        height, width = values.shape[:2]
        if values.ndim != 2 or (width, height) != self.stored_size:
            expected = " × ".join(map(str, self.stored_size))
            raise VitrailError(
                f"'{source}' is {width} × {height} pixels, expected {expected} as its picture '{self.path}'."
            )
        swap, flip_x, flip_y = _TURNS[self.orientation]
        turned = values.T if swap else values
        turned = turned[:, ::-1] if flip_x else turned
        return np.ascontiguousarray(turned[::-1] if flip_y else turned)


def read_picture(path: Path) -> Picture:
    """Read a picture and how it was turned to be upright."""
    image = read_image(path)
    try:
        with Image.open(path) as stored:
            size, orientation = stored.size, stored.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # damaged EXIF data raise almost anything
        raise broken("Picture", path, str(error) or type(error).__name__) from error
    return Picture(path, image, size, orientation if orientation in _TURNS else 1)


def clipped(box: Box, size: tuple[int, int]) -> Box | None:
    """Clip a box to a picture of (width, height); None when nothing of it remains."""
    x0, y0, x1, y1 = max(box[0], 0.0), max(box[1], 0.0), min(box[2], float(size[0])), min(box[3], float(size[1]))
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def class_masks(values: NDArray[np.generic], leave_out: set[int]) -> list[tuple[int, Mask]]:
    """Return (number, mask) for every number in an array of class numbers, smallest first."""
    numbers = [int(number) for number in np.unique(values)]
    return [(number, values == number) for number in numbers if number not in leave_out]
