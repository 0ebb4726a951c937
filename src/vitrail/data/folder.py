"""Folders of images: one sub-folder per class, a table of labels, or no labels at all."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from vitrail.data.base import Example, Listed, Mask, Object
from vitrail.data.images import UNREADABLE, files_under, no_images, open_image, picture_suffixes, read_image
from vitrail.data.label_tables import Row, read_table
from vitrail.data.paths import MASK_MODES, find_file, find_folder, folder_names, inside, read_values
from vitrail.data.results import is_explanation, is_result
from vitrail.data.trimaps import read_mask
from vitrail.errors import VitrailError
from vitrail.files import printable, reading
from vitrail.geometry import clip_box, tight_box

_OWN = ("labels.tsv", "labels.csv", "explanations.csv")


def table_of(folder: Path) -> Path | None:
    """The table of labels that a folder holds."""
    return next((path for name in ("labels.tsv", "labels.csv") if (path := folder / name).is_file()), None)


def label_of(path: Path) -> tuple[str | int | None, bool]:
    """The class of a single image, by the tables of labels beside it and one folder up, or else its folder's name.

    Returns:
        the class as it is written, and whether a table says it.
    """
    for folder in (path.parent, path.parent.parent):
        table = table_of(folder)
        if table is not None:
            content = read_table(table)
            file = path.relative_to(folder).as_posix()
            label = next((row.label for row in content.rows if row.file == file), None)
            if label is not None:
                return (label if content.labels is None or content.numbered else content.labels[label]), True
    return path.parent.name or None, False


class ImageFolder(Listed):
    """Images of a folder, without the pictures that vitrail wrote.

    With a table (`labels.tsv` or `labels.csv` is found by itself), the images it lists, in its order; see
    `read_table` for its columns. Without a table, sub-folders are classes, in sorted order; an image in no sub-folder
    has no label. A mask is the image that the table names, or a .png of numbers beside the image with the same name: a
    trimap (1 object, 2 background, 3 ignored), or 0 and one other number. Boxes are clipped to the image. Other files
    are in `skipped`.
    """

    concurrent = True

    def __init__(self, root: str | Path, table: str | Path | None = None) -> None:
        """Lists the images.

        Args:
            root: the folder.
            table: a .csv or .tsv of labels, here or in the folder; None = `labels.tsv` or `labels.csv` in it, if any.
        """
        self.root = find_folder([Path(root)], "the folder of images", Path(root), "check the path")
        self.name = self.root.resolve().name or "folder"
        self.table = table_of(self.root)
        if table is not None:
            places = [Path(table), self.root / table]
            self.table = find_file(places, f"the table '{table}'", self.root, "check the path")
        files = self._files()
        self._rows = self._classes_of_folders(files) if self.table is None else self._table_rows(self.table)
        self._ids = [printable(row.file) for row in self._rows]
        self._listed = {row.file for row in self._rows}
        used = self._listed.union(map(_mask_name, self._rows))
        self.skipped = {printable(file): self._reason(file) for file in files if file not in used}

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

    def path(self, position: int) -> Path:
        """The file of an image."""
        return self.root / self._rows[position].file

    def label(self, position: int) -> int | None:
        """The label of an image, which is not read."""
        return self._rows[position].label

    def _table_rows(self, path: Path) -> list[Row]:
        table = read_table(path)
        self.labels, self.numbered = table.labels, table.numbered
        for row in table.rows:
            for name in filter(None, (row.file, row.mask)):
                inside(self.root, name, path)
        return table.rows

    @reading()
    def _files(self) -> list[str]:
        """The files below the folder, without tables and what vitrail wrote."""
        # Sub-folders are named one by one because a search does not enter those that are links.
        folders = [self.root, *(self.root / name for name in folder_names(self.root))]
        paths = dict.fromkeys(path for folder in folders for path in files_under(folder))
        kept = [path for path in paths if path != self.table and path.name not in _OWN and not _is_written(path)]
        return sorted((path.relative_to(self.root).as_posix() for path in kept), key=lambda file: file.split("/"))

    def _classes_of_folders(self, files: list[str]) -> list[Row]:
        suffixes = picture_suffixes()
        pictures = [file for file in files if Path(file).suffix.lower() in suffixes]
        others = {Path(file).with_suffix("").as_posix() for file in pictures if not file.endswith(".png")}
        pictures = [file for file in pictures if not self._is_mask(file, others)]
        if not pictures and any(map(is_result, files_under(self.root))):
            raise VitrailError(f"there are no images in '{self.root}' besides earlier results of vitrail.")
        if not pictures:
            raise no_images(self.root, files)
        names = sorted({file.partition("/")[0] for file in pictures if "/" in file})
        self.labels = tuple(map(printable, names)) or None
        place = {name: index for index, name in enumerate(names)}
        return [Row(file, place.get(file.partition("/")[0]) if "/" in file else None, (), None) for file in pictures]

    def _is_mask(self, file: str, others: Container[str]) -> bool:
        """Whether a picture is a .png of numbers beside another picture with the same name."""
        if not file.endswith(".png") or file.removesuffix(".png") not in others:
            return False
        try:
            with open_image(self.root / file) as image:
                return image.mode in MASK_MODES
        except VitrailError:
            return False

    def _reason(self, file: str) -> str:
        """Why a file is no example."""
        suffix = Path(file).suffix.lower()
        if suffix not in picture_suffixes():
            return UNREADABLE.get(suffix, "not an image")
        assert self.table is not None  # without one, every picture is an example or a mask
        return f"not listed in {self.table.name}"

    def _mask(self, row: Row, path: Path, size: tuple[int, int]) -> tuple[Mask | None, Mask | None]:
        """(object, ignored pixels) of the mask that belongs to an image, if there is one."""
        mask_path = self.root / _mask_name(row)
        if row.mask is None and (_mask_name(row) in self._listed or not mask_path.is_file()):
            return None, None
        values = read_values(mask_path, "mask")
        if values.shape != (size[1], size[0]):
            raise VitrailError(
                f"mask '{mask_path}' is {values.shape[1]} × {values.shape[0]} pixels, expected {size[0]} × {size[1]} "
                f"as its image '{path}'."
            )
        return read_mask(values, mask_path)


def _mask_name(row: Row) -> str:
    """The mask of an image: the one that the table names, or the .png beside the image."""
    return row.mask or Path(row.file).with_suffix(".png").as_posix()


def _is_written(path: Path) -> bool:
    """Whether vitrail wrote a file: a picture, or its JSON file."""
    return is_result(path) or (path.suffix == ".json" and is_explanation(path))
