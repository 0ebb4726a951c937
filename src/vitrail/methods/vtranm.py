"""VTranM (TokenTM): attention weighted by how each head and each MLP transforms its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.core.rules import get_rule
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.methods.base import Attribution
from vitrail.methods.layerwise import LayerMap, Output, Rule
from vitrail.methods.registry import method
from vitrail.methods.values import HeadValueMethod, attention_of, sent_to, without_bias

TINY = 1e-12  # lengths below it have no direction


@method("vtranm", signed=False, family="transformation", cost=(1, 1), paper="Wu et al. 2024 (VTranM)")
@dataclass(kw_only=True)
class VTranM(HeadValueMethod, LayerMap):
    """Chain over attention and MLP of identity + attention × positive gradient × change of length and direction.

    The rows of the paper's table 4: ``aggregate, length, necc`` = F F F (equation 8 at the first block), T F F, T T F,
    T T T. Open in the paper: ``value_bias`` in the transformed vectors, ``reference`` "stream" or "normed" tokens,
    ``necc_scale`` times the softmax, ``output``.
    """

    aggregate: bool = True
    length: bool = True
    necc: bool = True
    value_bias: bool = True
    reference: Literal["stream", "normed"] = "stream"
    necc_scale: float = 1.0
    rule: Rule = "plain"
    output: Output = "logit"
    protocol: Literal["default", "vtranm"] = "default"

    keep: ClassVar[frozenset[str]] = frozenset({"x", "u", "mid", "A", "G", "v", "mlp_out"})
    aggregations: ClassVar[tuple[str, ...]] = ()
    no_aggregation: ClassVar[str] = "VTranM already runs through all layers"

    def needs(self) -> Sequence[TraceSpec]:
        depth = self.model.num_layers
        return self.specs([*range(depth if self.aggregate else 1), depth])

    def read(self, *traces: Trace) -> Attribution:
        (trace,) = traces
        # an attention pool is one more weighted attention, without an identity
        pooled = self.pools_by_attention and self.aggregate
        row = self.scores(trace, trace.num_layers) if pooled else self.rho(trace)
        for layer in reversed(range(trace.num_layers if self.aggregate else 1)):
            if self.aggregate:
                row = row + row * self.mlp_weight(trace, layer)
            row = row + (row[:, None] @ self.layer_map(trace, layer))[:, 0]
        if self.length:
            row = row * trace["x"][0].norm(dim=-1)  # C⁰ = diag ‖x_0‖
        return Attribution(self.on_grid(row))

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        """mean_h ReLU(G)⊙(A diag(w)): equation 8 with the weights of equation 13."""
        weighted = trace["G"][layer].clamp(min=0).mul_(trace["A"][layer])
        if not (self.length or self.necc):
            return weighted.mean(1)
        values, origin = trace["v"][layer], trace["x"][layer]
        attention, gamma = attention_of(trace, layer)
        if layer == trace.num_layers:
            origin = self.pooled_tokens(origin, trace)[:, -values.shape[2] :]
        elif self.reference == "normed":
            origin = trace["u"][layer]
        values = values if self.value_bias else without_bias(values, attention)
        lengths, products = sent_to(origin, values, attention, gamma)
        return weighted.mul_(self.weight(origin.norm(dim=-1)[:, None], lengths, products)[:, :, None]).mean(1)

    def pooled_tokens(self, x: Tensor, trace: Trace) -> Tensor:
        """What an attention pool sees: the stream, or its final norm."""
        norm = trace.network.head.norm
        return x if self.reference == "stream" or norm is None else get_rule("plain").norm(x, norm)

    def mlp_weight(self, trace: Trace, layer: int) -> Tensor:
        """(B, n): the update of an MLP is diagonal."""
        origin, moved = trace["mid"][layer], trace["mlp_out"][layer]
        return self.weight(origin.norm(dim=-1), moved.norm(dim=-1), (origin * moved).sum(-1))

    def weight(self, origin: Tensor, moved: Tensor, product: Tensor) -> Tensor:
        """w_j = ‖t_j‖/‖e_j‖ · softmax_j cos(e_j, t_j) (equations 9–11), from ‖e_j‖, ‖t_j‖ and ⟨e_j, t_j⟩."""
        weight = torch.ones_like(moved)
        if self.length:
            weight = moved / torch.where(origin > 0, origin, torch.ones_like(origin))
        if self.necc:
            cosine = product / (origin.clamp(min=TINY) * moved.clamp(min=TINY))
            weight = weight * cosine.softmax(-1) * self.necc_scale
        return weight
