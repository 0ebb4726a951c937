"""The same network with the matrix products of its blocks in half precision, and gradients that keep within its range.

The stream, norms, softmax and the head stay in single precision. Half precision is fp16: it has the ten
bits of TF32 (bf16 has seven), and what its exponents lack is made up for by powers of two. Recent CPUs multiply
only bf16 faster than float32, which is enough for scores, not for gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.core.parts import Architecture, Attention, Block, Linear, Mlp
from vitrail.errors import VitrailError

HALF = torch.float16
# The narrowest network whose scores a CPU computes faster in bf16: conversions cost as much as narrower products gain.
NARROWEST = 64
# The largest gradient that enters the blocks from the head, of each image, lies between this and its double.
PEAK = 2.0**2


def is_lowered(parts: Architecture) -> bool:
    """Whether its products are in half precision."""
    return parts.blocks[0].mlp.fc1.weight.dtype == HALF


def half_is_allowed() -> bool:
    """Whether ``precision="auto"`` may use half precision: the environment can forbid it for a process."""
    choice = os.environ.get("VITRAIL_PRECISION") or "auto"
    if choice not in ("auto", "full"):
        raise VitrailError(f"the environment variable VITRAIL_PRECISION must be auto or full, but is {choice}.")
    return choice == "auto"


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether an x86 CPU has instructions for matrix products of bf16."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 may not know
    return torch.backends.mkldnn.is_available() and any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


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
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    sizes = flat.split([tensor.numel() for tensor in tensors])
    parts = [part.view(tensor.shape) for part, tensor in zip(sizes, tensors, strict=True)]
    torch._foreach_copy_(parts, tensors)  # a few kernels on CUDA, where torch.cat has one for each tensor
    return parts


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
