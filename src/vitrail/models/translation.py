"""Translation of single torch modules into canonical parts, shared by every adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError

SUPPORTED = (
    "timm ViT, DeiT, DeiT-3, DINOv2, DINOv3, CLIP, SigLIP, EVA, EVA-02 and BEiT; torchvision ViT and Swin; Hugging "
    "Face ViT, DeiT, DINOv2, BEiT, CLIP, SigLIP, DINOv3, YOLOS and Swin; timm Swin (features only)"
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
    "Tanh": "tanh",
}
LIBRARIES = ("torch", "timm", "torchvision", "transformers")


def refuse(thing: Any, why: str) -> VitrailError:
    """The error for a module that cannot be expressed in canonical parts; it names the class."""
    return VitrailError(
        f"{class_name(thing)} is not supported: {why}. Supported: {SUPPORTED}. A backbone without a head: "
        f'vitrail.wrap(backbone, head=nn.Linear(…), pool="token"|"avg"|"map"|"pooler"|"patches").'
    )


def no_pool(module: nn.Module, pool: str | None) -> VitrailError:
    """The error for a way to pool that a backbone does not have."""
    part = {"token": "class token", "map": "attention pool", "pooler": "pooler"}.get(str(pool), f"pooling {pool!r}")
    return VitrailError(f"{class_name(module)} has no {part}, which pool={pool!r} needs: give another pool=.")


def class_name(thing: Any) -> str:
    """The name of an object's class, with its package where a class of torch.nn has the same name."""
    kind = type(thing)
    plain = getattr(nn, kind.__name__, kind) is kind
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def is_of_library(module: nn.Module) -> bool:
    """Whether the class is defined by torch or by a supported library."""
    return type(module).__module__.partition(".")[0] in LIBRARIES


def is_dropout(module: Any) -> bool:
    """Whether a module does nothing in evaluation mode: Identity, dropout, DropPath or PatchDropout."""
    kind = type(module)
    return kind is nn.Identity or (is_of_library(module) and "Drop" in kind.__name__)


def check_dropout(owner: Any, *names: str) -> None:
    """Refuses anything but dropout where the library has dropout: the view skips these modules."""
    for name in names:
        module = getattr(owner, name, None)
        if module is not None and not is_dropout(module):
            raise refuse(module, f"it stands in {type(owner).__name__}.{name}, where only dropout is supported")


def norm(module: nn.Module | None) -> parts.Norm | None:
    """LayerNorm or RMSNorm; None and Identity are no norm."""
    if module is None or isinstance(module, nn.Identity):
        return None
    kind = type(module)
    known = isinstance(module, nn.LayerNorm) or kind.__name__ in ("RmsNorm", "RMSNorm")
    if not known or not (is_of_library(module) or kind.forward is nn.LayerNorm.forward):
        raise refuse(module, "the only supported norm layers are LayerNorm and RMSNorm")
    shape: Any = module.normalized_shape
    eps: Any = module.eps if module.eps is not None else torch.finfo(torch.float32).eps
    weight, bias = (_detached(getattr(module, name, None)) for name in ("weight", "bias"))
    return parts.Norm(int(shape[-1]), float(eps), weight, bias, rms=not isinstance(module, nn.LayerNorm))


def needed_norm(module: nn.Module) -> parts.Norm:
    """The norm of a pre-norm block."""
    layer = norm(module)
    if layer is None:
        raise refuse(module, "a pre-norm block needs its norm")
    return layer


def linear(module: nn.Module, rows: slice = slice(None)) -> parts.Linear:
    """A linear layer, or some of its output rows."""
    if not isinstance(module, nn.Linear) or not (
        type(module).forward is nn.Linear.forward or getattr(module, "merged", False)  # loralib's, in evaluation mode
    ):
        raise refuse(module, "expected a linear layer (merge adapters, take the model before quantisation)")
    bias = _detached(module.bias)
    return parts.Linear(module.weight.detach()[rows], None if bias is None else bias[rows])


def patch_convolution(module: nn.Module) -> parts.Linear:
    """The convolution that embeds patches side by side: weight (d, channels, patch height, patch width)."""
    if (
        not isinstance(module, nn.Conv2d)
        or type(module).forward is not nn.Conv2d.forward
        or module.stride != module.kernel_size
        or module.padding not in ((0, 0), "valid")
        or module.dilation != (1, 1)
        or module.groups != 1
    ):
        raise refuse(module, "only a plain patch convolution can embed the image (no convolutional stem, no overlap)")
    return parts.Linear(module.weight.detach(), _detached(module.bias))


def classifier(module: nn.Module, norm: parts.Norm | None, pool: parts.PoolKind, **options: Any) -> parts.Head:
    """The head whose last part is one linear layer, or several with activations between them; dropout is left out."""
    children = list(module) if type(module) is nn.Sequential else [module]
    layers = [child for child in children if not is_dropout(child)]
    if not layers:
        raise refuse(module, "it is not a classification head")
    if len(layers) % 2 == 0:
        raise refuse(module, "a head must be a linear layer, or several with an activation between any two")
    read = pointwise if pool == "patches" else linear
    hidden = zip(layers[:-1:2], layers[1::2], strict=True)
    dense = tuple(parts.Dense(read(layer), activation(after)) for layer, after in hidden)
    return parts.Head(norm, pool, (read(layers[-1]),), dense=dense, **options)


def pointwise(module: nn.Module) -> parts.Linear:
    """A linear layer, or the convolution of single patches that does the same."""
    if not isinstance(module, nn.Conv2d):
        return linear(module)
    convolution = patch_convolution(module)
    if module.kernel_size != (1, 1):
        raise refuse(module, f"a head reads single patches, but it has a kernel of {module.kernel_size}")
    return parts.Linear(convolution.weight.flatten(1), convolution.bias)


def mean_of_patches(head: nn.Module, patches: Tensor) -> Tensor:
    """(B, N, d) → (B, C): the mean of what a head of linear layers, or of convolutions, makes of the patches."""
    if any(isinstance(part, nn.Conv2d) for part in head.modules()):
        return head(patches.transpose(1, 2)[..., None])[..., 0].mean(2)
    return head(patches).mean(1)


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
        raise refuse(module, f"the supported activations are {', '.join(sorted(set(ACTIVATIONS.values())))}")
    return ACTIVATIONS[name]


def gamma(value: Any) -> Tensor | None:
    """A LayerScale, given as parameter, module or nothing."""
    if value is None or isinstance(value, nn.Identity | float):
        return None
    scale = next((getattr(value, name) for name in ("gamma", "lambda1") if hasattr(value, name)), value)
    if not isinstance(scale, Tensor):
        raise refuse(value, "a LayerScale must have one factor per channel")
    return scale.detach()


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


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
