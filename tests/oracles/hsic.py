"""HSIC attribution, literally (specs/whitebox.md 5): dependence between one cell's presence and the output.

Readings: the output kernel is exp(−(y − y')² / (2 b²)); b is |median of the outputs|, the mean of the two middle values
for an even number, and 1 where that is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def input_kernel(column: Tensor) -> Tensor:
    """(n, n): 1 + (½ − (x − x')²)."""
    n = len(column)
    return torch.tensor([[1.5 - float(column[i] - column[j]) ** 2 for j in range(n)] for i in range(n)]).double()


def bandwidth(outputs: Tensor) -> float:
    """The median of the outputs themselves, not of their distances."""
    values = sorted(outputs.double().tolist())
    n = len(values)
    median = (values[(n - 1) // 2] + values[n // 2]) / 2
    return abs(median) if median != 0 else 1.0


def output_kernel(outputs: Tensor, width: float) -> Tensor:
    values = outputs.double().tolist()
    rows = [[math.exp(-((a - b) ** 2) / (2 * width**2)) for b in values] for a in values]
    return torch.tensor(rows, dtype=torch.float64)


def hsic(designs: Tensor, outputs: Tensor, width: float | None = None) -> Tensor:
    """(cells,): tr(HKH · HLH) / n of every cell, for designs (n, cells) of zeros and ones and outputs (n,)."""
    n = len(designs)
    H = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n
    L = H @ output_kernel(outputs, bandwidth(outputs) if width is None else width) @ H
    scores = [torch.trace(H @ input_kernel(column) @ H @ L) / n for column in designs.double().T]
    return torch.stack(scores)
