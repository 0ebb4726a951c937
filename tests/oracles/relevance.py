"""GenAtt, AttCAM, Conservative LRP and AttnLRP (specs/whitebox.md 4.7, 4.8, 4.15, 4.16), with full n × n matrices."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.families import Family
from tests.oracles.attention import readout
from tests.oracles.gradients import ixg
from tests.oracles.network import FROZEN as NETWORK_FROZEN
from tests.oracles.network import (
    PLAIN,
    Recorded,
    Rules,
    Tape,
    forward,
    head_rows,
    last_attention,
    run,
    scalar,
)
from tests.oracles.recipe import describe
from torch import Tensor, nn

CONSERVATIVE = Rules("detached", freeze_norms=True)  # activations and gated products keep their ordinary gradient
ATTN_LRP = Rules("uniform", freeze_norms=True, freeze_gates=True, halve_products=True)


def gradient_weighted(recorded: Recorded, l: int) -> Tensor:
    """Ā_l = mean_h ReLU(A_l ⊙ G_l): (B, n, n), or (B, 1, N) of an attention pool."""
    return (recorded.A[l] * recorded.G[l]).clamp(min=0).mean(dim=1)


def gen_att_matrix(recorded: Recorded) -> Tensor:
    """R ← R + Ā_l R from R = I, over the blocks: (B, n, n)."""
    batch, n, _ = recorded.x[0].shape
    R = torch.eye(n, dtype=recorded.x[0].dtype).expand(batch, -1, -1)
    for l in range(recorded.depth):
        R = R + gradient_weighted(recorded, l) @ R
    return R


def gen_att(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """ρᵀR; with an attention pool Ā_pool R, the pool's own gradient-weighted map without an identity."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    R = gen_att_matrix(recorded)
    row = readout(family, module, images)
    if recorded.has_pool:
        row = nn.functional.pad(gradient_weighted(recorded, recorded.depth)[:, 0], (recorded.prefix, 0))
    return torch.einsum("bi,bij->bj", row, R)


def gen_att_layer(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """ρᵀĀ_l; layer L is an attention pool's own row."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    return head_rows(readout(family, module, images), gradient_weighted(recorded, layer)[:, None])[:, 0]


def legrad(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    start: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """Σ_l mean over heads and queries of ReLU(∂s_l/∂A_l), s_l the score of the network that ends after block l."""
    recipe = describe(family, module, images)
    total = torch.zeros_like(recipe.tokens[..., 0])
    for l in range(start, len(recipe.blocks)):
        tape = Tape()
        ended = replace(recipe, blocks=recipe.blocks[: l + 1])
        logits = forward(ended, recipe.tokens.detach().requires_grad_(), NETWORK_FROZEN if frozen else PLAIN, tape)
        (G,) = torch.autograd.grad(scalar(logits, target, output).sum(), tape.kept["A"][l])
        total = total + G.clamp(min=0).mean(dim=(1, 2))
    return total


def attn_cam(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int | None = None,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """ρᵀM, the map of query i being M_ij = mean_h α_hi A_h[i, j] with α_hi the mean over patch keys of G_h[i, ·].

    A pool has one query, whose map is the result. None: the last attention, a pool's if any.
    """
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    rho, layer = readout(family, module, images), last_attention(recorded, layer)
    A, G = recorded.A[layer], recorded.G[layer]
    patches = rho.shape[1] - recorded.prefix
    M = torch.zeros_like(A[:, :1])
    for i in range(A.shape[2]):
        alpha = G[:, :, i, -patches:].mean(dim=-1)
        M[:, 0, i] = (alpha[:, :, None] * A[:, :, i]).mean(dim=1)
    return head_rows(rho, M)[:, 0]


def attn_cam_authors(family: Family, module: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """Chefer's form: ReLU, then min–max over the patches of the last attention's map; zero on prefixes, and if flat."""
    prefix = family.prefix
    m = attn_cam(family, module, images, target)[:, prefix:].clamp(min=0)
    m = m - m.amin(dim=1, keepdim=True)
    top = m.amax(dim=1, keepdim=True)
    return nn.functional.pad(m / torch.where(top > 0, top, torch.ones_like(top)), (prefix, 0))


def conservative_lrp(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, *, layer: int = 0, output: str = "logit"
) -> Tensor:
    """x_l ⊙ gradient with A and the norms' deviations constant, everything else ordinary."""
    return ixg(run(family, module, images, target, rules=CONSERVATIVE, output=output), layer)


def attn_lrp(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, *, layer: int = 0, output: str = "logit"
) -> Tensor:
    """x_l ⊙ gradient under AttnLRP.

    Norm deviations (those of q and k and inner norms too) constant, activations by their gate, gated products halved,
    v × ½, q and k × ¼ after their norms and rotation, softmax by its Jacobian. An attention pool has the same factors:
    v × ½, k × ¼; the half that belongs to its learned query is lost.
    """
    return ixg(run(family, module, images, target, rules=ATTN_LRP, output=output), layer)
