"""Tiny models with maps of every kind, and their literal readings in the form the oracles want."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tests import families
from tests.families import FAMILIES, Family, expected_logits
from tests.helpers import DOUBLE, viewed
from tests.oracles import curves
from tests.oracles.masked_forward import masked_logits
from torch import Tensor, nn

import vitrail
from vitrail.engine.noise import noise
from vitrail.metrics import Case, Scored
from vitrail.metrics.curves import _drawn
from vitrail.models.view import View

CLASSES = families.CLASSES
PIXEL_KINDS, TOKEN_KINDS = ("pixels", "tied pixels"), ("tokens", "tied tokens")

CLOSE = 1e-9

_LOGITS: dict[tuple[int, bytes], Tensor] = {}


@dataclass(frozen=True)
class Bench:
    """A model, two images, and what the module itself says of them."""

    family: Family
    module: nn.Module
    view: View

    @property
    def images(self) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(2, 3, *self.size, generator=generator, dtype=DOUBLE)

    @property
    def size(self) -> tuple[int, int]:
        return self.family.image_size

    @property
    def cells(self) -> int:
        return self.size[0] * self.size[1]

    def logits(self, images: Tensor) -> Tensor:
        """One column per class: −z and z for a head with one output. Oracles ask for the same image again and again."""
        key = digest(self.module, images)
        if key not in _LOGITS:
            _LOGITS[key] = two_classes(expected_logits(self.family, self.module, images))
        return _LOGITS[key].clone()

    def probabilities(self, images: Tensor) -> Tensor:
        logits = self.logits(images)
        return logits.sigmoid() if self.view.output == "sigmoid" else logits.softmax(1)

    def top(self, images: Tensor) -> list[int]:
        return self.logits(images).argmax(1).tolist()

    def softmax_logits(self, logits: Tensor, target: int) -> tuple[Tensor, int]:
        """Logits whose softmax has p(target) at the class returned, also where the model's probability is a sigmoid."""
        if self.view.output == "softmax":
            return logits, target
        own = logits[:, target]
        return torch.stack([own, torch.zeros_like(own)], dim=1), 0

    def subset(self, image: Tensor, spare: int | None = None) -> Callable[[list[int]], Tensor]:
        """Kept patches → logits (C,) by masking keys; a head that pools gets the patch ``spare`` where none is left."""

        def encode(kept: list[int]) -> Tensor:
            kept = [spare] if spare is not None and not kept else kept
            key = digest(self.module, image, bytes(kept))
            if key not in _LOGITS:
                keep = torch.tensor([kept], dtype=torch.long)
                _LOGITS[key] = two_classes(masked_logits(self.family, self.module, image, keep))[0]
            return _LOGITS[key].clone()

        return encode

    def maps(self, kinds: Sequence[str], seed: int = 0) -> Tensor:
        return torch.stack([a_map(kind, self.size, self.family.grid, seed + i) for i, kind in enumerate(kinds)])

    def case(self, values: Tensor, target: int = 1, image: int = 0, **known: Any) -> Case:
        """A case built by hand."""
        pixels = self.images[image : image + 1]
        return Case(self.view, pixels, values, target, self.top(pixels)[0], **known)


def digest(module: nn.Module, images: Tensor, kept: bytes = b"all") -> tuple[int, bytes]:
    return id(module), hashlib.blake2b(images.numpy().tobytes() + kept, digest_size=16).digest()


def two_classes(logits: Tensor) -> Tensor:
    return torch.cat([-logits, logits], dim=1) if logits.shape[1] == 1 else logits


def a_map(kind: str, size: tuple[int, int], grid: tuple[int, int], seed: int = 0) -> Tensor:
    """A map of the input's or the grid's size; a tied one has few levels, of which one is negative."""
    shape = size if "pixels" in kind else grid
    generator = torch.Generator().manual_seed(100 + seed)
    if kind.startswith("tied"):
        return torch.randint(-1, 3, shape, generator=generator).to(DOUBLE)
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


def _own(base: str, **overrides: Any) -> Family:
    make = functools.partial(families._timm, "vit_base_patch16_224", patch_size=8, **overrides)
    return replace(FAMILIES[base], make=make)


@functools.cache
def bench(name: str) -> Bench:
    """A family by name, or one of those that no family has: heads with a sigmoid, grids of a few patches."""
    if name == "one_output":
        family = _own("timm_vit", img_size=(32, 32), num_classes=1)
    elif name == "pooled_nine":
        family = _own("timm_vit_gap", img_size=(24, 24), class_token=False, global_pool="avg")
        family = replace(family, image_size=(24, 24), grid=(3, 3))
    elif name in ("four_patches", "six_patches"):
        size, grid = ((16, 16), (2, 2)) if name == "four_patches" else ((16, 24), (2, 3))
        family = replace(_own("timm_vit", img_size=size), image_size=size, grid=grid)
    elif name == "multi_label":
        family = FAMILIES["timm_vit_not_square"]
    else:
        return Bench(*viewed(name))
    module = family.build(DOUBLE)
    return Bench(family, module, vitrail.wrap(module, output="sigmoid" if name == "multi_label" else None))


def tie(cells: int, seed: int = 0) -> list[int]:
    """Of equal cells the product takes that which it drew first."""
    place = torch.empty(cells, dtype=torch.long)
    place[_drawn(cells, seed)] = torch.arange(cells)
    return place.tolist()


def on_input(values: Tensor, size: tuple[int, int]) -> np.ndarray:
    """The map at the size of the input."""
    return values.numpy() if tuple(values.shape) == size else curves.bilinear(values, size)


def on_grid(values: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """The mean over each patch."""
    small, (rows, columns) = values.numpy(), grid
    height, width = small.shape[0] // rows, small.shape[1] // columns
    return small.reshape(rows, height, columns, width).mean((1, 3))


def tied(values: Any) -> float:
    """The share of cells whose value another cell has too."""
    ordered = np.sort(np.asarray(values).ravel())
    equal = ordered[1:] == ordered[:-1]
    return float((np.append(equal, False) | np.append(False, equal)).mean())


def background(of: Bench, image: Tensor, protocol: str, kind: str, way: str = "deletion", seed: int = 0) -> Tensor:
    """What removed pixels become, by the oracle."""
    drawn = noise("uniform", image.shape[1:], range(1), seed, image.device).double()
    if protocol in ("rise", "vit_cx"):
        return curves.rise_baseline(image, way)
    if protocol == "tis":
        return curves.tis_baseline(image, kind, drawn)
    colours = of.view.preprocessing
    return curves.baseline(image, kind, colours.mean, colours.std, drawn)


def agrees(result: Scored, expected: tuple[Sequence[float], float]) -> None:
    """Curve and value are those of the oracle, relative to the curve's largest point."""
    points, value = expected
    assert result.curve is not None
    assert len(result.curve) == len(points)
    scale = max(abs(point) for point in points) or 1.0
    assert np.abs(np.subtract(result.curve, points)).max() <= CLOSE * scale
    assert abs(result.value - value) <= CLOSE * max(scale, abs(value))


def same(result: float, expected: float | None) -> None:
    """Equal to nine digits; None is NaN."""
    if expected is None:
        assert math.isnan(result)
    else:
        assert abs(result - expected) <= CLOSE * max(abs(expected), 1e-3), (result, expected)
