"""The same network with the matrix products of its blocks in lower precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.core.parts import Architecture, Attention, Block, Linear, Mlp


def lowered(parts: Architecture, dtype: torch.dtype) -> Architecture:
    """Copies of the blocks' linear layers in ``dtype``, with q, k and v fused; norms, embedding and head are unchanged.

    Autocast would convert each of them at every pass; here all are converted once.
    """
    linears = [linear for block in parts.blocks for linear in _linears(block)]
    weights = _converted([linear.weight for linear in linears], dtype)
    biases = _converted([_bias(linear) for linear in linears], dtype)
    copies = iter([Linear(*both) for both in zip(weights, biases, strict=True)])
    return replace(parts, blocks=tuple(_rebuilt(block, lambda: next(copies)) for block in parts.blocks))


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
