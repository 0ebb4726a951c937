"""torchvision's VisionTransformer in canonical form."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitrail.core import parts
from vitrail.models.translation import (
    activation,
    check_dropout,
    classifier,
    fused_qkv,
    is_dropout,
    linear,
    mean_of_patches,
    needed_norm,
    no_pool,
    norm,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
)

NETWORKS = ("VisionTransformer",)
HIERARCHICAL = ("SwinTransformer",)
POOLS: dict[str, parts.PoolKind] = {"token": "token", "avg": "mean", "patches": "patches"}


def is_torchvision(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torchvision.")


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form of a torchvision ViT."""
    if type(module).__name__ not in NETWORKS:
        raise refuse(module, "it is not a plain Vision Transformer")
    convolution, prefix = patch_convolution(module.conv_proj), prefix_tokens(module.class_token)
    count = module.encoder.pos_embedding.shape[1] - 1
    embedding = parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=prefix,
        positions=positions(module.encoder.pos_embedding, prefix.shape[0], count),
    )
    check_dropout(module.encoder, "dropout")
    blocks = tuple(_block(block) for block in module.encoder.layers)
    if head is None:
        head, pool = module.heads, "token"
    if pool not in POOLS:
        raise no_pool(module, pool)
    return parts.Architecture(embedding, blocks, classifier(head, norm(module.encoder.ln), POOLS[pool]))


def logits(module: Any, images: Tensor, head: nn.Module | None, pool: str | None) -> Tensor:
    """The logits of a clone of the network; with ``head``, those of the head on the tokens of its encoder."""
    if head is None:
        return module(images)
    tokens: list[Tensor] = []
    module.encoder.register_forward_hook(lambda _, __, out: tokens.append(out))
    module(images)
    if pool == "patches":
        return mean_of_patches(head, tokens[0][:, 1:])
    return head(tokens[0][:, 0] if pool == "token" else tokens[0][:, 1:].mean(1))


def own_pool(module: Any) -> str | None:
    """How a network without a head pools its tokens; None = it has a head."""
    return "token" if isinstance(module.heads, nn.Identity) else None


def width(module: Any) -> int:
    """The number of channels of what a head reads."""
    return int(module.hidden_dim)


def native_size(module: Any) -> tuple[int, int]:
    return module.image_size, module.image_size


def takes_other_sizes(module: Any) -> bool:
    return False


adapts_to_input = takes_other_sizes


def _block(block: Any) -> parts.Block:
    attention, mlp = block.self_attention, block.mlp
    check_dropout(block, "dropout")
    if type(attention) is not nn.MultiheadAttention:
        raise refuse(attention, "only nn.MultiheadAttention can be explained")
    if len(mlp) != 5 or not (is_dropout(mlp[2]) and is_dropout(mlp[4])):
        raise refuse(mlp, "only two linear layers with an activation and dropout are supported")
    q, k, v, together = fused_qkv(attention.in_proj_weight, attention.in_proj_bias)
    proj, scale = linear(attention.out_proj), attention.head_dim**-0.5
    mixing = parts.Attention(heads=attention.num_heads, q=q, k=k, v=v, proj=proj, scale=scale, together=together)
    hidden = parts.Mlp(linear(mlp[0]), linear(mlp[3]), activation(mlp[1]))
    return parts.Block(needed_norm(block.ln_1), mixing, needed_norm(block.ln_2), hidden)
