"""The papers' data sets in their real layouts with a few small pictures, and tiny networks in place of their models."""

from __future__ import annotations

import functools
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tests import families
from tests.data import layouts
from torch import nn

import vitrail
from vitrail.bench.plan import ModelSpec
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View

SIZE = (24, 18)  # of most pictures, (width, height)


def make_data(root: Path) -> dict[str, str]:
    """Requirement → path, for every requirement of every target."""
    makers = {
        "imagenet": _imagenet,
        "boxes": _boxes,
        "imagenet_s": _imagenet_s,
        "segmentation": _segmentation,
        "cifar10": _cifar10,
        "cifar100": _cifar100,
        "coco": _coco,
        "mura": _mura,
        "pets": _pets,
        "imagenet_hard": _imagenet_hard,
        "figure1": _figure1,
    }
    paths = {}
    for name, make in makers.items():
        make(root / name)
        paths[name] = str(root / name)
    paths |= {f"{name}_weights": str(root / f"{name}.pt") for name in ("cifar10", "cifar100", "mura", "pets")}
    paths["indices"] = str(layouts.text(root / "indices.txt", "3 0 2"))
    return paths


IMAGENET = [
    (layouts.TENCH, "00000009"),
    (layouts.TENCH, "00000004"),
    (layouts.SHARK, "00000002"),
    (layouts.GOLDFISH, "00000001"),
]


def _imagenet(root: Path) -> None:
    for seed, (wnid, number) in enumerate(IMAGENET):
        layouts.picture(root / "val" / wnid / f"ILSVRC2012_val_{number}.JPEG", SIZE, seed)


def _boxes(root: Path) -> None:
    for wnid, number in IMAGENET:
        layouts.voc_xml(root / "val" / f"ILSVRC2012_val_{number}.xml", [(wnid, (6, 5, 15, 13))], SIZE)


def _imagenet_s(root: Path) -> None:
    numbers = np.zeros((18, 24), dtype=int)
    numbers[4:12, 5:17] = 919  # the last line of the category file below: class 0
    numbers[12:14, 5:17] = 1000
    other = np.where(numbers == 919, 918, numbers)
    layouts.imagenet_s(
        root, {f"{layouts.TENCH}/ILSVRC2012_val_1": numbers, f"{layouts.GOLDFISH}/ILSVRC2012_val_2": other}, 919
    )


def _segmentation(root: Path) -> None:
    root.mkdir()
    draw = np.random.default_rng(0)
    mask = np.zeros((18, 24), dtype=np.uint8)
    mask[3:12, 4:16] = 1
    pairs = [(draw.integers(0, 256, (18, 24, 3), dtype=np.uint8), mask) for _ in range(3)]
    layouts.imagenet_segmentation(root / "gtsegs_ijcv.mat", pairs)


def _cifar(path: Path, heads: list[list[int]]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (len(heads), 3072), dtype=np.uint8)
    path.parent.mkdir(parents=True)
    path.write_bytes(np.concatenate([np.array(heads, np.uint8), pixels], axis=1).tobytes())


def _cifar10(root: Path) -> None:
    _cifar(root / "cifar-10-batches-bin" / "test_batch.bin", [[3], [8], [0]])


def _cifar100(root: Path) -> None:
    _cifar(root / "cifar-100-binary" / "test.bin", [[19, 99], [0, 5], [3, 41]])


def _coco(root: Path) -> None:
    images = [{"id": n, "file_name": f"{n:012}.jpg", "width": 24, "height": 18} for n in (1, 2, 3)]
    for image in images:
        layouts.picture(root / "train2017" / image["file_name"], SIZE, image["id"])
    shown = {1: [24, 22, 1], 2: [22], 3: [24, 24, 22]}  # picture 2 has no zebra
    annotations = []
    for picture, categories in shown.items():
        for place, category in enumerate(categories):
            x = 1 + 8 * place
            box = [x, 3, 6, 10]
            outline = [[x, 3, x + 6, 3, x + 6, 13, x, 13]]
            one = {"image_id": picture, "category_id": category, "bbox": box, "segmentation": outline, "iscrowd": 0}
            annotations.append({"id": len(annotations), **one})
    categories = [{"id": 1, "name": "person"}, {"id": 22, "name": "elephant"}, {"id": 24, "name": "zebra"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    layouts.text(root / "annotations" / "instances_train2017.json", json.dumps(content))


def _mura(root: Path) -> None:
    for number, kind in enumerate(("positive", "negative", "positive"), start=1):
        study = root / "MURA-v1.1" / "train" / "XR_ELBOW" / f"patient0000{number}" / f"study1_{kind}"
        layouts.picture(study / "image1.png", SIZE, number)


def _pets(root: Path) -> None:
    names = ["Abyssinian_100", "american_bulldog_7"]
    layouts.text(root / "annotations" / "test.txt", "\n".join(f"{name} {i} 1 1" for i, name in enumerate(names, 1)))
    for seed, name in enumerate(names):
        layouts.picture(root / "images" / f"{name}.jpg", SIZE, seed)
        layouts.values(root / "annotations" / "trimaps" / f"{name}.png", np.tile([1, 2, 3], (18, 8)))


def _imagenet_hard(root: Path) -> None:
    for seed in range(2):
        layouts.picture(root / f"{seed}.png", SIZE, seed)


def _figure1(root: Path) -> None:
    for seed, name in enumerate(("goldfish", "dogsled", "vine snake", "head cabbage")):
        layouts.picture(root / name / "1.png", SIZE, seed)


PETS = ("Abyssinian", "american bulldog")  # of 37 breeds
STAND_INS = {
    "vit_base_patch16_224": ("vit_base_patch16_224", 8),
    "vit_large_patch16_224": ("vit_large_patch16_224", 8),
    "vit_base_patch8_224": ("vit_base_patch8_224", 8),
    "deit_base_patch16_224": ("deit_tiny_patch16_224", 8),
    "deit_base_distilled_patch16_224": ("deit_tiny_distilled_patch16_224", 8),
    "eva_large_patch14_196": ("eva_large_patch14_196", 14),
}
SKIPPLUS = ("eva_large_patch14_196", "vit_base_patch8_224", "vit_base_patch16_224")
DEPTH = 4  # of SkipPLUS's models; the others need no more than two layers


@functools.cache
def _module(name: str, classes: int) -> nn.Module:
    stem = name.partition(".")[0]
    with torch.random.fork_rng(devices=[]):
        if stem.startswith("swin"):
            module = families._timm_swin("swin_tiny_patch4_window7_224", classes)
        else:
            built, patch = STAND_INS[stem]
            depth = (
                DEPTH if stem in SKIPPLUS and not name.endswith(("orig_in21k_ft_in1k", "augreg_in21k_ft_in1k")) else 2
            )
            module = families._timm(built, img_size=4 * patch, patch_size=patch, num_classes=classes, depth=depth)
    families.randomize(module, seed=zlib.crc32(name.encode()))  # other models, other weights
    return module.eval()


def stand_in(spec: ModelSpec) -> View:
    """A tiny random network of the family that a plan names, seen through the plan's preprocessing."""
    classes = spec.options.get("num_classes", 1000)
    module = _module(spec.name, classes)
    labels = [*PETS, *map(str, range(len(PETS), classes))] if classes == 37 else None
    view = vitrail.wrap(module, name=spec.name, labels=labels)
    view.preprocessing = Preprocess.from_dict(view.preprocessing.to_dict() | spec.preprocessing)
    return view


def certain(spec: ModelSpec) -> View:
    """A network that is sure of one class whatever it sees."""
    view = stand_in(spec)
    module = families._timm("vit_base_patch16_224", img_size=32, patch_size=8, num_classes=1000, depth=2)
    families.randomize(module, seed=0)
    with torch.no_grad():
        module.head.bias[7] += 100  # type: ignore[index]
    return replace(vitrail.wrap(module.eval(), name=spec.name), preprocessing=view.preprocessing)
