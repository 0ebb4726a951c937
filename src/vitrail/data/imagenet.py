"""ImageNet (ILSVRC2012) and Imagenette. Labels are ImageNet's 1000 indices: the place of the wnid in sorted order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from vitrail.data.base import Example, Listed, Object
from vitrail.data.images import read_image
from vitrail.data.orientation import Picture, read_picture
from vitrail.data.paths import (
    broken,
    find_file,
    find_folder,
    folder_names,
    missing,
    picture_names,
    read_integer,
    read_rows,
)
from vitrail.data.xml_boxes import read_xml_boxes
from vitrail.errors import VitrailError

IMAGENETTE_WNIDS = (
    "n01440764", "n02102040", "n02979186", "n03000684", "n03028079",
    "n03394916", "n03417042", "n03425413", "n03445777", "n03888257",
)  # fmt: skip

_WNID = re.compile(r"n\d{8}")
_FLAT_NAME = re.compile(r"ILSVRC2012_val_\d{8}")
_GET_IMAGENET = "download ILSVRC2012 from image-net.org and give the folder that holds it"
_GET_TRUTH = (
    "a flat validation folder needs devkit=, the unpacked ILSVRC2012_devkit_t12 (meta.mat and "
    "ILSVRC2012_validation_ground_truth.txt), or LOC_val_solution.csv beside it; or sort the files into wnid folders"
)


@lru_cache(maxsize=1)
def imagenet_classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The 1000 wnids in sorted order, and the names of their classes (both as timm ships them)."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    return tuple(info.label_names()), tuple(info.label_descriptions())


def index_of(wnids: Sequence[str]) -> dict[str, int]:
    return {wnid: index for index, wnid in enumerate(wnids)}


class ImageNet(Listed):
    """ILSVRC2012 images, with boxes where their XML files are given.

    Two layouts are read: class folders (`val/n01440764/*.JPEG`, in sorted order, the order of torchvision and of
    published index lists), and the flat validation archive (`ILSVRC2012_val_00000001.JPEG`, in that order), whose
    classes come from the devkit or from `LOC_val_solution.csv`.

    Boxes are taken as written: x0 = xmin, x1 = xmax, as the published evaluation code does. By the format the numbers
    are 1-based and inclusive; those of ILSVRC start at 0 and end at width − 1, so its last pixels are cut off. A box is
    scaled where its file declares another size than the image has, clipped to the image, and left out when
    nothing remains or when its class is none of the 1000.
    """

    name = "imagenet"
    concurrent = True

    def __init__(
        self,
        root: str | Path,
        split: str = "val",
        devkit: str | Path | None = None,
        boxes: str | Path | None = None,
    ) -> None:
        """Indexes the images.

        Args:
            root: the folder of the images, or the one that holds it as `val`.
            split: sub-folder of the images and of the boxes, where they have one.
            devkit: the unpacked devkit, for the flat layout.
            boxes: folder of the XML files, or the one that holds it as `val`.
        """
        root = Path(root)
        self.folder = find_folder([root / split, root], f"the ImageNet folder '{split}'", root, _GET_IMAGENET)
        wnids, names = imagenet_classes()
        self._index = index_of(wnids)
        nearby = [Path(devkit)] if devkit is not None else []
        nearby += [root, self.folder.parent, *list(self.folder.resolve().parents)[1:4]]
        self.labels = _mapped_names(nearby, wnids) or names
        if any(map(_WNID.fullmatch, folder_names(self.folder))):
            self._ids, self._labels = class_folder_files(self.folder, self._index, self.name)
        else:
            self._ids, self._labels = self._flat_files(nearby)
        self._boxes = None if boxes is None else _box_folder(Path(boxes), split)

    def load(self, position: int) -> Example:
        name, label = self._ids[position], self._labels[position]
        path = self.folder / name
        annotation = self._annotation(name)
        if annotation is None:
            return Example(name, read_image(path), label)
        picture = read_picture(path)
        return Example(name, picture.image, label, self._objects(picture, annotation))

    def _flat_files(self, nearby: list[Path]) -> tuple[list[str], list[int]]:
        stems = {name: match[0] for name in picture_names(self.folder) if (match := _FLAT_NAME.match(name))}
        if not stems:
            expected = "neither class folders (n01440764, …) nor images ILSVRC2012_val_########.JPEG"
            raise VitrailError(f"{expected} were found in '{self.folder}': {_GET_IMAGENET}.")
        classes = _ground_truth(nearby, self.folder)
        labels = []
        for name, stem in stems.items():
            if classes.get(stem) not in self._index:
                raise VitrailError(f"the ground truth has no class for '{name}': is the devkit that of ILSVRC2012?")
            labels.append(self._index[classes[stem]])
        return list(stems), labels

    def _annotation(self, name: str) -> Path | None:
        """The XML file of an image; in the training set some images have none."""
        if self._boxes is None:
            return None
        stem = Path(name).stem
        candidates = (self._boxes / f"{stem}.xml", self._boxes / Path(name).parent / f"{stem}.xml")
        return next((path for path in candidates if path.is_file()), None)

    def _objects(self, picture: Picture, path: Path) -> tuple[Object, ...]:
        declared_size, boxes = read_xml_boxes(path)
        (width, height), (declared_width, declared_height) = picture.stored_size, declared_size or picture.stored_size
        across, down = width / declared_width, height / declared_height
        objects = []
        for name, (x0, y0, x1, y1) in boxes:
            if _WNID.fullmatch(name) and name not in self._index:
                continue
            box = picture.box((x0 * across, y0 * down, x1 * across, y1 * down))
            if box is not None:
                # Some dogs of the training set carry their name instead of the wnid: label None, the image's own.
                objects.append(Object(self._index.get(name), box))
        return tuple(objects)


class Imagenette(Listed):
    """Ten easy classes of ImageNet (`val/n01440764/*.JPEG`).

    Labels are 0…9 in sorted order of wnids, or with `classes="imagenet"` ImageNet's indices.
    """

    name = "imagenette"
    concurrent = True

    def __init__(self, root: str | Path, split: str = "val", classes: Literal["own", "imagenet"] = "own") -> None:
        root = Path(root)
        how = "download imagenette2 from github.com/fastai/imagenette and give its folder"
        self.folder = find_folder([root / split], f"the Imagenette folder '{split}'", root, how)
        wnids, names = imagenet_classes()
        indices = [wnids.index(wnid) for wnid in IMAGENETTE_WNIDS]
        if own_classes(classes):
            self._index, self.labels = index_of(IMAGENETTE_WNIDS), tuple(names[index] for index in indices)
        else:
            self._index, self.labels = dict(zip(IMAGENETTE_WNIDS, indices, strict=True)), names
        files, self._labels = class_folder_files(self.folder, self._index, self.name)
        self._ids = [f"{split}/{name}" for name in files]

    def load(self, position: int) -> Example:
        name = self._ids[position]
        return Example(name, read_image(self.folder.parent / name), self._labels[position])


def own_classes(classes: str) -> bool:
    """Whether labels count a data set's own classes, instead of ImageNet's 1000."""
    if classes not in ("own", "imagenet"):
        raise VitrailError(f'classes must be "own" or "imagenet", but got {classes!r}.')
    return classes == "own"


def class_folder_files(folder: Path, index: Mapping[str, int], name: str) -> tuple[list[str], list[int]]:
    """Lists the images in wnid folders (paths below `folder`, sorted) and the labels of their folders."""
    files, labels = [], []
    for wnid in filter(_WNID.fullmatch, folder_names(folder)):
        if wnid not in index:
            raise VitrailError(f"'{folder / wnid}' is no class of {name}: for other classes, open it as a folder.")
        names = picture_names(folder / wnid)
        files += [f"{wnid}/{file}" for file in names]
        labels += [index[wnid]] * len(names)
    if not files:
        raise missing("an image in a class folder (n01440764, …)", folder, "check that the archive is unpacked there")
    return files, labels


def _mapped_names(nearby: list[Path], wnids: Sequence[str]) -> tuple[str, ...] | None:
    """Class names from the LOC_synset_mapping.txt of the Kaggle edition, if there is one."""
    path = next((path for folder in nearby if (path := folder / "LOC_synset_mapping.txt").is_file()), None)
    if path is None:
        return None
    names = {row[0]: " ".join(row[1:]) for row in read_rows(path, "the list of classes", 2)}
    return tuple(names.get(wnid, wnid) for wnid in wnids)


def _box_folder(boxes: Path, split: str) -> Path:
    how = "unpack ILSVRC2012_bbox_val_v3.tgz from image-net.org and give its folder"
    folder = find_folder([boxes / split, boxes], "the folder of boxes", boxes, how)
    if next(folder.rglob("*.xml"), None) is None:
        raise missing("an XML file", folder, how)
    return folder


def _ground_truth(nearby: list[Path], folder: Path) -> dict[str, str]:
    """The wnid of each validation image, by its name without suffix."""
    solution = next((path for place in nearby if (path := place / "LOC_val_solution.csv").is_file()), None)
    if solution is not None:
        rows = read_rows(solution, "the ground truth", 2, ",")
        return {row[0]: row[1].split()[0] for row in rows if row[1].strip()}
    places = [place / sub for place in nearby for sub in (".", "data", "ILSVRC2012_devkit_t12/data")]
    truth = "ILSVRC2012_validation_ground_truth.txt"
    path = find_file((place / truth for place in places), f"the file {truth}", folder, _GET_TRUTH)
    meta = find_file((place / "meta.mat" for place in places), "the devkit's meta.mat", folder, _GET_TRUTH)
    wnid_of = _devkit_wnids(meta)
    numbers = [read_integer(row[0], "the ground truth", path) for row in read_rows(path, "the ground truth", 1)]
    return {f"ILSVRC2012_val_{line:08}": wnid_of.get(number, "") for line, number in enumerate(numbers, start=1)}


def _devkit_wnids(path: Path) -> dict[int, str]:
    """ILSVRC2012_ID → wnid from the devkit's meta.mat (its ids are not in sorted order of wnids)."""
    import numpy as np
    from scipy.io import loadmat

    try:
        synsets = np.atleast_1d(loadmat(path, squeeze_me=True)["synsets"])
        return {int(item["ILSVRC2012_ID"]): str(item["WNID"]) for item in synsets}
    except Exception as error:  # scipy raises almost anything on damaged files
        raise broken("the devkit's", path, f"expected the synsets of ILSVRC2012 ({error})") from error
