"""Markov chains and bidirectional attention: TAM, BT-H, BT-T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.trace import Trace, trace
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution
from vitrail.methods.layerwise import LayerMap, Output, check_layers, on_tokens
from vitrail.methods.registry import method
from vitrail.methods.values import refuses_inner_norm, sent
from vitrail.models.parts import Attention
from vitrail.models.view import View
from vitrail.progress import shown


@dataclass(kw_only=True)
class Integrated(LayerMap):
    """A state swept through the layers, times the integrated gradient of the last attention.

    The gradient is averaged over ``steps`` images scaled from the mean colour to the image, both included; only the
    last attention is differentiated there. ``start_layer``: the first block used.
    """

    start_layer: int | None = None
    steps: int = 20
    output: Output = "logit"
    protocol: Literal["default", "authors", "tis"] = "default"

    aggregations: ClassVar[tuple[str, ...]] = ()
    no_aggregation: ClassVar[str] = "its state already runs through all layers"
    published_start: ClassVar[int] = 0

    def state(self, trace: Trace, start: int) -> Tensor:
        """(B, n)"""
        raise NotImplementedError

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        if self.steps < 1:
            raise VitrailError(f"steps must be at least 1, but got {self.steps}.")
        start = check_layers(range(self.start(), self.vit.num_layers), self.vit.num_layers).start
        found = self.trace(images, target, against, self.traced())
        weight = self.integrated_gradient(images, target, against)
        return Attribution(self.on_grid(self.state(found, start) * weight))

    def start(self) -> int:
        """The first block used."""
        published = min(self.published_start, self.vit.num_layers - 1) if self.protocol == "authors" else 0
        return published if self.start_layer is None else self.start_layer

    def traced(self) -> range:
        return range(self.start(), self.vit.num_layers + self.pools_by_attention)

    def integrated_gradient(self, images: Tensor, target: Tensor, against: Tensor | None) -> Tensor:
        """(B, n): the read-out row of mean_h of the positive part of the step-averaged gradient."""
        last = self.layers().start
        total: Tensor | None = None
        for step in shown(range(self.steps), self.info.name):
            scaled = images * (step / max(self.steps - 1, 1))
            found = trace(self.vit, scaled, target, against=against, output=self.output, keep={"G"}, layers=[last])
            total = found["G"][last] if total is None else total + found["G"][last]
        assert total is not None
        positive = (total / self.steps).clamp(min=0).mean(1)
        return self.read(found, positive)

    def read(self, trace: Trace, matrix: Tensor) -> Tensor:
        """The read-out row of the last attention's matrix, on all tokens."""
        if self.pools_by_attention:
            return on_tokens(matrix[:, 0], trace)
        return torch.einsum("bi,bij->bj", self.rho(trace), matrix)


@method(
    "tam",
    signed=False,
    family="markov",
    cost=(21, 2),
    protocols=("default", "authors", "tis"),
    paper="Yuan et al. 2021 (TAM)",
)
@dataclass(kw_only=True)
class Tam(Integrated):
    """Attention of the last layer sent down the layers as a Markov chain, times the integrated gradient.

    ``protocol="authors"`` starts at block 4, as the authors' function does; ``"tis"`` at block 0.
    """

    published_start: ClassVar[int] = 4

    def state(self, trace: Trace, start: int) -> Tensor:
        last = self.layers().start
        row = self.read(trace, trace["A"][last].mean(1))
        for layer in reversed(range(start, last)):
            row = row + (row[:, None] @ trace["A"][layer].mean(1))[:, 0]
        return row


@method(
    "bt_h",
    signed=False,
    family="markov",
    cost=(21, 3),
    protocols=("default", "authors", "tis"),
    paper="Chen et al. 2023 (BT)",
)
@dataclass(kw_only=True)
class BidirectionalHead(Integrated):
    """Attention with heads weighted by their gradients, rolled through the layers, times the integrated gradient.

    ``protocol="authors"`` starts at the fourth block, ``"tis"`` at the first.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"A", "G"})
    published_start: ClassVar[int] = 3

    def head_mean(self, trace: Trace, layer: int) -> Tensor:
        """Σ_h I_h A_h with I_h ∝ mean |A_hᵀ G_h|; equal heads where all gradients vanish."""
        attention, gradient = trace["A"][layer], trace["G"][layer]
        weights = (attention.transpose(-2, -1) @ gradient).abs().mean((-2, -1))  # (B, H)
        total = weights.sum(1, keepdim=True)
        shares = torch.where(
            total > 0, weights / torch.where(total > 0, total, torch.ones_like(total)), 1 / weights.shape[1]
        )
        return torch.einsum("bh,bhij->bij", shares, attention)

    def state(self, trace: Trace, start: int) -> Tensor:
        row = self.read(trace, self.head_mean(trace, trace.num_layers)) if self.pools_by_attention else self.rho(trace)
        for layer in reversed(range(start, trace.num_layers)):
            row = row + (row[:, None] @ self.head_mean(trace, layer))[:, 0]
        return row


@method(
    "bt_t",
    signed=False,
    family="markov",
    cost=(21, 2),
    protocols=("default", "authors", "tis"),
    paper="Chen et al. 2023 (BT)",
)
@dataclass(kw_only=True)
class BidirectionalToken(Integrated):
    """Attention with sources weighted by how much longer attention makes them, times the integrated gradient.

    ``protocol="authors"`` starts at the sixth block, ``"tis"`` at the first.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"A", "v", "x"})
    published_start: ClassVar[int] = 5

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        return super().unsupported(model) or refuses_inner_norm(model)

    def state(self, trace: Trace, start: int) -> Tensor:
        row = self.rho(trace)
        if self.pools_by_attention:
            pool = self.vit.architecture().head.attention_pool
            assert pool is not None
            row = self.read(trace, self.weighted(trace, trace.num_layers, pool.attention, None))
        for layer in reversed(range(start, trace.num_layers)):
            block = self.vit.blocks[layer]
            row = row + (row[:, None] @ self.weighted(trace, layer, block.attention, block.scale1))[:, 0]
        return row.abs()

    def weighted(self, trace: Trace, layer: int, attention: Attention, gamma: Tensor | None) -> Tensor:
        """mean_h A · diag(r), r_j = ‖what token j sends‖ / ‖token j‖."""
        made = sent(trace["v"][layer], attention, gamma).sum(1).norm(dim=-1)
        given = trace["x"][layer].norm(dim=-1)[:, -made.shape[1] :]
        ratio = made / torch.where(given > 0, given, torch.ones_like(given))
        return trace["A"][layer].mean(1) * ratio[:, None]
