"""Translation of single torch modules into canonical parts, shared by every adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError

SUPPORTED = (
    "timm ViT, DeiT, DeiT-3, DINOv2, DINOv3, CLIP, SigLIP, EVA, EVA-02 and BEiT; torchvision ViT and Swin; Hugging "
    "Face ViT, DeiT, DINOv2, BEiT, CLIP, SigLIP, DINOv3 and Swin; timm Swin (features only)"
)

# Class name of an activation module → canonical name; GELU decides by its `approximate`.
ACTIVATIONS: dict[str, parts.Activation] = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "GELUTanhActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Swish": "silu",
    "ReLU": "relu",
}


def refuse(thing: Any, why: str) -> VitrailError:
    """The error for something the engine cannot write as its operations; names the class."""
    name = thing if isinstance(thing, str) else type(thing).__name__
    return VitrailError(
        f"{name} is not supported: {why}. Supported: {SUPPORTED}. A backbone without a head: "
        f'vitrail.wrap(backbone, head=nn.Linear(…), pool="token"|"avg").'
    )


def norm(module: nn.Module | None) -> parts.Norm | None:
    """LayerNorm or RMSNorm; None and Identity are no norm."""
    if module is None or isinstance(module, nn.Identity):
        return None
    kind = type(module).__name__
    if not isinstance(module, nn.LayerNorm) and kind not in ("RmsNorm", "RMSNorm"):
        raise refuse(module, "as a norm layer only LayerNorm and RMSNorm are known")
    shape: Any = module.normalized_shape
    eps: Any = module.eps if module.eps is not None else torch.finfo(torch.float32).eps
    weight, bias = (_detached(getattr(module, name, None)) for name in ("weight", "bias"))
    return parts.Norm(int(shape[-1]), float(eps), weight, bias, rms=not isinstance(module, nn.LayerNorm))


def needed_norm(module: nn.Module) -> parts.Norm:
    """The norm of a pre-norm block, which must be there."""
    found = norm(module)
    if found is None:
        raise refuse(module, "a block without its norm is no pre-norm block")
    return found


def linear(module: nn.Module, rows: slice = slice(None)) -> parts.Linear:
    """A linear layer, or some of its output rows."""
    if not isinstance(module, nn.Linear):
        raise refuse(module, "expected a linear layer")
    bias = _detached(module.bias)
    return parts.Linear(module.weight.detach()[rows], None if bias is None else bias[rows])


def fused_qkv(weight: Tensor, bias: Tensor | None) -> tuple[parts.Linear, parts.Linear, parts.Linear, parts.Linear]:
    """(3d, d) → queries, keys and values, and the three as one."""
    weight, bias = weight.detach(), _detached(bias)
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    q, k, v = (parts.Linear(w, b) for w, b in zip(weight.chunk(3), biases, strict=True))
    return q, k, v, parts.Linear(weight, bias)


def activation(module: Any) -> parts.Activation:
    """The canonical name of an activation module."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    name = type(module).__name__
    if name not in ACTIVATIONS:
        raise refuse(module, f"as an activation only {', '.join(sorted(set(ACTIVATIONS.values())))} are known")
    return ACTIVATIONS[name]


def gamma(value: Any) -> Tensor | None:
    """A LayerScale, given as parameter, module or nothing."""
    if value is None or isinstance(value, nn.Identity | float):
        return None
    for name in ("gamma", "lambda1"):
        value = getattr(value, name, value)
    return _detached(value)


def prefix_tokens(*tokens: Tensor | None) -> Tensor:
    """Class, register, distillation tokens (1, k, d) → (P, d)."""
    return torch.cat([t.detach().reshape(-1, t.shape[-1]) for t in tokens if t is not None])


def positions(table: Tensor | None, prefix: int, count: int) -> Tensor | None:
    """A table (1, ·, d) → (P + N, d); tokens without a position get zeros (registers, DeiT-3's class token)."""
    if table is None:
        return None
    table = table.detach().reshape(-1, table.shape[-1])
    missing = prefix + count - table.shape[0]
    return table if not missing else torch.cat([table.new_zeros(missing, table.shape[1]), table])


def head_of(
    replacement: nn.Module | None,
    pool: str | None,
    norm_module: parts.Norm | None,
    own: parts.Head | None,
    pooled_norm: parts.Norm | None = None,
) -> parts.Head:
    """The model's own head, or the one given to ``wrap`` on a backbone without one."""
    if replacement is None:
        if pool is not None:
            raise VitrailError("pool= goes with head=: a model with a head of its own is explained as it pools.")
        assert own is not None
        return own
    kinds: dict[str, parts.PoolKind] = {"token": "token", "avg": "mean"}
    if pool not in kinds:
        raise VitrailError(f'head= needs pool="token" (class token) or "avg" (mean of the patches), but got {pool!r}.')
    return parts.Head(norm_module, kinds[pool], (linear(replacement),), pooled_norm)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
