"""Maps on the original image: sampling and resizing."""

import math
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.show.colours import Array

Positions: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


def fit_to_image(
    values: Tensor,
    box: tuple[float, float, float, float],
    image_size: tuple[int, int],
    mode: Literal["bilinear", "nearest"] = "bilinear",
    outside: float = math.nan,
) -> Tensor:
    """Samples a map (h, w) that covers ``box`` of an image at every pixel centre of the image.

    Args:
        values: the map; each value is at the centre of its cell, and edge values extend to the edge of the box.
        box: (left, top, right, bottom) in image pixels; may exceed the image.
        image_size: (width, height) of the image; the result is (height, width).
        outside: value of the pixels outside the box.
    """
    if values.ndim != 2 or values.numel() == 0:
        raise VitrailError(f"a map must have shape (h, w) and not be empty, but got shape {tuple(values.shape)}.")
    if mode not in ("bilinear", "nearest"):
        raise VitrailError(f"mode must be 'bilinear' or 'nearest', but got {mode!r}.")
    left, top, right, bottom = box
    if not (left < right and top < bottom):
        raise VitrailError(f"the box {box} is empty: expected left < right and top < bottom.")
    values = values if values.is_floating_point() else values.float()
    # With NumPy: torch starts threads of its own in each thread that draws, as where resize_map needs its antialias.
    array = values.detach().to("cpu", torch.promote_types(values.dtype, torch.float32)).numpy()
    rows, seen_rows = _positions(image_size[1], top, bottom, array.shape[0])
    columns, seen_columns = _positions(image_size[0], left, right, array.shape[1])
    sample = _nearest if mode == "nearest" else _bilinear
    fitted = np.ascontiguousarray(sample(sample(array, rows).T, columns).T)
    fitted[~seen_rows] = outside
    fitted[:, ~seen_columns] = outside
    return torch.from_numpy(fitted).to(values)


def resize_map(values: Tensor, size: tuple[int, int]) -> Array:
    """Resizes a map (H, W) to ``size`` (width, height); NaN neither spreads to other pixels nor vanishes."""
    raw = values.detach().to("cpu", torch.float32)[None, None]
    shape = (size[1], size[0])
    if raw.shape[2:] == shape:
        return np.asarray(raw[0, 0].numpy(), dtype=np.float32)

    def resize(tensor: Tensor) -> Tensor:
        return F.interpolate(tensor, shape, mode="bilinear", align_corners=False, antialias=True)

    weight = resize((~raw.isnan()).float())
    resized = resize(raw.nan_to_num(0.0)) / weight.clamp(min=1e-6)
    resized[weight < 0.5] = math.nan
    return np.asarray(resized[0, 0].numpy(), dtype=np.float32)


def _positions(pixels: int, start: float, end: float, cells: int) -> tuple[Positions, Mask]:
    """The positions of pixel centres along one axis, in cells from the start of the box, and which are inside."""
    centres = np.arange(pixels, dtype=np.float64) + 0.5
    return (centres - start) * (cells / (end - start)), (centres >= start) & (centres <= end)


def _nearest(values: NDArray[Any], positions: Positions) -> NDArray[Any]:
    return values[np.floor(positions).astype(np.intp).clip(0, len(values) - 1)]


def _bilinear(values: NDArray[Any], positions: Positions) -> NDArray[Any]:
    """Between cells as ``engine.maps.interpolated``: every pixel between equal cells is exactly equal to them."""
    places = np.clip(positions - 0.5, 0, len(values) - 1)
    before = places.astype(np.intp)
    share = (places - before).astype(values.dtype)[:, None]
    low, high = values[before], values[np.minimum(before + 1, len(values) - 1)]
    return np.asarray(low + share * (high - low))
