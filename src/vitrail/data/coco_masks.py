"""COCO's encodings of masks: polygons, and run lengths as numbers or packed into text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.base import Mask


def decode_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """The mask that a COCO annotation describes.

    Args:
        segmentation: a list of polygons [x, y, x, y, …], whose union counts, or a dictionary of run lengths.
        height: of the image.
        width: of the image.

    Raises:
        ValueError: it is neither, or does not match the image.
    """
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if segmentation.get("size") != [height, width]:
            raise ValueError(f"run lengths for {segmentation.get('size')}, expected {[height, width]}")
        return decode_runs(unpack_runs(counts) if isinstance(counts, str | bytes) else counts, height, width)
    if not isinstance(segmentation, list):
        raise ValueError(f"a segmentation of type {type(segmentation).__name__}")
    mask = np.zeros((height, width), dtype=bool)
    for polygon in segmentation:
        mask |= fill_polygon(polygon, height, width)
    return mask


def encode_mask(mask: Mask) -> dict[str, Any]:
    """The packed run lengths of a mask, as COCO's annotations have them."""
    height, width = mask.shape
    return {"size": [height, width], "counts": pack_runs(encode_runs(mask))}


def encode_runs(mask: Mask) -> list[int]:
    """The run lengths of a mask, the inverse of ``decode_runs``."""
    pixels = mask.T.ravel()
    ends = np.flatnonzero(np.diff(pixels)) + 1
    counts = np.diff(np.concatenate([[0], ends, [pixels.size]])).tolist()
    return [0, *counts] if pixels.size and pixels[0] else counts


def decode_runs(counts: Any, height: int, width: int) -> Mask:
    """The mask of run lengths: down the columns from the left, pixels outside and inside in turn."""
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("run lengths must be integers from 0")
    if sum(counts) != height * width:
        raise ValueError(f"run lengths cover {sum(counts)} pixels, expected {height * width}")
    inside = np.arange(len(counts)) % 2 == 1
    return np.ascontiguousarray(np.repeat(inside, counts).reshape(width, height).T)


def unpack_runs(text: str | bytes) -> list[int]:
    """The run lengths packed into text.

    A number is a series of characters from '0' on, five bits each, lowest first; bit 5 says that more follow, and
    bit 4 of the last is the sign. From the fourth number on, the difference to the number two before is stored.
    """
    codes = text.encode("ascii", "replace") if isinstance(text, str) else text
    runs: list[int] = []
    value = shift = 0
    for code in codes:
        bits = code - ord("0")
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError(f"packed run lengths hold the character {chr(code)!r} out of place")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("packed run lengths end in the middle of a number")
    return runs


def pack_runs(runs: Sequence[int]) -> str:
    """Run lengths packed into text, the inverse of ``unpack_runs``."""
    codes: list[int] = []
    for place, run in enumerate(runs):
        value = run - runs[place - 2] if place > 2 else run
        while not -16 <= value < 16:  # five bits hold the rest with its sign
            codes.append(32 | (value & 31))
            value >>= 5
        codes.append(value & 31)
    return "".join(chr(ord("0") + code) for code in codes)


def fill_polygon(polygon: Any, height: int, width: int) -> Mask:
    """The pixels whose centres lie inside a polygon, by the even-odd rule."""
    corners = _corners(polygon)
    # True where the inside starts or ends: along a row, every toggle switches between outside and inside.
    toggles = np.zeros((height, width + 1), dtype=bool)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if y0 > y1:
            x0, y0, x1, y1 = x1, y1, x0, y0
        rows = np.arange(max(0, math.ceil(y0 - 0.5)), min(height, math.ceil(y1 - 0.5)))
        if len(rows):
            crossings = x0 + (rows + 0.5 - y0) * (x1 - x0) / (y1 - y0)
            columns = np.ceil(crossings - 0.5).clip(0, width).astype(np.int64)
            toggles[rows, columns] ^= True
    return np.logical_xor.accumulate(toggles, axis=1)[:, :width]


def _corners(polygon: Sequence[float]) -> NDArray[np.float64]:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        raise ValueError("a polygon needs at least three corners, x and y of each")
    corners = np.asarray(polygon)
    if corners.ndim != 1 or corners.dtype.kind not in "iuf" or not np.isfinite(corners).all():
        raise ValueError("the corners of a polygon must be numbers")
    return corners.astype(np.float64).reshape(-1, 2)
