"""Folders of images: one sub-folder per class, a table of labels, or no labels at all."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.data.base import DataSet, Example, Mask, Object
from vitrail.data.images import image_files, read_image
from vitrail.data.label_tables import Row, read_table
from vitrail.data.paths import find_file, find_folder, folder_names, inside, read_values
from vitrail.data.trimaps import read_mask
from vitrail.errors import VitrailError
from vitrail.files import printable
from vitrail.geometry import clip_box, tight_box


class ImageFolder(DataSet):
    """Images of a folder.

    With a table (`labels.tsv` or `labels.csv` is found by itself), the images it lists, in its order; see
    `read_table` for its columns. A mask is the image that the table names, or a .png beside the image with the
    same name: a trimap (1 object, 2 background, 3 ignored), or 0 and one other number. Boxes are clipped to the
    image. Without a table, sub-folders are classes, in sorted order; a folder without sub-folders has no labels.
    """

    def __init__(self, root: str | Path, table: str | Path | None = None) -> None:
        """Lists the images.

        Args:
            root: the folder.
            table: a .csv or .tsv of labels, here or in the folder; None = `labels.tsv` or `labels.csv` in it, if any.
        """
        self.root = find_folder([Path(root)], "the folder of images", Path(root), "check the path")
        self.name = self.root.resolve().name or "folder"
        self.table = self._find_table(table)
        self._rows = self._classes_of_folders() if self.table is None else self._table_rows(self.table)
        self._ids = [printable(row.file) for row in self._rows]
        self._listed = {row.file for row in self._rows}

    @property
    def ids(self) -> list[str]:
        return self._ids

    def load(self, position: int) -> Example:
        row = self._rows[position]
        path = self.root / row.file
        image = read_image(path)
        boxes = [box for listed in row.boxes if (box := clip_box(listed, *image.size)) is not None]
        mask, ignore = self._mask(row, path, image.size)
        if mask is None:
            objects = tuple(Object(row.label, box) for box in boxes)
        elif len(boxes) == 1:
            objects = (Object(row.label, boxes[0], mask),)
        else:
            objects = (Object(row.label, tight_box(mask), mask), *(Object(row.label, box) for box in boxes))
        return Example(self._ids[position], image, row.label, objects, ignore)

    def _find_table(self, table: str | Path | None) -> Path | None:
        if table is not None:
            return find_file([Path(table), self.root / table], f"the table '{table}'", self.root, "check the path")
        return next((path for name in ("labels.tsv", "labels.csv") if (path := self.root / name).is_file()), None)

    def _table_rows(self, path: Path) -> list[Row]:
        table = read_table(path)
        self.labels = table.labels
        for row in table.rows:
            for name in filter(None, (row.file, row.mask)):
                inside(self.root, name, path)
        return table.rows

    def _classes_of_folders(self) -> list[Row]:
        folders = folder_names(self.root)
        # Sub-folders are named one by one because a search does not enter those that are links.
        paths = image_files([self.root, *(self.root / name for name in folders)])
        files = sorted((path.relative_to(self.root).as_posix() for path in paths), key=lambda file: file.split("/"))
        if not any("/" in file for file in files):
            return [Row(file, None, (), None) for file in files]
        if any("/" not in file for file in files):
            raise VitrailError(
                f"'{self.root}' holds both images and folders of images: move the images into folders of their "
                "class, or list all in a table labels.csv (file, label)."
            )
        names = sorted({file.partition("/")[0] for file in files})
        self.labels = tuple(map(printable, names))
        place = {name: index for index, name in enumerate(names)}
        return [Row(file, place[file.partition("/")[0]], (), None) for file in files]

    def _mask(self, row: Row, path: Path, size: tuple[int, int]) -> tuple[Mask | None, Mask | None]:
        """(object, ignored pixels) of the mask that belongs to an image, if there is one."""
        if row.mask is not None:
            mask_path = self.root / row.mask
        else:
            beside = path.with_suffix(".png")
            name = Path(os.path.relpath(beside, self.root)).as_posix()
            if self.table is None or name in self._listed or not beside.is_file():
                return None, None
            mask_path = beside
        values = read_values(mask_path, "mask")
        if values.shape != (size[1], size[0]):
            raise VitrailError(
                f"mask '{mask_path}' is {values.shape[1]} × {values.shape[0]} pixels, expected {size[0]} × {size[1]} "
                f"as its image '{path}'."
            )
        return read_mask(values, mask_path)
