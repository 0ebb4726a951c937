"""Occlusion with captum's meaning (specs/masks-and-gradients.md 1.4), and with patches truly removed.

`score` maps images (B, 3, H, W) to (B,); `image` is (1, 3, H, W). All channels of a window are replaced together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tests.families import Family, expected_logits
from tests.oracles import tis
from tests.oracles.network import scalar
from torch import Tensor, nn

Pair = tuple[int, int]


def windows(size: Pair, window: Pair, stride: Pair) -> list[Tensor]:
    """Boolean (H, W), row by row: 1 + ceil((H − w)/t) positions per axis, the last cut at the border."""
    windows = []
    for i in range(1 + math.ceil((size[0] - window[0]) / stride[0])):
        for j in range(1 + math.ceil((size[1] - window[1]) / stride[1])):
            inside = torch.zeros(size, dtype=torch.bool)
            top, left = i * stride[0], j * stride[1]
            inside[top : top + window[0], left : left + window[1]] = True
            windows.append(inside)
    return windows


def average(positions: list[Tensor], drops: list[Tensor]) -> Tensor:
    """The mean drop of the windows that cover each place."""
    total = sum(drop * inside for drop, inside in zip(drops, positions, strict=True))
    return total / sum(inside.to(total.dtype) for inside in positions)


@torch.no_grad()
def occlusion_map(
    score: Callable[[Tensor], Tensor], image: Tensor, window: Pair, stride: Pair, baseline: float | Tensor = 0.0
) -> Tensor:
    """(H, W): f(x) − f(x with the window at the baseline), a number or anything that broadcasts over the image."""
    positions, drops = windows((image.shape[2], image.shape[3]), window, stride), []
    painted = torch.zeros_like(image) + baseline
    for inside in positions:
        drops.append(score(image)[0] - score(torch.where(inside, painted, image))[0])
    return average(positions, drops)


@torch.no_grad()
def token_occlusion(
    family: Family,
    module: nn.Module,
    image: Tensor,
    window: Pair,
    stride: Pair,
    target: int,
    output: str = "probability",
) -> Tensor:
    """(grid_h, grid_w): window and stride count patches, and the patches of a window are removed.

    A window that holds every patch leaves none; it is scored as in `tis.scores`.
    """
    full = scalar(expected_logits(family, module, image), torch.tensor([target]), output)[0]
    positions = windows(family.grid, window, stride)
    drops = []
    for inside in positions:
        present = ~inside.flatten()
        drops.append(full - tis.scores(family, module, image, present[None], target, output)[0])
    return average(positions, drops)
