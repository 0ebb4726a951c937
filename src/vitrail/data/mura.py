"""MURA: X-rays of arms and hands, normal or abnormal."""

from __future__ import annotations

import re
from pathlib import Path

from vitrail.data.base import Example, Listed
from vitrail.data.images import read_image
from vitrail.data.paths import broken, find_folder, inside, read_rows, require_unique, utf8_names
from vitrail.errors import VitrailError

_STUDY = re.compile(r"study\d+_(positive|negative)")


class Mura(Listed):
    """`train/XR_ELBOW/patient00011/study1_positive/image1.png`, in the order of `train_image_paths.csv`.

    Label 1 is positive (abnormal), 0 negative. Without the list of paths the folders are searched, in sorted order.
    """

    name = "mura"
    concurrent = True
    labels = ("negative", "positive")

    def __init__(self, root: str | Path, split: str = "valid") -> None:
        """Lists the images.

        Args:
            root: the folder MURA-v1.1, or the one that holds it.
            split: "valid" or "train".
        """
        root = Path(root)
        how = "request MURA-v1.1 from stanfordmlgroup.github.io/competitions/mura and give its folder"
        places = [place for place in (root, root / "MURA-v1.1") if (place / split).is_dir()]
        self.folder = find_folder(places, f"the MURA folder '{split}'", root, how)
        listing = self.folder / f"{split}_image_paths.csv"
        if listing.is_file():
            rows = [row[0].strip() for row in read_rows(listing, "the list of paths", 1, ",")]
            # The list starts from the folder that holds MURA-v1.1.
            names = [re.sub(r"^MURA-v1\.\d/", "", row) for row in rows]
        else:
            paths = (path.relative_to(self.folder) for path in (self.folder / split).rglob("*.png"))
            visible = (path.as_posix() for path in paths if not path.name.startswith("."))
            names = utf8_names(visible, self.folder)
        if not names:
            raise broken("MURA folder", self.folder, "it lists no image")
        self._ids = require_unique(names, listing)
        self._labels = [self._label(name) for name in names]

    @staticmethod
    def _label(name: str) -> int:
        study = _STUDY.search(name)
        if study is None:
            raise VitrailError(f"MURA path {name!r} is in no folder study…_positive or study…_negative.")
        return int(study[1] == "positive")

    def load(self, position: int) -> Example:
        name = self._ids[position]
        return Example(name, read_image(inside(self.folder, name, "the list of paths")), self._labels[position])
