"""An image of a data set, with the annotations that were made on its stored pixels turned upright with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from vitrail.data.base import Example, Object, largest_class
from vitrail.data.images import read_image
from vitrail.data.paths import broken
from vitrail.errors import VitrailError
from vitrail.geometry import Box, clip_box, tight_box

# EXIF orientation → how the stored image becomes upright: swap x and y, then flip x, then flip y.
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
    """An upright image. The loaders of the published data sets ignore the EXIF orientation, so boxes and masks are
    given for the pixels as stored; `box` and `mask` turn them along with the image.
    """

    path: Path
    image: Image.Image
    stored_size: tuple[int, int]
    orientation: int

    def box(self, box: Box) -> Box | None:
        """Turns a box upright and clips it to the image; None when nothing of it remains."""
        (width, height), (swap, flip_x, flip_y) = self.image.size, _TURNS[self.orientation]
        x0, y0, x1, y1 = box
        if swap:
            x0, y0, x1, y1 = y0, x0, y1, x1
        if flip_x:
            x0, x1 = width - x1, width - x0
        if flip_y:
            y0, y1 = height - y1, height - y0
        return clip_box((x0, y0, x1, y1), width, height)

    def mask(self, values: NDArray[np.generic], source: str | Path) -> NDArray[np.generic]:
        """Turns an array (height, width) of the stored pixels upright.

        Args:
            values: a mask, or numbers of classes.
            source: where it came from, for errors.
        """
        height, width = values.shape[:2]
        if values.ndim != 2 or (width, height) != self.stored_size:
            expected = " × ".join(map(str, self.stored_size))
            raise VitrailError(
                f"'{source}' is {width} × {height} pixels, expected {expected} as its image '{self.path}'."
            )
        swap, flip_x, flip_y = _TURNS[self.orientation]
        turned = values.T if swap else values
        turned = turned[:, ::-1] if flip_x else turned
        return np.ascontiguousarray(turned[::-1] if flip_y else turned)


def read_picture(path: Path) -> Picture:
    """Reads an image and how it was turned to be upright."""
    image = read_image(path)
    try:
        with Image.open(path) as stored:
            size, orientation = stored.size, stored.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # damaged EXIF data raise almost anything
        raise broken("image", path, str(error) or type(error).__name__) from error
    return Picture(path, image, size, orientation if orientation in _TURNS else 1)


def segmented(
    name: str, picture: Picture, values: NDArray[Any], path: Path, labels: Mapping[int, int], ignore: int
) -> Example:
    """The example whose mask, as stored, holds class numbers: each class is an object, 0 is none, `labels` are known.

    Its label is that of the class with the largest area, None where no pixel has a class.
    """
    numbers = picture.mask(values, path)
    objects = []
    for number in np.unique(numbers).tolist():
        if number in labels:
            mask = numbers == number
            objects.append(Object(labels[number], tight_box(mask), mask))
        elif number not in (0, ignore):
            raise VitrailError(f"mask '{path}' holds class {number}, expected 0…{len(labels)} or {ignore} (ignore).")
    return Example(name, picture.image, largest_class(objects), tuple(objects), numbers == ignore, by_area=True)
