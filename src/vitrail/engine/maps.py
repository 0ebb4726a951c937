"""Maps: scaling to 0…1, enlarging to the size of the model input, spreading over pixels, regions of patches."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def min_max(values: Tensor) -> Tensor:
    """Scales to 0…1, order kept; a constant map gives zeros; NaN stays NaN and does not count."""
    known = values[~values.isnan()].double()
    if known.numel() == 0:
        return values.clone()
    low, high = known.min(), known.max()
    if low == high:
        return torch.where(values.isnan(), values, torch.zeros_like(values))
    return ((values.double() - low) / (high - low)).to(values.dtype)


def enlarged(values: Tensor, size: tuple[int, int]) -> Tensor:
    """(rows, columns) → ``size``, bilinear between the centres of cells, flat beyond the outermost.

    As torch's, but for rounding: between equal cells every pixel is exactly equal to them, so that ties stay ties.
    """
    return interpolated(interpolated(values, *_centres(size[0], len(values))).T, *_centres(size[1], values.shape[1])).T


def interpolated(values: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """Along the first axis: between cell ``before`` and the next, ``share`` of the way."""
    before = before.to(values.device)
    low, high = values[before], values[(before + 1).clamp(max=len(values) - 1)]
    return low + share.to(values)[:, None] * (high - low)


def between(places: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Places along an axis, in cells from the centre of the first → the cell before each, and the share beyond it."""
    places = places.clamp(0, cells - 1)
    before = places.floor().long()
    return before, places - before


def regions(grid: tuple[int, int], side: int) -> Tensor:
    """(R, N): which patches of a grid each square of ``side`` × ``side`` patches holds; smaller at the far borders."""
    rows, columns = (torch.arange(length) // side for length in grid)
    numbers = (rows[:, None] * (columns.max() + 1) + columns).flatten()
    return numbers == numbers.unique()[:, None]


def _centres(pixels: int, cells: int) -> tuple[Tensor, Tensor]:
    return between((torch.arange(pixels, dtype=torch.float64) + 0.5) * cells / pixels - 0.5, cells)


def upsampled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) → (K, H, W), bilinear, as torch has it: many at once, ties but for rounding."""
    return F.interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


@lru_cache(maxsize=16)
def bilinear(cells: int, pixels: int) -> Tensor:
    """(pixels, cells): the matrix of one axis of a bilinear enlargement."""
    eye = torch.eye(cells, dtype=torch.float64)[None]
    return F.interpolate(eye, size=pixels, mode="linear", align_corners=False)[0].T


def spread(maps: Tensor, inputs: Tensor) -> Tensor:
    """Maps (B, h, w) in the shape of the inputs (B, C, H, W), evenly over pixels and channels, total unchanged."""
    channels, height, width = inputs.shape[-3:]
    cells = (height * width * channels) / (maps.shape[-2] * maps.shape[-1])
    up = F.interpolate(maps[:, None], size=(height, width), mode="nearest-exact")
    return (up / cells).expand(-1, channels, -1, -1).contiguous()
