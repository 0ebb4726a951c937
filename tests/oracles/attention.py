"""Attention written out: scores, softmax, maps per block, Abnar's rollout and what the head pools."""

from __future__ import annotations

import functools

import torch
from tests.families import Family
from tests.oracles.recipe import Affine, Attention, AttentionPool, Block, Mlp, Recipe, Rotary, describe, version
from torch import Tensor, nn


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, H·d_h) → (B, H, n, d_h)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, n, d_h) → (B, n, H·d_h)."""
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn every channel pair (a, b) of the patches, the last N rows of (B, H, n, d_h), by its angle."""
    n = rotary.cos.shape[-2]
    prefix, patches = x[..., :-n, :], x[..., -n:, :]
    turned = torch.empty_like(patches)
    width = patches.shape[-1] // rotary.sections
    for pair in range(patches.shape[-1] // 2):
        i, start = pair % (width // 2), pair // (width // 2) * width
        a, b = (start + i, start + i + width // 2) if rotary.half else (start + 2 * i, start + 2 * i + 1)
        cos, sin = rotary.cos[..., a], rotary.sin[..., a]
        turned[..., a] = patches[..., a] * cos - patches[..., b] * sin
        turned[..., b] = patches[..., b] * cos + patches[..., a] * sin
    return torch.cat([prefix, turned], dim=-2)


def softmax(scores: Tensor) -> Tensor:
    exponentials = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def attention_weights(attention: Attention, u: Tensor, visible: Tensor | None = None) -> Tensor:
    """A (B, H, n, n) for normed tokens u (B, n, d); keys outside `visible` (B, n) get a score of −inf."""
    q = attention.q_norm(split_heads(attention.q(u), attention.heads))
    k = attention.k_norm(split_heads(attention.k(u), attention.heads))
    if attention.rotary is not None:
        q, k = rotate(q, attention.rotary), rotate(k, attention.rotary)
    scores = scores_of(attention, q, k)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    return among(attention, scores)


def scores_of(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Scaled products of queries and keys (B, H, n, n), mixed by talking heads, with the bias of positions."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if attention.scale is None else attention.scale)
    if attention.talk is not None:
        scores = over_heads(attention.talk[0], scores)
    return scores if attention.score_bias is None else scores + attention.score_bias


def over_heads(affine: Affine, weights: Tensor) -> Tensor:
    """A layer over the heads of (B, H, n, n)."""
    return affine(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def among(attention: Attention, scores: Tensor) -> Tensor:
    """The softmax of the scores of the tokens that take part; those that do not attend see themselves alone."""
    weights = torch.eye(scores.shape[-1], dtype=scores.dtype).repeat(*scores.shape[:2], 1, 1)
    scores = scores[:, :, attention.queries, attention.keys]
    weights[:, :, attention.queries, attention.keys] = softmax(scores).where(scores > -torch.inf, 0.0)
    return weights


def mixing(attention: Attention, weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """What values are multiplied by (B, H, n, n): attention, mixed by talking heads; zero where none takes part."""
    if attention.talk is not None:
        weights = over_heads(attention.talk[1], weights)
    if visible is not None:
        weights = weights * visible[:, None, None, :]
    part = torch.zeros_like(weights[0, 0])
    part[attention.queries, attention.keys] = 1
    return weights * part


def pool_weights(pool: AttentionPool, patches: Tensor, visible: Tensor | None = None) -> Tensor:
    """The pooling query's attention (B, H, 1, N) over normed patches (B, N, d)."""
    k = split_heads(pool.k(patches), len(pool.query))
    scores = pool.query[None, :, None, :] @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    return softmax(scores)


def run_mlp(mlp: Mlp, u: Tensor) -> Tensor:
    u = mlp.first(u)
    hidden = mlp.act(mlp.up(u)) if mlp.gate is None else mlp.act(mlp.gate(u)) * mlp.up(u)
    return mlp.down(mlp.inner_norm(hidden))


def run_block(block: Block, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x_l → (x_{l+1}, A_l)."""
    attention, u = block.attention, block.norm1(x)
    weights = attention_weights(attention, u, visible)
    v = attention.v_norm(split_heads(attention.v(u), attention.heads))
    mixed = join_heads(mixing(attention, weights, visible) @ v)
    branch = block.after1(attention.out(attention.gated(attention.inner_norm(mixed), u)))
    x = x + block.changed(branch if block.scale1 is None else block.scale1 * branch)
    branch = block.after2(run_mlp(block.mlp, u if block.parallel else block.norm2(x)))
    return x + block.changed(branch if block.scale2 is None else block.scale2 * branch), weights


def run_blocks(recipe: Recipe) -> tuple[Tensor, list[Tensor]]:
    """x_L and every A_l."""
    x, maps = recipe.tokens, []
    for block in recipe.blocks:
        x, weights = run_block(block, x)
        maps.append(weights)
    return x, maps


@torch.no_grad()
def attention_maps(family: Family, module: nn.Module, images: Tensor) -> list[Tensor]:
    """A_l (B, H, n, n) of every block, [query, key]."""
    return run_blocks(describe(family, module, images))[1]


@torch.no_grad()
def pool_map(family: Family, module: nn.Module, images: Tensor) -> Tensor | None:
    """The attention pool's map (B, H, 1, N); None where the head pools otherwise."""
    recipe = describe(family, module, images)
    if recipe.readout.attention is None:
        return None
    tokens = recipe.readout.norm(run_blocks(recipe)[0])
    return pool_weights(recipe.readout.attention, tokens[:, recipe.prefix :])


def rollout(maps: list[Tensor], readout_row: Tensor) -> Tensor:
    """ρᵀ (½I + ½Ā_{L-1}) ··· (½I + ½Ā_0) as full matrices: (B, n), prefix columns included."""
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    product = identity.expand(len(maps[0]), -1, -1)
    for weights in maps:
        product = (0.5 * identity + 0.5 * weights.mean(dim=1)) @ product
    return (readout_row[:, None, :] @ product)[:, 0]


def readout(family: Family, module: nn.Module, images: Tensor) -> Tensor:
    """ρ (B, n): how much of each token the head pools; kept until a parameter or the images change."""
    return _readout(family, module, version(module, images), images).clone()


@functools.lru_cache(maxsize=8)
@torch.no_grad()
def _readout(family: Family, module: nn.Module, version: int, images: Tensor) -> Tensor:
    recipe = describe(family, module, images)
    tokens = recipe.readout.norm(run_blocks(recipe)[0])
    rho = torch.zeros(tokens.shape[:2], dtype=tokens.dtype)
    pool, first_patch = recipe.readout.pool, recipe.prefix
    mean = 1 / (tokens.shape[1] - first_patch)
    if pool == "token":
        rho[:, 0] = 1
    elif pool == "pair":
        rho[:, :2] = 0.5
    elif pool in ("avg", "patches"):
        rho[:, first_patch:] = mean
    elif pool == "token_avg":
        rho[:, 0], rho[:, first_patch:] = 0.5, 0.5 * mean
    elif pool == "attention":
        rho[:, first_patch:] = pool_weights(recipe.readout.attention, tokens[:, first_patch:]).mean(dim=1)[:, 0]
    else:
        winners = tokens[:, first_patch:].argmax(dim=1)  # (B, d)
        share = nn.functional.one_hot(winners, tokens.shape[1] - first_patch).to(tokens.dtype).mean(dim=1)
        rho[:, first_patch:] = share if pool == "max" else 0.5 * share + 0.5 * mean
    return rho
