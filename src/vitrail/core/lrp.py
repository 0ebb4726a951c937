"""Rules whose backward pass carries relevance instead of gradients: Chefer's LRP, and ε-LRP.

Relevance flows in the gradients' place: each operation turns the relevance of its output into that of its inputs, and
autograd adds up what reaches a tensor from several sides (the clone rule). All sums are per image.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.parts import Activation, Linear, Norm
from vitrail.core.rules import Frozen, Plain, _apply, _attention_map


class AlphaBeta(Plain):
    """Chefer's LRP with α = 1 (Transformer Attribution): norms, activations, scales and softmax pass relevance on.

    The relevance of every linear layer is shared by all positive contributions together, and the two sides of a
    residual sum are rescaled so that their totals add up: the total stays 1.
    """

    name: ClassVar[str] = "alpha_beta"
    conserving: ClassVar[bool] = True

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _passed(x, super().norm(x, norm))

    def activate(self, z: Tensor, kind: Activation) -> Tensor:
        return _passed(z, super().activate(z, kind))

    def scale(self, x: Tensor, gamma: Tensor) -> Tensor:
        return _passed(x, super().scale(x, gamma))

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return _apply(_LinearRelevance, x, linear, self.conserving)

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
        assert talk is None  # its methods refuse heads that are mixed
        return _apply(_AttendRelevance, q, k, scale, bias)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        return _apply(_MixRelevance, weights, v)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        return self.mix(self.attend(q, k, scale, bias), v)

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        return _apply(_AddRelevance, x, branch.expand_as(x), self.conserving)

    def mean(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        return _apply(_MeanRelevance, x, super().mean(x, shares).detach(), shares)

    def embed(self, pixels: Tensor, linear: Linear) -> Tensor:
        return _apply(_BoundedLinearRelevance, pixels, linear)


class PublishedAlphaBeta(AlphaBeta):
    """As the authors' release computes its LRP baselines: the total doubles at each linear layer, sums not rescaled."""

    name = "alpha_beta_published"
    conserving = False


class Epsilon(Frozen):
    """ε-LRP on the frozen network: R = x⊙∂y, damped by |z|/(|z| + ε) at each linear output z; biases keep theirs."""

    name = "epsilon"
    epsilon: float = 1e-6

    def __init__(self, epsilon: float = 1e-6):
        self.epsilon = epsilon

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return _apply(_Damped, super().linear(x, linear), self.epsilon)


def _passed(x: Tensor, out: Tensor) -> Tensor:
    """``out`` forward; backward its relevance goes to ``x`` unchanged."""
    return _apply(_PassOn, x, out.detach())


def over(a: Tensor, b: Tensor) -> Tensor:
    """a/b with a tiny stabiliser, and 0 where b is 0."""
    shifted = b + 1e-9
    shifted = torch.where(shifted == 0, torch.full_like(b, 1e-9), shifted)
    return torch.where(b == 0, torch.zeros_like(a), a / shifted)


class _PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, None]:
        return relevance, None


class _LinearRelevance(torch.autograd.Function):
    """R_i = Σ_k (x_i w_ki)⁺ / Σ_i' (x_i' w_ki')⁺ · R_k; published: x⁺w⁺ and x⁻w⁻ each with a sum of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, conserving: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.conserving = linear.weight, conserving
        return F.linear(x, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        positive, negative = ctx.weight.clamp(min=0), ctx.weight.clamp(max=0)
        above, below = x.clamp(min=0), x.clamp(max=0)
        first, second = above @ positive.T, below @ negative.T
        if ctx.conserving:
            share = over(relevance, first + second)
            return above * (share @ positive) + below * (share @ negative), None, None
        return above * (over(relevance, first) @ positive) + below * (over(relevance, second) @ negative), None, None


class _BoundedLinearRelevance(torch.autograd.Function):
    """The z^B rule of a bounded input, with the bounds of each image."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, linear: Linear) -> Tensor:
        ctx.save_for_backward(pixels)
        ctx.weight = linear.weight
        return F.linear(pixels, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        positive, negative = ctx.weight.clamp(min=0), ctx.weight.clamp(max=0)
        low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
        z = x @ ctx.weight.T - low * positive.sum(1) - high * negative.sum(1)
        share = over(relevance, z)
        return x * (share @ ctx.weight) - low * (share @ positive) - high * (share @ negative), None


class _AttendRelevance(torch.autograd.Function):
    """Softmax passes relevance on; the product of queries and keys shares it half and half, unscaled."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k)
        return _attention_map(q, k, scale, bias)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, k = ctx.saved_tensors
        share = over(relevance, q @ k.transpose(-2, -1))
        return q * (share @ k) / 2, k * (share.transpose(-2, -1) @ q) / 2, None, None


class _MixRelevance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(weights, v)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, Tensor]:
        weights, v = ctx.saved_tensors
        share = over(relevance, weights @ v)
        return weights * (share @ v.transpose(-2, -1)) / 2, v * (weights.transpose(-2, -1) @ share) / 2


class _AddRelevance(torch.autograd.Function):
    """Each side its share of the sum; conserving: both rescaled so that totals go by the sizes of the sides' totals."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, conserving: bool) -> Tensor:
        ctx.save_for_backward(x, branch)
        ctx.conserving = conserving
        return x + branch

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, Tensor, None]:
        x, branch = ctx.saved_tensors
        share = over(relevance, x + branch)
        first, second = x * share, branch * share
        if ctx.conserving:
            axes = tuple(range(1, relevance.ndim))
            total, first_total, second_total = (t.sum(axes, keepdim=True) for t in (relevance, first, second))
            size = first_total.abs() + second_total.abs()
            first = first * over(over(first_total.abs(), size) * total, first_total)
            second = second * over(over(second_total.abs(), size) * total, second_total)
        return first, second, None


class _MeanRelevance(torch.autograd.Function):
    """Each token its share of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, shares: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if shares is None else x * shares[..., None])
        return mean.view_as(mean)

    @staticmethod
    def backward(ctx: Any, relevance: Tensor) -> tuple[Tensor, None, None]:
        (parts,) = ctx.saved_tensors
        return parts * over(relevance, parts.sum(1))[:, None], None, None


class _Damped(torch.autograd.Function):
    """Identity whose gradient is multiplied by z / (z + ε·sign z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.epsilon = epsilon
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad * (z.abs() / (z.abs() + ctx.epsilon)), None
