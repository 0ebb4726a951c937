"""Weakly supervised localisation: the box around the high values of a map against annotated boxes."""

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
from vitrail.geometry import Box, box_iou
from vitrail.metrics.base import Case, MapMetric, Scored, metric

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


def best_iou(box: Box | None, annotated: Sequence[Box]) -> float:
    """Intersection over union with the annotated box that matches best."""
    return 0.0 if box is None else max(box_iou(box, other) for other in annotated)


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
