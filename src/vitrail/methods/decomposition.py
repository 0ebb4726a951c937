"""Methods that take the score, or a layer's output, apart into shares of the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.core.parts import EVERY, Block, Norm
from vitrail.engine.trace import Trace
from vitrail.methods.gradients import completeness_gap, score_split
from vitrail.methods.layerwise import LayerMap, Layerwise, Mixing, OwnRollout
from vitrail.methods.registry import method
from vitrail.methods.values import ValueMethod, sent
from vitrail.models.view import View

# Entries of (rows, n, d) vectors held at once.
CHUNK = 32 * 2**20


@method("decompx", family="decomposition", signed=True, paper="Modarressi et al. 2023")
@dataclass(kw_only=True)
class DecompX(Layerwise):
    """Each token's share of the logit under frozen attention, norms and gates; shares and biases add up to it."""

    start_layer: int = 0

    rule: ClassVar[str] = "frozen"
    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx", "bias"})

    def extras(self, trace: Trace, layers: Iterable[int]) -> dict[str, Tensor]:
        """The gap of completeness, and how the score splits."""
        shares = [(self.scores(trace, layer), trace.bias_from(layer)) for layer in layers]
        return completeness_gap(trace, shares) | score_split(trace, shares)


@dataclass(kw_only=True)
class Contributions(ValueMethod, LayerMap):
    """Layer maps from the vectors V_ij = Σ_h A_ij^h f_j^h (+ x_i where i = j) that source j sends to target i.

    ``protocol="skipplus"``: the shift of the first norm and the bias of the values belong to no source and stay out.
    """

    protocol: Literal["default", "skipplus"] = "default"

    keep: ClassVar[frozenset[str]] = frozenset({"x", "W", "v"})

    @property
    def pools_by_attention(self) -> bool:
        return False  # a pool's query is no token: the blocks are read with its attention, which is ρ

    def sources(self, trace: Trace, layer: int) -> Tensor:
        """f (B, H, n, d)"""
        block, values = trace.network.blocks[layer], trace["v"][layer]
        if self.protocol == "skipplus":
            x = trace["x"][layer]
            assert block.norm1 is not None  # of a pre-norm block: others are refused
            passed = linear_part(x, block.norm1) * deviation(x, block.norm1)
            values = (passed @ block.attention.v.weight.T).unflatten(-1, (block.attention.heads, -1)).transpose(1, 2)
        return sent(values, block.attention, block.scale1)


class SerialContributions(Contributions):
    """Contributions that go on through the norm of the MLP behind attention."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = super().unsupported(model)
        if reason is None and any(block.parallel for block in model.blocks):
            return "its MLP stands beside its attention, not behind it"
        return reason


def squared_lengths(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """⟨Σ_h A_ij^h l_j^h, Σ_h A_ij^h r_j^h⟩ for all i, j, (B, n, n), without holding any vector V_ij.

    A (B, H, n, n), l and r (B, H, n, d): only the products between the heads of one source are needed.
    """
    gram = torch.einsum("bhjd,bgjd->bhgj", left, right)  # (B, H, H, n)
    mixed = torch.einsum("bhgj,bgij->bhij", gram, weights)
    return (weights * mixed).sum(1)


def diagonal_vectors(trace: Trace, layer: int, sources: Tensor) -> Tensor:
    """V_ii without the residual: (B, n, d)."""
    diagonal = trace["W"][layer].diagonal(dim1=-2, dim2=-1)  # (B, H, n)
    return torch.einsum("bhi,bhid->bid", diagonal, sources)


@method("attin", signed=False, family="decomposition", class_specific=False, cost=(1, 0), paper="Kobayashi et al. 2020")
@dataclass(kw_only=True)
class AttentionNorm(Contributions):
    """Length of what each token sends to the row that the head reads, heads summed before the norm.

    ``protocol="skipplus"``: without the shift of the first norm and the bias of the values.
    """

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        sources = self.sources(trace, layer)
        return squared_lengths(trace["W"][layer], sources, sources).clamp(min=0).sqrt()


@method(
    "attin_residual",
    signed=False,
    family="decomposition",
    class_specific=False,
    cost=(1, 0),
    paper="Kobayashi et al. 2021",
)
@dataclass(kw_only=True)
class AttentionNormResidual(Contributions):
    """As ``attin``, with the residual stream among what a token sends to itself."""

    version: ClassVar[int] = 2
    mixing: ClassVar[Mixing] = "none"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        sources = self.sources(trace, layer)
        lengths = squared_lengths(trace["W"][layer], sources, sources).clamp(min=0).sqrt()
        kept = (diagonal_vectors(trace, layer, sources) + trace["x"][layer]).norm(dim=-1)
        return lengths.diagonal_scatter(kept, dim1=-2, dim2=-1)


@method(
    "globenc", signed=False, family="decomposition", class_specific=False, cost=(1, 0), paper="Modarressi et al. 2022"
)
@dataclass(kw_only=True)
class GlobEnc(OwnRollout, SerialContributions):
    """Lengths after the second norm, the MLP taken as the identity; chained over the layers without an identity.

    ``protocol="skipplus"``: without the shift of the first norm and the bias of the values.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"x", "W", "v", "mid"})
    mixing: ClassVar[Mixing] = "none"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        block, weights, sources = trace.network.blocks[layer], trace["W"][layer], self.sources(trace, layer)
        assert block.norm2 is not None
        r = block.changed(deviation(trace["mid"][layer], block.norm2))  # (B, n, 1): of the target token
        passed = through_mlp(sources, block)
        lengths = (
            squared_lengths(weights, sources, sources)
            + 2 * r * squared_lengths(weights, sources, passed)
            + r**2 * squared_lengths(weights, passed, passed)
        )
        vectors = diagonal_vectors(trace, layer, sources) + trace["x"][layer]
        kept = (vectors + r * through_mlp(vectors, block)).norm(dim=-1)
        return lengths.clamp(min=0).sqrt().diagonal_scatter(kept, dim1=-2, dim2=-1)


@method("alti", signed=False, family="decomposition", class_specific=False, cost=(1, 0), paper="Ferrando et al. 2022")
@dataclass(kw_only=True)
class Alti(OwnRollout, SerialContributions):
    """How much nearer (L1) each source brings the output of attention; rows sum to one; chained over the layers.

    ``protocol="skipplus"``: the vectors of ``globenc``, without biases, against the output of the whole block.
    """

    keep: ClassVar[frozenset[str]] = frozenset({"x", "W", "v", "mid", "mlp_out"})
    mixing: ClassVar[Mixing] = "none"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        published, block = self.protocol == "skipplus", trace.network.blocks[layer]
        sources, weights = self.sources(trace, layer), trace["W"][layer]
        target = trace["mid"][layer] + (trace["mlp_out"][layer] if published else 0)  # (B, n, d)
        r = None
        if published:
            assert block.norm2 is not None  # of a pre-norm block: others are refused
            r = block.changed(deviation(trace["mid"][layer], block.norm2))  # (B, n, 1)

        def passed(vectors: Tensor, rows: slice = EVERY) -> Tensor:
            """(B, …, i, d): what the vectors are behind the second norm."""
            if r is None:
                return vectors
            return vectors + r[:, rows].view(len(r), *[1] * (vectors.ndim - 3), -1, 1) * through_mlp(vectors, block)

        batch, _, tokens, width = sources.shape
        columns = sources.transpose(1, 2).flatten(0, 1)  # (B·n, H, d)
        left, step = torch.empty_like(weights[:, 0]), max(1, CHUNK // (batch * tokens * width))
        for start in range(0, tokens, step):  # (B, n, rows, d) at a time: all rows would be n²d
            rows = slice(start, start + step)
            vectors = weights[:, :, rows].permute(0, 3, 2, 1).flatten(0, 1) @ columns  # V_ij, rows j and columns i
            distances = passed(vectors.unflatten(0, (batch, tokens)), rows).sub_(target[:, None, rows])
            left[:, rows] = torch.linalg.vector_norm(distances, 1, dim=-1).transpose(1, 2)
        kept = passed(diagonal_vectors(trace, layer, sources) + trace["x"][layer]) - target
        left.diagonal(dim1=1, dim2=2).copy_(kept.abs().sum(-1))
        return _rows_to_one((target.abs().sum(-1, keepdim=True) - left).clamp(min=0))


def deviation(x: Tensor, norm: Norm) -> Tensor:
    """r = 1/√(variance + ε) of each token, (B, n, 1)."""
    centred = x if norm.rms else x - x.mean(-1, keepdim=True)
    return torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.eps)


def linear_part(vectors: Tensor, norm: Norm) -> Tensor:
    """A norm with its deviation and its shift left out: γ ⊙ (v − mean v)."""
    centred = vectors if norm.rms else vectors - vectors.mean(-1, keepdim=True)
    return centred if norm.weight is None else centred * norm.weight


def through_mlp(vectors: Tensor, block: Block) -> Tensor:
    """The MLP branch with the identity in the MLP's place, but for the deviation of its norm."""
    assert block.norm2 is not None
    passed = linear_part(vectors, block.norm2)
    return passed if block.scale2 is None else passed * block.scale2


def _rows_to_one(matrix: Tensor) -> Tensor:
    """Rows normalised; a row without any contribution keeps its own token."""
    total = matrix.sum(-1, keepdim=True)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    return torch.where(total > 0, matrix / torch.where(total > 0, total, torch.ones_like(total)), identity)
