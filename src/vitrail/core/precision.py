"""The same network with the matrix products of its blocks in half precision, and gradients that keep within its range.

The stream, norms, softmax and the head stay in single precision. Half precision is fp16: it has the ten
bits of TF32 (bf16 has seven), and what its exponents lack is made up for by powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.core.parts import Architecture, Attention, Block, Linear, Mlp

HALF = torch.float16
# The largest gradient that enters the blocks from the head, of each image, lies between this and its double.
PEAK = 2.0**2


def is_lowered(parts: Architecture) -> bool:
    """Whether its products are in half precision."""
    return parts.blocks[0].mlp.fc1.weight.dtype == HALF


class Scaling:
    """Multiplies the gradients of each image by a power of two where they enter the blocks, and takes it out again."""

    factor: Tensor | None = None  # (B,): of the last backward pass

    def enter(self, x: Tensor) -> Tensor:
        """x itself, whose gradient is multiplied."""
        scaled: Tensor = _Scaled.apply(x, self)
        return scaled

    def leave(self, gradient: Tensor) -> Tensor:
        """The gradient (B, …) as it is without the factor, in single precision."""
        assert self.factor is not None
        return gradient / self.factor.view(-1, *[1] * (gradient.ndim - 1))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        peak = grad.abs().flatten(1).amax(1)
        exponent = torch.where((peak > 0) & peak.isfinite(), torch.frexp(peak).exponent, 0)
        ctx.scaling.factor = factor = torch.ldexp(torch.full_like(peak, 2 * PEAK), -exponent)
        return grad * factor.view(-1, *[1] * (grad.ndim - 1)), None


def lowered(parts: Architecture, dtype: torch.dtype = HALF) -> Architecture:
    """Copies of the blocks' and the embedding's linear layers in ``dtype``, with q, k and v fused; all else unchanged.

    Autocast would convert each of them at every pass; here all are converted once.
    """
    linears = [linear for block in parts.blocks for linear in _linears(block)]
    weights = _converted([linear.weight for linear in linears], dtype)
    biases = _converted([_bias(linear) for linear in linears], dtype)
    copies = iter([Linear(*both) for both in zip(weights, biases, strict=True)])
    blocks = tuple(_rebuilt(block, lambda: next(copies)) for block in parts.blocks)
    weight, bias = parts.embedding.weight.to(dtype), parts.embedding.bias
    embedding = replace(parts.embedding, weight=weight, bias=None if bias is None else bias.to(dtype))
    return replace(parts, embedding=embedding, blocks=blocks)


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies that are contiguous in memory."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).to(dtype)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _bias(linear: Linear) -> Tensor:
    return linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.weight.shape[0])


def _linears(block: Block) -> list[Linear]:
    attention, mlp = block.attention, block.mlp
    gate = [] if attention.gate is None else [attention.gate]
    up = [] if mlp.up is None else [mlp.up]
    return [attention.q, attention.k, attention.v, attention.proj, *gate, mlp.fc1, *up, mlp.fc2]


def _rebuilt(block: Block, take: Callable[[], Linear]) -> Block:
    """The block with other linear layers, taken in the order of ``_linears``."""
    q, k, v, proj = (take() for _ in range(4))
    gate = None if block.attention.gate is None else take()
    attention: Attention = replace(block.attention, q=q, k=k, v=v, proj=proj, gate=gate, together=_fused(q, k, v))
    fc1 = take()
    up = None if block.mlp.up is None else take()
    mlp: Mlp = replace(block.mlp, fc1=fc1, up=up, fc2=take())
    return replace(block, attention=attention, mlp=mlp)


def _fused(q: Linear, k: Linear, v: Linear) -> Linear:
    """One linear layer over the memory of three, which ``_converted`` made contiguous."""
    rows, width = sum(linear.weight.shape[0] for linear in (q, k, v)), q.weight.shape[1]
    assert q.bias is not None
    return Linear(q.weight.as_strided((rows, width), (width, 1)), q.bias.as_strided((rows,), (1,)))
