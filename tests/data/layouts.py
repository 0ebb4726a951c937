"""Miniatures of the published data sets, in their real layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TENCH, GOLDFISH, SHARK, PARACHUTE = "n01440764", "n01443537", "n01484850", "n03888257"


def picture(path: Path, size: tuple[int, int] = (12, 8), seed: int = 0, orientation: int | None = None) -> Path:
    """Write a random picture, (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image, extra = Image.fromarray(pixels), {}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        extra["exif"] = exif
    image.save(path, **extra)
    return path


def values(path: Path, numbers: Any, mode: str = "L") -> Path:
    """Write a picture whose pixels are numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(numbers, dtype=np.uint8))
    if mode == "P":
        image.putpalette(list(range(255, -1, -1)) * 3)
    image.save(path)
    return path


def text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def voc_xml(
    path: Path, objects: Sequence[tuple[str, tuple[float, ...]]], size: tuple[int, int] | None = (12, 8)
) -> Path:
    """Write an annotation as Pascal VOC and ILSVRC do."""
    edges = ("xmin", "ymin", "xmax", "ymax")
    items = "".join(
        f"<object><name>{name}</name><difficult>0</difficult><bndbox>"
        + "".join(f"<{edge}>{value}</{edge}>" for edge, value in zip(edges, box, strict=True))
        + "</bndbox></object>"
        for name, box in objects
    )
    declared = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    return text(path, f"<annotation><filename>{path.stem}</filename>{declared}{items}</annotation>")


def imagenet_folders(root: Path) -> Path:
    """Validation in class folders: two tench, one shark, one goldfish whose number is the first."""
    picture(root / "val" / TENCH / "ILSVRC2012_val_00000009.JPEG", seed=1)
    picture(root / "val" / TENCH / "ILSVRC2012_val_00000004.JPEG", seed=2)
    picture(root / "val" / SHARK / "ILSVRC2012_val_00000002.JPEG", seed=3)
    picture(root / "val" / GOLDFISH / "ILSVRC2012_val_00000001.JPEG", seed=4)
    return root


def imagenet_flat(root: Path) -> Path:
    """The flat validation archive beside its devkit, whose ids are not in sorted order of wnids."""
    from scipy.io import savemat

    for number in (3, 1, 2):
        picture(root / "val" / f"ILSVRC2012_val_{number:08}.JPEG", seed=number)
    devkit = root / "ILSVRC2012_devkit_t12" / "data"
    text(devkit / "ILSVRC2012_validation_ground_truth.txt", "2\n3\n1\n2\n")
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(1, SHARK, "shark", 0), (2, GOLDFISH, "goldfish", 0), (3, TENCH, "tench", 0), (1001, "n09999999", "x", 2)]
    savemat(devkit / "meta.mat", {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    return root


def imagenet_s(root: Path, numbers: Mapping[str, Any], size: int = 50) -> Path:
    """ImageNet-S with one picture for each array of class numbers, named <wnid>/<stem>."""
    from vitrail.data.imagenet import imagenet_classes

    for seed, (name, array) in enumerate(numbers.items()):
        classes = np.asarray(array)
        colours = np.stack([classes % 256, classes // 256, np.zeros_like(classes)], axis=-1)
        values(root / "validation-segmentation" / f"{name}.png", colours)
        picture(root / "validation" / f"{name}.JPEG", (classes.shape[1], classes.shape[0]), seed)
    # Backwards, so that a line's number is no index by accident.
    text(root / f"ImageNetS_categories_im{size}.txt", "\n".join(reversed(imagenet_classes()[0][:size])))
    return root


def imagenet_segmentation(path: Path, pairs: Sequence[tuple[Any, Any]]) -> Path:
    """The references and cells of MATLAB's HDF5, columns first."""
    import h5py

    with h5py.File(path, "w") as file:
        images, masks = [], []
        for number, (pixels, mask) in enumerate(pairs):
            file[f"#refs#/img{number}"] = np.asarray(pixels).transpose(2, 1, 0)
            file[f"#refs#/gt{number}"] = np.asarray(mask, dtype=np.uint8).T
            cell = file.create_dataset(f"#refs#/cell{number}", (1, 1), dtype=h5py.ref_dtype)
            cell[0, 0] = file[f"#refs#/gt{number}"].ref
            images.append(file[f"#refs#/img{number}"].ref)
            masks.append(cell.ref)
        for name, references in (("img", images), ("gt", masks)):
            table = file.create_dataset(f"value/{name}", (len(pairs), 1), dtype=h5py.ref_dtype)
            for number, reference in enumerate(references):
                table[number, 0] = reference
    return path


def coco(root: Path, annotations: Sequence[Mapping[str, Any]], split: str = "val2017") -> Path:
    """Pictures 7 and 3 of 12 × 8 pixels; categories 1, 18 and 90."""
    images = [{"id": number, "file_name": f"{number:012}.jpg", "width": 12, "height": 8} for number in (7, 3)]
    for image in images:
        picture(root / split / image["file_name"], seed=image["id"])
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
    content = {"images": images, "annotations": list(annotations), "categories": categories}
    text(root / "annotations" / f"instances_{split}.json", json.dumps(content))
    return root


def tiny_imagenet(root: Path) -> Path:
    """The official folders, with wnids.txt out of order as in the archive."""
    text(root / "wnids.txt", f"{SHARK}\n{TENCH}\n")
    text(root / "words.txt", f"{TENCH}\ttench, Tinca tinca\n{SHARK}\tgreat white shark\nn09999999\tother\n")
    rows = ["val_0.JPEG\t" + f"{SHARK}\t0\t32\t44\t62", "val_1.JPEG\t" + f"{TENCH}\t52\t55\t63\t63"]
    text(root / "val" / "val_annotations.txt", "\n".join(rows) + "\n")
    for number in range(2):
        picture(root / "val" / "images" / f"val_{number}.JPEG", (64, 64), number)
    for wnid in (TENCH, SHARK):
        text(root / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t10\t63\t58\n")
        picture(root / "train" / wnid / "images" / f"{wnid}_0.JPEG", (64, 64))
    picture(root / "test" / "images" / "test_0.JPEG", (64, 64))
    return root
