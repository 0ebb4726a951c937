"""Rules: how relevance flows back through the operations. Forward values are always those of the model."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.parts import Activation, Linear, Norm
from vitrail.errors import VitrailError

# Attention maps recomputed in the backward pass hold at most this many entries at a time.
CHUNK = 64 * 2**20


class Plain:
    """The model's own operations and their ordinary gradients."""

    name: ClassVar[str] = "plain"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.rms:
            return F.rms_norm(x, (norm.width,), norm.weight, norm.eps)
        return F.layer_norm(x, (norm.width,), norm.weight, norm.bias, norm.eps)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
        """(B, H, n, d) queries and keys → attention probabilities (B, H, n, n), rows [query, key].

        ``talk`` (H, H): the scores of the heads are mixed.
        """
        return _attention_map(q, k, scale, bias, talk)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        """``mix(attend(q, k), v)`` without materialising the attention map."""
        if q.is_cuda and q.shape[2] < k.shape[2]:  # for few queries, cuDNN's kernel gives other bits at every call
            return _attention_map(q, k, scale, bias) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)

    def activate(self, z: Tensor, kind: Activation) -> Tensor:
        return _activate(z, kind)

    def gate(self, a: Tensor, b: Tensor) -> Tensor:
        """Product of two live branches (SwiGLU)."""
        return a * b

    def match(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of two live branches, (B, n, d) and (B, m, d) → (B, n, m)."""
        return a @ b.transpose(1, 2)

    def damp(self, x: Tensor, z: Tensor) -> Tensor:
        """The output of attention times the gate ``sigmoid(z)``."""
        return x * torch.sigmoid(z)

    def scale(self, x: Tensor, gamma: Tensor) -> Tensor:
        return x * gamma

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def mean(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        """(B, n, d) → (B, d), evenly or with ``shares`` (B, n)"""
        return x.mean(1) if shares is None else (shares[:, None] @ x)[:, 0]

    def embed(self, pixels: Tensor, linear: Linear) -> Tensor:
        """The patch convolution, on patches (B, N, pixels)."""
        return self.linear(pixels, linear)


class Frozen(Plain):
    """Attention, norm deviation and activation gate held constant: the network is affine in its residual stream.

    Then gradient × input, with the biases, adds up to the logit at every layer (LibraGrad; DecompX in one backward).
    """

    name = "frozen"

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _apply(_FrozenRmsNorm if norm.rms else _FrozenLayerNorm, x, norm)

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
        # A leaf of its own, so that G = ∂y/∂A exists although nothing flows on to q and k.
        return _attention_map(q.detach(), k.detach(), scale, bias, talk).requires_grad_(torch.is_grad_enabled())

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        q, k = q.detach(), k.detach()
        if v.dtype in (torch.float16, torch.bfloat16) and bias is None:  # whose own backward pass is fused
            return Plain.fused(self, q, k, v, scale, bias)
        return _apply(_FrozenAttention, q, k, v, scale, bias)

    def activate(self, z: Tensor, kind: Activation) -> Tensor:
        return _apply(_FrozenActivation, z, kind)

    def damp(self, x: Tensor, z: Tensor) -> Tensor:
        return Plain.damp(self, x, z.detach())  # a weight between 0 and 1, as those of attention

    def gate(self, a: Tensor, b: Tensor) -> Tensor:
        # Two live factors would be counted twice: each branch carries half of the product.
        return _apply(_HalvedProduct, a, b)

    def match(self, a: Tensor, b: Tensor) -> Tensor:
        return Plain.match(self, _share(a, 0.5), _share(b, 0.5))


class Conservative(Plain):
    """Attention and norm deviation held constant, all else ordinary (Ali et al. 2022)."""

    name = "conservative"
    norm = Frozen.norm
    attend = Frozen.attend
    fused = Frozen.fused
    damp = Frozen.damp


class AttnLRP(Plain):
    """The uniform rule at both matrix products of attention, ordinary softmax (Achtibat et al. 2024)."""

    name = "attn_lrp"
    norm = Frozen.norm
    activate = Frozen.activate
    gate = Frozen.gate
    match = Frozen.match
    damp = Frozen.damp

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
        return _attention_map(_share(q, 0.5), _share(k, 0.5), scale, bias, talk)

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        return _share(weights, 0.5) @ _share(v, 0.5)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        # half at the weights times half at the queries and keys
        return super().fused(_share(q, 0.25), _share(k, 0.25), _share(v, 0.5), scale, bias)


RULES: dict[str, type[Plain]] = {rule.name: rule for rule in (Plain, Frozen, Conservative, AttnLRP)}


def get_rule(name: str) -> Plain:
    """The rule of that name."""
    if name not in RULES:
        raise VitrailError(f"unknown rule {name!r}: expected one of {', '.join(sorted(RULES))}.")
    return RULES[name]()


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return function.apply(*arguments)


def _share(x: Tensor, factor: float) -> Tensor:
    """The same value, with ``factor`` of its gradient."""
    return _apply(_Share, x, factor)


def _wide(x: Tensor) -> Tensor:
    """Half precision to fp32, for statistics and gates."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def attention_scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
    """(B, H, m, n): scaled products of queries and keys, mixed over the heads by ``talk``, with the bias."""
    scores = (q * scale) @ k.transpose(-2, -1)
    scores = scores if talk is None else mix_heads(scores, Linear(talk))
    return scores if bias is None else scores + bias


def mix_heads(weights: Tensor, linear: Linear) -> Tensor:
    """(B, H, m, n) → (B, H, m, n): a linear layer over the heads."""
    mixed = torch.einsum("gh,bhij->bgij", linear.weight.to(weights.dtype), weights)
    return mixed if linear.bias is None else mixed + linear.bias[:, None, None].to(weights.dtype)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(dim=-1).to(dtype)  # its kernel computes in fp32 where the scores are in half precision


def _attention_map(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
    return softmax(attention_scores(q, k, scale, bias, talk), q.dtype)


def _activate(z: Tensor, kind: Activation) -> Tensor:
    match kind:
        case "gelu":
            return F.gelu(z)
        case "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        case "quick_gelu":
            return z * torch.sigmoid(1.702 * z)
        case "silu":
            return F.silu(z)
        case "relu":
            return F.relu(z)
        case "tanh":
            return torch.tanh(z)


def activation_gate(z: Tensor, kind: Activation) -> Tensor:
    """The factor ``act(z) / z``, from its closed form: the quotient is unstable near zero."""
    z = _wide(z)
    match kind:
        case "gelu":
            return 0.5 * torch.erfc(-math.sqrt(0.5) * z)
        case "gelu_tanh":
            return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        case "quick_gelu":
            return torch.sigmoid(1.702 * z)
        case "silu":
            return torch.sigmoid(z)
        case "relu":
            return (z > 0).to(z.dtype)
        case "tanh":  # its quotient is stable, but for 0/0
            return torch.where(z == 0, 1.0, torch.tanh(z) / z)


class _FrozenLayerNorm(torch.autograd.Function):
    """∂x = (γ∂y − mean(γ∂y))·r: the mean stays live (it is linear), the deviation r does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
        out, _, r = torch.native_layer_norm(x, (norm.width,), norm.weight, norm.bias, norm.eps)
        ctx.save_for_backward(r)
        ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (r,), norm = ctx.saved_tensors, ctx.norm
        # the ordinary backward pass at a token of zeros, in one kernel: there the deviation has no gradient
        zeros, wanted = torch.zeros_like(grad), [True, False, False]
        (x, _, _) = torch.ops.aten.native_layer_norm_backward(
            grad, zeros, (norm.width,), torch.zeros_like(r), r, norm.weight, norm.bias, wanted
        )
        return x, None


class _FrozenRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(torch.rsqrt(_wide(x).pow(2).mean(-1, keepdim=True) + norm.eps))
        ctx.weight = norm.weight
        return F.rms_norm(x, (norm.width,), norm.weight, norm.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (r,) = ctx.saved_tensors
        wide = _wide(grad) if ctx.weight is None else _wide(grad * ctx.weight)
        return (wide * r).to(grad.dtype), None


class _FrozenActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: Activation) -> Tensor:
        ctx.save_for_backward(z)
        ctx.kind = kind
        return _activate(z, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        # ½ erfc(−z/√2) ∂y, each step one kernel that reads and writes its own precision; −z/√2 is rounded to that of z
        if ctx.kind == "gelu":
            double = torch.mul(z, -math.sqrt(0.5), out=torch.empty_like(z, dtype=_wide(z[:0]).dtype)).erfc_()
            zero = grad.new_zeros(())
            return torch.addcmul(zero, grad, double, value=0.5, out=torch.empty_like(grad)), None
        return (activation_gate(z, ctx.kind).mul_(grad)).to(grad.dtype), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _HalvedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        half = grad * 0.5
        return half * b, half * a


class _FrozenAttention(torch.autograd.Function):
    """Fused forward; the backward pass needs only Aᵀ∂y, from a map recomputed a few images or queries at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale, ctx.bias = scale, bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None, None]:
        q, k = ctx.saved_tensors
        bias = None if ctx.bias is None else ctx.bias.expand(*q.shape[:3], k.shape[2])
        row = q.shape[1] * k.shape[2]
        images, queries = max(1, CHUNK // (row * q.shape[2])), max(1, CHUNK // row)
        parts = []
        for first in range(0, q.shape[0], images):
            part = slice(first, first + images)
            received = torch.zeros_like(k[part])
            for query in range(0, q.shape[2], queries):
                rows = (part, slice(None), slice(query, query + queries))
                weights = _attention_map(q[rows], k[part], ctx.scale, None if bias is None else bias[rows])
                received += weights.transpose(-2, -1) @ grad[rows]
            parts.append(received)
        return None, None, torch.cat(parts), None, None
