"""Methods that give every layer a score per token: the base of PLUS, SkipPLUS and Rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.trace import Trace, trace
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, TokenMethod


@dataclass(kw_only=True)
class Layerwise(TokenMethod):
    """A trace and, per layer, a score for every token.

    Subclasses say what the trace must ``keep`` and how ``scores`` reads it; ``layers`` are those of the bare method.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx"})
    aggregations: ClassVar[tuple[str, ...]] = ("plus", "skipplus")

    def trace(self, images: Tensor, target: Tensor, against: Tensor | None, layers: Iterable[int]) -> Trace:
        rule, output = getattr(self, "rule", "plain"), getattr(self, "output", "logit")
        return trace(self.vit, images, target, against=against, rule=rule, output=output, keep=self.keep, layers=layers)

    def scores(self, trace: Trace, layer: int) -> Tensor:
        """(B, P + N): what each token has in the score, seen from the input of block ``layer``."""
        raise NotImplementedError

    def extras(self, trace: Trace, layers: Iterable[int]) -> dict[str, Tensor]:
        """What the trace tells besides the map, (B,) each."""
        return {}

    def layers(self) -> range:
        """The layers of the bare method."""
        first = getattr(self, "start_layer", 0)
        return range(first, first + 1)

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        return self.sum_over(self.layers(), images, target, against)

    def sum_over(self, layers: range, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        """The plain signed sum of the layers' scores, from one trace."""
        found = self.trace(images, target, against, check_layers(layers, self.vit.num_layers))
        total = torch.stack([self.scores(found, layer) for layer in layers]).sum(0)
        return Attribution(self.on_grid(total), self.extras(found, layers))


@dataclass(kw_only=True)
class LayerMap(Layerwise):
    """A method whose layers give whole token-to-token maps; their read-out row is the score.

    An attention pool counts as one more layer: the last one, and what the rows of the others are read with.
    """

    readout: Literal["head", "cls"] = "head"

    keep: ClassVar[frozenset[str]] = frozenset({"A"})
    aggregations: ClassVar[tuple[str, ...]] = ("plus", "skipplus", "rollout")

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        """(B, n, n), rows [to, from]; for an attention pool (layer L) (B, 1, keys)."""
        raise NotImplementedError

    def layers(self) -> range:
        """The last attention: the pool's, where the head has one."""
        depth = self.vit.num_layers
        return range(depth, depth + 1) if self.pools_by_attention else range(depth - 1, depth)

    @property
    def pools_by_attention(self) -> bool:
        return self.vit.architecture().head.pool == "attention" and self.readout == "head"

    def rho(self, trace: Trace) -> Tensor:
        """(B, n): the tokens the head reads, or the class token alone."""
        if self.readout == "head":
            return trace.readout
        if self.readout != "cls":
            raise VitrailError(f'readout must be "head" or "cls", but got {self.readout!r}.')
        if not trace.num_prefix:
            raise VitrailError(f'{self.model.name} has no class token: use readout="head".')
        return F.one_hot(trace.readout.new_zeros(len(trace.readout), dtype=torch.long), trace.readout.shape[1]).to(
            trace.readout.dtype
        )

    def scores(self, trace: Trace, layer: int) -> Tensor:
        tokens = trace.readout.shape[1]
        matrix = self.layer_map(trace, layer)
        if layer == trace.num_layers:
            return F.pad(matrix[:, 0], (tokens - matrix.shape[-1], 0))
        return torch.einsum("bi,bij->bj", self.rho(trace), matrix)


def check_layers(layers: range, depth: int) -> range:
    """Layers that a model with ``depth`` blocks has (``depth`` itself: after the last block)."""
    if not layers or layers[0] < 0 or layers[-1] > depth:
        raise VitrailError(
            f"start_layer={layers.start} does not fit a model with {depth} blocks: expected 0…{depth - 1}."
        )
    return layers
