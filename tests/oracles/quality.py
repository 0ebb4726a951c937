"""Robustness, complexity and sanity of maps, literally (specs/masks-and-gradients.md 5.4 and 5.5).

Readings: infidelity with a best scalar where Σ I·φ is always 0 has β = 0, so it is the mean of the squared
differences of f; two maps that are both constant have SSIM 1 (both become zeros) and rank correlation 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.oracles.curves import convolved, gaussian_kernel
from tests.oracles.localization import array, min_max
from torch import Tensor

# --- complexity -----------------------------------------------------------------------------------------------------


def gini(values: Any, protocol: str = "default") -> float:
    """Σ (2i − n − 1) v_i / (n Σ v), v ascending, i from 1. A map with negative values is lifted by its minimum.

    tis: every map is, and 1e-7 is added.
    """
    values = array(values).ravel()
    if protocol == "tis":
        values = values - values.min() + 1e-7
    elif values.min() < 0:
        values = values - values.min()
    ascending, n, total = sorted(values.tolist()), values.size, 0.0
    for i, value in enumerate(ascending, start=1):
        total += (2 * i - n - 1) * value
    return total / (n * sum(ascending)) if sum(ascending) > 0 else 0.0


# --- robustness -----------------------------------------------------------------------------------------------------


def norm(values: Any) -> float:
    return math.sqrt(sum(value**2 for value in array(values).ravel().tolist()))


def max_sensitivity(explain: Callable[[Tensor], Any], x: Tensor, noises: Sequence[Tensor]) -> float:
    """The largest ‖E(x + δ) − E(x)‖ / ‖E(x)‖; the denominator is 1 where that norm is 0."""
    clean = array(explain(x))
    size, largest = norm(clean) or 1.0, 0.0
    for noise in noises:
        largest = max(largest, norm(array(explain(x + noise)) - clean) / size)
    return largest


@torch.no_grad()
def infidelity(
    f: Callable[[Tensor], Tensor],
    attribution: Tensor,
    x: Tensor,
    perturbations: Sequence[Tensor],
    normalise: bool = False,
) -> float:
    """The mean of (β Σ I·φ − (f(x) − f(x − I)))² with β = 1, or the β that makes it smallest (captum's normalize).

    f maps (B, 3, H, W) to (B,); attribution, x and every I are (1, 3, H, W).
    """
    expected, actual = [], []
    for perturbation in perturbations:
        expected.append(sum((perturbation * attribution).flatten().tolist()))
        actual.append(float(f(x)[0]) - float(f(x - perturbation)[0]))
    beta, count = 1.0, len(expected)
    if normalise:
        product = sum(a * b for a, b in zip(expected, actual, strict=True)) / count
        square = sum(a**2 for a in expected) / count
        beta = product / square if square > 0 else 0.0
    return sum((beta * a - b) ** 2 for a, b in zip(expected, actual, strict=True)) / count


# --- sanity ---------------------------------------------------------------------------------------------------------


def ranks(values: Any) -> list[float]:
    """From 1, ascending; equal values share the mean of their places."""
    flat = array(values).ravel().tolist()
    result = []
    for value in flat:
        below, equal = sum(other < value for other in flat), sum(other == value for other in flat)
        result.append(below + (equal + 1) / 2)
    return result


def rank_correlation(a: Any, b: Any) -> float:
    """Spearman's: Pearson's correlation of the ranks; 0 where a map is constant."""
    first, second = ranks(a), ranks(b)
    middle = (len(first) + 1) / 2
    covariance = sum((p - middle) * (q - middle) for p, q in zip(first, second, strict=True))
    variances = sum((p - middle) ** 2 for p in first) * sum((q - middle) ** 2 for q in second)
    return covariance / math.sqrt(variances) if variances > 0 else 0.0


def ssim_image(a: Any, b: Any) -> np.ndarray:
    """(H, W): SSIM around every pixel of two images in [0, 1]: Gaussian 11×11, σ = 1.5, mirrored edges.

    Variances are those of the window as a population; rounding below 0 is cut.
    """
    a, b, kernel = array(a), array(b), gaussian_kernel(11, 1.5)
    c1, c2 = 0.01**2, 0.03**2

    def local(values: np.ndarray) -> np.ndarray:
        return convolved(values, kernel, "reflect")

    mean_a, mean_b = local(a), local(b)
    variance_a = np.maximum(local(a * a) - mean_a**2, 0)
    variance_b = np.maximum(local(b * b) - mean_b**2, 0)
    covariance = local(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance * (2 * covariance + c2) / (variance_a + variance_b + c2)


def ssim(a: Any, b: Any) -> float:
    """The mean of SSIM over all pixels of the min–max maps."""
    return float(ssim_image(min_max(a), min_max(b)).mean())


def completeness_gap(values: Any, expected: float) -> float:
    """|Σ map − expected|."""
    return abs(sum(array(values).ravel().tolist()) - expected)


# --- over images ----------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the neighbours of place percent/100 · (n − 1) of the sorted values."""
    ascending = sorted(values)
    place = percent / 100 * (len(ascending) - 1)
    below = min(int(place), len(ascending) - 1)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def bootstrap_interval(values: Sequence[float], indices: Any) -> tuple[float, float]:
    """The percentiles 2.5 and 97.5 of the means of the resamples; indices is (resamples, n)."""
    means = []
    for row in np.asarray(indices).tolist():
        means.append(sum(float(values[i]) for i in row) / len(row))
    return percentile(means, 2.5), percentile(means, 97.5)
