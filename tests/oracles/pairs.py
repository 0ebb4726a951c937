"""The dot product of two embeddings, pair by pair: every vector of one picture with every vector of the other."""

from __future__ import annotations

import torch
from torch import Tensor

# The vectors (n, D) of all tokens of a picture, prefix first, and that of its biases (D,).
Vectors = tuple[Tensor, Tensor]


def split(first: Vectors, second: Vectors, prefix: int) -> tuple[Tensor, float]:
    """The shares of pairs of patches (N_a, N_b), and the sum of all other pairs."""
    sides = [[*tokens.tolist(), bias.tolist()] for tokens, bias in (first, second)]
    count = len(sides[0]) - prefix - 1, len(sides[1]) - prefix - 1
    shares, rest = torch.zeros(count, dtype=first[0].dtype), 0.0
    for i, a in enumerate(sides[0]):
        for j, b in enumerate(sides[1]):
            share = sum(p * q for p, q in zip(a, b, strict=True))
            if 0 <= i - prefix < count[0] and 0 <= j - prefix < count[1]:
                shares[i - prefix, j - prefix] = share
            else:
                rest += share
    return shares, rest
