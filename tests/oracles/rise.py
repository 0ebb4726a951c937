"""RISE, literally (specs/masks-and-gradients.md 1.3), and its token variant. `image` is (1, 3, H, W).

`score` maps images (B, 3, H, W) to (B,): the probability, or the logit in the TIS tables. Readings: an image that is
not square has a cell size per axis, ceil(H/s) and ceil(W/s); a grid of one cell gives a constant mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tests.families import Family
from tests.oracles import tis
from torch import Tensor, nn


def mirrored(u: float, cells: int) -> float:
    """Into [0, s−1], mirrored at the centres of the first and the last cell."""
    u = abs(u)
    return 2 * (cells - 1) - u if u > cells - 1 else u


def rise_mask(grid: Tensor, offset: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(H, W): the s×s grid enlarged to ((s+1)·cell) per axis, cropped at `offset` (row, column)."""
    cells = len(grid)
    if cells == 1:
        return grid.expand(size).clone()
    cell = [math.ceil(length / cells) for length in size]
    mask = torch.empty(size, dtype=torch.float64)
    for row in range(size[0]):
        for column in range(size[1]):
            position = [(row, offset[0], cell[0]), (column, offset[1], cell[1])]
            y, x = (mirrored((i + o + 0.5) * cells / ((cells + 1) * c) - 0.5, cells) for i, o, c in position)
            mask[row, column] = _interpolate(grid, y, x)
    return mask


def _interpolate(grid: Tensor, y: float, x: float) -> float:
    last = len(grid) - 1
    top, left = min(int(y), last - 1), min(int(x), last - 1)
    down, right = y - top, x - left
    upper = (1 - right) * grid[top, left] + right * grid[top, left + 1]
    lower = (1 - right) * grid[top + 1, left] + right * grid[top + 1, left + 1]
    return float((1 - down) * upper + down * lower)


def weighted_sum(masks: Tensor, scores: Tensor, p1: float) -> Tensor:
    """1/(N·p1) Σ f_j M_j over the first axis of masks."""
    total = torch.zeros(masks.shape[1:], dtype=scores.dtype)
    for mask, score in zip(masks, scores, strict=True):
        total = total + score * mask
    return total / (len(masks) * p1)


@torch.no_grad()
def rise_map(score: Callable[[Tensor], Tensor], image: Tensor, masks: Tensor, p1: float) -> Tensor:
    """(H, W) from masks (N, H, W), multiplied in normalised space."""
    return weighted_sum(masks, torch.cat([score(image * mask) for mask in masks]), p1)


def token_rise(
    family: Family,
    module: nn.Module,
    image: Tensor,
    masks: Tensor,
    p1: float,
    target: int,
    output: str = "probability",
) -> Tensor:
    """(grid_h, grid_w) from boolean masks over patches (N, n): f with only the mask's patches present.

    A mask without patches is scored as in `tis.scores`; it adds to no patch, only to N.
    """
    scores = tis.scores(family, module, image, masks, target, output)
    return weighted_sum(masks, scores, p1).view(family.grid)
