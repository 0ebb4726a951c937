"""COCO: everyday scenes with 80 classes of things, each with a box and a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.base import Example, Listed, Mask, Object, largest_class
from vitrail.data.coco_masks import decode_segmentation
from vitrail.data.orientation import Picture, read_picture
from vitrail.data.paths import broken, find_file, find_folder, inside, read_text
from vitrail.geometry import Box

_GET = "download val2017.zip and annotations_trainval2017.zip from cocodataset.org and unpack both there"
_WHAT = "annotation file"


class Coco(Listed):
    """Images `val2017/*.jpg` with the boxes and masks of `annotations/instances_val2017.json`, in order of image ids.

    Labels are the categories in order of their ids (which have gaps: id 90 is label 79). Each thing is one object;
    crowds are ignored. The label of an example is the category with the largest area, None where nothing is
    annotated. Masks are decoded with their image.
    """

    name = "coco"
    concurrent = True

    def __init__(self, root: str | Path, split: str = "val2017") -> None:
        """Reads the annotation file.

        Args:
            root: the folder that holds `annotations` and the images' folder.
            split: name of the images' folder and end of the annotation file's name.
        """
        root = Path(root)
        file = root / "annotations" / f"instances_{split}.json"
        self.path = find_file([file], f"the file 'annotations/{file.name}'", root, _GET)
        folders = [root / split, root / "images" / split, root / "images"]
        self.folder = find_folder(folders, f"the folder '{split}' of images", root, _GET)
        try:
            content = json.loads(read_text(self.path, _WHAT))
            self._index(content["images"], content["annotations"], content["categories"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"expected COCO's images, annotations and categories ({type(error).__name__}: {error})"
            raise broken(_WHAT, self.path, why) from error
        if not self._images:
            raise broken(_WHAT, self.path, "it names no image")

    def _index(self, images: list[Any], annotations: list[Any], categories: list[Any]) -> None:
        names = {int(category["id"]): str(category["name"]) for category in categories}
        self._label = {number: label for label, number in enumerate(sorted(names))}
        self.labels = tuple(names[number] for number in self._label)
        self._images = sorted(images, key=lambda image: int(image["id"]))
        self._ids = [str(image["file_name"]) for image in self._images]
        self._annotations: dict[int, list[dict[str, Any]]] = {}
        for annotation in annotations:
            self._annotations.setdefault(int(annotation["image_id"]), []).append(annotation)

    def load(self, position: int) -> Example:
        entry = self._images[position]
        picture = read_picture(inside(self.folder, self._ids[position], self.path))
        objects, crowd = [], np.zeros((picture.image.height, picture.image.width), dtype=bool)
        try:
            if picture.stored_size != (entry["width"], entry["height"]):
                raise ValueError(f"it says {entry['width']} × {entry['height']} pixels, not {picture.stored_size}")
            for annotation in self._annotations.get(int(entry["id"]), []):
                mask = self._mask(annotation.get("segmentation"), picture)
                if annotation.get("iscrowd"):
                    crowd |= False if mask is None else mask
                    continue
                box = picture.box(_box(annotation["bbox"]))
                if box is not None:
                    objects.append(Object(self._label[annotation["category_id"]], box, mask))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            message = f"the entry of '{self._ids[position]}' is wrong ({type(error).__name__}: {error})"
            raise broken(_WHAT, self.path, message) from error
        for item in objects:
            if item.mask is not None:
                crowd &= ~item.mask
        return Example(self._ids[position], picture.image, largest_class(objects), tuple(objects), crowd, by_area=True)

    def _mask(self, segmentation: Any, picture: Picture) -> Mask | None:
        if not segmentation:
            return None
        width, height = picture.stored_size
        mask = picture.mask(decode_segmentation(segmentation, height, width), self.path)
        return mask.astype(np.bool_, copy=False)


def _box(numbers: Any) -> Box:
    x, y, width, height = (float(number) for number in numbers)
    if not np.isfinite([x, y, width, height]).all():
        raise ValueError(f"box {numbers}, expected finite numbers")
    return x, y, x + width, y + height
