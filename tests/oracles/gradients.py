"""Gradient methods, straight from their formulas (specs/whitebox.md 4.3, 4.4, 4.6; masks-and-gradients.md 4.5, 4.6).

Token maps are (B, n) over all tokens, prefix included; pixel maps are (B, H, W). `layer` l means the input x_l of
block l, 0 ≤ l ≤ L.
"""

from __future__ import annotations

import numpy as np
import torch
from tests.families import Family
from tests.oracles.attention import readout
from tests.oracles.network import Recorded, head_rows, pixel_gradient, run
from torch import Tensor, nn


def gradient(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    kind: str = "sum",
    layer: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """ "sum": Σ_k g_jk; "l2": ‖g_j‖₂, with g = ∂y/∂x_l."""
    g = run(family, module, images, target, frozen=frozen, output=output).gx[layer]
    return g.sum(dim=-1) if kind == "sum" else g.square().sum(dim=-1).sqrt()


def attention_gradient(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    kind: str = "mean",
    layer: int | None = None,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """ρᵀ of the mean over heads of G, |G| or ReLU(G) of block `layer`.

    None is the last block; L is an attention pool, whose single row is read as it is.
    """
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    G = recorded.G[recorded.depth - 1 if layer is None else layer]
    G = {"mean": G, "abs": G.abs(), "relu": G.clamp(min=0)}[kind]
    return head_rows(readout(family, module, images), G).mean(dim=1)


def ixg(recorded: Recorded, layer: int) -> Tensor:
    """Σ_k x_jk g_jk at x_l."""
    return (recorded.x[layer] * recorded.gx[layer]).sum(dim=-1)


def input_x_gradient(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    return ixg(run(family, module, images, target, frozen=frozen, output=output), layer)


def full_grad(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """IxG(x_l) + the bias maps of the blocks ≥ l + those of the end layers; pooled biases have no token."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    total = ixg(recorded, layer) + recorded.end_bias
    for l in range(layer, recorded.depth):
        total = total + recorded.bias[l]
    return total


def full_grad_plus(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    start: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """SkipPLUS equations 5 and 6 with the end layers: Σ_{l≥start} IxG(x_l), every bias from `start` on once."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    total = recorded.end_bias
    for l in range(start, recorded.depth):
        total = total + ixg(recorded, l) + recorded.bias[l]
    return total


def att_ixg(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int = 0,
    pairing: str = "input",
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """AttnFrom_j · IxG: A_l with x_l ("input") or with x_{l+1} ("output"); AttnFrom is the mean over heads and rows."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    attention_from = recorded.A[layer].mean(dim=(1, 2))
    return attention_from * ixg(recorded, layer if pairing == "input" else layer + 1)


def integrated_gradients(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    steps: int = 50,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """Gauss–Legendre on [0, 1] from the zero image: Σ_channels x · Σ_k w_k ∂y/∂pixels(α_k x); (B, H, W), signed."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(images)
    for node, weight in zip(nodes, weights, strict=True):
        alpha = (1 + node) / 2
        grad = pixel_gradient(family, module, alpha * images, target, frozen=frozen, output=output)
        total = total + weight / 2 * grad
    return (images * total).sum(dim=1)


def expected_gradients(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    references: list[Tensor],
    alphas: list[float],
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """Erion et al. 2021: the mean over draws (x', α) of Σ_channels (x − x') · ∂y/∂pixels(x' + α(x − x')); (B, H, W).

    `references` (3, H, W) and `alphas` are the draws, the same for all images.
    """
    total = torch.zeros_like(images)
    for reference, alpha in zip(references, alphas, strict=True):
        way = images - reference
        total = total + way * pixel_gradient(
            family, module, reference + alpha * way, target, frozen=frozen, output=output
        )
    return (total / len(alphas)).sum(dim=1)


def smooth_grad(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    noises: list[Tensor],
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """Σ_channels of the mean over the given noises ε_k (B, 3, H, W) of |∂y/∂pixels(x + ε_k)|; (B, H, W)."""
    total = torch.zeros_like(images)
    for noise in noises:
        total = total + pixel_gradient(family, module, images + noise, target, frozen=frozen, output=output).abs()
    return (total / len(noises)).sum(dim=1)
