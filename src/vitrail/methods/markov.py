"""Markov chains and bidirectional attention: TAM, BT-H, BT-T."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.requests import Asking, Batch, Traced, resolved
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution
from vitrail.methods.layerwise import LayerMap, Output, check_layers, on_tokens
from vitrail.methods.registry import method
from vitrail.methods.values import HeadValueMethod, attention_of, sent
from vitrail.progress import shown
from vitrail.targets import Target


@dataclass(kw_only=True)
class Integrated(LayerMap):
    """A chain through the layers, times the integrated gradient of the last attention.

    The gradient is averaged over ``steps`` images scaled from the mean colour to the image, both included; only the
    last attention is differentiated there. ``start_layer``: the first block used; None = the authors' choice, at most
    the last block; with ``protocol="tis"`` block 0.
    """

    start_layer: int | None = None
    steps: int = 20
    output: Output = "logit"
    protocol: Literal["default", "authors", "tis"] = "default"

    aggregations: ClassVar[tuple[str, ...]] = ()
    no_aggregation: ClassVar[str] = "its state already runs through all layers"
    published_start: ClassVar[int] = 0

    def weighted(self, trace: Trace, start: int, gradient: Tensor) -> Tensor:
        """(B, n): the chain from the last block down to ``start``, weighted by the integrated gradient."""
        raise NotImplementedError

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        if self.steps < 1:
            raise VitrailError(f"steps must be at least 1, but got {self.steps}.")
        (trace,) = yield [Traced(batch, target, spec) for spec in self.needs()]
        gradient = yield from self.integrated_gradient(batch, target)
        return Attribution(self.on_grid(self.weighted(trace, self.start(), gradient)))

    def start(self) -> int:
        """The first block used."""
        depth = self.model.num_layers
        published = 0 if self.protocol == "tis" else min(self.published_start, depth - 1)
        start = published if self.start_layer is None else self.start_layer
        return check_layers(range(start, depth), depth).start

    def needs(self) -> Sequence[TraceSpec]:
        return self.specs(range(self.start(), self.model.num_layers + self.pools_by_attention))

    def integrated_gradient(self, batch: Batch, target: Target) -> Asking[Tensor]:
        """W (B, n, n), of an attention pool (B, 1, keys): mean_h of the positive part of the step-averaged gradient."""
        target = yield from resolved(batch, target, self.reduced)
        spec = TraceSpec.of({"G"}, self.layers(), output=self.output, reduced=self.reduced)
        total: Tensor | float = 0.0
        for step in shown(range(self.steps), self.info.name):
            scaled = Batch(self.model, batch.images * (step / max(self.steps - 1, 1)))
            total = total + (yield Traced(scaled, target, spec))["G"][self.layers().start]
        assert isinstance(total, Tensor)
        return (total / self.steps).clamp(min=0).mean(1)


@method("tam", signed=False, family="markov", cost=(21, 2), paper="Yuan et al. 2021 (TAM)")
@dataclass(kw_only=True)
class Tam(Integrated):
    """Attention of the last layer sent down the layers as a Markov chain, times the integrated gradient.

    It starts at block 4, as the authors' function does (``protocol="authors"``); with ``protocol="tis"`` at block 0.
    """

    version: ClassVar[int] = 2
    published_start: ClassVar[int] = 4

    def weighted(self, trace: Trace, start: int, gradient: Tensor) -> Tensor:
        return self.state(trace, start) * self.row(trace, gradient)

    def state(self, trace: Trace, start: int) -> Tensor:
        """(B, n)"""
        last = self.layers().start
        row = self.row(trace, trace["A"][last].mean(1))
        for layer in reversed(range(start, last)):
            row = row + (row[:, None] @ trace["A"][layer].mean(1))[:, 0]
        return row

    def row(self, trace: Trace, matrix: Tensor) -> Tensor:
        """The read-out row of the last attention's matrix, on all tokens."""
        if self.pools_by_attention:
            return on_tokens(matrix[:, 0], trace)
        return torch.einsum("bi,bij->bj", self.rho(trace), matrix)


@dataclass(kw_only=True)
class Bidirectional(Integrated):
    """ρᵀ (W ⊙ R) with R = ∏ (I + M_l): each row of R that the head reads meets its own row of the gradient W.

    Only the rows that the head reads are carried: one for a class token, N for a mean over the patches, whose N n² per
    block are little beside the passes of the gradient.
    """

    version: ClassVar[int] = 3

    def step(self, trace: Trace, layer: int) -> Tensor:
        """M_l (B, n, n), never negative; for an attention pool (layer L) (B, 1, keys)."""
        raise NotImplementedError

    def weighted(self, trace: Trace, start: int, gradient: Tensor) -> Tensor:
        if self.pools_by_attention:
            return on_tokens(gradient[:, 0], trace) * self.rows(trace, start)[:, 0]
        read = self.read_tokens(trace)
        shares = self.rho(trace)[:, read, None]
        return (shares * gradient[:, read] * self.rows(trace, start)).sum(1)

    def rows(self, trace: Trace, start: int) -> Tensor:
        """(B, rows, n): the rows of R of the tokens that the head reads; the only row of an attention pool."""
        if self.pools_by_attention:
            rows = on_tokens(self.step(trace, trace.num_layers), trace)
        else:
            rho = self.rho(trace)
            rows = F.one_hot(self.read_tokens(trace), rho.shape[1]).to(rho).expand(len(rho), -1, -1)
        for layer in reversed(range(start, trace.num_layers)):
            rows = rows + rows @ self.step(trace, layer)
        return rows

    def read_tokens(self, trace: Trace) -> Tensor:
        """The tokens that the head reads in any image of the batch."""
        return self.rho(trace).any(0).nonzero()[:, 0]


@method("bt_h", signed=False, family="markov", cost=(21, 3), paper="Chen et al. 2023 (BT)")
@dataclass(kw_only=True)
class BidirectionalHead(Bidirectional):
    """Attention with heads weighted by their gradients, rolled through the layers, times the integrated gradient.

    It starts at block 3, as the authors' release does (``protocol="authors"``); with ``protocol="tis"`` at block 0.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"A", "G"})
    published_start: ClassVar[int] = 3

    def step(self, trace: Trace, layer: int) -> Tensor:
        """Σ_h I_h A_h with I_h ∝ mean |A_hᵀ G_h|; equal heads where all gradients vanish."""
        attention, gradient = trace["A"][layer], trace["G"][layer]
        weights = (attention.transpose(-2, -1) @ gradient).abs().mean((-2, -1))  # (B, H)
        total = weights.sum(1, keepdim=True)
        shares = torch.where(
            total > 0, weights / torch.where(total > 0, total, torch.ones_like(total)), 1 / weights.shape[1]
        )
        return torch.einsum("bh,bhij->bij", shares, attention)


@method("bt_t", signed=False, family="markov", cost=(21, 2), paper="Chen et al. 2023 (BT)")
@dataclass(kw_only=True)
class BidirectionalToken(HeadValueMethod, Bidirectional):
    """Attention with sources weighted by how much longer attention makes them, times the integrated gradient.

    It starts at block 5, as the authors' release does (``protocol="authors"``); with ``protocol="tis"`` at block 0.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"A", "v", "x"})
    published_start: ClassVar[int] = 5

    def step(self, trace: Trace, layer: int) -> Tensor:
        """mean_h A · diag(r), r_j = ‖what token j sends‖ / ‖token j‖."""
        attention, gamma = attention_of(trace, layer)
        sent_length = sent(trace["v"][layer], attention, gamma).sum(1).norm(dim=-1)
        token_length = trace["x"][layer].norm(dim=-1)[:, -sent_length.shape[1] :]
        ratio = sent_length / torch.where(token_length > 0, token_length, torch.ones_like(token_length))
        return trace["A"][layer].mean(1) * ratio[:, None]
