"""Chefer's relevance propagation and a conserving ε-LRP, written as relevances (specs/masks-and-gradients.md 3).

Chefer's rules refuse rotary positions, score biases, gated MLPs and attention pools. Norms (of q, k and inner ones
too), LayerScale, softmax and activations pass relevance on unchanged. Every sum inside a rule is over one image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tests.families import Family
from tests.oracles.attention import attention_weights, join_heads, mixing, pool_weights, readout, run_mlp, split_heads
from tests.oracles.network import run
from tests.oracles.recipe import Affine, Attention, AttentionPool, Block, Mlp, Readout, Recipe, describe
from torch import Tensor, nn


@dataclass
class Values:
    """The activations of one block; branch outputs are after LayerScale."""

    x: Tensor
    u: Tensor
    q: Tensor  # after its norm
    k: Tensor
    v: Tensor
    A: Tensor
    mixed: Tensor  # A·V, heads joined
    attention_out: Tensor
    mid: Tensor
    w: Tensor  # what the MLP reads: norm2(mid)
    mlp_out: Tensor


def values_of(block: Block, x: Tensor) -> Values:
    attention, u = block.attention, block.norm1(x)
    q, k, v = (split_heads(part(u), attention.heads) for part in (attention.q, attention.k, attention.v))
    q, k, v = attention.q_norm(q), attention.k_norm(k), attention.v_norm(v)
    A = mixing(attention, attention_weights(attention, u))
    mixed = join_heads(A @ v)
    branch = block.after1(attention.out(attention.gated(attention.inner_norm(mixed), u)))
    branch = block.changed(branch if block.scale1 is None else block.scale1 * branch)
    mid = x + branch
    w = u if block.parallel else block.norm2(mid)
    mlp_out = block.after2(run_mlp(block.mlp, w))
    mlp_out = block.changed(mlp_out if block.scale2 is None else block.scale2 * mlp_out)
    return Values(x, u, q, k, v, A, mixed, branch, mid, w, mlp_out)


def forward(recipe: Recipe) -> tuple[list[Values], Tensor]:
    """The values of every block, and x_L."""
    x, values = recipe.tokens, []
    for block in recipe.blocks:
        values.append(values_of(block, x))
        x = values[-1].mid + values[-1].mlp_out
    return values, x


def pooled_of(head: Readout, tokens: Tensor, prefix: int) -> Tensor:
    """The pooled vector (B, d), or (B, 2d)."""
    patches = tokens[:, prefix:]
    mean, largest = patches.mean(dim=1), patches.amax(dim=1)
    if head.pool == "attention":
        pool = head.attention
        o = pool.out(join_heads(pool_weights(pool, patches) @ split_heads(pool.v(patches), len(pool.query))))
        return (o + run_mlp(pool.mlp, pool.norm(o)))[:, 0]
    pooled = {"token": tokens[:, 0], "avg": mean, "max": largest, "avgmax": 0.5 * (largest + mean)}
    return torch.cat([tokens[:, 0], mean], dim=-1) if head.pool == "token_avg" else pooled[head.pool]


# ------------------------------------------------------------------------------------------------------ Chefer's rules


def over(a: Tensor, b: Tensor) -> Tensor:
    """a ⊘ b = a / (b + 1e-9), where that is 0 a / 1e-9, and 0 where b = 0."""
    below = b + 1e-9
    return torch.where(b == 0, 0.0, a / torch.where(below == 0, 1e-9, below))


def total(R: Tensor) -> Tensor:
    """Σ of one image, shaped to multiply R."""
    return R.flatten(1).sum(dim=1).view(-1, *[1] * (R.dim() - 1))


def linear_rule(variant: str, x: Tensor, weight: Tensor, R: Tensor) -> Tensor:
    """α = 1, bias ignored. ours: one joint denominator; orig: the two parts each receive all of R."""
    xp, xn, Wp, Wn = x.clamp(min=0), x.clamp(max=0), weight.clamp(min=0), weight.clamp(max=0)
    zp, zn = xp @ Wp.T, xn @ Wn.T
    Sp, Sn = (over(R, zp + zn),) * 2 if variant == "ours" else (over(R, zp), over(R, zn))
    return xp * (Sp @ Wp) + xn * (Sn @ Wn)


def add_rule(variant: str, x1: Tensor, x2: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """X ⊙ (R ⊘ (x1 + x2)); ours: then each tensor is rescaled to its share |Σ| of the total."""
    S = over(R, x1 + x2)
    a, b = x1 * S, x2 * S
    if variant == "orig":
        return a, b
    sum_a, sum_b = total(a), total(b)
    whole = sum_a.abs() + sum_b.abs()
    wanted_a, wanted_b = over(sum_a.abs(), whole) * total(R), over(sum_b.abs(), whole) * total(R)
    return a * over(wanted_a, sum_a), b * over(wanted_b, sum_b)


def clone_rule(x: Tensor, R1: Tensor, R2: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, R1 + R2)


def product_rule(a: Tensor, b: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """a·b of two matrices: S = R ⊘ ab; a ⊙ (S bᵀ) / 2 and b ⊙ (aᵀ S) / 2."""
    S = over(R, a @ b)
    return a * (S @ b.transpose(-1, -2)) / 2, b * (a.transpose(-1, -2) @ S) / 2


def attention_relprop(variant: str, attention: Attention, s: Values, R: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of the attention branch → relevance of u and of A."""
    R = linear_rule(variant, attention.inner_norm(s.mixed), attention.out.weight, R)
    R_A, R_v = product_rule(s.A, s.v, split_heads(R, attention.heads))
    R_q, R_kt = product_rule(s.q, s.k.transpose(-1, -2), R_A)  # softmax is the identity, the product unscaled
    parts = [(attention.q, R_q), (attention.k, R_kt.transpose(-1, -2)), (attention.v, R_v)]
    return sum(linear_rule(variant, s.u, affine.weight, join_heads(part)) for affine, part in parts), R_A


def block_relprop(variant: str, block: Block, s: Values, R: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of x_{l+1} → relevance of x_l and of A_l."""
    refuse(block)
    R_mid, R_mlp = add_rule(variant, s.mid, s.mlp_out, R)
    hidden = block.mlp.inner_norm(block.mlp.act(block.mlp.up(s.w)))
    R_mlp = linear_rule(variant, hidden, block.mlp.down.weight, R_mlp)
    R_mlp = linear_rule(variant, s.w, block.mlp.up.weight, R_mlp)
    R = clone_rule(s.mid, R_mid, R_mlp)
    R_x, R_branch = add_rule(variant, s.x, s.attention_out, R)
    R_branch, R_A = attention_relprop(variant, block.attention, s, R_branch)
    return clone_rule(s.x, R_x, R_branch), R_A


def refuse(block: Block) -> None:
    attention = block.attention
    if attention.rotary is not None or attention.score_bias is not None or block.mlp.gate is not None:
        raise NotImplementedError("rotary positions, score biases and gated MLPs have no rule")
    if attention.talk is not None:
        raise NotImplementedError("heads that are mixed have no rule")


def mean_rule(x: Tensor, R: Tensor) -> Tensor:
    """The z-rule: R_j = x_j ⊙ (R ⊘ Σ_j x_j)."""
    return x * over(R, x.sum(dim=1))[:, None]


def max_rule(x: Tensor, R: Tensor) -> Tensor:
    """Every channel's relevance goes to the token that wins it."""
    return torch.zeros_like(x).scatter(1, x.argmax(dim=1, keepdim=True), R[:, None])


def read_out_relprop(variant: str, head: Readout, x: Tensor, prefix: int, target: Tensor) -> Tensor:
    """One-hot 1 at the target's logit → relevance of x_L; the average of two heads is an Add of their halves."""
    tokens = head.norm(x)
    R_tokens = torch.zeros_like(tokens)
    start = nn.functional.one_hot(target, len(head.heads[0].weight)).to(x.dtype)
    if head.pool == "pair":
        halves = [0.5 * affine(tokens[:, i]) for i, affine in enumerate(head.heads)]
        for i, R in enumerate(add_rule(variant, *halves, start)):
            R_tokens[:, i] = linear_rule(variant, tokens[:, i], head.heads[i].weight, R)
        return R_tokens
    if head.pool == "attention":
        raise NotImplementedError("an attention pool has no rule")
    patches = tokens[:, prefix:]
    if head.pool == "patches":
        R = mean_rule(head.heads[0](patches) / patches.shape[1], start)
        R_tokens[:, prefix:] = linear_rule(variant, patches, head.heads[0].weight, R)
        return R_tokens
    pooled = pooled_of(head, tokens, prefix)
    R = linear_rule(variant, head.unit(head.embedding(pooled)), head.heads[0].weight, start)
    if head.projection is not None:
        R = linear_rule(variant, head.pooled_norm(pooled), head.projection.weight, R)
    if head.pool == "token":
        R_tokens[:, 0] = R
    elif head.pool == "avg":
        R_tokens[:, prefix:] = mean_rule(patches, R)
    elif head.pool == "max":
        R_tokens[:, prefix:] = max_rule(patches, R)
    elif head.pool == "avgmax":
        R_max, R_mean = add_rule(variant, 0.5 * patches.amax(dim=1), 0.5 * patches.mean(dim=1), R)
        R_tokens[:, prefix:] = max_rule(patches, R_max) + mean_rule(patches, R_mean)
    else:  # a concatenation splits
        R_tokens[:, 0], R_mean = R.chunk(2, dim=-1)
        R_tokens[:, prefix:] = mean_rule(patches, R_mean)
    return R_tokens


@dataclass
class Relevance:
    x: list[Tensor]  # of x_l, l = 0..L (B, n, d)
    A: list[Tensor]  # of A_l (B, H, n, n)

    @property
    def totals(self) -> list[Tensor]:
        """ΣR (B,) at every block boundary, l = 0..L."""
        return [R.sum(dim=(1, 2)) for R in self.x]


@torch.no_grad()
def relevance(family: Family, module: nn.Module, images: Tensor, target: Tensor, *, variant: str = "ours") -> Relevance:
    recipe = describe(family, module, images)
    values, x = forward(recipe)
    R_x, R_A = [read_out_relprop(variant, recipe.readout, x, recipe.prefix, target)], []
    for block, s in zip(reversed(recipe.blocks), reversed(values), strict=True):
        R, weights = block_relprop(variant, block, s, R_x[0])
        R_x.insert(0, R)
        R_A.insert(0, weights)
    return Relevance(R_x, R_A)


def relevance_of_attention(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, *, variant: str = "ours"
) -> list[Tensor]:
    return relevance(family, module, images, target, variant=variant).A


def trans_att(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, *, start_layer: int = 0, frozen: bool = False
) -> Tensor:
    """ρᵀ Π_{l ≥ start} (I + mean_h clamp⁺(G_l ⊙ R_{A_l})), no row normalisation; G of the logit; (B, n)."""
    G, R_A = (
        run(family, module, images, target, frozen=frozen).G,
        relevance_of_attention(family, module, images, target),
    )
    C = torch.eye(G[0].shape[-1], dtype=images.dtype).expand(len(images), -1, -1)
    for l in range(start_layer, len(R_A)):
        C = C + (G[l] * R_A[l]).clamp(min=0).mean(dim=1) @ C
    return torch.einsum("bi,bij->bj", readout(family, module, images), C)


def partial_lrp(family: Family, module: nn.Module, images: Tensor, target: Tensor, *, variant: str = "ours") -> Tensor:
    """ρᵀ mean_h clamp⁺(R_A) of the last block; variant "orig" is the published, doubling one."""
    R_A = relevance_of_attention(family, module, images, target, variant=variant)[-1]
    return torch.einsum("bi,bij->bj", readout(family, module, images), R_A.clamp(min=0).mean(dim=1))


# -------------------------------------------------------------------------------------------------------- to the pixels


@dataclass
class Embedding:
    """pixels → convolution → (norm) → + positions → (norm) → x_0, on the patches."""

    columns: Tensor  # (B, N, 3·p·p): the pixels of every patch
    convolution: Affine  # on columns
    norm: nn.Module
    before: Tensor  # x_0 before the norm that some networks have in front of the blocks (B, N, d)
    pre_norm: nn.Module
    patch: int
    size: tuple[int, int]

    def fold(self, columns: Tensor) -> Tensor:
        """(B, N, 3·p·p) → (B, H, W), summed over channels."""
        return nn.functional.fold(columns.transpose(1, 2), self.size, self.patch, stride=self.patch).sum(dim=1)


def embedding(family: Family, module: nn.Module, images: Tensor) -> Embedding:
    """Read off the module: its projection of pixels, and what enters its norm before the blocks."""
    parts = dict(module.named_modules())
    named = {name.rpartition(".")[2]: part for name, part in parts.items()}
    pre_norm = named.get("norm_pre", named.get("pre_layrnorm", nn.Identity()))
    recorded: list[Tensor] = []
    handle = pre_norm.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0]))
    tokens = describe(family, module, images.clone()).tokens  # a copy is not known yet: the module runs
    handle.remove()
    before = (recorded[0] if recorded else tokens)[:, family.prefix :]
    patch = images.shape[-1] // family.grid[1]
    columns = nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)
    norm, weights = parts.get("patch_embed.norm", nn.Identity()), projection(parts, patch)
    return Embedding(columns, weights, norm, before, pre_norm, patch, tuple(images.shape[-2:]))


def projection(parts: dict[str, nn.Module], patch: int) -> Affine:
    """The layer of the pixels of a patch, which are in the order of channels, rows, columns."""
    if "embeds.proj" in parts:  # of pixels in the order of rows, columns, channels
        layer = parts["embeds.proj"]
        return Affine(layer.weight.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2).flatten(1), layer.bias)
    if "encoder.patch_embed.input_proj" in parts:  # of 2x − 1
        weight = parts["encoder.patch_embed.input_proj"].weight
        return Affine(2 * weight, -weight.sum(dim=1))
    convolution = next(part for part in parts.values() if isinstance(part, nn.Conv2d))
    return Affine(convolution.weight.flatten(1), convolution.bias)


@torch.no_grad()
def lrp_pixels(family: Family, module: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """ "orig" rules to the pixels (B, H, W): positional Add, prefix dropped, z^B rule at the patch convolution.

    z^B: (x w − low w⁺ − high w⁻), bias ignored, low and high the least and the largest value of the image.
    """
    R = relevance(family, module, images, target, variant="orig").x[0][:, family.prefix :]
    e = embedding(family, module, images)
    conv_out = e.norm(e.convolution(e.columns))
    R, _ = add_rule("orig", conv_out, e.before - conv_out, R)
    x, W = e.columns, e.convolution.weight
    Wp, Wn = W.clamp(min=0), W.clamp(max=0)
    low, high = (bound(dim=(1, 2), keepdim=True).expand_as(x) for bound in (x.amin, x.amax))
    S = over(R, x @ W.T - low @ Wp.T - high @ Wn.T)
    return e.fold(x * (S @ W) - low * (S @ Wp) - high * (S @ Wn))


# --------------------------------------------------------------------------------------------------- conserving ε-LRP


def share(x: Tensor, whole: Tensor, R: Tensor) -> Tensor:
    """x ⊙ R / whole, the z-rule of a sum; zero where the whole is."""
    return torch.where(whole == 0, 0.0, x * R / torch.where(whole == 0, 1.0, whole))


def epsilon_rule(layer: Affine, x: Tensor, R: Tensor, eps: float) -> Tensor:
    """R_i = x_i Σ_k w_ki R_k / (z_k + ε sign z_k), sign 0 = 1; z holds the bias, which so absorbs its share."""
    z = layer(x)
    return x * ((R / (z + eps * torch.where(z < 0, -1.0, 1.0))) @ layer.weight)


def norm_rule(norm: nn.Module, x: Tensor, R: Tensor) -> Tensor:
    """The z-rule of y = M x + β with M = γ r (I − 11ᵀ/d), r frozen; an RMS norm has M = γ r."""
    if isinstance(norm, nn.Identity):
        return R
    width, centred = x.shape[-1], isinstance(norm, nn.LayerNorm)
    centre = torch.eye(width, dtype=x.dtype) - (1 / width if centred else 0)
    r = 1 / ((x @ centre).square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    S = share(torch.ones_like(x), norm(x), R)
    return x * r * torch.einsum("ki,...k->...i", norm.weight[:, None] * centre, S)


def mix_rule(A: Tensor, v: Tensor, R: Tensor) -> Tensor:
    """The z-rule of A·V with A frozen; R (B, n, d) of the joined heads → relevance of the joined values."""
    mixed = A @ v
    S = share(torch.ones_like(mixed), mixed, split_heads(R, v.shape[1]))
    return join_heads(v * (A.transpose(-1, -2) @ S))


def mlp_epsilon(mlp: Mlp, w: Tensor, R: Tensor, eps: float) -> Tensor:
    """Activations pass relevance on; each factor of a gated product gets half of it."""
    x, w = w, mlp.first(w)
    up = mlp.up(w)
    hidden = mlp.act(up) if mlp.gate is None else mlp.act(mlp.gate(w)) * up
    R = norm_rule(mlp.inner_norm, hidden, epsilon_rule(mlp.down, mlp.inner_norm(hidden), R, eps))
    if mlp.gate is None:
        return norm_rule(mlp.first, x, epsilon_rule(mlp.up, w, R, eps))
    return norm_rule(mlp.first, x, epsilon_rule(mlp.up, w, R / 2, eps) + epsilon_rule(mlp.gate, w, R / 2, eps))


def block_epsilon(block: Block, s: Values, R: Tensor, eps: float) -> Tensor:
    attention, out = block.attention, s.mid + s.mlp_out
    R_mlp = norm_rule(block.after2, run_mlp(block.mlp, s.w), share(s.mlp_out, out, R))
    R_mlp = mlp_epsilon(block.mlp, s.w, R_mlp, eps)
    R = share(s.mid, out, R) + (0 if block.parallel else norm_rule(block.norm2, s.mid, R_mlp))
    normed = attention.gated(attention.inner_norm(s.mixed), s.u)  # a constant gate passes relevance on
    R_branch = norm_rule(block.after1, attention.out(normed), share(s.attention_out, s.mid, R))
    R_branch = epsilon_rule(attention.out, normed, R_branch, eps)
    R_branch = mix_rule(s.A, s.v, norm_rule(attention.inner_norm, s.mixed, R_branch))
    R_v = split_heads(R_branch, attention.heads)
    R_branch = join_heads(norm_rule(attention.v_norm, split_heads(attention.v(s.u), attention.heads), R_v))
    R_u = epsilon_rule(attention.v, s.u, R_branch, eps) + (R_mlp if block.parallel else 0)
    return share(s.x, s.mid, R) + norm_rule(block.norm1, s.x, R_u)


def pool_epsilon(pool: AttentionPool, patches: Tensor, R: Tensor, eps: float) -> Tensor:
    """o + MLP(norm(o)), o = W_o (A·V): relevance of the pooled vector (B, 1, d) → of the patches."""
    A, v = pool_weights(pool, patches), split_heads(pool.v(patches), len(pool.query))
    mixed = join_heads(A @ v)
    o = pool.out(mixed)
    branch = run_mlp(pool.mlp, pool.norm(o))
    R_mlp = norm_rule(pool.norm, o, mlp_epsilon(pool.mlp, pool.norm(o), share(branch, o + branch, R), eps))
    R = epsilon_rule(pool.out, mixed, share(o, o + branch, R) + R_mlp, eps)
    return epsilon_rule(pool.v, patches, mix_rule(A, v, R), eps)


def read_out_epsilon(head: Readout, x: Tensor, prefix: int, target: Tensor, eps: float) -> Tensor:
    """The target's logit → relevance of x_L. The sum of several tokens (mean, avgmax) follows the z-rule."""
    tokens = head.norm(x)
    R_tokens, classes = torch.zeros_like(tokens), len(head.heads[0].weight)
    onehot = nn.functional.one_hot(target, classes).to(x.dtype)
    if head.pool == "pair":
        for i, affine in enumerate(head.heads):
            R_tokens[:, i] = epsilon_rule(affine, tokens[:, i], onehot * 0.5 * affine(tokens[:, i]), eps)
        return norm_rule(head.norm, x, R_tokens)
    if head.pool == "patches":
        logits = head.heads[0](tokens[:, prefix:])
        R = share(logits, logits.sum(dim=1, keepdim=True), (onehot * logits.mean(dim=1))[:, None])
        R_tokens[:, prefix:] = epsilon_rule(head.heads[0], tokens[:, prefix:], R, eps)
        return norm_rule(head.norm, x, R_tokens)
    pooled, patches = pooled_of(head, tokens, prefix), tokens[:, prefix:]
    embedding, normed = head.embedding(pooled), head.pooled_norm(pooled)
    R = epsilon_rule(head.heads[0], head.unit(embedding), onehot * head.logits(pooled), eps)
    R = norm_rule(head.unit, embedding, R)
    R = R if head.projection is None else epsilon_rule(head.projection, normed, R, eps)
    R = norm_rule(head.pooled_norm, pooled, R)
    if head.pool == "attention":
        R_tokens[:, prefix:] = pool_epsilon(head.attention, patches, R[:, None], eps)
    if head.pool.startswith("token"):
        R_tokens[:, 0] = R[:, : x.shape[-1]]
    if head.pool in ("avg", "token_avg"):
        R_tokens[:, prefix:] = share(patches, patches.sum(dim=1, keepdim=True), R[:, None, -x.shape[-1] :])
    if head.pool in ("max", "avgmax"):
        wins = torch.zeros_like(patches).scatter(1, patches.argmax(dim=1, keepdim=True), 1.0)
        factor = wins if head.pool == "max" else 0.5 * wins + 0.5 / patches.shape[1]
        R_tokens[:, prefix:] = share(patches * factor, pooled[:, None], R[:, None])
    return norm_rule(head.norm, x, R_tokens)


@torch.no_grad()
def epsilon_lrp(family: Family, module: nn.Module, images: Tensor, target: Tensor, *, eps: float) -> list[Tensor]:
    """Relevance of x_0 … x_L (B, n, d) under ε-LRP, which starts with the logit's value and loses only to biases and ε.

    Linear and convolution: the ε-rule with the bias inside z. Every other sum, the norms with their deviation frozen,
    A·V with A frozen, residual Adds, the mean pool: the z-rule without ε. Activations and LayerScale: the identity. A
    gated product: half to each factor. q and k receive nothing. With ε = 0 this is frozen input × gradient.
    """
    recipe = describe(family, module, images)
    values, x = forward(recipe)
    R = [read_out_epsilon(recipe.readout, x, recipe.prefix, target, eps)]
    for block, s in zip(reversed(recipe.blocks), reversed(values), strict=True):
        R.insert(0, block_epsilon(block, s, R[0], eps))
    return R


@torch.no_grad()
def epsilon_lrp_pixels(family: Family, module: nn.Module, images: Tensor, target: Tensor, *, eps: float) -> Tensor:
    """`epsilon_lrp` on to the pixels (B, H, W): norms as above, positions absorb a share, ε-rule at the convolution."""
    R = epsilon_lrp(family, module, images, target, eps=eps)[0][:, family.prefix :]
    e = embedding(family, module, images)
    conv_out = e.convolution(e.columns)
    R = share(e.norm(conv_out), e.before, norm_rule(e.pre_norm, e.before, R))
    return e.fold(epsilon_rule(e.convolution, e.columns, norm_rule(e.norm, conv_out, R), eps))
