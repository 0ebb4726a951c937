"""ViT-CX, literally (specs/masks-and-gradients.md 1.2). `image` is (1, 3, H, W), masks are (K, H, W).

`probability` maps images (B, 3, H, W) to the target's probability (B,). Readings where spec and paper are open:
* a constant channel is one whose features are all equal before the up-sampling; it is dropped;
* clusters are ordered by their first channel, which fixes which noise belongs to which mask;
* equal linkage distances: the pair with the smaller first clusters is merged first;
* without debiasing the score is the paper's f(y | X ⊙ M) (table 2), with no noise at all;
* without the coverage correction the map is Eq. (1), Σ s M; the authors' 1/K multiplies that one too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Score = Callable[[Tensor], Tensor]


def interpolation(source: int, size: int, corners: bool = False) -> Tensor:
    """(size, source): the bilinear weights of one axis; `corners` is align_corners."""
    weights = torch.zeros(size, source, dtype=torch.float64)
    for i in range(size):
        if corners:
            u = i * (source - 1) / (size - 1) if size > 1 else 0.0
        else:
            u = max((i + 0.5) * source / size - 0.5, 0.0)
        low = min(int(u), source - 1)
        high = min(low + 1, source - 1)
        weights[i, low] += 1 - (u - low)
        weights[i, high] += u - low
    return weights


def bilinear(maps: Tensor, size: tuple[int, int], corners: bool = False) -> Tensor:
    """(D, h, w) → (D, H, W)."""
    rows = interpolation(maps.shape[1], size[0], corners).to(maps.dtype)
    columns = interpolation(maps.shape[2], size[1], corners).to(maps.dtype)
    return torch.stack([rows @ one @ columns.T for one in maps])


def stretch(mask: Tensor) -> Tensor:
    return (mask - mask.min()) / (mask.max() - mask.min())


def feature_masks(features: Tensor, size: tuple[int, int]) -> Tensor:
    """M_vit (D', H, W): every channel of features (D, h, w) that is not constant, up-sampled, then in [0, 1]."""
    varying = torch.stack([channel for channel in features if channel.max() > channel.min()])
    return torch.stack([stretch(mask) for mask in bilinear(varying, size)])


def cosine_distances(masks: Tensor) -> Tensor:
    """(D, D): 1 − ⟨M_i, M_j⟩ / (‖M_i‖ ‖M_j‖)."""
    flat = masks.flatten(1)
    distances = flat.new_zeros(len(flat), len(flat))
    for i, a in enumerate(flat):
        for j, b in enumerate(flat):
            distances[i, j] = 1 - (a @ b) / (a.norm() * b.norm())
    return distances


def clusters(distances: Tensor, delta: float) -> list[list[int]]:
    """Complete linkage: merge the two clusters whose largest pairwise distance is least, as long as it is < δ."""
    table = distances.tolist()
    groups = [[i] for i in range(len(table))]
    while len(groups) > 1:
        linkages = [
            (max(table[i][j] for i in groups[a] for j in groups[b]), a, b)
            for a in range(len(groups))
            for b in range(a + 1, len(groups))
        ]
        distance, a, b = min(linkages)
        if not distance < delta:
            break
        groups[a] = sorted(groups[a] + groups[b])
        del groups[b]
        groups.sort()
    return groups


def cluster_masks(masks: Tensor, groups: list[list[int]], how: str = "stretched") -> Tensor:
    """(K, H, W): "mean", the paper's text; "stretched", as the authors released it: the sum, to [0, 1] again."""
    if how == "mean":
        return torch.stack([masks[group].mean(dim=0) for group in groups])
    return torch.stack([stretch(masks[group].sum(dim=0)) for group in groups])


@torch.no_grad()
def scores(
    probability: Score, image: Tensor, masks: Tensor, noises: Tensor | None = None, debias: bool = True
) -> Tensor:
    """s (K,): p(x⊙M + ε) − p(x + ε) + p(x), ε = (1 − M) Z_k with noises (K, 3, H, W); or p(x⊙M)."""
    masks = masks[:, None]
    if not debias:
        return probability(image * masks)
    epsilon = (1 - masks) * noises
    return probability(image * masks + epsilon) - probability(image + epsilon) + probability(image)


def saliency(masks: Tensor, scores: Tensor, pcb: bool = True, authors: bool = False) -> Tensor:
    """(H, W): Σ s M / Σ M, 0 where Σ M is 0; Σ s M without the correction; the authors divide by K as well."""
    total, coverage = torch.zeros_like(masks[0]), torch.zeros_like(masks[0])
    for mask, score in zip(masks, scores, strict=True):
        total, coverage = total + score * mask, coverage + mask
    if pcb:
        total = torch.where(coverage > 0, total / torch.where(coverage > 0, coverage, 1), 0)
    return total / len(masks) if authors else total


def masks_of(features: Tensor, size: tuple[int, int], delta: float, how: str = "stretched") -> Tensor:
    """M_cx (K, H, W)."""
    masks = feature_masks(features, size)
    return cluster_masks(masks, clusters(cosine_distances(masks), delta), how)


def vit_cx(
    probability: Score,
    image: Tensor,
    features: Tensor,
    noises: Tensor | None,
    delta: float = 0.1,
    *,
    debias: bool = True,
    pcb: bool = True,
    clustering: bool = True,
    random_masks: Tensor | None = None,
) -> Tensor:
    """The whole method. Table 2: variant 1 clustering off; 2 random masks; 3 debias off; 4 pcb off; 5 both off."""
    size = (image.shape[2], image.shape[3])
    if random_masks is not None:
        masks = random_masks
    elif clustering:
        masks = masks_of(features, size, delta)
    else:
        masks = feature_masks(features, size)
    return saliency(masks, scores(probability, image, masks, noises, debias), pcb)
