"""PAMI, literally (specs/whitebox.md 5). `probability` maps images (B, 3, H, W) to (B,); `image` is (1, 3, H, W)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def pami(
    probability: Callable[[Tensor], Tensor], image: Tensor, segmentations: list[Tensor], background: Tensor
) -> Tensor:
    """(H, W): every region of every label map (H, W) is kept alone, the rest comes from `background` (1, 3, H, W).

    The target's probability is added to the region; the sum is divided by how often each pixel was kept. Reading: a
    negative label belongs to no region (what a shift moved in), and a pixel that was never kept is 0.
    """
    total, count = torch.zeros_like(image[0, 0]), torch.zeros_like(image[0, 0])
    for labels in segmentations:
        kept = [labels == label for label in sorted(set(labels.flatten().tolist())) if label >= 0]
        scores = probability(torch.stack([torch.where(region, image[0], background[0]) for region in kept]))
        for region, score in zip(kept, scores, strict=True):
            total[region] += score
            count[region] += 1
    return torch.where(count > 0, total / count.clamp(min=1), 0)
