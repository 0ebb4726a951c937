"""Maps at the size of the model input."""

from __future__ import annotations

import torch
from torch import Tensor


def enlarged(values: Tensor, size: tuple[int, int]) -> Tensor:
    """(rows, columns) → ``size``, bilinear between the centres of cells, flat beyond the outermost.

    As torch's, but for rounding: between equal cells every pixel is exactly equal to them, so that ties stay ties.
    """
    return _along_rows(_along_rows(values, size[0]).T, size[1]).T


def _along_rows(values: Tensor, pixels: int) -> Tensor:
    cells = len(values)
    place = (torch.arange(pixels, dtype=torch.float64) + 0.5) * cells / pixels - 0.5
    place = place.clamp(0, cells - 1)
    before = place.floor().long()
    after = (before + 1).clamp(max=cells - 1)
    share = (place - before).to(values)[:, None]
    low, high = values[before.to(values.device)], values[after.to(values.device)]
    return low + share * (high - low)
