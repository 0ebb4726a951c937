"""Boxes (x0, y0, x1, y1) in pixels of an image, x1 and y1 exclusive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from torch import Tensor

Box: TypeAlias = tuple[float, float, float, float]


def check_box(box: Sequence[float]) -> Box:
    """The box, or an error if it is none or has no area."""
    if len(box) != 4 or not (box[0] < box[2] and box[1] < box[3]):
        raise VitrailError(f"a box is (x0, y0, x1, y1) with x0 < x1 and y0 < y1, but got {tuple(box)}.")
    return box[0], box[1], box[2], box[3]


def clip_box(box: Box, width: float, height: float) -> Box | None:
    """The part of a box inside an image; None if it is empty."""
    x0, y0, x1, y1 = max(box[0], 0.0), max(box[1], 0.0), min(box[2], float(width)), min(box[3], float(height))
    return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 else None


def box_area(box: Box) -> float:
    x0, y0, x1, y1 = box
    return (x1 - x0) * (y1 - y0)


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (box_area(a) + box_area(b) - shared)


def tight_box(mask: NDArray[np.bool_]) -> Box | None:
    """The smallest box around the pixels of a mask (H, W); None if it has none."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    if not len(columns):
        return None
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def fill_boxes(boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    """(H, W) bool: the pixels whose centre lies in any of the boxes."""
    import torch

    rows, columns = (torch.arange(length, dtype=torch.float32) + 0.5 for length in size)
    inside = torch.zeros(size, dtype=torch.bool)
    for x0, y0, x1, y1 in map(check_box, boxes):
        inside |= ((rows >= y0) & (rows < y1))[:, None] & ((columns >= x0) & (columns < x1))
    return inside
