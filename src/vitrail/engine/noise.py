"""Noise that depends on a seed and a number alone: the same on every device and however the work is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["uniform", "normal"]

_LOW = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # odd multipliers
# On a CPU few numbers at a time stay in its caches.
_CPU_NUMBERS = 2**18


def noise(kind: Kind, shape: Sequence[int], numbers: range, seed: int, device: torch.device) -> Tensor:
    """(len(numbers), *shape), float32: U[0, 1) or N(0, 1), an independent draw for each number."""
    size = math.prod(shape)
    drawn = [_signed(_scramble_int(_scramble_int(seed) ^ number)) for number in numbers]
    keys = torch.tensor(drawn, dtype=torch.int32, device=device)
    places = _scramble(torch.arange(size + size % 2, dtype=torch.int32, device=device))
    step = max(1, _CPU_NUMBERS // size) if device.type == "cpu" else len(keys)
    parts = [_draw(kind, places, keys[i : i + step, None]) for i in range(0, len(keys), max(step, 1))]
    return torch.cat(parts)[:, :size].view(-1, *shape) if parts else torch.empty(0, *shape, device=device)


def _draw(kind: Kind, places: Tensor, keys: Tensor) -> Tensor:
    bits = _scramble(places ^ keys) >> 8 & 0xFFFFFF
    uniform = bits.to(torch.float32) * 2**-24
    if kind == "uniform":
        return uniform
    first, second = uniform.chunk(2, dim=1)  # Box and Muller
    radius = (-2 * torch.log1p(-first)).sqrt()
    angle = second * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers that leaves no pattern: xor-shifts and odd multipliers, products cut to 32 bits.

    Shifts of int32 drag the sign along: it is masked off.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * _FIRST
    x = (x ^ (x >> 15 & 0x1FFFF)) * _signed(_SECOND)
    return x ^ (x >> 16 & 0xFFFF)


def _scramble_int(x: int) -> int:
    x = ((x & _LOW) ^ (x >> 32 & _LOW)) & _LOW
    x = ((x ^ (x >> 16)) * _FIRST) & _LOW
    x = ((x ^ (x >> 15)) * _SECOND) & _LOW
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    """The int32 that has the bits of this number."""
    return x - 2**32 if x >= 2**31 else x
