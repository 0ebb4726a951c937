"""Random crops of the bundled photographs: images for the embedded model that need no download."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitrail.data.base import Example, Listed
from vitrail.errors import VitrailError
from vitrail.samples import open_sample

PHOTOGRAPHS = ("cat", "coffee", "rocket")
SMALLEST = 0.6  # side of a crop, relative to the shorter side of its photograph


class Crops(Listed):
    """Square crops of the bundled photographs in turn, half of them mirrored; without labels.

    They show few objects, so intervals over them say little about other photographs. Ids are the photograph and the
    number of the crop: "cat-3".
    """

    name = "samples"
    concurrent = True

    def __init__(self, count: int, seed: int = 0) -> None:
        """Draws the crops.

        Args:
            count: number of crops.
            seed: of the draw; a smaller draw of the same seed is part of a larger one.
        """
        if count < 1:
            raise VitrailError(f"the number of crops must be at least 1, but got {count}.")
        self._draws = np.random.default_rng(seed).random((count, 4))
        self._ids = [f"{PHOTOGRAPHS[number % 3]}-{number // 3}" for number in range(count)]

    def load(self, position: int) -> Example:
        name = self._ids[position].rpartition("-")[0]
        image = open_sample(f"{name}.jpg")
        scale, across, down, mirror = self._draws[position]
        side = round((SMALLEST + (1 - SMALLEST) * scale) * min(image.size))
        left, top = (round(share * (length - side)) for share, length in zip((across, down), image.size, strict=True))
        crop = image.crop((left, top, left + side, top + side))
        return Example(self._ids[position], crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror < 0.5 else crop)
