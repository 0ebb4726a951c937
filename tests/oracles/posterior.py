"""posterior, literally: a Gaussian model of the scores of given subsets, dense in the space of masks.

y_S = b(|S|/N) + Σ_{i∈S} w_i + ε, with b(r) = c0 + c1 r(1 − r) + c2 r(1 − r)(1 − 2r) and nothing known about c,
w ~ N(0, σ²C), C = K_ℓ + t dd' + 100·11', ε ~ N(0, σ²η). `image` is (1, 3, H, W), subsets are rows (M, N).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from tests.families import Family, expected_logits
from tests.oracles import tis
from tests.oracles.attention import run_block
from tests.oracles.decompx import decompose
from tests.oracles.network import scalar
from tests.oracles.recipe import describe
from torch import Tensor, nn

LENGTHS = [1.0, 2.0, 4.0]
WEIGHTS = [0.0, 0.3, 1.0, 3.0, 10.0]
NOISES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


def squared_distance(a: int, b: int, columns: int) -> float:
    """Between two patches, in patches."""
    return (a // columns - b // columns) ** 2 + (a % columns - b % columns) ** 2


@torch.no_grad()
def features(family: Family, module: nn.Module, image: Tensor) -> Tensor:
    """(N, D): the output of the last block's first norm at the patches, their mean removed."""
    recipe = describe(family, module, image)
    x = recipe.tokens
    for block in recipe.blocks[:-1]:
        x, _ = run_block(block, x)
    patches = recipe.blocks[-1].norm1(x)[0, recipe.prefix :]
    return patches - patches.sum(dim=0) / len(patches)


def direction(family: Family, module: nn.Module, image: Tensor, target: int, against: int | None = None) -> Tensor:
    """d (N,): the sum of DecompX over the upper half of the start layers, mean 0 and population variance 1."""
    depth, total = len(describe(family, module, image).blocks), 0
    for layer in range(math.ceil(depth / 2), depth):
        shares = decompose(family, module, image, layer)[0][0, family.prefix :]
        total = total + shares[:, target] - (0 if against is None else shares[:, against])
    centred = total - total.sum() / len(total)
    return centred / ((centred**2).sum() / len(centred)).sqrt()


def kernel(features: Tensor, columns: int, length: float) -> Tensor:
    """K_ℓ (N, N)."""
    count = len(features)
    K = torch.zeros(count, count, dtype=features.dtype)
    for a, b in itertools.product(range(count), repeat=2):
        cosine = features[a] @ features[b] / (features[a].norm() * features[b].norm())
        near = math.exp(-squared_distance(a, b, columns) / (2 * length**2))
        K[a, b] = 0.95 * near * ((1 + cosine) / 2) ** 2 + 0.05 * (a == b)
    return K


def smoother(count: int, columns: int, deviation: float) -> Tensor:
    """S (N, N): each column is how the effect of one patch is shared, and sums to 1."""
    S = torch.eye(count, dtype=torch.float64)
    if deviation > 0:
        for a, b in itertools.product(range(count), repeat=2):
            S[a, b] = math.exp(-squared_distance(a, b, columns) / (2 * deviation**2))
    return S / S.sum(dim=0, keepdim=True)


def painted(image: Tensor, subset: Tensor, rows: int, columns: int) -> Tensor:
    """The image with the mean colour of all its pixels where a patch is not in the subset (N,)."""
    height, width = image.shape[2] // rows, image.shape[3] // columns
    picture, colour = image.clone(), image.flatten(2).sum(dim=2) / (image.shape[2] * image.shape[3])
    for i in range(rows * columns):
        if not subset[i]:
            top, left = i // columns * height, i % columns * width
            picture[:, :, top : top + height, left : left + width] = colour[:, :, None, None]
    return picture


def scores(
    family: Family,
    module: nn.Module,
    image: Tensor,
    subsets: Tensor,
    target: int,
    against: int | None,
    scale: str,
    space: str,
) -> Tensor:
    """y (M,): log-odds, which stop 1e-4 before 0 and 1, the probability, or the difference of two logits."""

    def readings(index: int, output: str) -> Tensor:
        if space == "tokens":
            return tis.scores(family, module, image, subsets, index, output)
        pictures = torch.cat([painted(image, subset, *family.grid) for subset in subsets])
        classes = torch.full((len(subsets),), index)
        with torch.no_grad():
            return scalar(expected_logits(family, module, pictures), classes, output)

    if against is not None:
        return readings(target, "logit") - readings(against, "logit")
    p = readings(target, "probability")
    if scale == "probability":
        return p
    p = p.clamp(1e-4, 1 - 1e-4)
    return (p / (1 - p)).log()


@dataclass
class Fitted:
    """Everything at one choice of C and η."""

    trend: Tensor  # ĉ (3,)
    effects: Tensor  # E[w|y] (N,)
    covariance: Tensor  # Cov[w|y] (N, N)
    variance: Tensor  # σ̂²
    likelihood: Tensor
    effective: Tensor  # tr ∂(Zw)/∂y: how many scores' worth of freedom the effects take


def trend_columns(subsets: Tensor) -> Tensor:
    """B (M, 3)."""
    r = subsets.to(torch.float64).sum(dim=1) / subsets.shape[1]
    return torch.stack([torch.ones_like(r), r * (1 - r), r * (1 - r) * (1 - 2 * r)], dim=1)


def conditioned(subsets: Tensor, y: Tensor, C: Tensor, noise: float) -> Fitted:
    """Generalised least squares for c, then w given y."""
    Z, B = subsets.to(torch.float64), trend_columns(subsets)
    V = Z @ C @ Z.T + noise * torch.eye(len(Z), dtype=torch.float64)
    inverse = torch.linalg.inv(V)
    information = B.T @ inverse @ B
    trend = torch.linalg.solve(information, B.T @ inverse @ y)
    rest = y - B @ trend
    gain = C @ Z.T @ inverse  # (N, M)
    freedom = len(y) - 3
    variance = rest @ inverse @ rest / freedom
    covariance = C - gain @ Z @ C + gain @ B @ torch.linalg.inv(information) @ B.T @ gain.T
    likelihood = -0.5 * (freedom * variance.log() + torch.logdet(V) + torch.logdet(information))
    removed = torch.eye(len(y), dtype=torch.float64) - B @ torch.linalg.inv(information) @ B.T @ inverse
    effective = (Z @ gain @ removed).trace()
    return Fitted(trend, gain @ rest, variance * covariance, variance, likelihood, effective)


@dataclass
class Result:
    map: Tensor  # (h, w)
    error: Tensor
    r2: Tensor
    fitted: Fitted


def posterior(
    family: Family,
    module: nn.Module,
    image: Tensor,
    subsets: Tensor,
    target: int,
    against: int | None = None,
    scale: str = "log_odds",
    smoothing: float = 0.5,
    space: str = "pixels",
) -> Result:
    """The whole method for these subsets."""
    y = scores(family, module, image, subsets, target, against, scale, space)
    d = direction(family, module, image, target, against)
    X, columns, count = features(family, module, image), family.grid[1], family.patches
    ones, best = torch.ones(count, count, dtype=torch.float64), None
    for length in LENGTHS:
        K = kernel(X, columns, length)
        for weight, noise in itertools.product(WEIGHTS, NOISES):
            C = K + weight * torch.outer(d, d) + 100 * ones
            fitted = conditioned(subsets, y, C, noise)
            if best is None or fitted.likelihood > best[0].likelihood:
                best = fitted, C, noise
    assert best is not None
    fitted, C, noise = best
    S = smoother(count, columns, smoothing)
    error = 1.6 * (S @ fitted.covariance @ S.T).diagonal().sqrt()
    return Result(
        (S @ fitted.effects).view(family.grid), error.view(family.grid), left_out(subsets, y, C, noise), fitted
    )


def left_out(subsets: Tensor, y: Tensor, C: Tensor, noise: float) -> Tensor:
    """R² of scores that are predicted from all others."""
    missed, B = [], trend_columns(subsets)
    for k in range(len(y)):
        others = torch.arange(len(y)) != k
        fitted = conditioned(subsets[others], y[others], C, noise)
        missed.append(y[k] - B[k] @ fitted.trend - subsets[k].to(torch.float64) @ fitted.effects)
    return 1 - torch.stack(missed).square().sum() / (y - y.mean()).square().sum()
