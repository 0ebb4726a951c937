"""Translation of single torch modules into canonical parts, shared by every adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models.clone import evaluation_clone

SUPPORTED = (
    "timm ViT (also hybrids and relative positions), DeiT, DeiT-3, DINOv2, DINOv3, CLIP, SigLIP, EVA, EVA-02, BEiT, "
    "CaiT and NaFlexViT; torchvision ViT and Swin; Hugging Face ViT, DeiT, DINOv2, BEiT, CLIP, SigLIP (2), DINOv3, "
    "YOLOS, EoMT and Swin; timm Swin (features only)"
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
LIBRARIES = ("torch", "timm", "torchvision", "transformers", "open_clip", "vitrail")


class OpaqueError(VitrailError):
    """A network as its library builds it has parts that cannot be expressed: it can only be a black box."""


def opaque(thing: Any, why: str) -> OpaqueError:
    """The error for a part of a library's own network that cannot be expressed in canonical parts."""
    return OpaqueError(f"{class_name(thing)} cannot be seen through: {why}.")


def refuse(thing: Any, why: str) -> VitrailError:
    """The error for a module that cannot be expressed in canonical parts; it names the class."""
    return VitrailError(
        f"{class_name(thing)} is not supported: {why}. Supported: {SUPPORTED}. A backbone without a head: "
        f'vitrail.wrap(backbone, head=nn.Linear(…), pool="token"|"avg"|"map"|"pooler"|"patches"). By its logits alone: '
        f"vitrail.wrap(module, black_box=True)."
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
    if not _is_norm(module) or not (is_of_library(module) or type(module).forward is nn.LayerNorm.forward):
        raise refuse(module, "the only supported norm layers are LayerNorm and RMSNorm")
    shape: Any = module.normalized_shape
    eps: Any = module.eps if module.eps is not None else torch.finfo(torch.float32).eps
    weight, bias = (_detached(getattr(module, name, None)) for name in ("weight", "bias"))
    return parts.Norm(int(shape[-1]), float(eps), weight, bias, rms=not isinstance(module, nn.LayerNorm))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__ in ("RmsNorm", "RmsNormFp32", "RMSNorm")


def needed_norm(module: nn.Module) -> parts.Norm:
    """The norm of a pre-norm block."""
    layer = norm(module)
    if layer is None:
        raise refuse(module, "a pre-norm block needs its norm")
    return layer


def linear(module: nn.Module, rows: slice = slice(None)) -> parts.Linear:
    """A linear layer, or some of its output rows; PEFT's LoRA is merged into a copy of the weights."""
    module = _merged(module)
    if not isinstance(module, nn.Linear) or not (
        type(module).forward is nn.Linear.forward or getattr(module, "merged", False)  # loralib's, in evaluation mode
    ):
        raise refuse(module, "expected a linear layer (merge adapters, take the model before quantisation)")
    weight, bias = unpacked(module.weight), _detached(module.bias)
    return parts.Linear(weight[rows], None if bias is None else bias[rows])


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor stands for one of another form: quantised, or distributed over processes."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def unpacked(weight: Tensor) -> Tensor:
    """The numbers of a weight, those of torchao's quantised ones as well."""
    weight = weight.detach()
    return weight.dequantize().detach() if is_packed(weight) else weight


def bare(module: Any) -> Any:
    """A part of a network without what torch.compile and activation checkpoints put around it."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = module._modules.get(name, module) if isinstance(module, nn.Module) else module
    return module


def _saved(module: Any) -> Any:
    """What PEFT trained in the place of a module, where it did."""
    if type(module).__name__ != "ModulesToSaveWrapper" or not type(module).__module__.startswith("peft."):
        return module
    if module.disable_adapters:
        return module.original_module
    (name,) = module.active_adapters
    return module.modules_to_save[name]


def _merged(module: Any) -> Any:
    """A layer with PEFT's active adapters merged into a copy of it; any other layer."""
    module = _saved(module)
    if not type(module).__module__.startswith("peft.tuners."):
        return module
    if module.disable_adapters or set(module.active_adapters) <= set(module.merged_adapters):
        return module.get_base_layer()
    try:
        copied = evaluation_clone(module)
        copied.base_layer = copy.deepcopy(module.base_layer)  # all that merging changes
        copied.merge()
    except Exception as error:
        raise refuse(module, f"its adapter cannot be merged ({error})") from error
    return copied.get_base_layer()


def beside(linears: Sequence[parts.Linear], norms: Sequence[parts.Norm]) -> parts.Linear:
    """Layers that read a stream through norms of their own as one that reads it through a norm without weights."""
    weights, biases = [], []
    for layer, norm in zip(linears, norms, strict=True):
        bias = layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias
        biases.append(bias if norm.bias is None else bias + layer.weight @ norm.bias)
        weights.append(layer.weight if norm.weight is None else layer.weight * norm.weight)
    return parts.Linear(torch.cat(weights), torch.cat(biases))


def summed(linears: Sequence[parts.Linear], scales: Sequence[Tensor | None]) -> parts.Linear:
    """The sum of scaled layers, each with an input of its own, as one that reads all inputs."""
    weights, bias = [], torch.zeros_like(linears[0].weight[:, 0])
    for layer, scale in zip(linears, scales, strict=True):
        weights.append(layer.weight if scale is None else scale[:, None] * layer.weight)
        if layer.bias is not None:
            bias = bias + (layer.bias if scale is None else scale * layer.bias)
    return parts.Linear(torch.cat(weights, dim=1), bias)


def patch_convolution(module: nn.Module) -> parts.Linear:
    """The convolution that embeds patches side by side: weight (d, channels, patch height, patch width)."""
    module = _merged(module)
    if (
        not isinstance(module, nn.Conv2d)
        or type(module).forward is not nn.Conv2d.forward
        or module.stride != module.kernel_size
        or module.padding not in ((0, 0), "valid")
        or module.dilation != (1, 1)
        or module.groups != 1
    ):
        raise refuse(module, "only a plain patch convolution can embed the image (no overlap)")
    return parts.Linear(module.weight.detach(), _detached(module.bias))


def classifier(module: nn.Module, norm: parts.Norm | None, pool: parts.PoolKind, **options: Any) -> parts.Head:
    """The head whose last part is one linear layer, or several with norms and activations between; without dropout."""
    layers = [*_in_order(_saved(module))]
    if not layers:
        raise refuse(module, "it is not a classification head")
    dense: list[parts.Dense] = []
    before: parts.Norm | None = None  # the next layer
    for layer in layers:
        name = type(layer).__name__
        if name in ("Softmax", "LogSoftmax", "Sigmoid"):
            raise refuse(layer, "the logits are explained: give the head without it")
        if name in ACTIVATIONS:
            if before is not None or not dense or dense[-1].activation is not None:
                raise refuse(layer, "in a head, an activation must follow a linear layer directly")
            dense[-1] = replace(dense[-1], activation=activation(layer))
        elif _is_norm(layer) and before is None:
            before = needed_norm(layer)
        else:
            made = _by_channel(layer) if isinstance(layer, nn.BatchNorm1d) else None
            read = pointwise if pool == "patches" else linear
            dense.append(parts.Dense(made or read(layer), norm=before))
            before = None
    if not dense or before is not None or dense[-1].activation is not None:
        raise refuse(module, "a head must end in a linear layer, which others, norms and activations may stand before")
    *hidden, last = dense
    return parts.Head(norm, pool, (last.linear,), dense=tuple(hidden), unit=last.norm, **options)


def _in_order(module: Any) -> Iterator[nn.Module]:
    """The layers of a head one after the other, without dropout."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _in_order(child)
    elif not is_dropout(module):
        yield module


def _by_channel(module: nn.BatchNorm1d) -> parts.Linear:
    """A batch norm in evaluation mode: a linear layer of each channel by itself."""
    if module.running_mean is None or module.running_var is None:
        raise refuse(module, "it keeps no statistics, so that an image's logits depend on the others of its batch")
    factor = (module.running_var + module.eps).rsqrt()
    factor = factor if module.weight is None else factor * module.weight
    bias = -module.running_mean * factor
    return parts.Linear(factor.diag().detach(), (bias if module.bias is None else bias + module.bias).detach())


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
