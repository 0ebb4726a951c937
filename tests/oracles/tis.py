"""Transformer Input Sampling, literally (specs/masks-and-gradients.md 1.1). Masks are rows: (M, N), N patches.

`image` is (1, 3, H, W). Readings where the spec is open:
* equal distances go to the first centroid, equal entries of a centroid to the first patch;
* several ratios: every centroid gives one mask per ratio, ratio by ratio, and all of them share one map;
* a patch that no mask contains gets the mean of all scores;
* a mask without any patch: prefix tokens alone, where the head reads only them; where the head pools patches there is
  nothing to pool, and the whole image in the mean colour (zeros after normalisation) takes its place.
"""

from __future__ import annotations

import torch
from tests.families import Family, expected_logits
from tests.oracles.attention import run_block
from tests.oracles.masked_forward import masked_logits
from tests.oracles.network import scalar
from tests.oracles.recipe import describe
from torch import Tensor, nn


@torch.no_grad()
def features(family: Family, module: nn.Module, image: Tensor) -> Tensor:
    """X (L·D, N): row l·D + c is channel c of the output of block l over the patches. Nothing is normed or centred."""
    recipe = describe(family, module, image)
    x, rows = recipe.tokens, []
    for block in recipe.blocks:
        x, _ = run_block(block, x)
        rows.append(x[0, recipe.prefix :].T)
    return torch.cat(rows)


def assign(X: Tensor, centroids: Tensor) -> list[int]:
    """The nearest centroid of every row of X in squared Euclidean distance; the first of equals."""
    nearest = []
    for row in X:
        distances = (centroids - row).square().sum(dim=1).tolist()
        nearest.append(distances.index(min(distances)))
    return nearest


def kmeans(
    X: Tensor, initial_centroids: Tensor, iterations: int = 100, tol: float = 1e-4, empty: str = "zero"
) -> Tensor:
    """Centroids (M, N) after the last update. It stops when the squared movements of all entries sum to ≤ tol.

    An empty cluster becomes the zero vector ("zero", the authors) or stays where it was ("keep").
    """
    centroids = initial_centroids.clone()
    for _ in range(iterations):
        nearest = assign(X, centroids)
        updated = centroids.clone()
        for j in range(len(centroids)):
            members = [i for i, cluster in enumerate(nearest) if cluster == j]
            if members:
                updated[j] = X[members].mean(dim=0)
            elif empty == "zero":
                updated[j] = 0
        moved = (updated - centroids).square().sum().item()
        centroids = updated
        if moved <= tol:
            break
    return centroids


def kept_count(ratio: float, patches: int) -> int:
    """N_k = ⌊ratio · n⌋."""
    return int(ratio * patches)


def binarise(centroids: Tensor, kept: int) -> Tensor:
    """Boolean masks (M, N): the `kept` largest entries of every row; of equal entries the first."""
    masks = torch.zeros(centroids.shape, dtype=torch.bool)
    for j, row in enumerate(centroids.tolist()):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        masks[j, order[:kept]] = True
    return masks


def pools_patches(family: Family, module: nn.Module, image: Tensor) -> bool:
    """Whether the head needs at least one patch."""
    return describe(family, module, image).readout.pool not in ("token", "pair")


@torch.no_grad()
def scores(
    family: Family, module: nn.Module, image: Tensor, masks: Tensor, target: int, output: str = "probability"
) -> Tensor:
    """w (M,): the target's probability or logit with only the patches of each mask, and every prefix token, present."""
    pooled, values = pools_patches(family, module, image), []
    for mask in masks:
        if not mask.any() and pooled:
            logits = expected_logits(family, module, torch.zeros_like(image))
        else:
            logits = masked_logits(family, module, image, mask.nonzero().T)
        values.append(scalar(logits, torch.tensor([target]), output))
    return torch.cat(values)


def tis_map(masks: Tensor, scores: Tensor) -> Tensor:
    """S (N,): the mean score of the masks that contain each patch; the mean of all scores where none does."""
    values = []
    for i in range(masks.shape[1]):
        containing = [scores[j] for j in range(len(masks)) if masks[j, i]]
        values.append(torch.stack(containing).mean() if containing else scores.mean())
    return torch.stack(values)


def min_max(values: Tensor, eps: float = 1e-12) -> Tensor:
    """The authors' last step: subtract the minimum, divide by the new maximum; zeros where the range is ≤ eps."""
    shifted = values - values.min()
    return shifted / shifted.max() if shifted.max() > eps else torch.zeros_like(values)


def all_masks(centroids: Tensor, ratios: list[float]) -> Tensor:
    """(R·M, N): the masks of the first ratio, then those of the second, …"""
    return torch.cat([binarise(centroids, kept_count(ratio, centroids.shape[1])) for ratio in ratios])


def tis(
    family: Family,
    module: nn.Module,
    image: Tensor,
    initial_centroids: Tensor,
    ratios: list[float],
    target: int,
    output: str = "probability",
    empty: str = "zero",
) -> Tensor:
    """The whole method, (grid_h, grid_w). When there is a centroid per channel, the channels themselves are taken."""
    X = features(family, module, image)
    centroids = X if len(initial_centroids) >= len(X) else kmeans(X, initial_centroids, empty=empty)
    masks = all_masks(centroids, ratios)
    return tis_map(masks, scores(family, module, image, masks, target, output)).view(family.grid)


def filled(image: Tensor, mask: Tensor, grid: tuple[int, int], noise: Tensor) -> Tensor:
    """The image (1, 3, H, W) with the pixels of every patch outside `mask` (N,) taken from `noise` (3, H, W)."""
    height, width = image.shape[2] // grid[0], image.shape[3] // grid[1]
    result = image.clone()
    for i, present in enumerate(mask.tolist()):
        if not present:
            top, left = i // grid[1] * height, i % grid[1] * width
            here = (..., slice(top, top + height), slice(left, left + width))
            result[0][here] = noise[here]
    return result


@torch.no_grad()
def pixel_scores(
    family: Family,
    module: nn.Module,
    image: Tensor,
    masks: Tensor,
    noises: Tensor,
    target: int,
    output: str = "probability",
) -> Tensor:
    """The ablation: all tokens stay, dropped patches are painted with noises[j] (M, 3, H, W), in normalised space."""
    pictures = [filled(image, mask, family.grid, noise) for mask, noise in zip(masks, noises, strict=True)]
    return scalar(expected_logits(family, module, torch.cat(pictures)), torch.full((len(masks),), target), output)
