"""What each source token sends through a block's attention: per-head value vectors after the output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.core.parts import Attention
from vitrail.engine.trace import Trace
from vitrail.methods.base import TokenMethod
from vitrail.models.view import View


class ValueMethod(TokenMethod):
    """A norm between the mixing and the projection ties all sources together: no source has vectors of its own."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = super().unsupported(model)
        if reason is not None:
            return reason
        blocks = model.blocks
        if any(block.attention.norm is not None for block in blocks):
            return "it has a norm between attention and its projection, so no source token has a vector of its own"
        if any(block.attention.gate is not None for block in blocks):
            return "it has a gate between attention and its projection, so no source token has a vector of its own"
        if any(block.post1 is not None for block in blocks):
            return "it has a norm behind its attention, so no source token has a vector of its own"
        return None


class HeadValueMethod(ValueMethod):
    """A value method that pairs the attention of each head with the values of that head."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = super().unsupported(model)
        if reason is None and any(block.attention.talk is not None for block in model.blocks):
            return "its heads are mixed after the softmax, so no head of attention has values of its own"
        return reason


def sent(v: Tensor, attention: Attention, gamma: Tensor | None) -> Tensor:
    """f_j^h = γ ⊙ W_o^h v_j^h: (B, H, n, d/H) values → (B, H, n, d); the output bias belongs to no source."""
    weight = attention.proj.weight.unflatten(1, (attention.heads, -1))  # (d, H, d/H)
    out = torch.einsum("bhjk,dhk->bhjd", v, weight)
    return out if gamma is None else out * gamma


def sent_to(tokens: Tensor, v: Tensor, attention: Attention, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖f_j^h‖ and ⟨e_j, f_j^h⟩ with the ``tokens`` e (B, n, d), both (B, H, n), without the vectors of ``sent``."""
    weight = attention.proj.weight if gamma is None else attention.proj.weight * gamma[:, None]
    heads = weight.unflatten(1, (attention.heads, -1))  # (d, H, d/H)
    gram = torch.einsum("dhk,dhl->hkl", heads, heads)
    pulled = (tokens @ weight).unflatten(-1, (attention.heads, -1)).transpose(1, 2)  # (B, H, n, d/H)
    return ((v @ gram) * v).sum(-1).clamp(min=0).sqrt(), (pulled * v).sum(-1)


def without_bias(v: Tensor, attention: Attention) -> Tensor:
    """The values with their bias taken off."""
    if attention.v.bias is None:
        return v
    return v - attention.v.bias.unflatten(0, (attention.heads, -1))[:, None]


def attention_of(trace: Trace, layer: int) -> tuple[Attention, Tensor | None]:
    """The attention of a block, with its LayerScale, or that of the attention pool behind the last block."""
    if layer < trace.num_layers:
        block = trace.network.blocks[layer]
        return block.attention, block.scale1
    pool = trace.network.head.attention_pool
    assert pool is not None
    return pool.attention, None
