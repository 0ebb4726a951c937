"""A trace: what one forward and one backward pass leave behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.operations import ReadoutRecorder, Walk
from vitrail.core.parts import Architecture, converted
from vitrail.core.precision import Scaling, is_lowered
from vitrail.core.rules import Plain, get_rule
from vitrail.engine.modes import own_modes
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.progress import passed
from vitrail.targets import Target, at_least_single

# What can be kept, and of which value each gradient is.
GRADIENTS = {"gx": "x", "gu": "u", "gmid": "mid", "G": "A", "gv": "v", "gfeatures": "features"}
VALUES = frozenset(GRADIENTS.values()) | {"W", "attention_out", "mlp_out"}
KEEPABLE = VALUES | frozenset(GRADIENTS) | {"bias"}
MATRICES = frozenset({"A", "W", "G"})  # of tokens by tokens, for each head


@dataclass(frozen=True)
class TraceSpec:
    """What a trace keeps, pairs of a name and a layer, and how it is made."""

    keep: frozenset[tuple[str, int]]
    rule: Any = "plain"
    output: str = "logit"
    precise: bool = False  # in double precision, for sums that all but cancel; not on devices that have none
    every_layer: bool = False  # the head reads the stream after every block, and no gradient leaves its block
    reduced: bool = False  # in half precision
    streamed: bool = False  # matrices are not stored: each block is computed again when they are read

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        layers: Iterable[int],
        rule: str | Plain = "plain",
        output: str = "logit",
        precise: bool = False,
        reduced: bool = False,
    ) -> TraceSpec:
        """All names at all layers."""
        keep = frozenset((name, layer) for layer in layers for name in names)
        return cls(keep, rule, output, precise, reduced=reduced and not precise)

    @property
    def backward(self) -> bool:
        """Whether a backward pass is needed."""
        return any(name in GRADIENTS or name == "bias" for name, _ in self.keep)

    @property
    def kind(self) -> Hashable:
        """Specifications of one kind can be one trace."""
        return self.rule, self.output, self.precise, self.every_layer, self.reduced

    def matrices(self, depth: int) -> frozenset[tuple[str, int]]:
        """The attention of blocks and its gradients that are held at once, where they are not streamed."""
        pairs = {(name, layer) for name, layer in self.keep if name in MATRICES and layer < depth}
        return frozenset(("G" if name == "G" else "A", layer) for name, layer in pairs) | {
            ("A", layer) for name, layer in pairs if name == "G"
        }

    def without_matrices(self, depth: int) -> TraceSpec:
        """What matrices are computed from in their place: the input of a block and the gradient of its output."""
        matrices = {(name, layer) for name, layer in self.keep if name in MATRICES and layer < depth}
        inputs = {("x", layer) for _, layer in matrices}
        outputs = {("gx", layer + 1) for name, layer in matrices if name == "G" and not self.every_layer}
        # an attention pool is small, and part of the head
        pool = {(name, depth) for name, _ in matrices}
        return replace(self, keep=(self.keep - matrices) | inputs | outputs | pool)

    def united(self, other: TraceSpec) -> TraceSpec:
        """One that keeps what both keep."""
        lead = self if self.backward or not other.backward else other
        return replace(lead, keep=self.keep | other.keep, reduced=self.reduced and other.reduced)

    def serves(self, other: TraceSpec) -> bool:
        """Whether its forward pass has the precision that the other asks for."""
        return self.precise == other.precise and (other.reduced or not self.reduced)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.keep)


@dataclass(frozen=True)
class Lazy(Mapping[int, Tensor]):
    """Tensors of layers that are computed when they are read."""

    layers: frozenset[int]
    compute: Callable[[int], Tensor]

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return self.compute(layer)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.layers))

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Trace:
    """Values and gradients by name and layer; ``trace["gx"][3]`` is ∂y/∂x_3, (B, n, d).

    ``x`` l = 0…L is the stream entering block l (L: leaving the last); ``u`` its first norm; ``mid`` the stream after
    attention; ``A`` attention (B, H, n, n), [query, key]; ``W`` the weights that mix values, where heads talk not those
    of attention; ``v`` values per head; ``attention_out`` the output of attention, ``mlp_out`` what the (scaled) MLP
    adds; ``gx``, ``gu``, ``gmid``, ``G``, ``gv`` gradients. An attention pool is one more layer: ``A[L]`` is
    (B, H, 1, keys). A hierarchical model has ``features`` and ``gfeatures`` (B, C, h, w) of its stages alone.
    """

    logits: Tensor  # (B, C)
    y: Tensor  # (B,): the explained score
    readout: Tensor  # ρ (B, n): what the head pools; empty for a hierarchical model
    num_layers: int
    num_prefix: int
    kept: dict[str, Mapping[int, Tensor]]
    # (B, n) per layer: Σ ⟨b, ∂y/∂out⟩ over the biases of a block; L: of the end layers
    bias: dict[int, Tensor] = field(default_factory=dict)
    pooled_bias: Tensor | None = None  # (B,): the biases behind the pooling, which belong to no token
    parts: Callable[[], Architecture] | None = None  # reads the network that was traced

    def __getitem__(self, name: str) -> Mapping[int, Tensor]:
        if name not in self.kept:
            raise KeyError(f"{name!r} was not kept in this trace; kept: {', '.join(sorted(self.kept)) or 'nothing'}")
        return self.kept[name]

    def bias_from(self, layer: int) -> Tensor:
        """b_{≥l} (B,): all biases from block ``layer`` on, the end layers and the head included."""
        if self.pooled_bias is None:
            raise KeyError("'bias' was not kept in this trace")
        first = min((l for l in self.bias if l >= layer), default=None)
        return self.pooled_bias if first is None else self._biases_from[first]

    @cached_property
    def _biases_from(self) -> dict[int, Tensor]:
        """b_{≥l} (B,) of every layer."""
        total, totals = self.pooled_bias, {}
        layers = sorted(self.bias, reverse=True)
        for layer, share in zip(layers, torch.stack([self.bias[layer] for layer in layers]).sum(2), strict=True):
            assert total is not None
            totals[layer] = total = total + share
        return totals

    @property
    def network(self) -> Architecture:
        """The parts of a network with tokens."""
        assert self.parts is not None
        return self.parts()


def trace(
    model: View,
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
        keep: what to store (see ``Trace``); the graph is cut below the lowest layer with a gradient.
        layers: the layers to store; None = all blocks.
        precise: in double precision, for what all but cancels; not on devices that have none.
    """
    unknown = set(keep) - KEEPABLE
    if unknown:
        raise VitrailError(f"cannot keep {sorted(unknown)} in a trace: expected some of {sorted(KEEPABLE)}.")
    depth = model.num_layers
    chosen = list(range(depth) if layers is None else layers)
    if not chosen or not set(chosen) <= set(range(depth + 1)):
        raise VitrailError(f"layers {sorted(chosen)} do not fit a model with {depth} blocks: expected 0…{depth}.")
    with own_modes():
        images, spec = model.check_images(images, model.precision), TraceSpec.of(keep, chosen, rule, output, precise)
        return make_traces(model, read_parts(model), images, [Target(target, against)], spec)[0]


def read_parts(view: View) -> Architecture | None:
    """The network in the view's precision; None where the view has no tokens."""
    if not view.has_tokens:
        return None
    parts = view.architecture()
    return parts if view.dtype == view.precision else converted(parts, view.precision)


def make_traces(
    view: View, parts: Architecture | None, images: Tensor, targets: Sequence[Target], spec: TraceSpec
) -> list[Trace]:
    """The traces of a batch, one for each target: one forward pass, and a backward pass each.

    ``parts``: the network, perhaps lowered; None where the view has no tokens.
    """
    images = images.detach().clone()
    if parts is None:
        return _trace_features(view, images, targets, spec)
    if spec.precise and images.device.type != "mps":
        parts, images = converted(parts, torch.float64), images.double()
    rule = get_rule(spec.rule) if isinstance(spec.rule, str) else spec.rule
    if spec.streamed:
        stored = replace(spec.without_matrices(len(parts.blocks)), streamed=False)
        made = make_traces(view, parts, images, targets, stored)
        return [
            replace(trace, kept=trace.kept | _Blocks(view, parts, rule, spec, target, trace).matrices())
            for trace, target in zip(made, targets, strict=True)
        ]
    recorder = _Recorder(spec, len(parts.blocks), parts.embedding.prefix.shape[0], is_lowered(parts))
    with torch.set_grad_enabled(spec.backward):
        with torch.no_grad():
            x = Walk(parts).embed(images)
        logits = Walk(parts, rule, recorder, scaling=recorder.scalings.get(len(parts.blocks))).encode(x)
        early = [Walk(parts, rule).head(x, parts.head, len(parts.blocks)) for x in recorder.early]
        made = []
        for target in targets:
            y = target.score(view, logits, spec.output)
            objective = y + sum(target.score(view, logits, spec.output) for logits in early)
            last = target is targets[-1]
            made.append(recorder.finish(logits.detach(), y, objective, keep_graph=not last))
    made = [replace(trace, parts=lambda: parts) for trace in made]
    if view.groups and spec.output == "logit":
        made = [_with_entropy(view, trace, target) for trace, target in zip(made, targets, strict=True)]
    passed(len(images))
    return made


def _with_entropy(view: View, trace: Trace, target: Target) -> Trace:
    if trace.pooled_bias is None:
        return trace
    return replace(trace, pooled_bias=trace.pooled_bias + _constant(view, trace.logits, target))


@torch.enable_grad()
def _constant(view: View, logits: Tensor, target: Target) -> Tensor:
    """(B,): what the score of a group is beyond a weighted sum of its logits, the entropy of the weights: a bias."""
    logits = logits.clone().requires_grad_()
    y = target.score(view, logits, "logit")
    (weights,) = torch.autograd.grad(y.sum(), logits)
    return (y - (weights * logits).sum(1)).detach()


def join_traces(traces: Sequence[Trace]) -> Trace:
    """Traces of parts of a batch as one of the whole."""
    first = traces[0]

    def whole(name: str) -> Mapping[int, Tensor]:
        layers = first.kept[name]
        joined = Lazy(frozenset(layers), lambda layer: torch.cat([part.kept[name][layer] for part in traces]))
        return joined if isinstance(layers, Lazy) else dict(joined)

    kept = {name: whole(name) for name in first.kept}
    bias = {layer: torch.cat([part.bias[layer] for part in traces]) for layer in first.bias}
    logits, y, readout = (torch.cat([getattr(part, name) for part in traces]) for name in ("logits", "y", "readout"))
    shares = [part.pooled_bias for part in traces if part.pooled_bias is not None]
    pooled = torch.cat(shares) if shares else None
    return replace(first, logits=logits, y=y, readout=readout, kept=kept, bias=bias, pooled_bias=pooled)


def _trace_features(view: View, images: Tensor, targets: Sequence[Target], spec: TraceSpec) -> list[Trace]:
    """The features of stages of a hierarchical model and, where asked for, the gradients of the score there."""
    if spec.rule != "plain":
        raise VitrailError(f'rule="{spec.rule}" needs tokens and blocks, which {view.name} does not have.')
    stages = sorted({stage for _, stage in spec.keep})
    with torch.set_grad_enabled(spec.backward):
        logits, features = view.staged(images.requires_grad_(spec.backward), stages)
        maps = {stage: view.as_map(out.detach()) for stage, out in zip(stages, features, strict=True)}
        nothing, traces = logits.new_empty(len(logits), 0), []
        for target in targets:
            y = target.score(view, logits, spec.output)
            kept: dict[str, Mapping[int, Tensor]] = {"features": maps}
            if spec.backward:
                gradients = torch.autograd.grad(y.sum(), features, retain_graph=target is not targets[-1])
                kept["gfeatures"] = {stage: view.as_map(out) for stage, out in zip(stages, gradients, strict=True)}
            traces.append(Trace(logits.detach(), y.detach(), nothing, len(stages), 0, kept))
    return traces


class _Blocks:
    """The blocks of a streamed trace: one is computed again at a time, and its matrices held until another is read."""

    def __init__(
        self, view: View, parts: Architecture, rule: Plain, spec: TraceSpec, target: Target, stored: Trace
    ) -> None:
        self.view, self.parts, self.rule, self.spec, self.target = view, parts, rule, spec, target
        self.stored = stored
        self.layer: int | None = None
        self.held: Mapping[str, Tensor] = {}

    def matrices(self) -> dict[str, Mapping[int, Tensor]]:
        """What the trace lacks, by name; an attention pool's are stored."""
        depth = len(self.parts.blocks)
        kept: dict[str, Mapping[int, Tensor]] = {}
        for name in self.spec.names & MATRICES:
            pool = {layer: tensor for layer, tensor in self.stored.kept.get(name, {}).items() if layer == depth}
            layers = frozenset(layer for other, layer in self.spec.keep if other == name and layer < depth)
            kept[name] = Lazy(layers | set(pool), partial(self.read, name, pool))
        return kept

    def read(self, name: str, pool: Mapping[int, Tensor], layer: int) -> Tensor:
        if layer in pool:
            return pool[layer]
        if layer != self.layer:
            self.layer, self.held = None, {}  # free before the next are made
            held = self.compute(self.parts, layer)
            if is_lowered(self.parts) and not all(tensor.isfinite().all() for tensor in held.values()):
                parts = read_parts(self.view)  # beyond half precision
                assert parts is not None
                held = self.compute(parts, layer)
            self.layer, self.held = layer, held
        return self.held[name]

    def compute(self, parts: Architecture, layer: int) -> dict[str, Tensor]:
        """The matrices of a block, from its input and, for gradients, that of its output or the head behind it."""
        keep = frozenset((name, l) for name, l in self.spec.keep if l == layer and name in MATRICES)
        spec, depth = replace(self.spec, keep=keep), len(parts.blocks)
        recorder = _Recorder(spec, depth, parts.embedding.prefix.shape[0], is_lowered(parts))
        with own_modes(), torch.set_grad_enabled(spec.backward):
            x = recorder.see("x", layer, self.stored["x"][layer])
            out = Walk(parts, self.rule, recorder).block(x, parts.blocks[layer], layer)
            held = {name: at_least_single(recorder.seen[name][layer].detach()) for name in spec.names - {"G"}}
            if spec.backward:
                scaling = Scaling()
                if is_lowered(parts):
                    out = scaling.enter(out)
                above = None if spec.every_layer else self.stored["gx"][layer + 1].to(out.dtype)
                if spec.every_layer:
                    out = self.target.score(self.view, Walk(parts, self.rule).head(out, parts.head, depth), spec.output)
                    above = torch.ones_like(out)
                attention = recorder.seen["A"][layer]
                (gradient,) = torch.autograd.grad(out, attention, above, allow_unused=True)
                gradient = torch.zeros_like(attention) if gradient is None else gradient
                held["G"] = scaling.leave(gradient) if is_lowered(parts) else gradient
        return held


class _Recorder(ReadoutRecorder):
    """Stores what was asked for, cuts the graph below the lowest layer with a gradient, taps the biases."""

    def __init__(self, spec: TraceSpec, depth: int, prefix: int, lowered: bool):
        super().__init__(depth)
        self.spec, self.prefix = spec, prefix
        # by the layer whose stream the head reads: of the gradients that enter the block below
        read = range(depth + 1) if spec.every_layer else (depth,)
        self.scalings = {layer: Scaling() for layer in read} if lowered else {}
        self.wanted: dict[str, set[int]] = {}
        for name, layer in spec.keep:
            if name != "bias":
                self.wanted.setdefault(GRADIENTS.get(name, name), set()).add(layer)
        backward = [layer for name, layer in spec.keep if name in GRADIENTS or name == "bias"]
        self.cut = min(backward, default=None)
        self.tapped_from = min((layer for name, layer in spec.keep if name == "bias"), default=None)
        self.early: list[Tensor] = []  # the stream before the last block, where the head reads every layer
        self.seen: dict[str, dict[int, Tensor]] = {name: {} for name in self.wanted}
        self.taps: list[tuple[int, Tensor]] = []

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        super().see(name, layer, x)
        if name == "x" and self.spec.every_layer and self.cut is not None and self.cut < layer < self.depth:
            self.early.append(x if layer not in self.scalings else self.scalings[layer].enter(x))
            x = x.detach().requires_grad_()
        if name == "x" and layer == self.cut:
            x = x.detach().requires_grad_()
        if name in self.wanted and (layer in self.wanted[name] or (name in ("A", "v") and layer == self.depth)):
            self.seen[name][layer] = x
        return x

    def bias(self, out: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        if self.tapped_from is None or bias is None or layer < self.tapped_from:
            return out
        tap = torch.zeros(out.shape[:-1], device=out.device, dtype=torch.promote_types(out.dtype, torch.float32))
        self.taps.append((layer, tap.requires_grad_()))
        return _Tap.apply(out, bias, tap)

    def wants(self, name: str, layer: int) -> bool:
        return super().wants(name, layer) or layer in self.wanted.get(name, ())

    def finish(self, logits: Tensor, y: Tensor, objective: Tensor, keep_graph: bool) -> Trace:
        """The trace, with the gradients of the objective."""
        assert self.readout is not None
        names = self.spec.names
        kept: dict[str, dict[int, Tensor]] = {
            name: {l: at_least_single(t.detach()) for l, t in self.seen[name].items()} for name in names & VALUES
        }
        asked = [(name, l, t) for name in sorted(names & set(GRADIENTS)) for l, t in self._differentiated(name)]
        bias: dict[int, Tensor] = {}
        pooled: Tensor | None = None
        if self.spec.backward:
            sources = [t for _, _, t in asked] + [t for _, t in self.taps]
            # a streamed trace stores none where the head reads every layer
            grads = sources and torch.autograd.grad(
                objective.sum(), sources, allow_unused=True, retain_graph=keep_graph
            )
            gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(sources, grads, strict=True)]
            if self.scalings:
                places = [*((name, layer) for name, layer, _ in asked), *(("bias", layer) for layer, _ in self.taps)]
                gradients = [self.left(*place, grad) for place, grad in zip(places, gradients, strict=True)]
            for (name, layer, _), grad in zip(asked, gradients, strict=False):
                kept.setdefault(name, {})[layer] = grad
            if "bias" in names:
                bias, pooled = self._bias_maps(gradients[len(asked) :], y)
        return Trace(logits, y.detach(), self.readout, self.depth, self.prefix, {**kept}, bias, pooled)

    def left(self, name: str, layer: int, gradient: Tensor) -> Tensor:
        """A gradient without the factor that it has where it comes from a block."""
        if layer == self.depth and name != "gx":  # of the head
            return gradient
        above = min(layer + 1, self.depth) if self.spec.every_layer else self.depth
        return self.scalings[above].leave(gradient)

    def _differentiated(self, name: str) -> list[tuple[int, Tensor]]:
        """The values by which a gradient is taken; those below the cut, kept for their value, have none."""
        layers = {layer for kept, layer in self.spec.keep if kept == name}
        pool = {self.depth} if name in ("G", "gv") else set()
        return [(l, t) for l, t in self.seen[GRADIENTS[name]].items() if l in layers | pool]

    def _bias_maps(self, shares: list[Tensor], y: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Sums the taps of each layer: per token where the operation has tokens, else into one number per image."""
        assert self.tapped_from is not None
        maps = {
            l: y.new_zeros(y.shape[0], self.tokens, dtype=torch.promote_types(y.dtype, torch.float32))
            for l in range(self.tapped_from, self.depth + 1)
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
        bias = ctx.bias.to(grad.dtype)
        return grad, None, (grad @ bias if bias.ndim == 1 else (grad * bias).sum(-1)).to(ctx.dtype)
