"""Shapley values by enumeration, KernelSHAP and LIME as explicit least squares (specs/whitebox.md 5).

A coalition is a boolean vector over M players; `value` maps one to a number. Readings:
* KernelSHAP: the empty and the full coalition are the constraint, so they are left out of the sum where they are given;
  weights are the Shapley kernel of each listed coalition unless given (coalitions drawn from the kernel: ones);
* LIME: the distance is to the unperturbed sample, all ones; an all-zero sample is at distance 1; weights are
  exp(−D²/σ²) with no square root and no factor 2; the intercept is not penalised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

Value = Callable[[Tensor], float]


def subsets(players: int) -> Tensor:
    """(2^M, M) boolean, in binary order, the first player the most significant."""
    return torch.tensor(list(itertools.product([False, True], repeat=players)), dtype=torch.bool)


def exact(value: Value, players: int) -> Tensor:
    """φ_i = Σ over S without i of |S|! (M − |S| − 1)! / M! · (v(S ∪ i) − v(S))."""
    table = {tuple(row.tolist()): float(value(row)) for row in subsets(players)}
    phi = torch.zeros(players, dtype=torch.float64)
    for coalition, without in table.items():
        size = sum(coalition)
        for i in range(players):
            if not coalition[i]:
                joined = (*coalition[:i], True, *coalition[i + 1 :])
                weight = math.factorial(size) * math.factorial(players - size - 1) / math.factorial(players)
                phi[i] += weight * (table[joined] - without)
    return phi


def shapley_kernel(players: int, size: int) -> float:
    """(M − 1) / (C(M, s) · s · (M − s)) for 0 < s < M."""
    return (players - 1) / (math.comb(players, size) * size * (players - size))


def kernel_shap(coalitions: Tensor, values: Tensor, empty: float, full: float, weights: Tensor | None = None) -> Tensor:
    """φ (M,): minimises Σ w_S (v(S) − v(∅) − Σ_{i∈S} φ_i)² subject to Σ φ = v(N) − v(∅).

    Solved with a Lagrange multiplier; the coalitions must determine φ.
    """
    players = coalitions.shape[1]
    normal = torch.zeros(players + 1, players + 1, dtype=torch.float64)
    right = torch.zeros(players + 1, dtype=torch.float64)
    for row, coalition in enumerate(coalitions.to(torch.float64)):
        size = int(coalition.sum())
        if size in (0, players):
            continue
        weight = shapley_kernel(players, size) if weights is None else float(weights[row])
        normal[:players, :players] += weight * torch.outer(coalition, coalition)
        right[:players] += weight * (float(values[row]) - empty) * coalition
    normal[players, :players] = normal[:players, players] = 1
    right[players] = full - empty
    return torch.linalg.solve(normal, right)[:players]


def lime_weights(samples: Tensor, sigma: float = 0.25) -> Tensor:
    """exp(−D²/σ²), D = 1 − cos(sample, all ones) = 1 − √(k/M) for a sample with k ones."""
    weights = []
    for sample in samples.to(torch.float64):
        norms = sample.norm() * math.sqrt(len(sample))
        distance = 1 - float(sample.sum() / norms) if norms > 0 else 1.0
        weights.append(math.exp(-(distance**2) / sigma**2))
    return torch.tensor(weights, dtype=torch.float64)


def lime(samples: Tensor, values: Tensor, sigma: float = 0.25, ridge: float = 1.0) -> tuple[Tensor, float]:
    """(β (M,), intercept): minimises Σ_s w_s (y_s − β₀ − β·z_s)² + ridge ‖β‖²; weights are not normalised."""
    weights = lime_weights(samples, sigma)
    players = samples.shape[1]
    normal = torch.zeros(players + 1, players + 1, dtype=torch.float64)
    right = torch.zeros(players + 1, dtype=torch.float64)
    for sample, value, weight in zip(samples.to(torch.float64), values, weights, strict=True):
        row = torch.cat([sample, torch.ones(1, dtype=torch.float64)])
        normal += weight * torch.outer(row, row)
        right += weight * float(value) * row
    for i in range(players):
        normal[i, i] += ridge
    solution = torch.linalg.solve(normal, right)
    return solution[:players], float(solution[players])
