"""AttIN, GlobEnc and ALTI (specs/whitebox.md 4.10–4.12): norms of the vectors V_ij that token j sends to token i.

Layer maps are (B, n, n), [to, from]. Forward only. Networks with an inner norm before the projection are out of scope.
The read-out row is ρᵀ everywhere, for an attention pool too.
"""

from __future__ import annotations

import torch
from tests.families import Family
from tests.oracles.attention import attention_weights, mixing, readout, run_block, split_heads
from tests.oracles.recipe import Block, describe
from torch import Tensor, nn


def linear_part(norm: nn.Module, x: Tensor, statistics: Tensor) -> Tensor:
    """γ ⊙ (x − mean x) / deviation(statistics), without β; an RMS norm does not centre. Last axis is the channel's."""
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(dim=-1, keepdim=True)
        variance = statistics.var(dim=-1, correction=0, keepdim=True)
    else:
        variance = statistics.square().mean(dim=-1, keepdim=True)
    return x / (variance + norm.eps).sqrt() * norm.weight


def moved_values(block: Block, x: Tensor, value_bias: bool = True) -> Tensor:
    """f_j^h = γ1 ⊙ W_o^h (W_v^h LN1(x)_j + b_v^h): (B, H, n, d). Without value_bias neither LN1's β nor b_v."""
    attention = block.attention
    assert isinstance(attention.inner_norm, nn.Identity), "an inner norm mixes the sources"
    values = attention.v(block.norm1(x)) if value_bias else linear_part(block.norm1, x, x) @ attention.v.weight.T
    values = split_heads(values, attention.heads)
    out = attention.out.weight.unflatten(1, (attention.heads, -1))  # (d, H, d_h)
    moved = torch.einsum("bhjc,dhc->bhjd", values, out)
    return moved if block.scale1 is None else moved * block.scale1


def attention_vectors(block: Block, x: Tensor, value_bias: bool = True) -> Tensor:
    """Σ_h A_ij^h f_j^h (B, n, n, d)."""
    weights = mixing(block.attention, attention_weights(block.attention, block.norm1(x)))
    return torch.einsum("bhij,bhjd->bijd", weights, moved_values(block, x, value_bias))


def residual_vectors(block: Block, x: Tensor, value_bias: bool = True) -> Tensor:
    """Σ_h A_ij^h f_j^h + δ_ij x_i."""
    V = attention_vectors(block, x, value_bias).clone()
    for i in range(x.shape[1]):
        V[:, i, i] += x[:, i]
    return V


def middle(block: Block, x: Tensor) -> Tensor:
    """The stream after attention."""
    weights = mixing(block.attention, attention_weights(block.attention, block.norm1(x)))
    branch = torch.einsum("bhij,bhjd->bid", weights, moved_values(block, x))
    bias = block.attention.out.bias
    if bias is not None:
        branch = branch + (bias if block.scale1 is None else block.scale1 * bias)
    return x + block.changed(branch)


def globenc_vectors(block: Block, x: Tensor, value_bias: bool = True, layer_scale: bool = True) -> Tensor:
    """V + γ2 ⊙ LN2frozen(V): the MLP replaced by the identity, LN2 with the deviation of the real stream, no β."""
    V = residual_vectors(block, x, value_bias)
    branch = linear_part(block.norm2, V, middle(block, x)[:, :, None])
    branch = branch if block.scale2 is None or not layer_scale else block.scale2 * branch
    return V + block.changed(branch.flatten(2)).view_as(branch)


@torch.no_grad()
def inputs(family: Family, module: nn.Module, images: Tensor) -> tuple[list[Block], list[Tensor]]:
    """The blocks, and x_0 … x_L."""
    recipe = describe(family, module, images)
    stream = [recipe.tokens]
    for block in recipe.blocks:
        stream.append(run_block(block, stream[-1])[0])
    return recipe.blocks, stream


@torch.no_grad()
def attin_maps(family: Family, module: nn.Module, images: Tensor, *, value_bias: bool = True) -> list[Tensor]:
    """‖Σ_h A_ij^h f_j^h‖₂."""
    blocks, stream = inputs(family, module, images)
    return [attention_vectors(b, x, value_bias).norm(dim=-1) for b, x in zip(blocks, stream, strict=False)]


@torch.no_grad()
def attin_residual_maps(family: Family, module: nn.Module, images: Tensor, *, value_bias: bool = True) -> list[Tensor]:
    """‖Σ_h A_ij^h f_j^h + δ_ij x_i‖₂."""
    blocks, stream = inputs(family, module, images)
    return [residual_vectors(b, x, value_bias).norm(dim=-1) for b, x in zip(blocks, stream, strict=False)]


@torch.no_grad()
def globenc_maps(
    family: Family, module: nn.Module, images: Tensor, *, value_bias: bool = True, layer_scale: bool = True
) -> list[Tensor]:
    """‖V_ij‖₂ of `globenc_vectors`, not normalised. SkipPLUS's code has value_bias=False."""
    blocks, stream = inputs(family, module, images)
    return [globenc_vectors(b, x, value_bias, layer_scale).norm(dim=-1) for b, x in zip(blocks, stream, strict=False)]


def contributions(y: Tensor, V: Tensor) -> Tensor:
    """c_ij = ReLU(‖y_i‖₁ − ‖y_i − V_ij‖₁), rows divided by their sum; a row with no positive entry is one-hot at i."""
    c = (y.abs().sum(dim=-1)[:, :, None] - (y[:, :, None] - V).abs().sum(dim=-1)).clamp(min=0)
    for image in c:
        for i in range(len(image)):
            if image[i].sum() > 0:
                image[i] /= image[i].sum()
            else:
                image[i, i] = 1
    return c


@torch.no_grad()
def alti_maps(family: Family, module: nn.Module, images: Tensor, *, protocol: str = "default") -> list[Tensor]:
    """default: y = the stream after attention, V = AttIN + residual.

    skipplus: y = the output of the whole block, V = GlobEnc's vectors without biases.
    """
    blocks, stream = inputs(family, module, images)
    maps = []
    for l, block in enumerate(blocks):
        x = stream[l]
        if protocol == "skipplus":
            maps.append(contributions(stream[l + 1], globenc_vectors(block, x, value_bias=False)))
        else:
            maps.append(contributions(middle(block, x), residual_vectors(block, x)))
    return maps


def rolled(maps: list[Tensor], rho: Tensor) -> Tensor:
    """ρᵀ M_{L-1} ··· M_0: the residual is inside the maps, so a plain product; (B, n)."""
    product = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype).expand_as(maps[0])
    for M in maps:
        product = M @ product
    return torch.einsum("bi,bij->bj", rho, product)


def row(family: Family, module: nn.Module, images: Tensor, layer_map: Tensor) -> Tensor:
    """ρᵀM (B, n): what AttIN reports for the last block, and PLUS sums."""
    return torch.einsum("bi,bij->bj", readout(family, module, images), layer_map)


def globenc(family: Family, module: nn.Module, images: Tensor, *, value_bias: bool = True) -> Tensor:
    """The unnormalised product; the product may carry any factor per image."""
    return rolled(globenc_maps(family, module, images, value_bias=value_bias), readout(family, module, images))


def alti(family: Family, module: nn.Module, images: Tensor, *, protocol: str = "default") -> Tensor:
    return rolled(alti_maps(family, module, images, protocol=protocol), readout(family, module, images))
