"""TAM, BT-H and BT-T (specs/masks-and-gradients.md 4.2, 4.3).

`start_layer` is the first block used, from 0; None: the authors' choice, at most the last block.

The last attention is the last block's, or an attention pool's; the CLS row is ρᵀ, or the pool's only row. A pool starts
the product with its own map, without an identity. ρ and the attention maps are those of the unscaled image.
"""

from __future__ import annotations

import functools

import torch
from tests.families import Family
from tests.oracles.attention import join_heads, readout
from tests.oracles.network import Recorded, head_rows, run
from torch import Tensor, nn

TAM_START, BT_H_START, BT_T_START = 4, 3, 5  # the authors' first blocks

scaled = functools.lru_cache(maxsize=16)(torch.mul)  # the same tensor again: its recording is kept


def scaled_gradient(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, steps: int, **how: bool
) -> Tensor:
    """Ḡ = (1/T) Σ_k G_last(α_k x), α_k = k/(T−1), both ends included; with T = 1 only the zero image."""
    total = 0
    for k in range(steps):
        alpha = k / (steps - 1) if steps > 1 else 0.0
        total = total + run(family, module, scaled(images, alpha), target, **how).G[-1]
    return total / steps


def weights(family: Family, module: nn.Module, images: Tensor, target: Tensor, steps: int, **how: bool) -> Tensor:
    """W = mean_h clamp⁺(Ḡ), (B, n, n) or a pool's (B, 1, N): clamped after the mean over steps, before heads."""
    return scaled_gradient(family, module, images, target, steps, **how).clamp(min=0).mean(dim=1)


def weight_row(family: Family, module: nn.Module, images: Tensor, target: Tensor, steps: int, **how: bool) -> Tensor:
    """The read-out row of W (B, n)."""
    W = weights(family, module, images, target, steps, **how)
    return head_rows(readout(family, module, images), W[:, None])[:, 0]


def first_block(recorded: Recorded, start_layer: int | None, published: int) -> int:
    return min(published, recorded.depth - 1) if start_layer is None else start_layer


def tam_state(family: Family, module: nn.Module, images: Tensor, target: Tensor, start_layer: int | None) -> Tensor:
    """v = ρᵀ mean_h A_last, then v ← v · mean_h A_l + v down to start_layer; its sum is 2^(number of steps)."""
    recorded = run(family, module, images, target)
    v = head_rows(readout(family, module, images), recorded.A[-1]).mean(dim=1)
    for l in reversed(range(first_block(recorded, start_layer, TAM_START), len(recorded.A) - 1)):
        v = torch.einsum("bi,bij->bj", v, recorded.A[l].mean(dim=1)) + v
    return v


def tam(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    steps: int = 20,
    start_layer: int | None = 0,
    frozen: bool = False,
) -> Tensor:
    """v ⊙ W."""
    v = tam_state(family, module, images, target, start_layer)
    return v * weight_row(family, module, images, target, steps, frozen=frozen)


def head_mixture(recorded: Recorded, l: int) -> Tensor:
    """Â = Σ_h I_h A_h, I_h = mean_ij |A_hᵀ G_h|_ij normalised to sum 1 over heads; equal heads if all vanish."""
    A, G = recorded.A[l], recorded.G[l]
    importance = (A.transpose(-1, -2) @ G).abs().mean(dim=(-1, -2))  # (B, H)
    total = importance.sum(dim=1, keepdim=True)
    equal = torch.full_like(importance, 1 / importance.shape[1])
    weights = torch.where(total > 0, importance / torch.where(total > 0, total, 1.0), equal)
    return torch.einsum("bh,bhij->bij", weights, A)


def value_ratio(recorded: Recorded, l: int, layer_scale: bool = True) -> Tensor:
    """r_j = ‖γ1 ⊙ W_o v_j‖₂ / ‖z_j‖₂ (B, n): value vectors joined over heads, no b_o; z = x_l, before any norm."""
    if l < recorded.depth:
        block = recorded.recipe.blocks[l]
        out, scale, z = block.attention.out, block.scale1, recorded.x[l]
        assert isinstance(block.attention.inner_norm, nn.Identity), "an inner norm mixes the sources"
    else:
        out, scale, z = recorded.recipe.readout.attention.out, None, recorded.x[-1][:, recorded.prefix :]
    moved = join_heads(recorded.v[l]) @ out.weight.detach().T
    if scale is not None and layer_scale:
        moved = moved * scale.detach()
    return moved.norm(dim=-1) / z.norm(dim=-1)


def weighted_values(recorded: Recorded, l: int, layer_scale: bool = True) -> Tensor:
    """mean_h A · diag(r)."""
    return recorded.A[l].mean(dim=1) * value_ratio(recorded, l, layer_scale)[:, None, :]


def product(recorded: Recorded, maps: list[Tensor]) -> Tensor:
    """R ← R + M_l R from R = I over the given blocks' maps (B, n, n)."""
    batch, n, _ = recorded.x[0].shape
    R = torch.eye(n, dtype=recorded.x[0].dtype).expand(batch, -1, -1)
    for M in maps:
        R = R + M @ R
    return R


def _finish(recorded: Recorded, maps: list[Tensor], rho: Tensor, W: Tensor) -> Tensor:
    """ρᵀ (W ⊙ |R|). A pool's map, the last of `maps`, times R has one row, that of the pool's query."""
    if recorded.has_pool:
        row, W_row = (head_rows(rho, M[:, None])[:, 0] for M in (maps[-1], W))
        return W_row * torch.einsum("bi,bij->bj", row, product(recorded, maps[:-1])).abs()
    return torch.einsum("bi,bij->bj", rho, W * product(recorded, maps).abs())


def bt_h(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    steps: int = 20,
    start_layer: int | None = 0,
    frozen: bool = False,
) -> Tensor:
    """R ← R + Â_l R with the head mixture Â."""
    recorded = run(family, module, images, target, frozen=frozen)
    first = first_block(recorded, start_layer, BT_H_START)
    maps = [head_mixture(recorded, l) for l in range(first, len(recorded.A))]
    W = weights(family, module, images, target, steps, frozen=frozen)
    return _finish(recorded, maps, readout(family, module, images), W)


def bt_t(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    steps: int = 20,
    start_layer: int | None = 0,
    frozen: bool = False,
    layer_scale: bool = True,
) -> Tensor:
    """R ← R + (mean_h A_l) diag(r_l) R."""
    recorded = run(family, module, images, target, frozen=frozen)
    first = first_block(recorded, start_layer, BT_T_START)
    maps = [weighted_values(recorded, l, layer_scale) for l in range(first, len(recorded.A))]
    W = weights(family, module, images, target, steps, frozen=frozen)
    return _finish(recorded, maps, readout(family, module, images), W)
