"""ImageNet-S: ImageNet images with a class for every pixel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from vitrail.data.base import Example, Listed
from vitrail.data.imagenet import imagenet_classes, index_of, own_classes
from vitrail.data.orientation import read_picture, segmented
from vitrail.data.paths import find_file, find_folder, folder_names, missing, read_rows, read_values, utf8_names
from vitrail.errors import VitrailError

_IGNORE = 1000


class ImageNetS(Listed):
    """`validation/<wnid>/*.JPEG` with `validation-segmentation/<wnid>/*.png`, in sorted order of paths.

    The class number of a pixel is R + 256·G: 0 is other, 1000 is ignore, k is line k of the category file. Each class
    in an image is one object. The label of an example is the class with the largest area (that of its folder, when
    no pixel has a class), as an index of ImageNet's 1000 classes, or with `classes="own"` as a line of the category
    file, from 0.
    """

    name = "imagenet_s"
    concurrent = True

    def __init__(
        self,
        root: str | Path,
        size: int = 919,
        split: str = "validation",
        categories: str | Path | None = None,
        classes: Literal["own", "imagenet"] = "imagenet",
    ) -> None:
        """Indexes the masks.

        Args:
            root: the folder that holds `validation` and `validation-segmentation`.
            size: number of classes: 919, 300 or 50.
            split: the folder of the images; masks are in the one with `-segmentation` added.
            categories: the category file, `ImageNetS_categories_im919.txt`; None = look in `root` and beside it.
            classes: what labels count.
        """
        if size not in (919, 300, 50):
            raise VitrailError(f"ImageNet-S has size 919, 300 or 50, got size={size}.")
        root = Path(root)
        how = "get ImageNet-S from github.com/LUSSeg/ImageNet-S and give its folder"
        self.pictures = find_folder([root / split], f"the ImageNet-S folder '{split}'", root, how)
        self.masks = find_folder([root / f"{split}-segmentation"], f"the folder '{split}-segmentation'", root, how)
        self._read_classes(_read_categories(root, size, categories), classes)
        self._ids = []
        for wnid in folder_names(self.masks):
            files = utf8_names((path.name for path in self.masks.glob(f"{wnid}/*.png")), self.masks / wnid)
            self._ids += [f"{wnid}/{Path(file).stem}" for file in files]
        if not self._ids:
            raise missing("a mask <wnid>/*.png", self.masks, how)

    def _read_classes(self, wnids: list[str], classes: str) -> None:
        """Finds the label of each number in the masks, and the names of the labels."""
        every, names = imagenet_classes()
        if own_classes(classes):
            place = index_of(wnids)
            self.labels = tuple(names[every.index(wnid)] if wnid in every else wnid for wnid in wnids)
        else:
            place, self.labels = index_of(every), names
        unknown = [wnid for wnid in wnids if wnid not in place]
        if unknown:
            raise VitrailError(f"category {unknown[0]!r} is no ImageNet class: check the category file.")
        self._label_of_number = {number: place[wnid] for number, wnid in enumerate(wnids, start=1)}
        self._label_of_folder = place

    def load(self, position: int) -> Example:
        name = self._ids[position]
        picture, path = read_picture(self.pictures / f"{name}.JPEG"), self.masks / f"{name}.png"
        colours = read_values(path, "mask", ("RGB", "RGBA")).astype(np.int64)
        numbers = colours[..., 0] + 256 * colours[..., 1]
        example = segmented(name, picture, numbers, path, self._label_of_number, _IGNORE)
        return example if example.objects else replace(example, label=self._label_of_folder.get(name.partition("/")[0]))


def _read_categories(root: Path, size: int, categories: str | Path | None) -> list[str]:
    file = f"ImageNetS_categories_im{size}.txt"
    how = f"{file} says which class a mask's numbers mean: get it from github.com/LUSSeg/ImageNet-S (data/categories)"
    places = [root / file, root.parent / file, root / "categories" / file, root.parent / "categories" / file]
    path = find_file(places if categories is None else [Path(categories)], f"the file {categories or file}", root, how)
    wnids = [row[0] for row in read_rows(path, "the category file", 1)]
    if len(wnids) != size or len(set(wnids)) != size:
        raise VitrailError(f"'{path}' names {len(set(wnids))} classes, expected {size}: check size=.")
    return wnids
