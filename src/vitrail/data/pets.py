"""Oxford-IIIT Pet: 37 breeds of cats and dogs, each image with a trimap."""

from __future__ import annotations

from pathlib import Path

from vitrail.data.base import Example, Listed, Object
from vitrail.data.orientation import read_picture
from vitrail.data.paths import broken, find_file, find_folder, inside, read_integer, read_rows, read_values
from vitrail.data.trimaps import read_trimap
from vitrail.geometry import tight_box

_GET = "download images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets and unpack both there"


class OxfordPets(Listed):
    """`images/*.jpg`, `annotations/trimaps/*.png`, in the order of `annotations/test.txt` or `trainval.txt`.

    Labels are the class ids of those lists, from 0 instead of 1. The pet's pixels (1 in the trimap) are the object,
    its border (3) is ignored.
    """

    name = "pets"
    concurrent = True

    def __init__(self, root: str | Path, split: str = "test") -> None:
        """Reads the list of a split.

        Args:
            root: the folder that holds `images` and `annotations`.
            split: "test" or "trainval".
        """
        root = Path(root)
        self.images = find_folder([root / "images"], "the folder 'images' of Oxford-IIIT Pet", root, _GET)
        self.annotations = find_folder([root / "annotations"], "the folder 'annotations'", root, _GET)
        listing = self.annotations / f"{split}.txt"
        find_file([listing], f"the list '{split}.txt'", self.annotations, "give split='test' or split='trainval'")
        self._ids, self._labels = _read_listing(listing)
        self.labels = _breeds([self.annotations / "list.txt", listing])

    def load(self, position: int) -> Example:
        name, label = self._ids[position], self._labels[position]
        picture = read_picture(inside(self.images, f"{name}.jpg", self.annotations))
        path = inside(self.annotations / "trimaps", f"{name}.png", self.annotations)
        pet, border = read_trimap(picture.mask(read_values(path, "trimap"), path), path)
        return Example(name, picture.image, label, (Object(label, tight_box(pet), pet),), border)


def _read_listing(path: Path) -> tuple[list[str], list[int]]:
    rows = read_rows(path, "the list", 2)
    labels = [read_integer(row[1], "the list", path) - 1 for row in rows]
    if not rows or min(labels) < 0:
        raise broken("the list", path, "expected lines of a name and a class id from 1")
    return [row[0] for row in rows], labels


def _breeds(listings: list[Path]) -> list[str]:
    """The breed of each class, which is the name of its images without their number."""
    breeds: dict[int, str] = {}
    for path in listings:
        if path.is_file():
            names, labels = _read_listing(path)
            breeds.update({label: name.rpartition("_")[0] for name, label in zip(names, labels, strict=True)})
    return [breeds.get(label, f"class {label}").replace("_", " ") for label in range(max(breeds) + 1)]
