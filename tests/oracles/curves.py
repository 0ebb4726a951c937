"""Perturbation curves, literally (specs/masks-and-gradients.md 5.2, specs/whitebox.md 6.1 and 6.3).

Images are (1, 3, H, W) float64 tensors in normalised space; `probabilities` and `logits` map (B, 3, H, W) to (B, C).
A map is (H, W), a cell is a flat index into it, row by row. `tie` is a permutation of the cells: of equal values the
cell with the smaller tie[cell] comes first (none given: row-major). Curves are lists of floats. Readings:
* the tis protocol does not cap its number of steps: there p = 1, and the curve stays at its end;
* `random` values and the mean colour are per image; a blur wider than the image is mirrored as often as needed;
* a token run without any patch (insertion when N < 10) is left to `encode_subset`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Classifier = Callable[[Tensor], Tensor]
Curve = tuple[list[float], float]


def order(values: Any, tie: Sequence[int] | None = None) -> list[int]:
    """The cells by descending value."""
    flat = np.asarray(values, dtype=np.float64).ravel().tolist()
    ties = range(len(flat)) if tie is None else [int(t) for t in tie]
    return sorted(range(len(flat)), key=lambda cell: (-flat[cell], ties[cell]))


def trapezoid(values: Sequence[float], positions: Sequence[float]) -> float:
    area = 0.0
    for i in range(1, len(values)):
        area += (positions[i] - positions[i - 1]) * (values[i] + values[i - 1]) / 2
    return area


# --- the size of the image ------------------------------------------------------------------------------------------


def bilinear(values: Any, size: tuple[int, int]) -> np.ndarray:
    """Half-pixel centres: output i sits at (i + ½)·n/N − ½ of the input, clamped to [0, n − 1].

    As first + share·(second − first): between equal values there is exactly that value, and ties stay ties.
    """
    small = np.asarray(values, dtype=np.float64)
    result = np.empty(size)
    for row in range(size[0]):
        top, bottom, down = _between(row, small.shape[0], size[0])
        for column in range(size[1]):
            left, right, across = _between(column, small.shape[1], size[1])
            before = small[top, left] + down * (small[bottom, left] - small[top, left])
            after = small[top, right] + down * (small[bottom, right] - small[top, right])
            result[row, column] = before + across * (after - before)
    return result


def _between(i: int, small: int, large: int) -> tuple[int, int, float]:
    position = min(max((i + 0.5) * small / large - 0.5, 0.0), small - 1.0)
    first = int(position)
    return first, min(first + 1, small - 1), position - first


def nearest(values: Any, size: tuple[int, int]) -> np.ndarray:
    """The input cell that holds the centre of the output cell: ⌊(i + ½)·n/N⌋."""
    small = np.asarray(values, dtype=np.float64)
    result = np.empty(size)
    for row in range(size[0]):
        for column in range(size[1]):
            source = (2 * row + 1) * small.shape[0] // (2 * size[0]), (2 * column + 1) * small.shape[1] // (2 * size[1])
            result[row, column] = small[source]
    return result


# --- baseline images ------------------------------------------------------------------------------------------------


def denormalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return torch.stack([image[:, c] * std[c] + mean[c] for c in range(3)], dim=1)


def normalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return torch.stack([(image[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)


def gaussian_kernel(length: int = 11, sigma: float = 5.0) -> np.ndarray:
    """(length, length): a Gaussian, cut off and made to sum to one."""
    middle = length // 2
    kernel = np.empty((length, length))
    for row in range(length):
        for column in range(length):
            kernel[row, column] = math.exp(-((row - middle) ** 2 + (column - middle) ** 2) / (2 * sigma**2))
    return kernel / kernel.sum()


def rise_kernel(length: int = 11, sigma: float = 5.0) -> np.ndarray:
    """A Dirac smoothed as scipy.ndimage.gaussian_filter does: cut off at 4 σ, (d c b a | a b c d | d c b a)."""
    radius = int(4 * sigma + 0.5)
    weights = [math.exp(-(k**2) / (2 * sigma**2)) for k in range(-radius, radius + 1)]
    line = np.zeros(length)  # the kernel is the outer product of the smoothed line with itself
    for i in range(length):
        for k in range(-radius, radius + 1):
            j = (i + k) % (2 * length)
            if (j if j < length else 2 * length - 1 - j) == length // 2:
                line[i] += weights[k + radius] / sum(weights)
    return np.outer(line, line)


def mirrored(i: int, length: int) -> int:
    """Into [0, length − 1], mirrored at the centres of the first and the last cell: c b | a b c d | c b."""
    while length > 1 and not 0 <= i < length:
        i = -i if i < 0 else 2 * (length - 1) - i
    return min(max(i, 0), length - 1)


def convolved(values: Any, kernel: np.ndarray, padding: str) -> np.ndarray:
    """(H, W) weighted with a symmetric kernel; beyond the edges mirrored ("reflect") or nothing ("zeros")."""
    values = np.asarray(values, dtype=np.float64)
    (height, width), reach = values.shape, len(kernel) // 2
    around = np.zeros((height + 2 * reach, width + 2 * reach))
    for row in range(-reach, height + reach):
        for column in range(-reach, width + reach):
            if padding == "reflect":
                around[row + reach, column + reach] = values[mirrored(row, height), mirrored(column, width)]
            elif 0 <= row < height and 0 <= column < width:
                around[row + reach, column + reach] = values[row, column]
    result = np.empty((height, width))
    for row in range(height):
        for column in range(width):
            result[row, column] = (around[row : row + len(kernel), column : column + len(kernel)] * kernel).sum()
    return result


def blurred(image: Tensor, kernel: np.ndarray, padding: str) -> Tensor:
    channels = [torch.from_numpy(convolved(image[0, c].numpy(), kernel, padding)) for c in range(3)]
    return torch.stack(channels)[None]


def baseline(
    image: Tensor, kind: str, mean: Sequence[float], std: Sequence[float], noise: Tensor | None = None
) -> Tensor:
    """The default: built in [0, 1] image space, then normalised. `noise` (1, 3, H, W) holds values of U[0, 1)."""
    rgb = denormalised(image, mean, std)
    if kind == "mean":
        result = torch.stack([torch.full_like(rgb[0, c], float(rgb[0, c].mean())) for c in range(3)])[None]
    elif kind == "black":
        result = torch.zeros_like(rgb)
    elif kind == "blur":
        result = blurred(rgb, gaussian_kernel(), "reflect")
    elif kind == "random":
        assert noise is not None
        result = noise
    else:
        raise ValueError(kind)
    return normalised(result, mean, std)


def tis_baseline(image: Tensor, kind: str, noise: Tensor | None = None) -> Tensor:
    """Everything in normalised space, so "black" is the mean colour of the statistics and "mean" one grey value."""
    if kind == "mean":
        return torch.full_like(image, float(image.mean()))
    if kind == "black":
        return torch.zeros_like(image)
    if kind == "blur":
        return blurred(image, gaussian_kernel(), "reflect")
    assert kind == "random"
    assert noise is not None
    return noise


def rise_baseline(image: Tensor, kind: str) -> Tensor:
    """Of the RISE repository, in normalised space: deletion goes to zeros, insertion starts from its own blur."""
    return torch.zeros_like(image) if kind == "deletion" else blurred(image, rise_kernel(), "zeros")


# --- insertion and deletion -----------------------------------------------------------------------------------------


def changed(start: Tensor, end: Tensor, cells: Sequence[int]) -> Tensor:
    """`start` with these pixels taken from `end`."""
    result, width = start.clone(), start.shape[3]
    for cell in cells:
        result[0, :, cell // width, cell % width] = end[0, :, cell // width, cell % width]
    return result


def default_counts(pixels: int, steps: int) -> list[int]:
    steps = min(steps, pixels)
    return [t * pixels // steps for t in range(steps + 1)]


def tis_counts(pixels: int, steps: int) -> list[int]:
    per_step = math.ceil(pixels / steps)
    return [min(t * per_step, pixels) for t in range(1, steps + 1)]


def rise_counts(pixels: int, step: int) -> list[int]:
    return [min(t * step, pixels) for t in range(math.ceil(pixels / step) + 1)]


@torch.no_grad()
def curve(
    probabilities: Classifier, start: Tensor, end: Tensor, cells: Sequence[int], counts: Sequence[int], target: int
) -> list[float]:
    """The target's probability after the first n cells went from `start` to `end`, for every n of counts."""
    return [float(probabilities(changed(start, end, cells[:count]))[0, target]) for count in counts]


def insertion_deletion(
    probabilities: Classifier,
    image: Tensor,
    background: Tensor,
    values: Any,
    target: int,
    tie: Sequence[int] | None = None,
    kind: str = "deletion",
    steps: int = 224,
    protocol: str = "default",
) -> Curve:
    """The curve and its value. In the rise protocol `steps` is the number of pixels per step."""
    start, end = (image, background) if kind == "deletion" else (background, image)
    cells = order(values, tie)
    counts = {"default": default_counts, "tis": tis_counts, "rise": rise_counts}[protocol](len(cells), steps)
    scores = curve(probabilities, start, end, cells, counts, target)
    if protocol == "tis":
        return scores, sum(scores) / len(scores)
    last = len(scores) - 1
    if protocol == "rise":
        return scores, (sum(scores) - scores[0] / 2 - scores[-1] / 2) / last
    return scores, trapezoid(scores, [t / last for t in range(last + 1)])


# --- positive and negative perturbation, AOPC, log odds -------------------------------------------------------------

LEVELS = [t / 20 for t in range(21)]
CHEFER_LEVELS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def level_counts(pixels: int) -> list[int]:
    return [t * pixels // 20 for t in range(21)]


def ranked(values: Any, tie: Sequence[int] | None, sign: str) -> list[int]:
    """Most important first ("positive"), or the order of the negated map ("negative")."""
    values = np.asarray(values, dtype=np.float64)
    return order(values if sign == "positive" else -values, tie)


@torch.no_grad()
def hits(
    probabilities: Classifier, image: Tensor, background: Tensor, cells: Sequence[int], counts: list[int], label: int
) -> list[float]:
    """1 where the first of the largest classes is the label."""
    result = []
    for count in counts:
        row = probabilities(changed(image, background, cells[:count]))[0].tolist()
        result.append(float(row.index(max(row)) == label))
    return result


def perturbation(
    probabilities: Classifier,
    image: Tensor,
    background: Tensor,
    values: Any,
    label: int,
    tie: Sequence[int] | None = None,
    sign: str = "positive",
) -> Curve:
    """Hits at 0, 5, …, 100 % and their area. The vtranm protocol is this with the black background of image space."""
    cells = ranked(values, tie, sign)
    scores = hits(probabilities, image, background, cells, level_counts(len(cells)), label)
    return scores, trapezoid(scores, LEVELS)


def chefer_perturbation(
    probabilities: Classifier,
    image: Tensor,
    background: Tensor,
    values: Any,
    label: int,
    tie: Sequence[int] | None = None,
    sign: str = "positive",
) -> Curve:
    """Hits at 10, 20, …, 90 %, int(pixels · level) pixels each; the area has a span of 0.8 and is not divided by it."""
    cells = ranked(values, tie, sign)
    counts = [int(len(cells) * level) for level in CHEFER_LEVELS]
    scores = hits(probabilities, image, background, cells, counts, label)
    return scores, trapezoid(scores, CHEFER_LEVELS)


def aopc(
    probabilities: Classifier,
    image: Tensor,
    background: Tensor,
    values: Any,
    target: int,
    tie: Sequence[int] | None = None,
) -> Curve:
    """p(target | x) − p(target | x_k) at the 21 levels, and the mean of all 21."""
    cells = order(values, tie)
    scores = curve(probabilities, image, background, cells, level_counts(len(cells)), target)
    drops = [scores[0] - score for score in scores]
    return drops, sum(drops) / len(drops)


def log_odds(
    logits: Classifier,
    image: Tensor,
    background: Tensor,
    values: Any,
    target: int,
    tie: Sequence[int] | None = None,
) -> Curve:
    """Log p(target | x_k) − log p(target | x) at the 21 levels, and the mean of all 21."""
    cells = order(values, tie)

    def log_probabilities(images: Tensor) -> Tensor:
        return torch.tensor([log_softmax(row.tolist()) for row in logits(images)], dtype=torch.float64)

    scores = curve(log_probabilities, image, background, cells, level_counts(len(cells)), target)
    changes = [score - scores[0] for score in scores]
    return changes, sum(changes) / len(changes)


def log_softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    total = largest + math.log(sum(math.exp(logit - largest) for logit in logits))
    return [logit - total for logit in logits]


# --- token metrics --------------------------------------------------------------------------------------------------


def token_counts(patches: int) -> list[int]:
    return [i * patches // 10 for i in range(1, 10)]


@torch.no_grad()
def token_curve(
    encode_subset: Callable[[list[int]], Tensor],
    values: Any,
    label: int,
    tie: Sequence[int] | None = None,
    kind: str = "deletion",
    reading: str = "accuracy",
    protocol: str = "default",
) -> Curve:
    """Ten points and their value. Deletion: nothing dropped, then without the top k. Insertion: top k, then all.

    `encode_subset` maps the kept patches, ascending, to logits (C,). accuracy: is the first of the largest classes the
    label; aopc: p(label | x) − p(label | x_k). skipplus: percentages of an area whose span is 0.9; 100 minus that for
    deletion accuracy and insertion aopc, so that higher is better.
    """
    cells = order(values, tie)
    everything = sorted(cells)
    counts = token_counts(len(cells))
    if kind == "deletion":
        subsets = [everything] + [sorted(cells[count:]) for count in counts]
        ratios = [i / 10 for i in range(10)]
    else:
        subsets = [sorted(cells[:count]) for count in counts] + [everything]
        ratios = [i / 10 for i in range(1, 11)]
    full = math.exp(log_softmax(encode_subset(everything).tolist())[label])
    points = []
    for subset in subsets:
        row = encode_subset(subset).tolist()
        if reading == "accuracy":
            points.append(float(row.index(max(row)) == label))
        else:
            points.append(full - math.exp(log_softmax(row)[label]))
    area = trapezoid(points, ratios)
    if protocol == "default":
        return points, area / 0.9
    turned = (kind, reading) in (("deletion", "accuracy"), ("insertion", "aopc"))
    return points, 100 - 100 * area if turned else 100 * area
