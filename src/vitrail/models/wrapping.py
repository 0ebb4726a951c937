"""From an ``nn.Module`` to a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from vitrail.errors import VitrailError
from vitrail.models import huggingface, timm, torchvision
from vitrail.models.hierarchical import Hierarchical, is_hierarchical
from vitrail.models.labels import imagenet_labels, read_labels
from vitrail.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.translation import refuse
from vitrail.models.view import Output, View
from vitrail.models.vit import ViT

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Colour statistics of the published Hugging Face checkpoints, for a module that comes without its processor.
HUGGINGFACE_COLOURS = {"vit": (HALF, HALF), "beit": (HALF, HALF), "siglip": (HALF, HALF), "clip": (CLIP_MEAN, CLIP_STD)}


def wrap(
    module: nn.Module,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    *,
    head: nn.Linear | None = None,
    pool: str | None = None,
    output: Output | None = None,
    img_size: int | tuple[int, int] | None = None,
    processor: Any = None,
    name: str | None = None,
) -> View:
    """A view of a timm, torchvision or Hugging Face module you already have.

    Args:
        module: the network; it is never changed.
        labels: class names, or a file of them; None = what the model knows.
        mean: colour mean of the preprocessing, if not the model's own.
        std: colour deviation, likewise.
        head: a linear head for a backbone without one.
        pool: with ``head``: "token" or "avg".
        output: "softmax" or "sigmoid"; None = as the model says.
        img_size: input size, for networks that take several.
        processor: the Hugging Face image processor, if at hand.
        name: what to call it.
    """
    if isinstance(module, View):
        raise VitrailError("wrap() got a view; it takes the nn.Module (view.module).")
    if not isinstance(module, nn.Module):
        raise VitrailError(
            f"wrap() takes an nn.Module, but got {type(module).__name__}. To load by name: vitrail.load."
        )
    inner = getattr(module, "_orig_mod", module)  # a torch.compile'd model is read through
    name = name or _name(inner)
    if is_hierarchical(inner):
        if head is not None:
            raise refuse(inner, "head= is for backbones with tokens")
        size = as_pair(img_size) or _hierarchical_size(inner)
        view: View = Hierarchical(inner, name, _preprocess(inner, size, mean, std, processor))
    else:
        adapter = _adapter(inner)
        size = _input_size(inner, adapter, img_size)
        describe = partial(adapter.describe, inner, size, head, pool)
        width, channels, *patch = describe().embedding.weight.shape  # refuse now, not at the first call
        if channels != 3:
            raise refuse(inner, f"it takes {channels} colour channels; only RGB models can be explained")
        if head is not None and head.in_features != width:
            raise VitrailError(
                f"head= takes {head.in_features} numbers, but {name} gives {width} per token: expected "
                f"nn.Linear({width}, {head.out_features})."
            )
        preprocessing = _whole_patches(_preprocess(inner, size, mean, std, processor), patch)
        view = ViT(inner, name, preprocessing, describe=describe)
    view.labels = _labels(view, labels)
    view.output = output or _output(view)
    if view.output not in ("softmax", "sigmoid"):
        raise VitrailError(f'output must be "softmax" or "sigmoid", but got {output!r}.')
    return view


def _adapter(module: nn.Module) -> ModuleType:
    for adapter, is_own in (
        (timm, timm.is_timm),
        (torchvision, torchvision.is_torchvision),
        (huggingface, huggingface.is_huggingface),
    ):
        if is_own(module):
            return adapter
    raise refuse(module, "it comes from none of timm, torchvision and Hugging Face")


def _name(module: Any) -> str:
    if timm.is_timm(module):  # without the tag of its pretrained weights: a module need not have these
        config = getattr(module, "pretrained_cfg", None) or {}
        return config.get("architecture") or type(module).__name__
    if huggingface.is_huggingface(module):
        return module.config.name_or_path or type(module).__name__
    return type(module).__name__


def as_pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """An input size as (height, width), or an error."""
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(edge, int) and edge > 0 for edge in pair):
        raise VitrailError(f"img_size must be a positive number or (height, width), but got {size!r}.")
    return pair[0], pair[1]


def _input_size(module: nn.Module, adapter: ModuleType, wanted: int | tuple[int, int] | None) -> tuple[int, int]:
    if type(module).__name__ not in adapter.NETWORKS:
        raise refuse(module, "it is not a plain Vision Transformer")
    asked, native = as_pair(wanted), adapter.native_size(module)
    if asked is None or asked == native:
        return native
    if not adapter.takes_other_sizes(module):
        raise VitrailError(
            f"{type(module).__name__} was built for images of {native[0]}×{native[1]} and cannot take {asked[0]}×"
            f"{asked[1]}. With timm: create_model(…, img_size={asked}) or model.set_input_size(img_size={asked})."
        )
    return asked


def _hierarchical_size(module: Any) -> tuple[int, int]:
    if huggingface.is_huggingface(module):
        return huggingface.native_size(module)
    if timm.is_timm(module):
        return timm.native_size(module)
    return (256, 256) if "V2" in type(module.features[1][0]).__name__ else (224, 224)


def _preprocess(
    module: Any,
    size: tuple[int, int],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    processor: Any,
) -> Preprocess:
    if processor is not None:
        base = Preprocess.from_huggingface(processor, size)
    elif timm.is_timm(module):
        from timm.data import resolve_model_data_config

        config = {**resolve_model_data_config(module), "input_size": (3, *size)}
        base = Preprocess.from_timm(config)
    elif huggingface.is_huggingface(module):
        kind = module.config.model_type
        colours = HUGGINGFACE_COLOURS.get(kind, (IMAGENET_MEAN, IMAGENET_STD))
        base = Preprocess(size, *colours, interpolation="bilinear", fit="squash")
    else:
        base = Preprocess(size, interpolation="bilinear", fit="crop", resize=round(min(size) * 256 / 224))
    given: dict[str, Any] = {"mean": mean, "std": std, "size": size}
    changes: dict[str, Any] = {name: tuple(value) for name, value in given.items() if value is not None}
    return replace(base, **changes)


def _whole_patches(made: Preprocess, patch: Sequence[int]) -> Preprocess:
    """The same steps, less what is too narrow for a patch: a patch convolution does not look at it."""
    rows, columns = (edge % one for edge, one in zip(made.size, patch, strict=True))
    return replace(made, size=(made.size[0] - rows, made.size[1] - columns), dropped=(rows, columns))


def _labels(view: View, given: Sequence[str] | Mapping[int, str] | str | Path | None) -> Sequence[str] | None:
    count = view.num_classes
    if given is not None:
        return read_labels(given, count)
    module: Any = view.module
    if huggingface.is_huggingface(module):
        names = getattr(module.config, "id2label", None) or {}
        generic = all(name == f"LABEL_{i}" for i, name in names.items())
        return None if generic or len(names) != view.num_outputs or count != len(names) else read_labels(names, count)
    return imagenet_labels(module, view.num_outputs)


def _output(view: View) -> Output:
    module: Any = view.module
    if view.num_outputs == 1:
        return "sigmoid"
    if huggingface.is_huggingface(module):
        multi = getattr(module.config, "problem_type", None) == "multi_label_classification"
        return "sigmoid" if multi else "softmax"
    return "softmax"
