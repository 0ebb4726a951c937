"""COCO images with a zebra and an elephant, for SkipPLUS's figure 6."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.base import DataSet, Example, Listed
from vitrail.data.coco import Coco
from vitrail.data.imagenet import imagenet_classes, index_of
from vitrail.errors import VitrailError

# COCO category → prefix of the image ids, and ImageNet class
ANIMALS = {"zebra": ("zebra", "n02391049"), "elephant": ("African elephant", "n02504458")}


class ZebraElephant(Listed):
    """Every image with both animals, once for each of them, with ImageNet labels and no other objects."""

    name = "coco zebra and elephant"
    concurrent = True

    def __init__(self, data: DataSet) -> None:
        if not isinstance(data, Coco) or data.labels is None:
            raise VitrailError(f"the zebra and elephant images are part of COCO, but the data set is {data.name}.")
        wnids, self.labels = imagenet_classes()
        indices, missing = index_of(wnids), [name for name in ANIMALS if name not in data.labels]
        if missing:
            raise VitrailError(f"the annotations of {data.name} lack the category {' and '.join(missing)}.")
        self.data = data
        self._class = {data.labels.index(name): indices[wnid] for name, (_, wnid) in ANIMALS.items()}
        both = [i for i, labels in enumerate(_labels_in(data)) if self._class.keys() <= labels]
        if not both:
            raise VitrailError(f"no image of {data.name} shows a zebra and an elephant.")
        self._images = [(i, indices[wnid], name) for i in both for name, wnid in ANIMALS.values()]
        self._ids = [f"{name}/{data.ids[i]}" for i, _, name in self._images]

    def load(self, position: int) -> Example:
        source, label, _ = self._images[position]
        example = self.data.load(source)
        objects = [replace(o, label=self._class[o.label]) for o in example.objects if o.label in self._class]
        return replace(example, id=self._ids[position], label=label, objects=tuple(objects), by_area=False)


def _labels_in(data: Coco) -> list[set[int]]:
    """The labels of the objects of each image, without decoding it."""
    annotations = [data._annotations.get(int(image["id"]), []) for image in data._images]
    return [{data._label[item["category_id"]] for item in items if not item.get("iscrowd")} for items in annotations]
