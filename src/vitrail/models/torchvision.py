"""torchvision's VisionTransformer in canonical form."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitrail.core import parts
from vitrail.models.translation import (
    activation,
    fused_qkv,
    head_of,
    linear,
    needed_norm,
    norm,
    positions,
    prefix_tokens,
    refuse,
)

NETWORKS = ("VisionTransformer",)
HIERARCHICAL = ("SwinTransformer",)


def is_torchvision(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torchvision.")


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form of a torchvision ViT."""
    if type(module).__name__ not in NETWORKS:
        raise refuse(module, "it is not a plain Vision Transformer")
    if not isinstance(module.conv_proj, nn.Conv2d):
        raise refuse(module, "a convolutional stem is not a plain patch convolution")
    prefix = prefix_tokens(module.class_token)
    count = module.encoder.pos_embedding.shape[1] - 1
    embedding = parts.Embedding(
        module.conv_proj.weight.detach(),
        None if module.conv_proj.bias is None else module.conv_proj.bias.detach(),
        prefix,
        positions(module.encoder.pos_embedding, prefix.shape[0], count),
    )
    final = norm(module.encoder.ln)
    own = None
    if head is None:
        if len(module.heads) != 1:
            raise refuse(module, "a head of several layers (representation_size) is not known")
        own = parts.Head(final, "token", (linear(module.heads[0]),))
    blocks = tuple(_block(block) for block in module.encoder.layers)
    return parts.Architecture(embedding, blocks, head_of(head, pool, final, own))


def native_size(module: Any) -> tuple[int, int]:
    return module.image_size, module.image_size


def takes_other_sizes(module: Any) -> bool:
    return False


def _block(block: Any) -> parts.Block:
    attention = block.self_attention
    q, k, v, together = fused_qkv(attention.in_proj_weight, attention.in_proj_bias)
    out, scale = linear(attention.out_proj), attention.head_dim**-0.5
    mixing = parts.Attention(attention.num_heads, q, k, v, out, scale, together=together)
    mlp = parts.Mlp(linear(block.mlp[0]), linear(block.mlp[3]), activation(block.mlp[1]))
    return parts.Block(needed_norm(block.ln_1), mixing, needed_norm(block.ln_2), mlp)
