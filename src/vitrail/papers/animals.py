"""Zebras and elephants in one picture: COCO as SkipPLUS's figure 6 uses it."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.base import DataSet, Example
from vitrail.data.coco import Coco
from vitrail.data.imagenet import imagenet_classes, index_of
from vitrail.errors import VitrailError

# COCO's category → its name in front of our ids, and ImageNet's class
ANIMALS = {"zebra": ("zebra", "n02391049"), "elephant": ("African elephant", "n02504458")}


class ZebraElephant(DataSet):
    """Every picture that shows both animals, twice: once for each, with ImageNet's labels and no other objects."""

    name = "coco zebra and elephant"

    def __init__(self, data: DataSet) -> None:
        if not isinstance(data, Coco) or data.labels is None:
            raise VitrailError(f"zebras and elephants are looked for in COCO, but the data are {data.name}.")
        wnids, self.labels = imagenet_classes()
        place, lacking = index_of(wnids), [name for name in ANIMALS if name not in data.labels]
        if lacking:
            raise VitrailError(f"the annotations of {data.name} know no {' and no '.join(lacking)}.")
        self.data = data
        self._class = {data.labels.index(name): place[wnid] for name, (_, wnid) in ANIMALS.items()}
        both = [i for i, found in enumerate(_labels_in(data)) if self._class.keys() <= found]
        if not both:
            raise VitrailError(f"no picture of {data.name} shows a zebra and an elephant.")
        self._places = [(i, place[wnid], name) for i in both for name, wnid in ANIMALS.values()]
        self._ids = [f"{name}/{data.ids[i]}" for i, _, name in self._places]

    @property
    def ids(self) -> list[str]:
        return self._ids

    def load(self, position: int) -> Example:
        place, label, _ = self._places[position]
        found = self.data.load(place)
        objects = [replace(o, label=self._class[o.label]) for o in found.objects if o.label in self._class]
        return replace(found, id=self._ids[position], label=label, objects=tuple(objects), by_area=False)


def _labels_in(data: Coco) -> list[set[int]]:
    """The labels of each picture's things, without decoding a picture."""
    things = [data._annotations.get(int(image["id"]), []) for image in data._images]
    return [{data._label[one["category_id"]] for one in own if not one.get("iscrowd")} for own in things]
