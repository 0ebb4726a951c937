"""Objects from elsewhere: masks and boxes that are not beside the images of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vitrail.data.base import DataSet, Example, Object
from vitrail.data.label_tables import read_table
from vitrail.data.paths import find_folder, read_values
from vitrail.data.trimaps import read_mask
from vitrail.errors import VitrailError
from vitrail.geometry import Box, clip_box, tight_box


class WithObjects(DataSet):
    """A data set whose objects are those of a folder of masks and of a table of boxes.

    A mask has the name of its image and ends in .png; a table has the columns ``file`` and ``boxes``. An image that
    neither names keeps the objects it has.
    """

    def __init__(self, data: DataSet, masks: Path | None = None, boxes: Path | None = None) -> None:
        self.data, self.name, self.labels, self.numbered = data, data.name, data.labels, data.numbered
        self.skipped, self.concurrent = data.skipped, data.concurrent
        self._masks = None if masks is None else _mask_files(masks, data)
        self._boxes = None if boxes is None else _listed_boxes(boxes, data)

    @property
    def ids(self) -> list[str]:
        return self.data.ids

    def load(self, position: int) -> Example:
        example = self.data.load(position)
        if self._masks is not None and (path := self._masks.get(example.id)) is not None:
            mask, ignore = read_mask(read_values(path, "mask"), path)
            example = replace(example, objects=(Object(example.label, tight_box(mask), mask),), ignore=ignore)
        if self._boxes is not None and (listed := self._boxes.get(example.id)):
            clipped = [clip_box(box, *example.image.size) for box in listed]
            example = replace(example, objects=tuple(Object(example.label, box) for box in clipped if box is not None))
        return example


def _mask_files(folder: Path, data: DataSet) -> Mapping[str, Path]:
    """The mask of each image that has one, by the image's name or its path in the data set."""
    root = find_folder([folder], "the folder of masks", folder, "check --masks")
    candidates = {name: [root / PurePosixPath(name).with_suffix(".png"), root / f"{PurePosixPath(name).stem}.png"]
                  for name in data.ids}  # fmt: skip
    files = {name: next((path for path in paths if path.is_file()), None) for name, paths in candidates.items()}
    known = {name: path for name, path in files.items() if path is not None}
    if not known:
        raise VitrailError(
            f"no mask in '{folder}' has the name of an image of {data.name}: expected, as for {data.ids[0]!r}, "
            f"'{PurePosixPath(data.ids[0]).stem}.png'."
        )
    return known


def _listed_boxes(table: Path, data: DataSet) -> Mapping[str, tuple[Box, ...]]:
    """The boxes of each image that a table names, by its name or its path in the data set."""
    rows = {row.file: row.boxes for row in read_table(table).rows}
    known = {name: rows.get(name, rows.get(PurePosixPath(name).name, ())) for name in data.ids}
    if not any(known.values()):
        raise VitrailError(
            f"the table '{table}' has no boxes for the images of {data.name}: expected columns file and boxes, and "
            f"files as {data.ids[0]!r}."
        )
    return known
