"""Removing patches, literally: all tokens stay, but no query sees a removed patch and no pooling counts it."""

from __future__ import annotations

import torch
from tests.families import Family
from tests.oracles.attention import join_heads, pool_weights, run_block, run_mlp, split_heads
from tests.oracles.recipe import AttentionPool, Readout, Recipe, describe
from torch import Tensor, nn


@torch.no_grad()
def masked_logits(family: Family, module: nn.Module, images: Tensor, keep: Tensor) -> Tensor:
    """Logits (B, C) when image b keeps only the patches keep[b] (B, k), grid indices; prefix tokens always stay."""
    recipe = describe(family, module, images)
    rows = [_one_image(recipe, tokens[None], kept) for tokens, kept in zip(recipe.tokens, keep, strict=True)]
    return torch.cat(rows)


def _one_image(recipe: Recipe, x: Tensor, kept: Tensor) -> Tensor:
    visible = torch.zeros(1, x.shape[1], dtype=torch.bool)
    visible[:, : recipe.prefix] = True
    visible[:, recipe.prefix + kept] = True
    for block in recipe.blocks:
        x, _ = run_block(block, x, visible)
    return _read_out(recipe.readout, x, visible, recipe.prefix)


def _read_out(readout: Readout, x: Tensor, visible: Tensor, prefix: int) -> Tensor:
    tokens = readout.norm(x)  # (1, n, d)
    if readout.pool == "pair":
        return (readout.heads[0](tokens[:, 0]) + readout.heads[1](tokens[:, 1])) / 2
    if readout.pool == "attention":
        pooled = _attention_pool(readout.attention, tokens[:, prefix:], visible[:, prefix:])
    else:
        pooled = _pool(readout.pool, tokens[:, 0], tokens[:, prefix:][:, visible[0, prefix:]])
    return readout.logits(pooled)


def _pool(how: str, token: Tensor, kept: Tensor) -> Tensor:
    """First token (1, d) and kept patches (1, k, d) → what the head sees."""
    if how == "token":
        return token
    mean, largest = kept.mean(dim=1), kept.amax(dim=1)
    return {
        "avg": mean,
        "patches": mean,  # as the head is affine
        "max": largest,
        "avgmax": 0.5 * (largest + mean),
        "token_avg": torch.cat([token, mean], dim=-1),
    }[how]


def _attention_pool(pool: AttentionPool, patches: Tensor, visible: Tensor) -> Tensor:
    weights = pool_weights(pool, patches, visible)  # (1, H, 1, N)
    mixed = pool.out(join_heads(weights @ split_heads(pool.v(patches), len(pool.query))))
    return (mixed + run_mlp(pool.mlp, pool.norm(mixed)))[:, 0]
