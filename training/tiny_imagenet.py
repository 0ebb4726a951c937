"""Tiny-ImageNet as packed WebP files, and the photographs that must stay unseen."""

from __future__ import annotations

import io
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

SIDE = 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Images = NDArray[np.uint8]


def _decode(files: list[bytes]) -> Images:
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


def read_images(path: Path, limit: int | None = None) -> tuple[Images, NDArray[np.int64]]:
    """Images (n, 64, 64, 3) and labels of one .npz file; image i is the bytes between offsets i and i + 1."""
    packed = np.load(path)
    data, offsets = packed["data"].tobytes(), packed["offsets"]
    labels = packed["labels"].astype(np.int64)[:limit]
    files = [data[offsets[i] : offsets[i + 1]] for i in range(len(labels))]
    chunks = [files[i : i + 500] for i in range(0, len(files), 500)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(_decode, chunks))), labels


def read_train(folder: Path, limit: int | None = None) -> tuple[Images, NDArray[np.int64]]:
    parts = [read_images(path, limit) for path in sorted(folder.glob("train-*.npz"))[: 1 if limit else None]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def read_class_names(folder: Path) -> list[str]:
    """The first of the names of each class."""
    lines = (folder / "classes.tsv").read_text(encoding="utf-8").splitlines()
    names = [line.split("\t")[2].split(",")[0].strip() for line in lines]
    if len(set(names)) != len(names):
        raise ValueError("two classes have the same first name")
    return names


def read_photos(folder: Path) -> tuple[list[Image.Image], list[int]]:
    rows = [line.split("\t") for line in (folder / "labels.tsv").read_text(encoding="utf-8").splitlines()]
    return [Image.open(folder / row[0]).convert("RGB") for row in rows], [int(row[1]) for row in rows]


def centre_crop(photo: Image.Image) -> Images:
    """Shortest side to 64, then the middle square."""
    scale = SIDE / min(photo.size)
    width, height = (max(SIDE, round(side * scale)) for side in photo.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    resized = photo.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)))


def squash(photo: Image.Image) -> Images:
    return np.asarray(photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 (n, 3, 64, 64) to the numbers the network sees."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def near_duplicates(train: Images, unseen: Images, threshold: float = 0.94) -> NDArray[np.int64]:
    """Indices of training images that look like one of `unseen`: their 16×16 colour thumbnails correlate.

    Both sides have been through lossy compression, sometimes through another crop, so equal bytes would find nothing.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unseen_thumbnails = _thumbnails(unseen, device)
    duplicates = []
    for start in range(0, len(train), 5000):
        similarity = _thumbnails(train[start : start + 5000], device) @ unseen_thumbnails.T
        duplicates.append(start + np.flatnonzero((similarity.amax(dim=1) > threshold).cpu().numpy()))
    return np.concatenate(duplicates)


def _thumbnails(images: Images, device: str) -> torch.Tensor:
    """Rows of length one whose products are correlations."""
    pixels = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float()
    small = torch.nn.functional.avg_pool2d(pixels, SIDE // 16).flatten(1)
    return torch.nn.functional.normalize(small - small.mean(dim=1, keepdim=True), dim=1)
