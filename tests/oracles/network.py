"""One literal differentiable network on the recipe, from the tokens x_0 to the logits, with every quantity kept.

A `Rules` value says which parts are held constant for the backward pass; forward values never change. Gradients are
taken with `torch.autograd.grad`, so no parameter of the module ever gets a `.grad`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tests.families import Family
from tests.oracles.attention import among, join_heads, mixing, rotate, scores_of, softmax, split_heads
from tests.oracles.decompx import gate_of
from tests.oracles.recipe import Affine, Attention, AttentionPool, Block, Mlp, Readout, Recipe, describe, version
from torch import Tensor, nn

Place = int | str  # a block, "end" (a bias on tokens after the last block) or "pooled" (a bias without a token)


@dataclass(frozen=True)
class Rules:
    """What the backward pass does differently from the ordinary gradient."""

    attention: str = "plain"  # "detached": A is a constant leaf; "uniform": AttnLRP, v × ½, q and k × ¼
    freeze_norms: bool = False  # the reciprocal deviation is a constant; the mean stays live
    freeze_gates: bool = False  # act(z) = z · gate, with the gate constant
    halve_products: bool = False  # a ⊙ b of a gated MLP: each branch gets half


PLAIN = Rules()
FROZEN = Rules("detached", freeze_norms=True, freeze_gates=True, halve_products=True)


@dataclass
class Recorded:
    """One forward and one backward of Σ_images y. Lists run over blocks, x and gx over l = 0..L.

    A, G and v have one more entry, index L, where the head is an attention pool: (B, H, 1, N), (B, H, N, d_h).
    """

    x: list[Tensor]  # (B, n, d)
    gx: list[Tensor]
    u: list[Tensor]  # norm1(x_l)
    gu: list[Tensor]
    mid: list[Tensor]  # the stream after attention
    gmid: list[Tensor]
    A: list[Tensor]  # (B, H, n, n), [query, key]
    G: list[Tensor]
    v: list[Tensor]  # (B, H, n, d_h)
    attention_out: list[Tensor]  # after LayerScale
    mlp_out: list[Tensor]  # after LayerScale
    normed: Tensor  # final norm of x_L (B, n, d)
    bias: list[Tensor]  # (B, n): Σ over the biases b of the block of ⟨b, ∂y/∂out⟩, on the token of out
    end_bias: Tensor  # (B, n): final norm; keys and values of an attention pool
    pooled_bias: Tensor  # (B,): everything after pooling, the heads included
    logits: Tensor  # (B, C)
    y: Tensor  # (B,)
    prefix: int
    recipe: Recipe

    @property
    def depth(self) -> int:
        return len(self.recipe.blocks)

    @property
    def has_pool(self) -> bool:
        return len(self.A) > self.depth


@dataclass
class Tape:
    """Tensors and bias outputs met on the way."""

    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    biases: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        self.kept.setdefault(name, []).append(tensor)
        return tensor

    def biased(self, place: Place, bias: Tensor | None, out: Tensor) -> Tensor:
        if bias is not None:
            self.biases.append((place, bias.detach(), out))
        return out


def run(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    frozen: bool = False,
    output: str = "logit",
    rules: Rules | None = None,
) -> Recorded:
    """Everything of one forward and one backward; `target` (B,) is the class of each image.

    Oracles ask for the same again and again: what was recorded is kept until a parameter changes.
    """
    return _record(
        family, module, version(module, images), images, target, rules or (FROZEN if frozen else PLAIN), output
    )


@functools.lru_cache(maxsize=32)
def _record(
    family: Family, module: nn.Module, version: int, images: Tensor, target: Tensor, rules: Rules, output: str
) -> Recorded:
    recipe = describe(family, module, images)
    tape = Tape()
    logits = forward(recipe, recipe.tokens.detach().requires_grad_(), rules, tape)
    y = scalar(logits, target, output)
    names = ("x", "u", "mid", "A")
    wanted = [tensor for name in names for tensor in tape.kept[name]]
    outs = [out for _, _, out in tape.biases]
    grads = torch.autograd.grad(y.sum(), wanted + outs, allow_unused=True, materialize_grads=True)
    gradient_of = {id(tensor): grad for tensor, grad in zip(wanted, grads, strict=False)}
    gx, gu, gmid, G = ([gradient_of[id(tensor)] for tensor in tape.kept[name]] for name in names)
    bias, end_bias, pooled_bias = _bias_maps(tape, grads[len(wanted) :], recipe)
    kept = {name: [tensor.detach() for tensor in tensors] for name, tensors in tape.kept.items()}
    (normed,) = kept.pop("normed")
    return Recorded(
        **kept, gx=gx, gu=gu, gmid=gmid, G=G, normed=normed, bias=bias, end_bias=end_bias, pooled_bias=pooled_bias,
        logits=logits.detach(), y=y.detach(), prefix=recipe.prefix, recipe=recipe,
    )  # fmt: skip


def pixel_gradient(
    family: Family, module: nn.Module, images: Tensor, target: Tensor, *, frozen: bool = False, output: str = "logit"
) -> Tensor:
    """∂y/∂pixels (B, 3, H, W). Frozen rules hold from x_0 on; the embedding has its ordinary gradient."""
    pixels = images.detach().requires_grad_()
    recipe = inspect.unwrap(describe)(family, module, pixels)
    logits = forward(recipe, recipe.tokens, FROZEN if frozen else PLAIN, Tape())
    return torch.autograd.grad(scalar(logits, target, output).sum(), pixels)[0]


def scalar(logits: Tensor, target: Tensor, output: str = "logit") -> Tensor:
    """y (B,): the target's logit or its softmax probability."""
    values = logits if output == "logit" else softmax(logits)
    return values[torch.arange(len(logits)), target]


def _bias_maps(tape: Tape, grads: tuple[Tensor, ...], recipe: Recipe) -> tuple[list[Tensor], Tensor, Tensor]:
    """⟨b, ∂y/∂out⟩ per token: out is (B, n, c), or (B, H, n, d_h) after a norm of q or k, or has the patches only."""
    batch, n, _ = recipe.tokens.shape
    maps: dict[Place, Tensor] = {
        place: recipe.tokens.new_zeros(batch, n) for place in [*range(len(recipe.blocks)), "end"]
    }
    pooled = recipe.tokens.new_zeros(batch)
    for (place, bias, _), grad in zip(tape.biases, grads, strict=True):
        inner = (bias * grad).sum(dim=-1)
        if place == "pooled":
            pooled += inner
            continue
        inner = inner.sum(dim=1) if inner.dim() == 3 else inner
        maps[place][:, n - inner.shape[1] :] += inner
    return [maps[l] for l in range(len(recipe.blocks))], maps["end"], pooled


# ------------------------------------------------------------------------------------------------------------- forward


def forward(recipe: Recipe, tokens: Tensor, rules: Rules, tape: Tape) -> Tensor:
    """x_0 (B, n, d) → logits (B, C)."""
    x = tape.keep("x", tokens)
    for l, block in enumerate(recipe.blocks):
        x = tape.keep("x", run_block(block, x, rules, tape, l))
    return read_out(recipe.readout, x, recipe.prefix, rules, tape)


def run_block(block: Block, x: Tensor, rules: Rules, tape: Tape, l: int) -> Tensor:
    u = tape.keep("u", norm(block.norm1, x, rules, tape, l))
    branch = norm(block.after1, self_attention(block.attention, u, rules, tape, l), rules, tape, l)
    branch = block.changed(branch if block.scale1 is None else block.scale1 * branch)
    branch = tape.keep("attention_out", branch)
    x = tape.keep("mid", x + branch)
    branch = run_mlp(block.mlp, u if block.parallel else norm(block.norm2, x, rules, tape, l), rules, tape, l)
    branch = norm(block.after2, branch, rules, tape, l)
    return x + tape.keep("mlp_out", block.changed(branch if block.scale2 is None else block.scale2 * branch))


def linear(layer: Affine, x: Tensor, tape: Tape, place: Place) -> Tensor:
    return tape.biased(place, layer.bias, layer(x))


def norm(layer: nn.Module, x: Tensor, rules: Rules, tape: Tape, place: Place) -> Tensor:
    """(x − mean) · r · γ + β with r = 1/√(variance + ε); an RMS norm neither centres nor has a β."""
    if isinstance(layer, nn.Identity):
        return x
    centred = isinstance(layer, nn.LayerNorm)
    if centred:
        x = x - x.mean(dim=-1, keepdim=True)
    r = (x.square().mean(dim=-1, keepdim=True) + layer.eps).rsqrt()
    y = x * (r.detach() if rules.freeze_norms else r) * layer.weight
    return tape.biased(place, layer.bias, y + layer.bias) if centred else y


def activation(act: Callable[[Tensor], Tensor], z: Tensor, rules: Rules) -> Tensor:
    return z * gate_of(act, z).detach() if rules.freeze_gates else act(z)


def run_mlp(mlp: Mlp, u: Tensor, rules: Rules, tape: Tape, place: Place) -> Tensor:
    u = norm(mlp.first, u, rules, tape, place)
    up = linear(mlp.up, u, tape, place)
    if mlp.gate is None:
        hidden = activation(mlp.act, up, rules)
    else:
        a = activation(mlp.act, linear(mlp.gate, u, tape, place), rules)
        hidden = 0.5 * a.detach() * up + 0.5 * a * up.detach() if rules.halve_products else a * up
    return linear(mlp.down, norm(mlp.inner_norm, hidden, rules, tape, place), tape, place)


def attend(weights: Tensor, rules: Rules, tape: Tape) -> Tensor:
    if rules.attention == "detached":
        weights = weights.detach().requires_grad_()  # cut from q and k, still a leaf: G = ∂y/∂A exists
    return tape.keep("A", weights)


def share(x: Tensor, factor: float, rules: Rules) -> Tensor:
    """The value of x; under AttnLRP its gradient is `factor` times the ordinary one."""
    return factor * x + (1 - factor) * x.detach() if rules.attention == "uniform" else x


def self_attention(attention: Attention, u: Tensor, rules: Rules, tape: Tape, l: int) -> Tensor:
    q, k, v = (
        split_heads(linear(part, u, tape, l), attention.heads) for part in (attention.q, attention.k, attention.v)
    )
    q, k = norm(attention.q_norm, q, rules, tape, l), norm(attention.k_norm, k, rules, tape, l)
    if attention.rotary is not None:
        q, k = rotate(q, attention.rotary), rotate(k, attention.rotary)
    # uniform rule at both products: A·V halves v and A, Q·Kᵀ halves q and k again
    v = norm(attention.v_norm, v, rules, tape, l)
    q, k, mixable = share(q, 0.25, rules), share(k, 0.25, rules), share(tape.keep("v", v), 0.5, rules)
    weights = attend(among(attention, scores_of(attention, q, k)), rules, tape)
    mixed = norm(attention.inner_norm, join_heads(mixing(attention, weights) @ mixable), rules, tape, l)
    if attention.gate is not None:
        gate = torch.sigmoid(linear(attention.gate, u, tape, l))
        mixed = mixed * (gate.detach() if rules.attention != "plain" else gate)
    return linear(attention.out, mixed, tape, l)


def read_out(readout: Readout, x: Tensor, prefix: int, rules: Rules, tape: Tape) -> Tensor:
    tokens = tape.keep("normed", norm(readout.norm, x, rules, tape, "end"))
    if readout.pool == "pair":
        logits = [linear(head, tokens[:, i], tape, "pooled") for i, head in enumerate(readout.heads)]
        return 0.5 * (logits[0] + logits[1])
    patches = tokens[:, prefix:]
    if readout.pool == "patches":
        return linear(readout.heads[0], patches, tape, "end").mean(dim=1)
    if readout.pool == "attention":
        pooled = attention_pool(readout.attention, patches, rules, tape)
    else:
        pooled = pool(readout.pool, tokens, patches)
    pooled = norm(readout.pooled_norm, pooled, rules, tape, "pooled")
    if readout.projection is not None:
        pooled = linear(readout.projection, pooled, tape, "pooled")
    return linear(readout.heads[0], norm(readout.unit, pooled, rules, tape, "pooled"), tape, "pooled")


def pool(kind: str, tokens: Tensor, patches: Tensor) -> Tensor:
    first, mean = tokens[:, 0], patches.mean(dim=1)
    winners = patches.argmax(dim=1, keepdim=True)  # (B, 1, d)
    largest = patches.gather(1, winners)[:, 0]
    pooled = {"token": first, "avg": mean, "patches": mean, "max": largest, "avgmax": 0.5 * (largest + mean)}
    return torch.cat([first, mean], dim=-1) if kind == "token_avg" else pooled[kind]


def attention_pool(pool: AttentionPool, patches: Tensor, rules: Rules, tape: Tape) -> Tensor:
    """One learned query over the patches, then o + MLP(norm(o)); under AttnLRP as a block's attention."""
    heads = len(pool.query)
    k, v = (split_heads(linear(part, patches, tape, "end"), heads) for part in (pool.k, pool.v))
    k, mixable = share(k, 0.25, rules), share(tape.keep("v", v), 0.5, rules)
    scores = pool.query[None, :, None, :] @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
    mixed = join_heads(attend(softmax(scores), rules, tape) @ mixable)[:, 0]
    o = linear(pool.out, mixed, tape, "pooled")
    return o + run_mlp(pool.mlp, norm(pool.norm, o, rules, tape, "pooled"), rules, tape, "pooled")


# ------------------------------------------------------------------------------------------------------- read-out rows


def head_rows(rho: Tensor, maps: Tensor) -> Tensor:
    """ρᵀM of every head (B, H, n); a pool's map (B, H, 1, N) is its own row, zero on the prefix columns."""
    n = rho.shape[1]
    if maps.shape[-1] == n and maps.shape[-2] == n:
        return torch.einsum("bi,bhij->bhj", rho, maps)
    return nn.functional.pad(maps[:, :, 0], (n - maps.shape[-1], 0))


def last_attention(recorded: Recorded, layer: int | None) -> int:
    """`layer`, or the last attention of the network: the pool's where there is one."""
    return len(recorded.A) - 1 if layer is None else layer
