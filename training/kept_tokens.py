"""A timm VisionTransformer that may look at some of its patches only."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def choose_patches(images: int, patches: int, kept: int, device: torch.device | str) -> Tensor:
    """(images, kept): for each image its own random patches."""
    return torch.rand(images, patches, device=device).argsort(dim=1)[:, :kept]


def embed(model: VisionTransformer, images: Tensor, kept: Tensor | None = None) -> Tensor:
    """CLS token and the kept patches (all when None), with their positions."""
    patches = model.patch_embed(images)
    tokens = model._pos_embed(patches).to(patches.dtype)  # under autocast the residual stream stays in bfloat16
    if kept is None:
        return tokens
    index = torch.cat([torch.zeros_like(kept[:, :1]), kept + 1], dim=1)
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))


def features(model: VisionTransformer, images: Tensor, kept: Tensor | None = None) -> Tensor:
    """Normalised tokens after the last block, CLS first."""
    return model.norm(model.blocks(embed(model, images, kept)))


@torch.inference_mode()
def predict(model: VisionTransformer, images: Tensor, kept_share: float = 1.0, batch: int = 500) -> Tensor:
    """Logits of normalised images, each seen through a random `kept_share` of its patches."""
    patches = model.patch_embed.num_patches
    logits = []
    for part in images.split(batch):
        kept = None if kept_share == 1 else choose_patches(len(part), patches, round(patches * kept_share), part.device)
        logits.append(model.head(features(model, part, kept)[:, 0]).float())
    return torch.cat(logits)
