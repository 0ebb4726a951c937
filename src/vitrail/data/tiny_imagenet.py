"""Tiny-ImageNet: 200 classes of ImageNet at 64 × 64 pixels, each image with one box."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.base import Example, Listed, Object
from vitrail.data.images import read_image
from vitrail.data.paths import (
    broken,
    find_file,
    find_folder,
    inside,
    missing,
    picture_names,
    read_box,
    read_integer,
    read_rows,
)
from vitrail.errors import VitrailError
from vitrail.geometry import Box, clip_box

_Image: TypeAlias = tuple[str, int | None, Box | None]  # id, label and box, as the annotations have it

_GET = "download tiny-imagenet-200.zip from cs231n.stanford.edu and give the unpacked folder"


class TinyImageNet(Listed):
    """The official folders (`val/images` with `val_annotations.txt`; `train/<wnid>/images`), or packed files.

    Labels are 0…199 in sorted order of wnids (not the order of `wnids.txt`), objects are the images' boxes, whose
    last pixels count. Packed: `val.npz` or `train-*.npz` with `data` (the bytes of all image files), `offsets` (where
    each starts, and the end), `labels` and `boxes`, beside `classes.tsv` (index, wnid, names).
    """

    name = "tiny_imagenet"

    def __init__(self, root: str | Path, split: str = "val") -> None:
        """Indexes the images.

        Args:
            root: the folder of either layout.
            split: "val" or "train"; with the official folders also "test", which has no labels.
        """
        if split not in ("val", "train", "test"):
            raise VitrailError(f"Tiny-ImageNet has the splits val, train and test, got split={split!r}.")
        root = Path(root)
        find_folder([root], "the folder of Tiny-ImageNet", root, _GET)
        packs = sorted([*root.glob(f"{split}.npz"), *root.glob(f"{split}-*.npz")])
        self._source = _Packed(root, packs) if packs else _Official(root, split)
        self.concurrent = not packs  # which are opened at their first use
        self._ids, self.labels = self._source.ids, self._source.names

    def load(self, position: int) -> Example:
        image, label, last_pixels = self._source.read(position)
        objects: tuple[Object, ...] = ()
        if last_pixels is not None:
            x0, y0, x1, y1 = last_pixels
            box = clip_box((x0, y0, x1 + 1, y1 + 1), *image.size)
            objects = () if box is None else (Object(label, box),)
        return Example(self._ids[position], image, label, objects)


class _Official:
    """Names, ids, labels and boxes from the text files of the official folders."""

    def __init__(self, root: Path, split: str) -> None:
        wnids = find_file([root / "wnids.txt"], "the file wnids.txt of Tiny-ImageNet", root, _GET)
        self.wnids = sorted(row[0] for row in read_rows(wnids, "the list of classes", 1))
        self.names = self._words(root / "words.txt")
        self.root = root
        self.images = list({"val": self._validation, "train": self._training, "test": self._test}[split]())
        self.ids = [name for name, _, _ in self.images]
        if not self.ids:
            raise missing(f"an image of the split '{split}'", root, _GET)

    def _words(self, path: Path) -> list[str]:
        words: dict[str, str] = {}
        if path.is_file():
            words = {row[0]: row[1].strip() for row in read_rows(path, "the list of names", 2, "\t")}
        return [words.get(wnid, wnid) for wnid in self.wnids]

    def _validation(self) -> Iterator[_Image]:
        path = self.root / "val" / "val_annotations.txt"
        find_file([path], "the file val/val_annotations.txt", self.root, _GET)
        for name, wnid, *box in read_rows(path, "annotation", 6):
            if wnid not in self.wnids:
                raise broken("annotation", path, f"class {wnid!r} is not in wnids.txt")
            yield f"val/images/{name}", self.wnids.index(wnid), read_box(box[:4], "annotation", path)

    def _training(self) -> Iterator[_Image]:
        for label, wnid in enumerate(self.wnids):
            path = self.root / "train" / wnid / f"{wnid}_boxes.txt"
            if path.is_file():
                for name, *box in read_rows(path, "annotation", 5):
                    yield f"train/{wnid}/images/{name}", label, read_box(box[:4], "annotation", path)

    def _test(self) -> Iterator[_Image]:
        folder = self.root / "test" / "images"
        for name in picture_names(folder) if folder.is_dir() else []:
            yield f"test/images/{name}", None, None

    def read(self, position: int) -> tuple[Image.Image, int | None, Box | None]:
        name, label, box = self.images[position]
        return read_image(inside(self.root, name, "the annotations of Tiny-ImageNet")), label, box


class _Packed:
    """Images packed into .npz files, each of which is opened at its first use."""

    def __init__(self, root: Path, packs: list[Path]) -> None:
        path = find_file([root / "classes.tsv"], "the file classes.tsv", root, "it belongs to the .npz files")
        rows = read_rows(path, "the list of classes", 3, "\t")
        if [read_integer(row[0], "the list of classes", path) for row in rows] != list(range(len(rows))):
            raise broken("the list of classes", path, "expected the indices 0, 1, 2, … in order")
        self.names = [row[2].strip() for row in rows]
        self.packs = packs
        self.ids: list[str] = []
        self.places: list[tuple[int, int]] = []
        self._tables = [_arrays(pack, ("offsets", "labels", "boxes")) for pack in packs]
        self._bytes: dict[int, NDArray[np.uint8]] = {}
        for number, (pack, table) in enumerate(zip(packs, self._tables, strict=True)):
            self._check(pack, table)
            count = len(table["labels"])
            self.ids += [f"{pack.stem}/{position:05}" for position in range(count)]
            self.places += [(number, position) for position in range(count)]

    def _check(self, pack: Path, table: dict[str, NDArray[Any]]) -> None:
        count = len(table["labels"])
        shapes = table["labels"].shape, table["boxes"].shape, table["offsets"].shape
        if shapes != ((count,), (count, 4), (count + 1,)) or not count:
            raise broken("pack", pack, f"labels, boxes and offsets are {shapes}, expected (n,), (n, 4) and (n + 1,)")
        if table["labels"].min() < 0 or table["labels"].max() >= len(self.names):
            raise broken("pack", pack, f"it has labels outside 0…{len(self.names) - 1}")

    def read(self, position: int) -> tuple[Image.Image, int | None, Box | None]:
        number, place = self.places[position]
        pack, table = self.packs[number], self._tables[number]
        if number not in self._bytes:
            self._bytes[number] = _arrays(pack, ("data",))["data"]
        start, end = (int(offset) for offset in table["offsets"][place : place + 2])
        try:
            with Image.open(io.BytesIO(self._bytes[number][start:end].tobytes())) as stored:
                image = read_image(stored)
        except (OSError, ValueError, SyntaxError, VitrailError, Image.DecompressionBombError) as error:
            raise broken("image", f"{pack}:{place}", str(error)) from error
        x0, y0, x1, y1 = table["boxes"][place].astype(float).tolist()
        return image, int(table["labels"][place]), (x0, y0, x1, y1)


def _arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as pack:
            return {name: pack[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise broken("pack", path, f"expected an .npz with {', '.join(names)} ({error})") from error
