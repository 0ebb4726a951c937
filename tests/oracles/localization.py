"""Where a map points, literally (specs/masks-and-gradients.md 5.3, specs/whitebox.md 6.2 and 6.4).

Maps are (H, W); masks are boolean (H, W) at the input; boxes are (x0, y0, x1, y1) with exclusive x1 and y1. Readings:
* an empty mask is not excluded from the pointing game: it is a miss;
* a mass of zero gives 0 (the authors of TIS would divide by zero);
* IoU of a class that is in neither the prediction nor the truth: Chefer's intersection / (union + np.spacing(1)) = 0;
* average precision without any positive is undefined: None;
* a pixel in both masks of `discriminativity` counts for both, and the maximum there is a hit;
* a region without pixels (a constant map, threshold above 0) has no box: IoU 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.oracles.curves import order

Box = tuple[int, int, int, int]
EPS = float(np.spacing(1.0))


def array(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def boolean(mask: Any) -> np.ndarray:
    return np.asarray(mask, dtype=bool)


def min_max(values: Any) -> np.ndarray:
    """Onto [0, 1]; a constant map becomes zeros."""
    values = array(values)
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def maximum(values: Any, tie: Sequence[int] | None = None) -> tuple[int, int]:
    """Row and column of the largest value; of equals the one with the smallest tie, or the first in row-major order."""
    cell = order(values, tie)[0]
    width = array(values).shape[1]
    return cell // width, cell % width


# --- pointing game, energy, discriminativity ------------------------------------------------------------------------


def pointing_game(
    values: Any, mask: Any, tie: Sequence[int] | None = None, tolerance: float = 0, max_area: float = 0.5
) -> bool | None:
    """Whether a pixel of the mask lies within `tolerance` px of the maximum. None: the mask covers max_area or more.

    The tis protocol is this without `tie`.
    """
    mask = boolean(mask)
    if mask.sum() / mask.size >= max_area:
        return None
    row, column = maximum(values, tie)
    for y in range(mask.shape[0]):
        for x in range(mask.shape[1]):
            if mask[y, x] and (y - row) ** 2 + (x - column) ** 2 <= tolerance**2:
                return True
    return False


def mass(values: Any) -> np.ndarray:
    """The positive part of a map with negative values, the height above the minimum of any other."""
    values = array(values)
    if values.min() < 0:
        return np.where(values > 0, values, 0.0)
    return values - values.min()


def inside(weights: np.ndarray, mask: Any) -> float:
    mask, total = boolean(mask), 0.0
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            if mask[row, column]:
                total += float(weights[row, column])
    return total


def energy_pointing_game(values: Any, mask: Any, protocol: str = "default") -> float:
    """The share of the mass inside the mask; in the tis protocol the mass is |map|."""
    weights = np.abs(array(values)) if protocol == "tis" else mass(values)
    total = inside(weights, np.ones(weights.shape))
    return inside(weights, mask) / total if total > 0 else 0.0


def discriminativity(values: Any, own: Any, other: Any, tie: Sequence[int] | None = None) -> tuple[float, bool]:
    """Mass in `own` over mass in both masks (0.5 where there is none), and whether the maximum is in `own`."""
    weights = mass(values)
    mine, theirs = inside(weights, own), inside(weights, other)
    share = mine / (mine + theirs) if mine + theirs > 0 else 0.5
    return share, bool(boolean(own)[maximum(values, tie)])


# --- Chefer's segmentation test -------------------------------------------------------------------------------------


def foreground(values: Any) -> np.ndarray:
    """Boolean (H, W): the min–max map above its own mean."""
    values = min_max(values)
    return values > values.mean()


def areas(prediction: Any, truth: Any) -> tuple[int, int, list[int], list[int]]:
    """Correct pixels, all pixels, and intersections and unions of (background, foreground)."""
    prediction, truth = boolean(prediction), boolean(truth)
    correct, intersections, unions = 0, [0, 0], [0, 0]
    for predicted, actual in zip(prediction.ravel().tolist(), truth.ravel().tolist(), strict=True):
        correct += predicted == actual
        for index, which in enumerate((False, True)):
            intersections[index] += predicted == which and actual == which
            unions[index] += predicted == which or actual == which
    return correct, truth.size, intersections, unions


def segmentation_over(maps: Sequence[Any], masks: Sequence[Any]) -> tuple[float, float]:
    """Pixel accuracy and mean IoU of a data set: counts are added up over the images, then divided."""
    correct, total, intersections, unions = 0, 0, [0, 0], [0, 0]
    for values, mask in zip(maps, masks, strict=True):
        right, pixels, inter, union = areas(foreground(values), mask)
        correct += right
        total += pixels
        for which in range(2):
            intersections[which] += inter[which]
            unions[which] += union[which]
    ious = [intersections[which] / (unions[which] + EPS) for which in range(2)]
    return correct / total, (ious[0] + ious[1]) / 2


def pixel_accuracy(values: Any, mask: Any) -> float:
    return segmentation_over([values], [mask])[0]


def mean_iou(values: Any, mask: Any) -> float:
    return segmentation_over([values], [mask])[1]


def average_precision(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Σ (R_n − R_{n−1}) P_n over the distinct scores, from the largest; what is ≥ the score is predicted positive."""
    scores, labels = array(scores).ravel(), boolean(labels).ravel()
    positives = int(labels.sum())
    if positives == 0:
        return None
    result, last = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        predicted = scores >= threshold
        hits = int((predicted & labels).sum())
        recall, precision = hits / positives, hits / int(predicted.sum())
        result += (recall - last) * precision
        last = recall
    return result


def mean_ap(values: Any, mask: Any) -> float:
    """Average precision of both channels together: 1 − map for the background, the min–max map for the foreground."""
    values, mask = min_max(values).ravel(), boolean(mask).ravel()
    result = average_precision(np.concatenate([1 - values, values]), np.concatenate([~mask, mask]))
    assert result is not None
    return result


def segmentation_ap(values: Any, mask: Any, ignore: Any = None, protocol: str = "default") -> float | None:
    """Average precision over all pixels that are not ignored; in skipplus ignored pixels are negatives."""
    values, mask = array(values).ravel(), boolean(mask).ravel()
    ignored = np.zeros(mask.shape, dtype=bool) if ignore is None else boolean(ignore).ravel()
    if protocol == "skipplus":
        return average_precision(values, mask & ~ignored)
    return average_precision(values[~ignored], mask[~ignored])


# --- boxes ----------------------------------------------------------------------------------------------------------


def components(region: Any) -> list[list[tuple[int, int]]]:
    """The pixels (row, column) of every component, neighbours touching at a side or a corner, by their first pixel."""
    left, regions = boolean(region).copy(), []
    for row in range(left.shape[0]):
        for column in range(left.shape[1]):
            if not left[row, column]:
                continue
            pixels, waiting = [], [(row, column)]
            left[row, column] = False
            while waiting:
                y, x = waiting.pop()
                pixels.append((y, x))
                for near_y in range(max(y - 1, 0), min(y + 2, left.shape[0])):
                    for near_x in range(max(x - 1, 0), min(x + 2, left.shape[1])):
                        if left[near_y, near_x]:
                            left[near_y, near_x] = False
                            waiting.append((near_y, near_x))
            regions.append(pixels)
    return regions


def predicted_box(values: Any, threshold: float) -> Box | None:
    """Around the largest component of the min–max map ≥ threshold; of equals the first in row-major order."""
    largest: list[tuple[int, int]] = []
    for pixels in components(min_max(values) >= threshold):
        if len(pixels) > len(largest):
            largest = pixels
    if not largest:
        return None
    rows, columns = [y for y, _ in largest], [x for _, x in largest]
    return min(columns), min(rows), max(columns) + 1, max(rows) + 1


def box_iou(a: Box, b: Box) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union else 0.0


def best_iou(values: Any, boxes: Sequence[Box], threshold: float) -> float:
    box = predicted_box(values, threshold)
    return 0.0 if box is None else max((box_iou(box, truth) for truth in boxes), default=0.0)


def box_localization(
    values: Any,
    boxes: Sequence[Box],
    threshold: float,
    iou_threshold: float = 0.5,
    predicted: int | None = None,
    label: int | None = None,
) -> tuple[float, bool, bool]:
    """The best IoU with any true box, gt_known and top1."""
    iou = best_iou(values, boxes, threshold)
    known = iou >= iou_threshold
    return iou, known, known and predicted == label


def max_box_acc(
    maps: Sequence[Any], boxes: Sequence[Sequence[Box]], deltas: Sequence[float] = (0.3, 0.5, 0.7)
) -> tuple[float, list[float]]:
    """The mean over δ of the accuracy at the best of the thresholds 0, 0.01, …, 0.99, and these accuracies."""
    ious = [[best_iou(m, b, i / 100) for m, b in zip(maps, boxes, strict=True)] for i in range(100)]
    best = []
    for delta in deltas:
        best.append(max(sum(iou >= delta for iou in row) / len(row) for row in ious))
    return sum(best) / len(best), best
