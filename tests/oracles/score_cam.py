"""Score-CAM on token features (specs/masks-and-gradients.md 1.5). `image` is (1, 3, H, W), features are (D, h, w).

Readings: "eq1" up-samples and scales as ViT-CX does (align_corners=False, constant channels dropped), which makes it
ViT-CX without clustering, noise and coverage correction, and its final min–max is optional. "library" keeps constant
channels: their mask is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.oracles.attention import softmax
from tests.oracles.vit_cx import bilinear, feature_masks, stretch
from torch import Tensor

Score = Callable[[Tensor], Tensor]


@torch.no_grad()
def eq1(score: Score, image: Tensor, features: Tensor, scaled: bool = False) -> Tensor:
    """(H, W): Σ_d s(x ⊙ M_d) M_d; the score s is the logit, in ViT-CX the probability."""
    masks = feature_masks(features, (image.shape[2], image.shape[3]))
    total = torch.zeros_like(masks[0])
    for mask in masks:
        total = total + score(image * mask)[0] * mask
    return stretch(total) if scaled else total


def library_masks(features: Tensor, size: tuple[int, int]) -> Tensor:
    """(D, H, W): align_corners=True, then (m − min) / (max − min + 1e-8) of every channel."""
    masks = bilinear(features, size, corners=True)
    return torch.stack([(mask - mask.min()) / (mask.max() - mask.min() + 1e-8) for mask in masks])


@torch.no_grad()
def library_weights(logit: Score, image: Tensor, features: Tensor) -> Tensor:
    """α (D,): the softmax over channels of the target's logit of x ⊙ M_d."""
    masks = library_masks(features, (image.shape[2], image.shape[3]))
    return softmax(torch.cat([logit(image * mask) for mask in masks]))


def library_tokens(logit: Score, image: Tensor, features: Tensor) -> Tensor:
    """(h, w): ReLU(Σ_d α_d · feature_d), raw features."""
    weights = library_weights(logit, image, features)
    return sum(weight * channel for weight, channel in zip(weights, features, strict=True)).clamp(min=0)


def library_scale(cam: Tensor) -> Tensor:
    """m − min, over 1e-7 + the new maximum."""
    shifted = cam - cam.min()
    return shifted / (1e-7 + shifted.max())


def library(logit: Score, image: Tensor, features: Tensor) -> Tensor:
    """(H, W): scaled, enlarged (align_corners=False), scaled again."""
    cam = library_scale(library_tokens(logit, image, features))
    return library_scale(bilinear(cam[None], (image.shape[2], image.shape[3]))[0])
