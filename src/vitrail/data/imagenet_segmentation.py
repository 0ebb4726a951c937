"""ImageNet-Segmentation (Guillaumin et al., IJCV 2014): 4,276 images with a mask of the object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.base import Example, Listed, Object
from vitrail.data.images import read_image
from vitrail.data.paths import broken, missing
from vitrail.errors import VitrailError
from vitrail.geometry import tight_box


class ImageNetSegmentation(Listed):
    """The file `gtsegs_ijcv.mat` (HDF5). It has masks of the foreground and no classes: every label is None.

    Ids are the positions in the file, from 0.
    """

    name = "imagenet_segmentation"

    def __init__(self, path: str | Path) -> None:
        """Opens the file.

        Args:
            path: `gtsegs_ijcv.mat`, or its folder.
        """
        self.path = Path(path) / "gtsegs_ijcv.mat" if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise missing("the file of ImageNet-Segmentation", self.path, "download gtsegs_ijcv.mat and give its path")
        self._file: Any = None
        try:
            images, masks = self._content()
            count = len(images)
            if images.shape != (count, 1) or masks.shape != (count, 1):
                raise ValueError(f"/value/img is {images.shape} and /value/gt {masks.shape}")
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise broken("file", self.path, f"expected HDF5 with /value/img and /value/gt, n × 1 ({error})") from error
        self._ids = [f"{position:04}" for position in range(count)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file does not travel to another process

    def load(self, position: int) -> Example:
        images, masks = self._content()
        try:
            pixels = self._array(images[position, 0]).transpose(2, 1, 0)
            cell = self._array(masks[position, 0])
            mask = self._array(cell[0, 0]).transpose(1, 0) != 0
        except (OSError, KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise broken("file", self.path, f"image {position} is damaged ({error})") from error
        if pixels.shape[:2] != mask.shape:
            raise VitrailError(
                f"image {position} of '{self.path}' is {pixels.shape[:2]} and its mask {mask.shape}: they must agree."
            )
        image = read_image(np.ascontiguousarray(pixels))
        return Example(self._ids[position], image, None, (Object(None, tight_box(mask), mask),))

    def _content(self) -> tuple[Any, Any]:
        """The tables of references to images and masks, from a file that opens at first use."""
        if self._file is None:
            try:
                import h5py
            except ImportError:
                raise VitrailError(
                    "ImageNet-Segmentation is an HDF5 file, and reading it needs h5py: pip install 'vitrail[data]'."
                ) from None
            self._file = h5py.File(self.path, "r")
        return self._file["value/img"], self._file["value/gt"]

    def _array(self, reference: Any) -> NDArray[Any]:
        return np.asarray(self._file[reference][()])
