"""Weakly supervised localisation: the box around what a map shows against the boxes people drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.engine.maps import min_max
from vitrail.errors import VitrailError
from vitrail.metrics.base import Box, Case, MapMetric, Scored, metric

THRESHOLDS = 100  # of MaxBoxAcc: 0, 0.01, … 0.99
DELTAS = (0.3, 0.5, 0.7)


def box_above(values: NDArray[np.floating], threshold: float) -> Box | None:
    """The box of the largest connected region (corners touch) where the map is at least ``threshold``."""
    from scipy.ndimage import find_objects, label

    regions, count = label(values >= threshold, structure=np.ones((3, 3)))
    if not count:
        return None
    sizes = np.bincount(regions.ravel())[1:]
    rows, columns = find_objects(regions)[int(sizes.argmax())]  # labels are given in row-major order
    return float(columns.start), float(rows.start), float(columns.stop), float(rows.stop)


def best_iou(found: Box | None, boxes: Sequence[Box]) -> float:
    """Intersection over union with the box that fits best."""
    return 0.0 if found is None else max(iou(found, box) for box in boxes)


def iou(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (a, b)]
    return shared / (sum(areas) - shared)


def painted(boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    """(H, W) bool: the pixels whose centre lies in a box (x0, y0, x1, y1)."""
    rows, columns = (torch.arange(length, dtype=torch.float32) + 0.5 for length in size)
    inside = torch.zeros(size, dtype=torch.bool)
    for x0, y0, x1, y1 in map(check_box, boxes):
        inside |= ((rows >= y0) & (rows < y1))[:, None] & ((columns >= x0) & (columns < x1))
    return inside


def clipped(boxes: Sequence[Sequence[float]], size: tuple[int, int]) -> list[Box]:
    """What of the boxes lies in a picture of (H, W); those of which nothing does are left out."""
    found = []
    for x0, y0, x1, y1 in map(check_box, boxes):
        box = max(x0, 0.0), max(y0, 0.0), min(x1, float(size[1])), min(y1, float(size[0]))
        if box[0] < box[2] and box[1] < box[3]:
            found.append(box)
    return found


def check_box(box: Sequence[float]) -> Box:
    if len(box) != 4 or not (box[0] < box[2] and box[1] < box[3]):
        raise VitrailError(f"a box is (x0, y0, x1, y1) with x0 < x1 and y0 < y1, but got {tuple(box)}.")
    return box[0], box[1], box[2], box[3]


@metric("box_localization", family="localisation", higher_is_better=True, needs="boxes", paper="ViT-CX")
@dataclass(kw_only=True)
class BoxLocalization(MapMetric):
    """Whether the box around the largest region of high values fits the object's box (IoU ≥ ``iou``).

    ``kind="gt_known"``; ``"top1"``: the prediction must be right too; ``"max_box_acc"``: of a data set, with the best
    threshold for it and the mean over IoU ≥ 0.3, 0.5, 0.7 (of one image: at ``threshold``).
    """

    threshold: float = 0.5
    iou: float = 0.5
    kind: Literal["gt_known", "top1", "max_box_acc"] = "gt_known"

    def score(self, case: Case) -> Scored:
        assert case.boxes
        if not 0 < self.threshold <= 1:
            raise VitrailError(f"threshold must be above 0 and at most 1, but got {self.threshold}.")
        if not 0 < self.iou <= 1:
            raise VitrailError(f"iou must be above 0 and at most 1, but got {self.iou}.")
        if self.kind == "top1" and case.label is None:
            raise VitrailError('kind="top1" needs the true class of every image: use kind="gt_known".')
        scaled = min_max(case.on_input.double()).cpu().numpy()
        fit = best_iou(box_above(scaled, self.threshold), case.boxes)
        if self.kind == "max_box_acc":
            parts = [best_iou(box_above(scaled, i / THRESHOLDS), case.boxes) for i in range(THRESHOLDS)]
            return Scored(float(np.mean([fit >= delta for delta in DELTAS])), parts=parts)
        right = self.kind == "gt_known" or case.predicted == case.label
        return Scored(float(right and fit >= self.iou))

    @staticmethod
    def combine(parts: Tensor) -> Tensor:
        rates = [(parts >= delta).double().mean(-2).amax(-1) for delta in DELTAS]
        return torch.stack(rates).mean(0)
