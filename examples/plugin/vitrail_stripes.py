"""A plugin of vitrail: images of stripes, a classifier that tells their direction, a method and a metric.

Importing this module registers all four; ``pyproject.toml`` names them, so that vitrail imports it when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail.data import Example, Object, data_set
from vitrail.metrics import MapMetric, Scored, metric

DIRECTIONS = ("horizontal", "vertical")


@vitrail.method("local_contrast", class_specific=False, level="pixel", needs="logits", cost=(0, 0), signed=False)
def local_contrast(model, images: Tensor, target: Tensor, window: int = 9) -> Tensor:
    """Standard deviation of the brightness around each pixel: what catches the eye, whatever the model sees."""
    gray = F.pad(images.mean(1, keepdim=True), [window // 2] * 4, mode="replicate")
    mean, square = (F.avg_pool2d(values, window, stride=1)[:, 0] for values in (gray, gray**2))
    return (square - mean**2).clamp(min=0).sqrt()[:, : images.shape[-2], : images.shape[-1]]


@metric("border_share", higher_is_better=False)
@dataclass(kw_only=True)
class BorderShare(MapMetric):
    """Share of the positive evidence within ``width`` of the sides, as a share of height and width."""

    width: float = 0.125

    def score(self, case) -> Scored:
        positive = case.map.double().clamp(min=0)
        rows, columns = (round(self.width * size) for size in positive.shape)
        inside = positive[rows : positive.shape[0] - rows, columns : positive.shape[1] - columns].sum()
        return Scored(float(1 - inside / positive.sum()) if positive.any() else float("nan"))


@data_set("stripes")
def open_stripes(place: str = "", size: int = 64) -> list[Example]:
    """Gray images with a patch of stripes, `stripes:20` for twenty; the class is their direction."""
    draw = np.random.default_rng(0)
    examples = []
    for number in range(int(place or 10)):
        side, label = size // 2, number % len(DIRECTIONS)
        left, top = (int(offset) for offset in draw.integers(0, size - side, 2))
        pixels = np.full((size, size), 128, np.uint8)
        waves = (127 * (1 + np.sign(np.sin(np.arange(side) * np.pi / 3 + 0.1)))).astype(np.uint8)
        pixels[top : top + side, left : left + side] = waves[:, None] if DIRECTIONS[label] == "horizontal" else waves
        stripes = Object(label, box=(float(left), float(top), float(left + side), float(top + side)))
        examples.append(Example(f"{number:04}", Image.fromarray(pixels).convert("RGB"), label, objects=(stripes,)))
    return examples


class Direction(nn.Module):
    """Logits of the directions: how much brightness changes across them."""

    def forward(self, images: Tensor) -> Tensor:
        gray = images.mean(1)
        return torch.stack([gray.diff(dim=axis).square().mean((1, 2)) * 64 for axis in (1, 2)], dim=1)


@vitrail.model("stripes")
def load_stripes(place: str = "64"):
    """A classifier of stripes without weights; `stripes:96` for inputs of 96 × 96 pixels."""
    half = [0.5] * 3
    return vitrail.wrap(Direction(), labels=DIRECTIONS, img_size=int(place), fit="squash", mean=half, std=half)
