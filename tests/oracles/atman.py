"""AtMan, literally (specs/whitebox.md 4.17), on the recipe's explicit forward. `image` is (1, 3, H, W).

In every head of every block the scaled scores, relative position bias included, are shifted so that each row's minimum
over all keys is 0; then key column j is multiplied by factors[j], then comes the softmax. An attention pool's scores
over the patches are treated the same way, with the patches' factors. Readings: only patches are suppressed, one map
entry each; the token itself always gets the factor; similarities are those of x_0, the tokens that enter the first
block, positions included, and only patches are neighbours.
"""

from __future__ import annotations

import torch
from tests.families import Family
from tests.oracles.attention import among, join_heads, mixing, rotate, run_mlp, scores_of, softmax, split_heads
from tests.oracles.network import pool
from tests.oracles.recipe import Attention, AttentionPool, Block, Recipe, describe
from torch import Tensor, nn


def suppress(scores: Tensor, factors: Tensor) -> Tensor:
    """Scores (…, queries, keys) shifted to a row minimum of 0, each key column times its factor."""
    return (scores - scores.amin(dim=-1, keepdim=True)) * factors


def self_attention(attention: Attention, u: Tensor, factors: Tensor) -> Tensor:
    q, k, v = (split_heads(part(u), attention.heads) for part in (attention.q, attention.k, attention.v))
    q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.rotary is not None:
        q, k = rotate(q, attention.rotary), rotate(k, attention.rotary)
    scores = scores_of(attention, q, k)
    part = scores[:, :, attention.queries, attention.keys]
    scores[:, :, attention.queries, attention.keys] = suppress(part, factors[attention.keys])
    weights = mixing(attention, among(attention, scores))
    mixed = attention.inner_norm(join_heads(weights @ attention.v_norm(v)))
    return attention.out(attention.gated(mixed, u))


def run_block(block: Block, x: Tensor, factors: Tensor) -> Tensor:
    u = block.norm1(x)
    branch = block.after1(self_attention(block.attention, u, factors))
    x = x + block.changed(branch if block.scale1 is None else block.scale1 * branch)
    branch = block.after2(run_mlp(block.mlp, u if block.parallel else block.norm2(x)))
    return x + block.changed(branch if block.scale2 is None else block.scale2 * branch)


def attention_pool(pool: AttentionPool, patches: Tensor, factors: Tensor) -> Tensor:
    k, v = (split_heads(part(patches), len(pool.query)) for part in (pool.k, pool.v))
    scores = pool.query[None, :, None, :] @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
    mixed = pool.out(join_heads(softmax(suppress(scores, factors)) @ v))
    return (mixed + run_mlp(pool.mlp, pool.norm(mixed)))[:, 0]


def suppressed_logits(recipe: Recipe, factors: Tensor) -> Tensor:
    """Logits (B, C) with the factors (n,) of all tokens, prefix first."""
    x, readout, prefix = recipe.tokens, recipe.readout, recipe.prefix
    for block in recipe.blocks:
        x = run_block(block, x, factors)
    tokens = readout.norm(x)
    if readout.pool == "pair":
        return (readout.heads[0](tokens[:, 0]) + readout.heads[1](tokens[:, 1])) / 2
    if readout.pool == "attention":
        pooled = attention_pool(readout.attention, tokens[:, prefix:], factors[prefix:])
    else:
        pooled = pool(readout.pool, tokens, tokens[:, prefix:])
    return readout.logits(pooled)


def cross_entropy(logits: Tensor, target: int) -> Tensor:
    return -softmax(logits)[0, target].log()


def token_factors(tokens: Tensor, prefix: int, t: int, factor: float, threshold: float | None) -> Tensor:
    """(n,): the factor for patch t, (1 − f)(1 − cos) + f for patches with cos ≥ θ and cos ≥ 0, 1 for all others.

    `tokens` is x_0 (n, d); without a threshold no other patch is touched.
    """
    factors = torch.ones(len(tokens), dtype=tokens.dtype)
    for i in range(prefix, len(tokens) if threshold is not None else prefix):
        a, b = tokens[i], tokens[prefix + t]
        cosine = (a @ b) / (a.norm() * b.norm())
        if cosine >= threshold and cosine >= 0:
            factors[i] = (1 - factor) * (1 - cosine) + factor
    factors[prefix + t] = factor
    return factors


@torch.no_grad()
def atman(
    family: Family, module: nn.Module, image: Tensor, target: int, factor: float = 0.1, threshold: float | None = None
) -> Tensor:
    """(grid_h, grid_w): cross-entropy with patch t suppressed − original cross-entropy; positive is important."""
    recipe = describe(family, module, image)
    original = cross_entropy(suppressed_logits(recipe, recipe.tokens.new_ones(family.tokens)), target)
    relevance = []
    for t in range(family.patches):
        factors = token_factors(recipe.tokens[0], recipe.prefix, t, factor, threshold)
        relevance.append(cross_entropy(suppressed_logits(recipe, factors), target) - original)
    return torch.stack(relevance).view(family.grid)
