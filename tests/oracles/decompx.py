"""DecompX as its definition says: carry the share of every source token in every vector, forward through the network.

A stream is the real activation x (B, n_to, d) with its parts V (B, n_to, n_from + 1, d), the last part for the biases.
Attention maps, norm deviations and activation gates are frozen at their actual values, so every step is affine, and
after every step Σ_from V = x, which is asserted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tests.families import Family
from tests.oracles.attention import attention_weights, join_heads, mixing, pool_weights, run_block, split_heads
from tests.oracles.recipe import Affine, Attention, AttentionPool, Block, Mlp, Readout, Recipe, Unit, describe
from torch import Tensor, nn


class Stream(NamedTuple):
    x: Tensor
    parts: Tensor


@torch.no_grad()
def decompose(family: Family, module: nn.Module, images: Tensor, start_layer: int) -> tuple[Tensor, Tensor]:
    """Shares of the tokens of x_start in every logit (B, n, C), and the biases' share (B, C); start_layer is 0..L."""
    recipe = describe(family, module, images)
    logits = _read_out(recipe.readout, _encoded(recipe, start_layer), recipe.prefix)
    return logits.parts[:, 0, :-1], logits.parts[:, 0, -1]


@torch.no_grad()
def decompose_embedding(
    family: Family,
    module: nn.Module,
    images: Tensor,
    start_layer: int = 0,
    cosine: bool = True,
    patch: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The vectors (B, n, D) of the tokens of x_start in what the head reads, and that of the biases (B, D).

    `cosine`: the parts are divided by the length of the embedding. `patch`: the token of this patch is read in place of
    what the head pools.
    """
    recipe = describe(family, module, images)
    stream, readout = _encoded(recipe, start_layer), recipe.readout
    if patch is None:
        pooled = _pooled(readout, stream, recipe.prefix)
    else:
        pooled = _rows(_norm(readout.norm, stream), slice(recipe.prefix + patch, recipe.prefix + patch + 1))
    pooled = _projected(readout, pooled)
    if cosine:
        pooled = _norm(Unit(pooled.x[0, 0]), pooled)
    return pooled.parts[:, 0, :-1], pooled.parts[:, 0, -1]


def _encoded(recipe: Recipe, start_layer: int) -> Stream:
    """The tokens after the last block, as parts of those of x_start."""
    x = recipe.tokens
    for block in recipe.blocks[:start_layer]:
        x, _ = run_block(block, x)
    batch, n, width = x.shape
    parts = torch.zeros(batch, n, n + 1, width, dtype=x.dtype)
    for i in range(n):
        parts[:, i, i] = x[:, i]
    stream = _checked(x, parts)
    for block in recipe.blocks[start_layer:]:
        stream = _block(block, stream)
    return stream


def _checked(x: Tensor, parts: Tensor) -> Stream:
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-3
    error = (parts.sum(dim=2) - x).abs().max() / x.abs().max()
    assert error < tolerance, f"the parts do not add up to the activation: relative error {error:.1e}"
    return Stream(x, parts)


def _linear(layer: Affine, stream: Stream) -> Stream:
    parts = stream.parts @ layer.weight.T
    if layer.bias is not None:
        parts[:, :, -1] += layer.bias
    return _checked(layer(stream.x), parts)


def _norm(norm: nn.Module, stream: Stream) -> Stream:
    """γ ⊙ (V − mean_d V) / deviation(x) + β; an RMS norm does not centre."""
    if isinstance(norm, nn.Identity):
        return stream
    centred = isinstance(norm, nn.LayerNorm)
    x, parts = stream
    if centred:
        variance = x.var(dim=-1, correction=0, keepdim=True)
        parts = parts - parts.mean(dim=-1, keepdim=True)
    else:
        variance = x.square().mean(dim=-1, keepdim=True)
    parts = parts / (variance + norm.eps).sqrt()[:, :, None] * norm.weight
    if centred:
        parts[:, :, -1] += norm.bias
    return _checked(norm(x), parts)


def _mix(weights: Tensor, stream: Stream) -> Stream:
    """Per head Σ_s A[t, s] V[s, j]; `weights` (B, H, n_to, n_from) are frozen, heads are concatenated."""
    heads = weights.shape[1]
    values = stream.parts.unflatten(-1, (heads, -1))  # (B, s, j, H, d_h)
    parts = torch.einsum("bhts,bsjhc->btjhc", weights, values).flatten(-2)
    return _checked(join_heads(weights @ split_heads(stream.x, heads)), parts)


def _add(a: Stream, b: Stream) -> Stream:
    return _checked(a.x + b.x, a.parts + b.parts)


def _scale(factor: Tensor | float | None, stream: Stream) -> Stream:
    return stream if factor is None else _checked(stream.x * factor, stream.parts * factor)


def gate_of(act: nn.Module, z: Tensor) -> Tensor:
    """act(z) / z, written so that it has no hole at zero."""
    name = type(act).__name__.lower()
    if "quick" in name:
        return torch.sigmoid(1.702 * z)
    if "silu" in name:
        return torch.sigmoid(z)
    if "tanh" in name or getattr(act, "approximate", "none") == "tanh":
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    assert "gelu" in name, name
    return 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def _mlp(mlp: Mlp, stream: Stream) -> Stream:
    stream = _norm(mlp.first, stream)
    up = _linear(mlp.up, stream)
    if mlp.gate is None:
        hidden = _checked(mlp.act(up.x), up.parts * gate_of(mlp.act, up.x)[:, :, None])
    else:  # act(g) ⊙ b: each branch carries half of the product
        gate = _linear(mlp.gate, stream)
        through_gate = gate.parts * (gate_of(mlp.act, gate.x) * up.x)[:, :, None]
        through_up = up.parts * mlp.act(gate.x)[:, :, None]
        hidden = _checked(mlp.act(gate.x) * up.x, 0.5 * (through_gate + through_up))
    return _linear(mlp.down, _norm(mlp.inner_norm, hidden))


def _block(block: Block, stream: Stream) -> Stream:
    attention, normed = block.attention, _norm(block.norm1, stream)
    weights = attention_weights(attention, normed.x)
    mixed = _mix(mixing(attention, weights), _of_heads(attention, _linear(attention.v, normed)))
    mixed = _norm(attention.inner_norm, mixed)
    if attention.gate is not None:  # a constant factor of each channel
        gate = torch.sigmoid(attention.gate(normed.x))
        mixed = _checked(mixed.x * gate, mixed.parts * gate[:, :, None])
    branch = _linear(attention.out, mixed)
    stream = _add(stream, _changed(block, _scale(block.scale1, _norm(block.after1, branch))))
    branch = _mlp(block.mlp, normed if block.parallel else _norm(block.norm2, stream))
    return _add(stream, _changed(block, _scale(block.scale2, _norm(block.after2, branch))))


def _changed(block: Block, branch: Stream) -> Stream:
    return _checked(block.changed(branch.x), block.changed(branch.parts.flatten(2)).view_as(branch.parts))


def _of_heads(attention: Attention, values: Stream) -> Stream:
    """The norm of the values of each head."""
    if isinstance(attention.v_norm, nn.Identity):
        return values
    x, parts = (t.unflatten(-1, (attention.heads, -1)) for t in values)  # an RMS norm without weights
    r = (x.square().mean(dim=-1, keepdim=True) + attention.v_norm.eps).rsqrt()
    return _checked((x * r).flatten(-2), (parts * r[:, :, None]).flatten(-2))


def _rows(stream: Stream, rows: slice) -> Stream:
    return Stream(stream.x[:, rows], stream.parts[:, rows])


def _mean(stream: Stream) -> Stream:
    return _checked(stream.x.mean(dim=1, keepdim=True), stream.parts.mean(dim=1, keepdim=True))


def _max(stream: Stream) -> Stream:
    """Every channel is the one of the token that wins it."""
    winners = stream.x.argmax(dim=1, keepdim=True)  # (B, 1, d)
    index = winners[:, :, None].expand(-1, -1, stream.parts.shape[2], -1)
    return _checked(stream.x.amax(dim=1, keepdim=True), stream.parts.gather(1, index))


def _attention_pool(pool: AttentionPool, patches: Stream) -> Stream:
    mixed = _mix(pool_weights(pool, patches.x), _linear(pool.v, patches))
    output = _linear(pool.out, mixed)
    return _add(output, _mlp(pool.mlp, _norm(pool.norm, output)))


def _read_out(readout: Readout, stream: Stream, prefix: int) -> Stream:
    if readout.pool == "pair":
        tokens = _norm(readout.norm, stream)
        first, second = (_linear(readout.heads[i], _rows(tokens, slice(i, i + 1))) for i in (0, 1))
        return _scale(0.5, _add(first, second))
    if readout.pool == "patches":
        return _mean(_linear(readout.heads[0], _rows(_norm(readout.norm, stream), slice(prefix, None))))
    pooled = _projected(readout, _pooled(readout, stream, prefix))
    return _linear(readout.heads[0], _norm(readout.unit, pooled))


def _pooled(readout: Readout, stream: Stream, prefix: int) -> Stream:
    tokens = _norm(readout.norm, stream)
    first, patches = _rows(tokens, slice(0, 1)), _rows(tokens, slice(prefix, None))
    if readout.pool == "attention":
        return _attention_pool(readout.attention, patches)
    if readout.pool == "token_avg":
        mean = _mean(patches)
        return _checked(torch.cat([first.x, mean.x], dim=-1), torch.cat([first.parts, mean.parts], dim=-1))
    if readout.pool == "avgmax":
        return _scale(0.5, _add(_max(patches), _mean(patches)))
    return {
        "token": lambda: first,
        "avg": lambda: _mean(patches),
        "patches": lambda: _mean(patches),
        "max": lambda: _max(patches),
    }[readout.pool]()


def _projected(readout: Readout, pooled: Stream) -> Stream:
    pooled = _norm(readout.pooled_norm, pooled)
    return pooled if readout.projection is None else _linear(readout.projection, pooled)
