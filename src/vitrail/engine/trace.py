"""A trace: what one forward and one backward pass leave behind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.ops import Walk
from vitrail.engine.rules import Plain, get_rule
from vitrail.engine.sharing import Wish, current
from vitrail.errors import VitrailError
from vitrail.models.parts import Architecture, converted

if TYPE_CHECKING:
    from vitrail.models.vit import ViT

# What can be kept, and under which name its gradient is asked for.
GRADIENTS = {"gx": "x", "gu": "u", "gmid": "mid", "G": "A", "gv": "v"}
VALUES = frozenset(GRADIENTS.values()) | {"attention_out", "mlp_out"}
KEEPABLE = VALUES | frozenset(GRADIENTS) | {"bias"}


@dataclass(frozen=True)
class Trace:
    """Values and gradients by name and layer; ``trace["gx"][3]`` is ∂y/∂x_3, (B, n, d).

    ``x`` l = 0…L is the stream entering block l (L: leaving the last); ``u`` its first norm; ``mid`` the stream after
    attention; ``A`` attention (B, H, n, n), [query, key]; ``v`` values per head; ``attention_out`` what attention
    gives, ``mlp_out`` what the (scaled) MLP adds; ``gx``, ``gu``, ``gmid``, ``G``, ``gv`` gradients. An attention pool
    is one more layer: ``A[L]`` is (B, H, 1, keys).
    """

    logits: Tensor  # (B, C)
    y: Tensor  # (B,): the explained score
    readout: Tensor  # ρ (B, n): what the head pools
    num_layers: int
    num_prefix: int
    kept: dict[str, dict[int, Tensor]]
    # (B, n) per layer: Σ ⟨b, ∂y/∂out⟩ over the biases of a block; L: of the end layers
    bias: dict[int, Tensor] = field(default_factory=dict)
    pooled_bias: Tensor | None = None  # (B,): the biases behind the pooling, which belong to no token

    def __getitem__(self, name: str) -> dict[int, Tensor]:
        if name not in self.kept:
            raise KeyError(f"{name!r} was not kept in this trace; kept: {', '.join(sorted(self.kept)) or 'nothing'}")
        return self.kept[name]

    def bias_from(self, layer: int) -> Tensor:
        """b_{≥l} (B,): all biases from block ``layer`` on, the end layers and the head included."""
        if self.pooled_bias is None:
            raise KeyError("'bias' was not kept in this trace")
        return self.pooled_bias + sum(b.sum(1) for l, b in self.bias.items() if l >= layer)


def trace(
    model: ViT,
    images: Tensor,
    target: Tensor | None = None,
    *,
    against: Tensor | None = None,
    rule: str | Plain = "plain",
    output: str = "logit",
    keep: Collection[str] = ("x", "gx"),
    layers: Iterable[int] | None = None,
    precise: bool = False,
) -> Trace:
    """One forward and, if a gradient or the biases are kept, one backward pass of a batch.

    Args:
        model: the view.
        images: (B, C, H, W), normalised.
        target: (B,) class per image; None = the predicted one.
        against: (B,) explain y = z_target − z_against instead of z_target.
        rule: how relevance flows back, a name or a rule.
        output: "logit" or "probability": what is differentiated.
        keep: what to store (see ``Trace``); the graph is cut below the lowest layer kept.
        layers: the layers to store; None = all blocks.
        precise: in double precision, for what all but cancels; not on devices that have none.
    """
    unknown = set(keep) - KEEPABLE
    if unknown:
        raise VitrailError(f"cannot keep {sorted(unknown)} in a trace: expected some of {sorted(KEEPABLE)}.")
    depth = model.num_layers
    wish = Wish(frozenset(keep), frozenset(range(depth) if layers is None else layers), rule, output, precise)
    if not fits(wish, depth):
        told = sorted(wish.layers)
        raise VitrailError(f"layers {told} do not fit a model with {depth} blocks: expected 0…{depth}.")
    batch = current()
    if batch is not None and batch.answers(wish, model, images, target, against):
        return batch.found(lambda whole: _make(whole, model, images, target, None))
    return _make(wish, model, images, target, against)


def fits(wish: Wish, depth: int) -> bool:
    """Whether a model with so many blocks has the layers."""
    return bool(wish.layers) and wish.layers <= set(range(depth + 1))


def _make(wish: Wish, model: ViT, images: Tensor, target: Tensor | None, against: Tensor | None) -> Trace:
    parts, pixels = _in_precision(wish.precise, model, model.check_images(images.detach().clone()))
    rule = get_rule(wish.rule) if isinstance(wish.rule, str) else wish.rule
    recorder = _Recorder(wish.keep, wish.layers, len(parts.blocks), parts.embedding.prefix.shape[0])
    with torch.inference_mode(False), torch.set_grad_enabled(recorder.backward):
        with torch.no_grad():
            x = Walk(parts).embed(pixels)
        logits = Walk(parts, rule, recorder).encode(x)
        y = model.score(logits, target, against, wish.output)
        return recorder.finish(logits.detach(), y)


def _in_precision(precise: bool, model: ViT, pixels: Tensor) -> tuple[Architecture, Tensor]:
    """The network and its input: in double precision, or in the model's own."""
    parts = model.architecture()
    if precise and pixels.device.type != "mps":
        return converted(parts, torch.float64), pixels.double()
    return parts, pixels


def pixel_gradient(
    model: ViT,
    images: Tensor,
    target: Tensor,
    *,
    against: Tensor | None = None,
    rule: str | Plain = "plain",
    output: str = "logit",
    precise: bool = False,
) -> Tensor:
    """∂y/∂images (B, C, H, W), or whatever the rule carries back to the pixels; ``precise`` as in ``trace``."""
    with torch.inference_mode(False), torch.enable_grad():
        parts, pixels = _in_precision(precise, model, images.detach().clone())
        pixels.requires_grad_()
        walk = Walk(parts, get_rule(rule) if isinstance(rule, str) else rule)
        y = model.score(walk.encode(walk.embed(pixels)), target, against, output)
        return torch.autograd.grad(y.sum(), pixels)[0]


class _Recorder:
    """Stores what was asked for, cuts the graph below the lowest layer, taps the biases."""

    def __init__(self, keep: frozenset[str], layers: frozenset[int], depth: int, prefix: int):
        self.keep, self.layers, self.depth, self.prefix = keep, layers, depth, prefix
        self.names = (keep & VALUES) | {GRADIENTS[name] for name in keep & set(GRADIENTS)}
        self.backward = bool(keep & set(GRADIENTS)) or "bias" in keep
        self.lowest = min(layers)
        self.seen: dict[str, dict[int, Tensor]] = {name: {} for name in self.names}
        self.taps: list[tuple[int, Tensor]] = []
        self.readout: Tensor | None = None
        self.tokens = 0

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        if name == "readout":
            self.readout = x.detach()
        elif name == "A" and layer == self.depth:  # an attention pool is what the head reads
            self.readout = F.pad(x.detach().mean(1).squeeze(1), (self.tokens - x.shape[-1], 0))
        if name == "x":
            self.tokens = x.shape[1]
            if layer == self.lowest and self.backward:
                x = x.detach().requires_grad_()
        if name in self.names and (layer in self.layers or (name in ("A", "v") and layer == self.depth)):
            self.seen[name][layer] = x
        return x

    def bias(self, out: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        if "bias" not in self.keep or bias is None or layer < self.lowest:
            return out
        tap = torch.zeros(out.shape[:-1], device=out.device, dtype=torch.promote_types(out.dtype, torch.float32))
        self.taps.append((layer, tap.requires_grad_()))
        return _Tap.apply(out, bias, tap)

    def wants(self, name: str, layer: int) -> bool:
        return layer == self.depth or (name in self.names and layer in self.layers)

    def finish(self, logits: Tensor, y: Tensor) -> Trace:
        assert self.readout is not None
        kept = {name: {l: t.detach() for l, t in self.seen[name].items()} for name in self.keep & VALUES}
        asked = [
            (name, l, t) for name in sorted(self.keep & set(GRADIENTS)) for l, t in self.seen[GRADIENTS[name]].items()
        ]
        bias: dict[int, Tensor] = {}
        pooled: Tensor | None = None
        if self.backward:
            sources = [t for _, _, t in asked] + [t for _, t in self.taps]
            grads = torch.autograd.grad(y.sum(), sources, allow_unused=True)
            found = [torch.zeros_like(t) if g is None else g for t, g in zip(sources, grads, strict=True)]
            for (name, layer, _), grad in zip(asked, found, strict=False):
                kept.setdefault(name, {})[layer] = grad
            if "bias" in self.keep:
                bias, pooled = self._bias_maps(found[len(asked) :], y)
        return Trace(logits, y.detach(), self.readout, self.depth, self.prefix, kept, bias, pooled)

    def _bias_maps(self, shares: list[Tensor], y: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Sums the taps of each layer: per token where the operation has tokens, else into one number per image."""
        maps = {
            l: y.new_zeros(y.shape[0], self.tokens, dtype=torch.promote_types(y.dtype, torch.float32))
            for l in range(self.lowest, self.depth + 1)
        }
        pooled = torch.zeros_like(maps[self.depth][:, 0])
        for (layer, _), share in zip(self.taps, shares, strict=True):
            share = share.sum(1) if share.ndim == 3 else share  # heads of a qk-norm
            if share.ndim == 2 and share.shape[1] in (self.tokens, self.tokens - self.prefix):
                maps[layer] += F.pad(share, (self.tokens - share.shape[1], 0))
            else:
                pooled += share.flatten(1).sum(1) if share.ndim == 2 else share
        return maps, pooled


class _Tap(torch.autograd.Function):
    """Identity whose backward leaves ⟨bias, ∂y/∂out⟩ per token in the zero-valued tap: no gradient is stored."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor, tap: Tensor) -> Tensor:
        ctx.bias, ctx.dtype = bias, tap.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        return grad, None, (grad @ ctx.bias.to(grad.dtype)).to(ctx.dtype)
