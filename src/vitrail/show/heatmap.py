"""From a map over the model input to a map over the original image."""

import math
from typing import Literal

import torch
from torch import Tensor

from vitrail.engine.maps import between, interpolated
from vitrail.errors import VitrailError


def fit_to_image(
    values: Tensor,
    box: tuple[float, float, float, float],
    image_size: tuple[int, int],
    mode: Literal["bilinear", "nearest"] = "bilinear",
    outside: float = math.nan,
) -> Tensor:
    """Sample a map (h, w) that covers `box` of an image at every pixel centre of the image.

    Args:
        values: The map; each value sits in the middle of its cell and edge values extend to the edge of the box.
        box: (left, top, right, bottom) in image pixels; may exceed the image.
        image_size: (width, height) of the image; the result is (height, width).
        outside: What pixels outside the box get.
    """
    if values.ndim != 2 or values.numel() == 0:
        raise VitrailError(f"A map of shape {tuple(values.shape)} was given, expected a non-empty (h, w).")
    if mode not in ("bilinear", "nearest"):
        raise VitrailError(f"Interpolation mode {mode!r} was given, expected 'bilinear' or 'nearest'.")
    left, top, right, bottom = box
    if not (left < right and top < bottom):
        raise VitrailError(f"The box {box} is empty, expected left < right and top < bottom.")
    values = values if values.is_floating_point() else values.float()
    rows, seen_rows = _positions(image_size[1], top, bottom, values.shape[0], values.device)
    columns, seen_columns = _positions(image_size[0], left, right, values.shape[1], values.device)
    take = _nearest if mode == "nearest" else _bilinear
    fitted = take(take(values, rows).T, columns).T
    seen = seen_rows[:, None] & seen_columns
    return torch.where(seen, fitted, torch.full((), outside, dtype=fitted.dtype, device=fitted.device))


def _positions(pixels: int, start: float, end: float, cells: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where pixel centres fall along one axis, in cells from the start of the box, and which are inside."""
    centres = torch.arange(pixels, dtype=torch.float64, device=device) + 0.5
    return (centres - start) * (cells / (end - start)), (centres >= start) & (centres <= end)


def _nearest(values: Tensor, positions: Tensor) -> Tensor:
    return values[positions.floor().long().clamp(0, len(values) - 1)]


def _bilinear(values: Tensor, positions: Tensor) -> Tensor:
    return interpolated(values, *between(positions - 0.5, len(values)))
