"""SaCo, IDSDS, faithfulness correlation and ROAD, literally: one removal at a time.

`Score` maps the removed cells, flat indices, to the score of the class without them. Readings:
* SaCo compares the mean salience of groups, which is their sum but for a factor where groups have one size;
* a correlation with something constant is 0, and so is SaCo of a constant map;
* ROAD's weights are those of the neighbours inside the image, made to sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.oracles.curves import Classifier, changed, nearest, order
from tests.oracles.quality import rank_correlation
from torch import Tensor

Score = Callable[[list[int]], float]


def cell_means(values: Any, grid: tuple[int, int]) -> np.ndarray:
    """The mean over the part of a map that each cell of a grid touches."""
    values, result = np.asarray(values, dtype=np.float64), np.empty(grid)
    for row in range(grid[0]):
        top, bottom = row * values.shape[0] // grid[0], -(-(row + 1) * values.shape[0] // grid[0])
        for column in range(grid[1]):
            left, right = column * values.shape[1] // grid[1], -(-(column + 1) * values.shape[1] // grid[1])
            result[row, column] = values[top:bottom, left:right].mean()
    return result


def pixels_of(cells: list[int], grid: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """The pixels whose centres lie in the cells of a grid."""
    owners = nearest(np.arange(grid[0] * grid[1]).reshape(grid), size).ravel().tolist()
    return [pixel for pixel, owner in enumerate(owners) if int(owner) in cells]


def saco(score: Score, values: Any, groups: int = 10, tie: Sequence[int] | None = None) -> float:
    cells, flat = order(values, tie), np.asarray(values, dtype=np.float64).ravel().tolist()
    groups = min(groups, len(cells))
    members = [cells[i * len(cells) // groups : (i + 1) * len(cells) // groups] for i in range(groups)]
    salience = [sum(flat[cell] for cell in group) / len(group) for group in members]
    falls = [score([]) - score(sorted(group)) for group in members]
    if max(flat) == min(flat):
        return 0.0
    total = weights = 0.0
    for i in range(groups):
        for j in range(i + 1, groups):
            weight = salience[i] - salience[j] if falls[i] >= falls[j] else salience[j] - salience[i]
            total += weight
            weights += abs(weight)
    return total / weights


def idsds(score: Score, values: Any) -> float:
    falls = [score([]) - score([cell]) for cell in range(np.asarray(values).size)]
    return rank_correlation(values, falls)


def faithfulness_correlation(score: Score, values: Any, subsets: Sequence[Sequence[int]]) -> float:
    flat = np.asarray(values, dtype=np.float64).ravel().tolist()
    sums = [sum(flat[cell] for cell in subset) for subset in subsets]
    falls = [score([]) - score(sorted(subset)) for subset in subsets]
    return 0.0 if max(flat) == min(flat) else pearson(sums, falls)


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    variances = sum((p - mean_a) ** 2 for p in a) * sum((q - mean_b) ** 2 for q in b)
    return covariance / math.sqrt(variances) if variances > 0 else 0.0


def without_pixels(
    classifier: Classifier, image: Tensor, background: Tensor, target: int, grid: tuple[int, int] | None = None
) -> Score:
    """The score with pixels, or with the pixels of the cells of a grid, replaced by the background."""
    size = (image.shape[-2], image.shape[-1])

    def score(removed: list[int]) -> float:
        pixels = removed if grid is None else pixels_of(removed, grid, size)
        return float(classifier(changed(image, background, pixels))[0, target])

    return score


# --- ROAD -----------------------------------------------------------------------------------------------------------


def neighbours(pixel: int, size: tuple[int, int]) -> dict[int, float]:
    """The pixels around one and their weights: a sixth beside, a twelfth across the corner."""
    row, column = divmod(pixel, size[1])
    result = {}
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            inside = 0 <= row + down < size[0] and 0 <= column + right < size[1]
            if inside and (down, right) != (0, 0):
                result[(row + down) * size[1] + column + right] = 1 / 12 if down and right else 1 / 6
    return {other: weight / sum(result.values()) for other, weight in result.items()}


def imputed(image: Tensor, removed: Sequence[int]) -> Tensor:
    """Every removed pixel is the weighted mean of its neighbours: a dense system of equations."""
    size, result = (image.shape[-2], image.shape[-1]), image.clone()
    places = {pixel: i for i, pixel in enumerate(removed)}
    if not places:
        return result
    for channel in range(3):
        colours = image[0, channel].flatten().tolist()
        matrix, right = np.eye(len(places)), np.zeros(len(places))
        for pixel, i in places.items():
            for other, weight in neighbours(pixel, size).items():
                if other in places:
                    matrix[i, places[other]] -= weight
                else:
                    right[i] += weight * colours[other]
        for pixel, value in zip(places, np.linalg.solve(matrix, right).tolist(), strict=True):
            result[0, channel].view(-1)[pixel] = value
    return result


@torch.no_grad()
def road(
    probabilities: Classifier,
    image: Tensor,
    values: Any,
    target: int,
    noises: Sequence[Tensor],
    tie: Sequence[int] | None = None,
) -> dict[str, float]:
    """The mean probability after both orders of removal, and half of their difference; a noise (3, H, W) per share."""
    means = {}
    for name, sign in (("morf", 1.0), ("lerf", -1.0)):
        cells, scores = order(sign * np.asarray(values, dtype=np.float64), tie), []
        for percent, noise in zip((10, 20, 30, 40, 50, 70, 90), noises, strict=True):
            removed = cells[: percent * len(cells) // 100]
            picture = imputed(image, removed)
            for pixel in removed:
                row, column = divmod(pixel, image.shape[-1])
                picture[0, :, row, column] += noise[:, row, column]
            scores.append(float(probabilities(picture)[0, target]))
        means[name] = sum(scores) / len(scores)
    return {**means, "both": (means["lerf"] - means["morf"]) / 2}
