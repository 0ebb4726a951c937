"""Pascal VOC: 20 classes, with boxes or with a class for every pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vitrail.data.base import Example, Listed, Object, largest_class
from vitrail.data.orientation import Picture, read_picture, segmented
from vitrail.data.paths import broken, find_file, find_folder, inside, read_rows, read_values
from vitrail.data.xml_boxes import read_xml_boxes
from vitrail.errors import VitrailError

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

_IGNORE = 255
_LABEL_OF_NUMBER = {label + 1: label for label in range(len(VOC_CLASSES))}
_IMAGE_SETS = {"segmentation": "Segmentation", "detection": "Main"}


class PascalVoc(Listed):
    """`JPEGImages/*.jpg` in the order of `ImageSets/Segmentation/val.txt`, or of `ImageSets/Main/val.txt`.

    With `task="segmentation"` each class in an image is one object with its mask (`SegmentationClass`, 255 is
    ignored) and the box around it; with `task="detection"` each thing in the XML file is one object with its box,
    from the 1-based, inclusive numbers of the file. The label of an example is the class with the largest area.
    """

    name = "voc"
    concurrent = True
    labels = VOC_CLASSES

    def __init__(
        self,
        root: str | Path,
        year: int | str = 2012,
        split: str = "val",
        task: Literal["segmentation", "detection"] = "segmentation",
    ) -> None:
        """Reads the list of a split.

        Args:
            root: `VOCdevkit`, the folder that holds it, or `VOC2012` itself.
            year: of the challenge.
            split: a list in `ImageSets`: "train", "val", "trainval" or "test".
            task: whether objects come from masks or from boxes.
        """
        if task not in _IMAGE_SETS:
            raise VitrailError(f'task must be "segmentation" or "detection", but got {task!r}.')
        root, self.task = Path(root), task
        how = f"download VOCtrainval {year} from host.robots.ox.ac.uk/pascal/VOC and give the folder VOC{year}"
        places = [root / f"VOCdevkit/VOC{year}", root / f"VOC{year}", root]
        here = (place for place in places if (place / "JPEGImages").is_dir())
        self.folder = find_folder(here, f"the folder 'JPEGImages' of VOC {year}", root, how)
        listing = self.folder / "ImageSets" / _IMAGE_SETS[task] / f"{split}.txt"
        find_file([listing], f"the list '{split}.txt' of VOC {year}", listing.parent, how)
        self._ids = [row[0] for row in read_rows(listing, "the list", 1)]
        if not self._ids:
            raise broken("the list", listing, "it is empty")

    def load(self, position: int) -> Example:
        name = self._ids[position]
        picture = read_picture(inside(self.folder / "JPEGImages", f"{name}.jpg", "ImageSets"))
        if self.task == "detection":
            objects = self._boxed_objects(picture, self.folder / "Annotations" / f"{name}.xml")
            return Example(name, picture.image, largest_class(objects), objects, by_area=True)
        path = self.folder / "SegmentationClass" / f"{name}.png"
        return segmented(name, picture, read_values(path, "mask"), path, _LABEL_OF_NUMBER, _IGNORE)

    @staticmethod
    def _boxed_objects(picture: Picture, path: Path) -> tuple[Object, ...]:
        objects = []
        for name, (x0, y0, x1, y1) in read_xml_boxes(path)[1]:
            if name not in VOC_CLASSES:
                raise broken("annotation", path, f"it names the class {name!r}, expected one of Pascal VOC's 20")
            box = picture.box((x0 - 1, y0 - 1, x1, y1))
            if box is not None:
                objects.append(Object(VOC_CLASSES.index(name), box))
        return tuple(objects)
