"""A Vision Transformer, written once as a short sequence of operations.

``Walk`` goes from the image to the logits. A rule says how relevance flows back through each operation; a recorder
observes the intermediate tensors of each layer. Neither changes a forward value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.parts import (
    EVERY,
    Architecture,
    Attention,
    AttentionPool,
    Block,
    Dense,
    Embedding,
    Head,
    Linear,
    Mlp,
    Norm,
    Rope,
)
from vitrail.core.precision import Scaling
from vitrail.core.queries import read_region
from vitrail.core.rules import Plain, mix_heads


class Recorder(Protocol):
    """Observes a walk; each call returns the tensor to continue with."""

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        """An intermediate tensor was computed."""

    def bias(self, out: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        """``out`` is the output of an operation that added ``bias``, (d,) or one for each token."""

    def wants(self, name: str, layer: int) -> bool:
        """Whether an expensive tensor (an attention map) should be computed."""


class Blind:
    """A recorder that records nothing."""

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        return x

    def bias(self, out: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        return out

    def wants(self, name: str, layer: int) -> bool:
        return False


class ReadoutRecorder(Blind):
    """A recorder of what the head pools: ρ (B, n), the share of each token."""

    def __init__(self, depth: int) -> None:
        self.depth, self.tokens = depth, 0
        self.readout: Tensor | None = None

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        if name == "x":
            self.tokens = x.shape[1]
        elif name == "readout":
            self.readout = x.detach()
        elif name == "A" and layer == self.depth:  # an attention pool is what the head reads
            self.readout = F.pad(x.detach().mean(1).squeeze(1), (self.tokens - x.shape[-1], 0))
        return x

    def wants(self, name: str, layer: int) -> bool:
        return layer == self.depth


class Walk:
    """The operations of one network under one rule.

    Args:
        architecture: the parts, with the model's weights.
        rule: how relevance flows back.
        recorder: observes the intermediate tensors.
        keep: (B, k) grid indices of the patches that are present; None = all of them.
        scaling: of the gradients that enter the blocks.
    """

    def __init__(
        self,
        architecture: Architecture,
        rule: Plain | None = None,
        recorder: Recorder | None = None,
        keep: Tensor | None = None,
        scaling: Scaling | None = None,
    ):
        self.parts = architecture
        self.rule = rule or Plain()
        self.recorder: Recorder = recorder or Blind()
        self.prefix = architecture.embedding.prefix.shape[0]
        self.keep, self.scaling = keep, scaling
        self.ordinary = type(self.rule) is Plain  # gradients
        self.bare = self.ordinary and type(self.recorder) is Blind

    def embed(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → x_0 (B, P + N, d): after positions, prefix tokens and the norm before the blocks."""
        return embed(self.parts.embedding, images, self.rule)

    def encode(self, x: Tensor) -> Tensor:
        """x_0 (B, n, d) → logits (B, C)."""
        depth = len(self.parts.blocks)
        for layer, block in enumerate(self.parts.blocks):
            only = self.parts.head.reads if self.bare and layer == depth - 1 else None
            x = self.block(self.recorder.see("x", layer, x), block, layer, only)
        with torch.autocast(x.device.type, enabled=False):  # fp16 is too coarse for differences of scores
            x = self.recorder.see("x", depth, x)
            return self.head(x if self.scaling is None else self.scaling.enter(x), self.parts.head, depth)

    def block(self, x: Tensor, block: Block, layer: int, only: int | None = None) -> Tensor:
        """One residual block, (B, n, d) → (B, n, d), or (B, only, d) of the first tokens alone."""
        u = self.recorder.see("u", layer, self.norm(x, block.norm1, layer))
        u = fitted(u, block.attention.q)  # once, not for each of the products that follow
        target, x = (u, x) if only is None else (u[:, :only], x[:, :only])
        branch = self.attention(target, u, block.attention, layer, block.changing, slice(block.waiting, None))
        branch = self.recorder.see("attention_out", layer, branch)
        branch = block.changed(self.scale(self.norm(branch, block.post1, layer), block.scale1))
        x = self.recorder.see("mid", layer, self.rule.add(x, branch))
        branch = self.mlp(target if block.parallel else self.norm(x, block.norm2, layer), block.mlp, layer)
        branch = block.changed(self.scale(self.norm(branch, block.post2, layer), block.scale2))
        x = self.rule.add(x, self.recorder.see("mlp_out", layer, branch))
        if block.positions is None:
            return x
        positions = self.present(block.positions)
        return self.recorder.bias(self.rule.add(x, positions), positions, layer)

    def attention(
        self,
        target: Tensor,
        source: Tensor,
        attention: Attention,
        layer: int,
        asking: slice = EVERY,
        seen: slice = EVERY,
    ) -> Tensor:
        """Queries from ``target`` (B, m, d), keys and values from ``source`` (B, n, d).

        Only the targets ``asking`` attend, and only to the sources ``seen``.
        """
        q, k, v = (self.split(x, attention.heads) for x in self.project(target, source, attention, layer))
        q, k = (
            self.position(q, attention.q_norm, attention, layer),
            self.position(k, attention.k_norm, attention, layer),
        )
        v = self.recorder.see(
            "v", layer, v if attention.v_norm is None else self.norm(v, attention.v_norm, layer).to(v.dtype)
        )
        bias, shape = self.score_bias(attention.bias, q.dtype, q.shape[2]), (q.shape[2], k.shape[2])
        q, k, v, bias = q[:, :, asking], k[:, :, seen], v[:, :, seen], None if bias is None else bias[..., asking, seen]
        if attention.talk is None and not (self.recorder.wants("A", layer) or self.recorder.wants("W", layer)):
            out = self.rule.fused(q, k, v, attention.scale, bias)
        else:
            before = None if attention.talk is None else attention.talk.before
            weights = self.rule.attend(q, k, attention.scale, bias, before)
            weights = self.weighed("A", layer, weights, shape, asking, seen)
            if attention.talk is not None:
                weights = mix_heads(weights, attention.talk.after)
            out = self.rule.mix(self.weighed("W", layer, weights, shape, asking, seen), v)
        if out.shape[2] < shape[0]:  # nothing for those who do not ask
            out = F.pad(out, (0, 0, asking.start, shape[0] - asking.start - out.shape[2]))
        out = self.norm(out.transpose(1, 2).flatten(2), attention.norm, layer)  # (B, H, m, d/H) → (B, m, d)
        if attention.gate is not None:
            out = self.rule.damp(out, self.linear(target, attention.gate, layer))
        return self.linear(out, attention.proj, layer)

    def weighed(
        self, name: str, layer: int, weights: Tensor, shape: tuple[int, int], asking: slice, seen: slice
    ) -> Tensor:
        """Weights (B, H, ·, ·), which the recorder sees as those of all targets (B, H, m, n).

        By attention ("A"), targets that do not ask see themselves alone; they mix ("W") no values.
        """
        if not self.recorder.wants(name, layer):
            return weights
        if weights.shape[2:] == shape:
            return self.recorder.see(name, layer, weights)
        whole = weights.new_zeros(*weights.shape[:2], *shape)
        if name == "A":
            whole.diagonal(dim1=-2, dim2=-1).fill_(1)
        whole[..., asking, seen] = weights
        return self.recorder.see(name, layer, whole)[..., asking, seen]

    def project(self, target: Tensor, source: Tensor, attention: Attention, layer: int) -> Sequence[Tensor]:
        """Queries, keys and values, (B, ·, d) each."""
        if attention.together is not None and target is source and self.ordinary:
            widths = [linear.weight.shape[0] for linear in (attention.q, attention.k, attention.v)]
            return self.linear(target, attention.together, layer).split(widths, dim=-1)
        return (
            self.linear(target, attention.q, layer),
            self.linear(source, attention.k, layer),
            self.linear(source, attention.v, layer),
        )

    def mlp(self, u: Tensor, mlp: Mlp, layer: int) -> Tensor:
        u = fitted(self.norm(u, mlp.first, layer), mlp.fc1)
        hidden = self.rule.activate(self.linear(u, mlp.fc1, layer), mlp.activation)
        if mlp.up is not None:
            hidden = self.rule.gate(hidden, self.linear(u, mlp.up, layer))
        return self.linear(self.norm(hidden, mlp.norm, layer), mlp.fc2, layer)

    def head(self, x: Tensor, head: Head, layer: int) -> Tensor:
        """Final norm, pooling and linear head(s); the recorder gets what is pooled as ``readout`` (B, n)."""
        x = self.norm(x, head.norm, layer)
        if head.pool == "pair":
            self.recorder.see("readout", layer, _first(x, 2))
            first, second = (self.linear(x[:, i], linear, layer) for i, linear in enumerate(head.linears))
            half = first.new_full((), 0.5)
            logits = self.rule.add(self.rule.scale(first, half), self.rule.scale(second, half))
            return logits if head.answer is None else head.answer(x, x[:, :2].mean(1), logits)[:, None]
        if head.pool == "patches":
            shares = self.shares(x[:, self.prefix :], head.weights)
            self.recorder.see("readout", layer, F.pad(shares, (self.prefix, 0)))
            vectors = self.features(x[:, self.prefix :], head, layer)
            pooled = self.rule.mean(vectors, shares)
            logits = self.rule.mean(self.linear(vectors, head.linears[0], layer), shares)
        elif head.pool == "queries":
            pooled, logits = read_region(self, x, head, layer)
        else:
            pooled = self.features(self.pool(x, head, layer), head, layer)
            logits = self.linear(pooled, head.linears[0], layer)
        return logits if head.answer is None else head.answer(x, pooled, logits)[:, None]

    def features(self, pooled: Tensor, head: Head, layer: int) -> Tensor:
        """What the last linear layer of the head reads, (…, d) → (…, D)."""
        pooled = self.dense(self.norm(pooled, head.pooled_norm, layer), head.dense, layer)
        # embeddings of other images are in single precision, whatever that of the model is
        return self.norm(pooled.to(head.linears[0].weight.dtype), head.unit, layer)

    def dense(self, x: Tensor, layers: Sequence[Dense], layer: int) -> Tensor:
        for dense in layers:
            x = self.linear(self.norm(x, dense.norm, layer), dense.linear, layer)
            x = x if dense.activation is None else self.rule.activate(x, dense.activation)
        return x

    def shares(self, patches: Tensor, weights: Tensor | None) -> Tensor:
        """(B, N): the shares of the patches in the mean that the head makes of their logits."""
        shares = torch.ones_like(patches[..., 0]) if weights is None else weights.expand(len(patches), -1)
        if weights is not None and self.keep is not None:
            shares = shares.gather(1, self.keep)
        total = shares.sum(1, keepdim=True)
        return shares / total.where(total > 0, 1)

    def pool(self, x: Tensor, head: Head, layer: int) -> Tensor:
        """(B, n, d) → (B, d), or (B, 2d) for ``token_and_mean``."""
        start = 0 if head.include_prefix else self.prefix
        patches = x[:, start:]
        spread = F.pad(torch.full_like(patches[..., 0], 1 / max(patches.shape[1], 1)), (start, 0))  # (B, n)
        match head.pool:
            case "mean":
                self.recorder.see("readout", layer, spread)
                return self.rule.mean(patches)
            case "max":
                self.recorder.see("readout", layer, _won(patches, start))
                return patches.amax(1)
            case "avgmax":
                self.recorder.see("readout", layer, (_won(patches, start) + spread) / 2)
                half = patches.new_full((), 0.5)
                return self.rule.add(
                    self.rule.scale(patches.amax(1), half), self.rule.scale(self.rule.mean(patches), half)
                )
            case "token_and_mean":
                self.recorder.see("readout", layer, (_first(x, 1) + spread) / 2)
                return torch.cat([x[:, 0], self.rule.mean(patches)], dim=1)
            case "attention":
                assert head.attention_pool is not None
                return self.attention_pool(patches, head.attention_pool, layer)
            case _ if head.choices > 1:
                chosen = self.surest(x, head, layer)
                self.recorder.see("readout", layer, F.one_hot(chosen, x.shape[1]).to(x.dtype))
                return x[torch.arange(len(x), device=x.device), chosen]
            case _:
                self.recorder.see("readout", layer, _only(x, head.token))
                return x[:, head.token]

    @torch.no_grad()
    def surest(self, x: Tensor, head: Head, layer: int) -> Tensor:
        """(B,): the number of the token among the head's choices that is the surest of any class but the last."""
        walk = Walk(self.parts)
        vectors = walk.features(x[:, head.token : head.token + head.choices], head, layer)
        logits = walk.linear(vectors, head.linears[0], layer)
        return head.token + logits.softmax(-1)[..., :-1].amax(-1).argmax(1)

    def attention_pool(self, patches: Tensor, pool: AttentionPool, layer: int) -> Tensor:
        query = pool.query.expand(patches.shape[0], -1, -1)
        pooled = self.attention(query, patches, pool.attention, layer)
        if pool.mlp is not None:
            pooled = self.rule.add(pooled, self.mlp(self.norm(pooled, pool.norm, layer), pool.mlp, layer))
        return pooled[:, 0]

    def norm(self, x: Tensor, norm: Norm | None, layer: int) -> Tensor:
        if norm is None:
            return x
        out = self.recorder.bias(self.rule.norm(_widened(x, norm), norm), norm.bias, layer)
        kind = x.device.type
        # once here, not in each of the products that follow
        return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out

    def linear(self, x: Tensor, linear: Linear, layer: int) -> Tensor:
        return self.recorder.bias(self.rule.linear(fitted(x, linear), linear), linear.bias, layer)

    def scale(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        return x if gamma is None else self.rule.scale(x, gamma)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, n, d) → (B, H, n, d/H)

    def position(self, x: Tensor, norm: Norm | None, attention: Attention, layer: int) -> Tensor:
        """QK-norm and rotation of queries or keys (B, H, n, d/H)."""
        if norm is not None:
            x = self.norm(x, norm, layer).to(x.dtype)
        return x if attention.rope is None else rotate(x, attention.rope, self.prefix, self.keep)

    def score_bias(self, bias: Tensor | None, dtype: torch.dtype, queries: int) -> Tensor | None:
        """The additive score bias of the first queries and the tokens present: (H, n, n) → (1 or B, H, queries, m)."""
        if bias is None:
            return None
        if self.keep is None:
            return bias[None, :, :queries].to(dtype)
        numbers = self.numbers(self.keep)
        return bias[:, numbers[:, :queries, None], numbers[:, None, :]].transpose(0, 1).to(dtype)

    def present(self, table: Tensor) -> Tensor:
        """The rows (n, d) of all tokens → those of the tokens present, (n, d) or (B, m, d)."""
        return table if self.keep is None else table[self.numbers(self.keep)]

    def numbers(self, keep: Tensor) -> Tensor:
        """(B, m): which tokens the prefix tokens and the patches ``keep`` (B, k) are."""
        numbers = F.pad(keep + self.prefix, (self.prefix, 0))
        numbers[:, : self.prefix] = torch.arange(self.prefix, device=keep.device)
        return numbers


def fitted(x: Tensor, linear: Linear) -> Tensor:
    """In the precision of the weights, which may be lower than that of the stream."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(linear.weight.dtype)


def _widened(x: Tensor, norm: Norm) -> Tensor:
    """In the precision of the norm, which may be higher than that of a product."""
    return x if norm.weight is None else x.to(norm.weight.dtype)


def embed(parts: Embedding, images: Tensor, rule: Plain) -> Tensor:
    """(B, C, H, W) → (B, P + N, d)."""
    images = images if parts.stem is None else parts.stem.run(images)
    patch = parts.weight.shape[-2:]
    grid = (images.shape[-2] // patch[0], images.shape[-1] // patch[1])
    images = images[..., : grid[0] * patch[0], : grid[1] * patch[1]]
    # (B, C, gh·ph, gw·pw) → (B, N, C·ph·pw): a patch convolution is a linear map of each patch
    pixels = images.unflatten(-1, (grid[1], -1)).unflatten(-3, (grid[0], -1)).permute(0, 2, 4, 1, 3, 5)
    patches = Linear(parts.weight.flatten(1), parts.bias)
    x = rule.embed(fitted(pixels.flatten(3).flatten(1, 2), patches), patches)
    if parts.patch_norm is not None:
        x = rule.norm(_widened(x, parts.patch_norm), parts.patch_norm)
    x = torch.cat([parts.prefix.expand(x.shape[0], -1, -1), x], dim=1)
    if parts.positions is not None:
        x = rule.add(x, parts.positions)
    return x if parts.norm is None else rule.norm(x, parts.norm)


def rotate(x: Tensor, rope: Rope, prefix: int, keep: Tensor | None) -> Tensor:
    """Rotary positions on the patches of (B, H, n, w); prefix tokens are not rotated."""
    if x.shape[2] <= prefix:
        return x
    sin, cos = rope.sin, rope.cos
    if keep is not None:  # (N, w) → (B, 1, k, w); (H, N, w) → (B, H, k, w)
        sin, cos = (t[keep][:, None] if t.ndim == 2 else t[:, keep].transpose(0, 1) for t in (sin, cos))
    head, patches = x[:, :, :prefix], x[:, :, prefix:]
    if rope.half:
        first, second = patches.unflatten(-1, (rope.sections, -1)).chunk(2, dim=-1)
        partner = torch.cat([-second, first], dim=-1).flatten(-2)
    else:
        partner = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
    return torch.cat([head, (patches * cos + partner * sin).to(x.dtype)], dim=2)


def _first(x: Tensor, count: int) -> Tensor:
    """(B, n): equal shares of the first tokens."""
    readout = torch.zeros_like(x[..., 0])
    readout[:, :count] = 1 / count
    return readout


def _only(x: Tensor, token: int) -> Tensor:
    """(B, n): all of one token."""
    readout = torch.zeros_like(x[..., 0])
    readout[:, token] = 1
    return readout


def _won(patches: Tensor, start: int) -> Tensor:
    """(B, N, d) → (B, n): the share of channels whose maximum each token holds."""
    winners = F.one_hot(patches.argmax(1), patches.shape[1])  # (B, d, N)
    return F.pad(winners.to(patches.dtype).mean(1), (start, 0))
