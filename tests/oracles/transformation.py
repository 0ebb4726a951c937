"""VTranM / TokenTM with full matrices (specs/whitebox.md 4.1; equations 8–18 of the paper)."""

from __future__ import annotations

import torch
from tests.families import Family
from tests.oracles.attention import readout
from tests.oracles.network import Recorded, head_rows, run
from tests.oracles.recipe import Affine
from torch import Tensor, nn


def cosine(e: Tensor, t: Tensor) -> Tensor:
    """cos over the last axis; zero where a vector is zero."""
    lengths = e.norm(dim=-1) * t.norm(dim=-1)
    return (e * t).sum(dim=-1) / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def necc_of(e: Tensor, t: Tensor) -> Tensor:
    """Equation 12: exp(cos(e_j, t_j)) over its sum over the tokens, the axis before the last."""
    similarity = cosine(e, t).exp()
    return similarity / similarity.sum(dim=-1, keepdim=True)


def weights_of(e: Tensor, t: Tensor, length: bool, necc: bool) -> Tensor:
    """Equation 13: w_j = (‖t_j‖/‖e_j‖) · NECC(j), each factor on request."""
    w = torch.ones_like(t[..., 0])
    if length:
        w = w * t.norm(dim=-1) / e.norm(dim=-1)
    return w * necc_of(e, t) if necc else w


def moved(v: Tensor, out: Affine, scale: Tensor | None) -> Tensor:
    """t_j^h = γ1 ⊙ W_o^h v_j^h (B, H, n, d)."""
    per_head = out.weight.detach().unflatten(1, (v.shape[1], -1))  # (d, H, d_h)
    t = torch.einsum("bhjc,dhc->bhjd", v, per_head)
    return t if scale is None else t * scale.detach()


def values(recorded: Recorded, l: int, value_bias: bool) -> Tensor:
    """v_j^h (B, H, n, d_h), with or without b_v. LN1's β belongs to the attention's input and stays."""
    if value_bias:
        return recorded.v[l]
    is_block = l < recorded.depth
    affine = recorded.recipe.blocks[l].attention.v if is_block else recorded.recipe.readout.attention.v
    if affine.bias is None:
        return recorded.v[l]
    return recorded.v[l] - affine.bias.detach().unflatten(0, (recorded.v[l].shape[1], -1))[None, :, None, :]


def attention_update(
    recorded: Recorded, l: int, length: bool, necc: bool, value_bias: bool = True, reference: str = "stream"
) -> Tensor:
    """mean_h[ReLU(G^h) ⊙ (A^h diag(w^h))] (B, n, n), without the identity; (B, 1, N) of an attention pool."""
    if l < recorded.depth:
        block = recorded.recipe.blocks[l]
        assert isinstance(block.attention.inner_norm, nn.Identity), "an inner norm mixes the sources"
        out, scale = block.attention.out, block.scale1
        e = recorded.x[l] if reference == "stream" else recorded.u[l]
    else:
        out, scale = recorded.recipe.readout.attention.out, None
        e = (recorded.x[-1] if reference == "stream" else recorded.normed)[:, recorded.prefix :]
    t = moved(values(recorded, l, value_bias), out, scale)
    w = weights_of(e[:, None], t, length, necc)  # (B, H, n)
    return (recorded.G[l].clamp(min=0) * (recorded.A[l] * w[:, :, None, :])).mean(dim=1)


def mlp_update(recorded: Recorded, l: int, length: bool, necc: bool, reference: str = "stream") -> Tensor:
    """diag(w) (B, n, n): one head, A = I, no gradient; t = the MLP branch, e = the stream after attention."""
    e = recorded.mid[l] if reference == "stream" else recorded.recipe.blocks[l].norm2(recorded.mid[l]).detach()
    return torch.diag_embed(weights_of(e, recorded.mlp_out[l], length, necc))


def vtranm(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    aggregate: bool = True,
    length: bool = True,
    necc: bool = True,
    value_bias: bool = True,
    reference: str = "stream",
    mlp_reference: str = "stream",
    output: str = "logit",
    frozen: bool = False,
) -> Tensor:
    """ρᵀ U_ffn^{L-1} U_att^{L-1} ··· U_ffn^0 U_att^0 C⁰ with C⁰ = diag‖x_0‖, or I without length (B, n).

    aggregate=False: ρᵀ U_att^0 C⁰. An attention pool starts with its own map, without identity and without its MLP,
    which would only multiply by one number per image; its NECC runs over the patches. `reference="normed"` compares
    with LN1(x_l), of a pool with the final norm; the MLP's e_j stays the stream unless `mlp_reference="normed"`.
    """
    recorded = run(family, module, images, target, output=output, frozen=frozen)
    batch, n, _ = recorded.x[0].shape
    identity = torch.eye(n, dtype=images.dtype).expand(batch, -1, -1)
    C = torch.diag_embed(recorded.x[0].norm(dim=-1)) if length else identity
    row = readout(family, module, images)
    if not aggregate:
        first = identity + attention_update(recorded, 0, length, necc, value_bias, reference)
        return torch.einsum("bi,bij->bj", row, first @ C)
    for l in range(recorded.depth):
        C = (identity + attention_update(recorded, l, length, necc, value_bias, reference)) @ C
        C = (identity + mlp_update(recorded, l, length, necc, mlp_reference)) @ C
    if recorded.has_pool:
        last = attention_update(recorded, recorded.depth, length, necc, value_bias, reference)
        row = head_rows(row, last[:, None])[:, 0]
    return torch.einsum("bi,bij->bj", row, C)
