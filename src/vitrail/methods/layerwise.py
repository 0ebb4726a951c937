"""Methods that give every layer a score per token: the base of PLUS, SkipPLUS and Rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, TraceMethod

Readout = Literal["head", "cls"]
Rule = Literal["plain", "frozen"]
Output = Literal["logit", "probability"]
Mixing = Literal["half", "half_raw", "add", "none"]


@dataclass(kw_only=True)
class Layerwise(TraceMethod):
    """A trace and, per layer, a score for every token.

    Subclasses say what the trace must ``keep`` and how ``scores`` reads it, by default input × gradient; ``layers`` are
    those of the bare method.
    """

    bears_half: ClassVar[bool] = True
    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx"})
    aggregations: ClassVar[tuple[str, ...]] = ("plus", "skipplus")
    aggregated_version: ClassVar[int | None] = None  # of the aggregated forms, where only the bare method has changed
    no_aggregation: ClassVar[str] = "its layers give scores, not token-to-token maps"

    def specs(self, layers: Iterable[int]) -> Sequence[TraceSpec]:
        """The traces with these layers."""
        rule, output = getattr(self, "rule", "plain"), getattr(self, "output", "logit")
        return [TraceSpec.of(self.keep, layers, rule, output, self.cancels(layers), self.reduced)]

    def needs(self) -> Sequence[TraceSpec]:
        return self.specs(check_layers(self.layers(), self.all_layers(0).stop))

    def combined(self, *traces: Trace) -> Trace:
        """One trace with what all of ``specs`` keep."""
        return traces[0]

    def cancels(self, layers: Iterable[int]) -> bool:
        """Whether sums all but cancel at these layers, so that only a trace in double precision tells what is left."""
        return False

    def scores(self, trace: Trace, layer: int) -> Tensor:
        """(B, P + N): the share of each token in the score, seen from the input of block ``layer``."""
        return input_x_gradient(trace, layer)

    def term(self, trace: Trace, layer: int) -> Tensor:
        """(B, P + N): what the layer adds to PLUS."""
        return self.scores(trace, layer)

    def closing(self, trace: Trace) -> Tensor | None:
        """(B, P + N): what is added once to a sum over layers."""
        return None

    def extras(self, trace: Trace, layers: Iterable[int]) -> dict[str, Tensor]:
        """What the trace tells besides the map, (B,) each."""
        return {}

    def layers(self) -> range:
        """The layers of the bare method."""
        first: int = getattr(self, "start_layer", 0)
        return range(first, first + 1)

    def all_layers(self, start: int) -> range:
        """The layers of PLUS from ``start`` on."""
        return range(start, self.model.num_layers)

    def read(self, *traces: Trace) -> Attribution:
        return self.sum_over(self.combined(*traces), self.layers(), self.scores)

    def sum_over(self, trace: Trace, layers: range, term: Callable[[Trace, int], Tensor]) -> Attribution:
        """The plain signed sum of the layers' terms."""
        total = torch.stack([term(trace, layer) for layer in layers]).sum(0)
        closing = self.closing(trace)
        return Attribution(self.on_grid(total if closing is None else total + closing), self.extras(trace, layers))


@dataclass(kw_only=True)
class LayerMap(Layerwise):
    """A method whose layers give whole token-to-token maps; their read-out row is the score.

    ``mixing`` says how Rollout chains the maps T: "half" ½I + ½T̄ with rows normalised to one, "half_raw" ½I + ½T,
    "add" I + T, "none" T itself. An attention pool counts as one more layer, the last one: its own map is the row that
    the sweep starts with, and the rows of the other layers are read with its attention.
    """

    readout: Readout = "head"

    keep: ClassVar[frozenset[str]] = frozenset({"A"})
    aggregations: ClassVar[tuple[str, ...]] = ("plus", "skipplus", "rollout")
    mixing: ClassVar[Mixing] = "half"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        """(B, n, n), rows [to, from]; for an attention pool (layer L) (B, 1, keys)."""
        raise NotImplementedError

    def layers(self) -> range:
        """The last attention: the pool's, where the head has one."""
        depth = self.model.num_layers
        return range(depth, depth + 1) if self.pools_by_attention else range(depth - 1, depth)

    def all_layers(self, start: int) -> range:
        return range(start, self.model.num_layers + self.pools_by_attention)

    @property
    def pools_by_attention(self) -> bool:
        return self.model.pools_by_attention and self.readout == "head"

    def rho(self, trace: Trace) -> Tensor:
        """(B, n): the tokens the head reads, or the class token alone."""
        return readout_row(trace, self.readout, self.model.name)

    def scores(self, trace: Trace, layer: int) -> Tensor:
        matrix = self.layer_map(trace, layer)
        if layer == trace.num_layers:
            return on_tokens(matrix[:, 0], trace)
        return torch.einsum("bi,bij->bj", self.rho(trace), matrix)

    def rollout(self, trace: Trace, start: int) -> Tensor:
        """ρᵀ ∏ (mixed maps), from the last layer down to ``start``: O(n²) per layer, since only one row is needed."""
        row = self.scores(trace, trace.num_layers) if self.pools_by_attention else self.rho(trace)
        for layer in reversed(range(start, trace.num_layers)):
            matrix = self.layer_map(trace, layer)
            if self.mixing == "half":
                matrix = _normalised(matrix)
            match self.mixing:
                case "half" | "half_raw":  # tokens that do not attend stay as they are
                    half = 0.5 * trace.network.blocks[layer].changed(row)
                    row = row - half + (half[:, None] @ matrix)[:, 0]
                case "add":
                    row = row + (row[:, None] @ matrix)[:, 0]
                case "none":  # products of many maps vanish or explode, and only the order of the row matters
                    row = _normalised((row[:, None] @ matrix)[:, 0])
        return row


@dataclass(kw_only=True)
class OwnRollout(LayerMap):
    """A layer-map method that is published with its own Rollout: that is the bare method."""

    start_layer: int = 0

    def layers(self) -> range:
        return range(self.start_layer, self.model.num_layers)

    def needs(self) -> Sequence[TraceSpec]:
        return self.specs(check_layers(self.layers(), self.model.num_layers))

    def read(self, *traces: Trace) -> Attribution:
        return Attribution(self.on_grid(self.rollout(self.combined(*traces), self.layers().start)))


def input_x_gradient(trace: Trace, layer: int) -> Tensor:
    """(B, n): Σ_k x_jk g_jk at the input of a block."""
    return (trace["x"][layer] * trace["gx"][layer]).sum(-1)


def readout_row(trace: Trace, readout: str, name: str) -> Tensor:
    """ρ (B, n): what the head pools, or the class token alone."""
    if readout == "head":
        return trace.readout
    if not trace.num_prefix:
        raise VitrailError(f'{name} has no class token: use readout="head".')
    row = torch.zeros_like(trace.readout)
    row[:, 0] = 1
    return row


def on_tokens(keys: Tensor, trace: Trace) -> Tensor:
    """Scores of the keys of an attention pool (B, keys) → of all tokens (B, P + N)."""
    return F.pad(keys, (trace.readout.shape[1] - keys.shape[-1], 0))


def check_layers(layers: range, depth: int) -> range:
    """Layers that a method has on a model, 0…depth − 1."""
    if not layers or layers[0] < 0 or layers[-1] >= depth:
        raise VitrailError(f"layer {layers.start} does not fit a model with {depth} layers: expected 0…{depth - 1}.")
    return layers


def _normalised(rows: Tensor) -> Tensor:
    """Rows divided by their sums; rows that sum to zero stay as they are."""
    total = rows.sum(-1, keepdim=True)
    return rows / torch.where(total == 0, torch.ones_like(total), total)
