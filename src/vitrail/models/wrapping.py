"""From an ``nn.Module`` to a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitrail.core.parts import Architecture
from vitrail.errors import VitrailError
from vitrail.models import chain, clip, detection, huggingface, open_clip, segmentation, timm, torchvision, zero_shot
from vitrail.models.agreement import GATHER, check_logits, check_tensors
from vitrail.models.black_box import BlackBox, as_logits
from vitrail.models.captions import CaptionModel
from vitrail.models.clone import evaluation_clone
from vitrail.models.detection import Detector
from vitrail.models.hierarchical import Hierarchical, is_hierarchical
from vitrail.models.labels import imagenet_labels, read_labels
from vitrail.models.preprocessing import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, Fit, Preprocess
from vitrail.models.translation import OpaqueError, class_name, refuse
from vitrail.models.view import Output, View
from vitrail.models.vit import ViT
from vitrail.models.zero_shot import Prompts, ZeroShotViT

LIBRARIES = (
    (timm, timm.is_timm),
    (torchvision, torchvision.is_torchvision),
    (huggingface, huggingface.is_huggingface),
)
T = TypeVar("T")
POOLS = ("token", "avg", "map", "pooler", "patches")
HALF = (0.5, 0.5, 0.5)
# Colour statistics of the published Hugging Face checkpoints, for modules without a processor.
HUGGINGFACE_COLOURS = {
    "vit": (HALF, HALF),
    "beit": (HALF, HALF),
    "siglip": (HALF, HALF),
    "siglip2": (HALF, HALF),
    "clip": (CLIP_MEAN, CLIP_STD),
}


def wrap(
    module: nn.Module,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    *,
    fit: str | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    head: nn.Module | None = None,
    pool: str | None = None,
    output: Output | None = None,
    img_size: int | tuple[int, int] | None = None,
    processor: Any = None,
    prompts: Prompts | None = None,
    tokenizer: Any = None,
    features: str | Sequence[str] | None = None,
    black_box: bool = False,
    name: str | None = None,
) -> View:
    """A view of a module you already have: a plain ViT is seen through, any other image classifier is a black box.

    The module is run on a random image in evaluation mode: its logits and the view's must agree.

    Args:
        module: the network; it is never changed.
        labels: class names, or a file of them; None = what the model knows.
        mean: colour mean of the preprocessing, if not the model's.
        std: colour standard deviation, likewise.
        fit: "squash", "crop" or "pad", likewise; another fit scales to the input size exactly.
        crop_pct: the image is scaled to the input size divided by this, likewise.
        interpolation: "bicubic", "bilinear", "nearest" or "lanczos", likewise.
        head: a head for a backbone without one: a linear layer, or several with activations between them. None = the
            view of a backbone without a head has its embedding as output, and no classes.
        pool: what ``head`` or the embedding reads: "token", "avg", "map" (attention pool), "pooler" (Hugging Face's
            ``pooler_output``), or "patches" for a segmentation head, which reads every patch; 1 × 1 convolutions serve
            as linear layers.
        output: "softmax" or "sigmoid"; None = read from the model.
        img_size: input size, for networks that take several; None = the processor's, or the model's own.
        processor: the Hugging Face image processor, if available.
        prompts: the classes of a CLIP or SigLIP: texts, lists of texts that are averaged, or either by a name.
        tokenizer: with ``prompts``: the Hugging Face tokenizer.
        features: the path of a layer whose output is a feature map, or several from first to last, for CAMs and
            ``vit_cx`` on a black box; None = the last feature map, if there is one.
        black_box: explain the module by its logits, even where it is a plain ViT.
        name: its name in messages and results.
    """
    if isinstance(module, View):
        raise VitrailError("wrap() got a view; it takes the nn.Module (view.module).")
    if not isinstance(module, nn.Module):
        raise VitrailError(
            f"wrap() takes an nn.Module, but got {type(module).__name__}. To load by name: vitrail.load."
        )
    inner, normalize = unwrapped(module)
    if normalize is not None:
        if mean is not None or std is not None:
            raise VitrailError("the module normalises its inputs itself (Normalize): leave out mean= and std=.")
        mean, std = normalize
    if labels is None and inner is not module:
        labels = _names_of_config(module)
    check_tensors(inner, of_any_kind=black_box or not _is_seen_through(inner))
    if not _is_of_zoo(inner) and processor is None and None in (img_size, mean, std):
        raise VitrailError(
            f"{class_name(inner)} is no model of timm, torchvision or Hugging Face: say how images become its inputs, "
            f"as in its training, with img_size=, mean= and std= (or processor=).{_inside(inner)}"
        )
    view = outline(
        inner, labels, head, pool, output, img_size, processor, prompts, tokenizer, name, features, black_box
    )
    view.preprocessing = view.preprocessing.changed(
        fit=fit, mean=mean, std=std, crop_pct=crop_pct, interpolation=interpolation
    )
    if head is None and view.head is not None:  # of a backbone without one
        head, pool = view.head, pool or _own_pool(inner)
    if head is not None:
        check_tensors(head)
        _check_kind(inner, head)
    own_head = None if head is None else evaluation_clone(head)
    check_logits(view, partial(_own_logits, view=view, head=own_head, pool=pool))
    return view


AROUND = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def unwrapped(module: nn.Module) -> tuple[nn.Module, tuple[Sequence[float], Sequence[float]] | None]:
    """The network inside what training puts around it, and the mean and deviation of a Normalize before it.

    What is taken off computes what the network computes: torch.compile, DataParallel and its like, averages of weights,
    the wrapper of transformers around timm models, that of PEFT around a model with adapters.
    """
    inner = _inner(module)
    if inner is module:
        return module, None
    if module._forward_hooks or module._forward_pre_hooks:
        raise VitrailError(
            f"the {type(module).__name__} around the network has hooks: register them on the inner module "
            f"({next(name for name, part in module.named_modules() if part is inner)})."
        )
    network, normalize = unwrapped(inner)
    if type(module) is nn.Sequential:
        first: Any = module[0]
        return network, (list(first.mean), list(first.std))
    return network, normalize


def _inner(module: Any) -> nn.Module:
    """What a module is put around, or the module itself."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise VitrailError(f"the module is sharded (FSDP): {GATHER}")
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        raise VitrailError(f"{class_name(module)} is a traced or exported program: give the module it was made from.")
    kind, inner = type(module), module
    package = kind.__module__.partition(".")[0]
    if "_orig_mod" in module._modules:
        inner = module._orig_mod
    elif isinstance(module, AROUND) or (package == "timm" and kind.__name__.startswith("ModelEma")):
        inner = module.module
    elif package == "transformers" and kind.__name__ == "TimmWrapperForImageClassification":
        inner = module.timm_model
    elif package == "peft" and hasattr(module, "get_base_model"):
        inner = module.get_base_model()
    elif kind is nn.Sequential and len(module) == 2 and _is_normalize(module[0]):
        inner = module[1]
    return inner


def _is_normalize(module: nn.Module) -> bool:
    """Whether it is torchvision's Normalize, of either version."""
    kind = type(module)
    return kind.__name__ == "Normalize" and kind.__module__.startswith("torchvision.transforms")


def _names_of_config(module: Any) -> Mapping[int, str] | None:
    """The class names in the configuration of a module of transformers."""
    names = getattr(getattr(module, "config", None), "id2label", None)
    return None if not names or all(name == f"LABEL_{i}" for i, name in names.items()) else names


def outline(
    module: Any,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    head: nn.Module | None = None,
    pool: str | None = None,
    output: Output | None = None,
    img_size: int | tuple[int, int] | None = None,
    processor: Any = None,
    prompts: Prompts | None = None,
    tokenizer: Any = None,
    name: str | None = None,
    features: str | Sequence[str] | None = None,
    black_box: bool = False,
) -> View:
    """The view that ``wrap`` returns, of a module that is not run and may have no weights."""
    name = name or _name(module)
    huggingface.check_kind(module)
    texts = prompts_of(module, prompts)
    if texts is not None:
        module = _compared_with(module, texts, tokenizer, labels, head)
    elif tokenizer is not None:
        raise VitrailError("tokenizer= goes with prompts=, the texts that it reads.")
    is_embedding = False
    if head is None and texts is None and features is None and not black_box:
        head, pool, is_embedding = _embedding_head(module, pool)
    _check_pool(head, pool)
    names = (features,) if isinstance(features, str) else None if features is None else tuple(features)
    view: View
    if black_box or names is not None or not _is_seen_through(module):
        view = _black_box(module, name, img_size, processor, names, head)
    elif is_hierarchical(module):
        if head is not None:
            raise refuse(module, "head= is for backbones with tokens")
        preprocessing = _preprocess(module, _hierarchical_size(module), img_size, processor)
        view = Hierarchical(module, name, preprocessing)
    else:
        try:
            view = _seen_through(module, name, img_size, processor, head, pool, texts, tokenizer)
        except OpaqueError as error:
            if head is not None:
                raise
            view = _black_box(module, name, img_size, processor, names, head)
            view.note = f"{error} {view.note}"
    if texts is None and not is_embedding:
        view.labels = _labels(view, labels)
    _check_output(view, output, labels, is_embedding)
    view.is_embedding, view.output = is_embedding, "score" if is_embedding else output or _output(view)
    return view


def _check_output(view: View, output: Output | None, labels: Any, is_embedding: bool) -> None:
    if output not in (None, "softmax", "sigmoid"):
        raise VitrailError(f'output must be "softmax" or "sigmoid", but got {output!r}.')
    if is_embedding and (output is not None or labels is not None):
        raise VitrailError(f"{view.name} has no classes, which labels= and output= are about: give head= and pool=.")


def _embedding_head(module: Any, pool: str | None) -> tuple[nn.Module | None, str | None, bool]:
    """The head and the pooling of a module that came without one, and whether its outputs are an embedding."""
    own_pool = _own_pool(module)
    if own_pool is None:
        return None, pool, timm.is_projecting(chain.network_of(module))
    if pool == "patches":
        raise VitrailError('pool="patches" is for a head that reads every patch: give head= too.')
    return _identity(module), pool or own_pool, True


def _own_pool(module: Any) -> str | None:
    """How a plain ViT without a head pools its tokens; None for any other network."""
    for adapter, is_own in LIBRARIES:
        if is_own(module) and type(module).__name__ in adapter.NETWORKS:
            pool: str | None = adapter.own_pool(module)
            return pool
    return None


def _identity(module: Any) -> nn.Linear:
    """The head of a backbone that has none: its outputs are the channels of the embedding."""
    width, like = _adapter(module).width(module), next(module.parameters())
    head = nn.utils.skip_init(nn.Linear, width, width, bias=False, device=like.device, dtype=like.dtype)
    nn.init.eye_(head.weight)
    return head.requires_grad_(False)


def _seen_through(
    module: Any,
    name: str,
    img_size: int | tuple[int, int] | None,
    processor: Any,
    head: nn.Module | None,
    pool: str | None,
    texts: dict[str, list[str]] | None,
    tokenizer: Any,
) -> ViT:
    """The view of a plain ViT."""
    adapter = _adapter(module)
    preprocessing = _preprocess(module, adapter.native_size(module), img_size, processor)
    if adapter is chain:
        patch = _described(module, partial(chain.patch_size, module))
        chain.check_front(module, preprocessing.size, patch)
    _check_size(module, adapter, preprocessing.size, img_size)
    describe = partial(adapter.describe, module, preprocessing.size, head, pool)
    architecture = _described(module, describe)  # refuse now, not at the first call
    embedding = architecture.embedding
    channels = embedding.weight.shape[1]
    if embedding.stem is None and channels != 3:
        raise refuse(
            module,
            f"it takes {channels} colour channels; only RGB models can be explained: nn.Sequential(channels, model), "
            "whose first part makes these of RGB, is one",
        )
    if head is not None:
        _check_width(architecture, name)
    preprocessing = _whole_patches(preprocessing, embedding.patch)
    if texts is None:
        kind = Detector if detection.is_detector(module) else ViT
        return kind(module, name, preprocessing, describe=describe, head=head)
    return ZeroShotViT(
        module, name, preprocessing, labels=tuple(texts), describe=describe, prompts=texts, tokenizer=tokenizer
    )


def _black_box(
    module: Any,
    name: str,
    img_size: int | tuple[int, int] | None,
    processor: Any,
    features: tuple[str, ...] | None,
    head: nn.Module | None,
) -> BlackBox:
    """The view of any classifier."""
    if head is not None:
        raise refuse(module, "head= is for backbones with tokens; of any other, give a module that ends in the head")
    if timm.is_timm(module) and getattr(module, "num_classes", None) == 0:
        raise refuse(module, "it has no classification head (num_classes is 0)")
    size = _box_size(module, img_size, processor)
    view = BlackBox(module, name, _preprocess(module, size, img_size, processor), stage_names=features)
    known = f"logits and the features of {', '.join(view.stage_names)}" if view.stage_names else "logits"
    view.note = f"Explained as a black box, by its {known}; a plain ViT can be explained by every method."
    view.note += _inside(module)
    return view


def _inside(module: nn.Module) -> str:
    """Which part of a module can be seen into, as a sentence."""
    inside = next(((path, part) for path, part in module.named_modules() if path and _is_seen_through(part)), None)
    if inside is None:
        return ""
    path, kind = inside[0], type(inside[1]).__name__
    return f" Its part {path} is a {kind}: give that to wrap(), with head= where it has none."


def prompts_of(module: Any, prompts: Prompts | None) -> dict[str, list[str]] | None:
    """The prompts of a model with a text tower; None for any other model."""
    kind = type(module).__name__
    if prompts is not None and not zero_shot.is_zero_shot(module):
        raise reads_no_texts(kind)
    if prompts is None and zero_shot.is_zero_shot(module):
        raise VitrailError(
            f'{kind} has no classes of its own: give prompts=["a photo of a cat", "a photo of a dog"] and tokenizer=.'
        )
    return None if prompts is None else zero_shot.checked_prompts(prompts)


def reads_no_texts(kind: str) -> VitrailError:
    """The error for prompts of a model without a text tower."""
    return VitrailError(
        f"prompts= is for {', '.join(clip.MODELS)} of Hugging Face and CLIP of open_clip, which read texts, but got "
        f"{kind}."
    )


def _compared_with(
    module: Any, texts: dict[str, list[str]], tokenizer: Any, labels: Any, head: nn.Module | None
) -> zero_shot.ZeroShot:
    """A model with a text tower as a classifier of these prompts."""
    for argument, value in (("labels", labels), ("head", head)):
        if value is not None:
            raise VitrailError(
                f"{argument}= contradicts prompts=, which are the classes: to name them, give prompts={{name: text}}."
            )
    return zero_shot.ZeroShot(module, zero_shot.embed_texts(module, tokenizer, texts))


def _check_pool(head: nn.Module | None, pool: str | None) -> None:
    if head is None and pool is not None:
        raise VitrailError("pool= goes with head=: a model with its own head is explained as it pools.")
    if head is not None and pool not in POOLS:
        raise VitrailError(
            f'head= needs pool="token" (class token), "avg" (mean of the patches), "map" (attention pool), "pooler" '
            f'(Hugging Face\'s pooler_output) or "patches" (an output per patch), but got {pool!r}.'
        )


def _check_kind(module: nn.Module, head: nn.Module) -> None:
    """Backbone and head must have the same precision and device."""
    (dtype, device), (head_dtype, head_device) = (
        (parameter.dtype, parameter.device) for parameter in (next(module.parameters()), next(head.parameters()))
    )
    if (dtype, device) != (head_dtype, head_device):
        raise VitrailError(
            f"head= has {head_dtype} on {head_device}, but the backbone has {dtype} on {device}: use "
            f"head.to({str(device)!r}, {dtype})."
        )


def _described(module: nn.Module, describe: Callable[[], T]) -> T:
    """What is read of the parts of a module; an error where they are not those of its library."""
    try:
        return describe()
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:  # a part is something else
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise refuse(_of_library(module), f"its parts are not those that its library builds ({reason})") from error


def _check_width(architecture: Architecture, name: str) -> None:
    """The head given to ``wrap`` must match the width of what is pooled."""
    head, width = architecture.head, architecture.embedding.weight.shape[0]
    if head.attention_pool is not None:
        width = head.attention_pool.attention.proj.weight.shape[0]
    for linear in (*(dense.linear for dense in head.dense), *head.linears):
        outputs, inputs = linear.weight.shape
        if inputs != width:
            raise VitrailError(
                f"head= takes {inputs} features, but {name} has {width}: expected nn.Linear({width}, {outputs})."
            )
        width = outputs


def _own_logits(module: Any, images: Tensor, view: View, head: nn.Module | None, pool: str | None) -> Tensor:
    if isinstance(view, BlackBox):
        return as_logits(module(images))
    return _adapter(module).logits(module, images, head, pool)


def _adapter(module: nn.Module) -> ModuleType:
    if isinstance(module, zero_shot.ZeroShot):
        return zero_shot
    if chain.is_chain(module):
        return chain
    if detection.is_detector(module):
        return detection
    if segmentation.is_segmenter(module):
        return segmentation
    for adapter, is_own in LIBRARIES:
        if is_own(module) and type(module).__name__ in adapter.NETWORKS:
            return adapter
    plain = next(kind for kind in type(module).__mro__ if _is_network(kind))
    raise refuse(module, f"it may compute something else than {plain.__module__}.{plain.__name__}")


def _is_of_zoo(module: nn.Module) -> bool:
    """Whether the module comes from a library of models."""
    is_known = isinstance(module, CaptionModel) or open_clip.is_open_clip(module)
    return is_known or any(is_own(module) for _, is_own in LIBRARIES)


def _is_seen_through(module: nn.Module) -> bool:
    """Whether it is a network whose parts are known, or a subclass of one, which may compute something else."""
    return (
        isinstance(module, zero_shot.ZeroShot)
        or chain.is_chain(module)
        or detection.is_detector(module)
        or segmentation.is_segmenter(module)
        or zero_shot.is_zero_shot(module)
        or any(_is_network(kind) for kind in type(module).__mro__)
    )


def _is_network(kind: type) -> bool:
    return any(
        kind.__module__.startswith(package) and kind.__name__ in (*adapter.NETWORKS, *adapter.HIERARCHICAL)
        for package, adapter in ((timm.PACKAGES, timm), ("torchvision.", torchvision), ("transformers.", huggingface))
    )


def _of_library(module: nn.Module) -> Any:
    """The module that its library built."""
    model: Any = module.model if isinstance(module, zero_shot.ZeroShot) else module
    return model.vision if isinstance(model, CaptionModel) else model


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


def _check_size(
    module: nn.Module, adapter: ModuleType, size: tuple[int, int], wanted: int | tuple[int, int] | None
) -> None:
    """The network must accept the requested size, or the one of its processor."""
    native, kind = adapter.native_size(module), type(_of_library(module)).__name__
    if size == native:
        return
    if not adapter.takes_other_sizes(module):
        raise VitrailError(
            f"{kind} was built for images of {native[0]}×{native[1]} and cannot take {size[0]}×{size[1]}. With timm: "
            f"create_model(…, img_size={size}) or model.set_input_size(img_size={size})."
        )
    if wanted is None and not adapter.adapts_to_input(module):
        raise VitrailError(
            f"{kind} was built for images of {native[0]}×{native[1]} and cannot take the {size[0]}×{size[1]} of its "
            f"processor unless its positions are interpolated: give img_size={size} for that, "
            f"img_size={native}, or another processor."
        )


def _hierarchical_size(module: Any) -> tuple[int, int]:
    if huggingface.is_huggingface(module):
        return huggingface.native_size(module)
    if timm.is_timm(module):
        return timm.native_size(module)
    return (256, 256) if "V2" in type(module.features[1][0]).__name__ else (224, 224)


def _box_size(module: Any, img_size: int | tuple[int, int] | None, processor: Any) -> tuple[int, int]:
    """(H, W) of the input of a black box."""
    requested = as_pair(img_size)
    if requested is not None:
        return requested
    if timm.is_timm(module):
        built_for = getattr(getattr(module, "patch_embed", None), "img_size", None)
        configured = (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
        size = built_for or (configured and configured[1:])
    elif torchvision.is_torchvision(module):
        size = (224, 224)
    else:
        size = getattr(getattr(module, "config", None), "image_size", None)
    if size is None and processor is None:
        raise refuse(module, "it does not say the size of its inputs; give img_size=")
    return (224, 224) if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])


def _preprocess(
    module: Any,
    native: tuple[int, int],
    img_size: int | tuple[int, int] | None,
    processor: Any,
) -> Preprocess:
    module = _of_library(module)
    requested = as_pair(img_size)
    size = requested or native
    if processor is not None:
        if hasattr(processor, "data_config"):  # transformers' wrapper of timm models
            base = Preprocess.from_timm(processor.data_config)
        else:
            keeps_shape = detection.is_detector(module) or segmentation.is_segmenter(module)
            base = (Preprocess.from_detector if keeps_shape else Preprocess.from_huggingface)(processor, native)
        return base if requested is None else base.resized(requested)
    if timm.is_timm(module):
        from timm.data import resolve_model_data_config

        config = {**resolve_model_data_config(module), "input_size": (3, *size)}
        return Preprocess.from_timm(config)
    if open_clip.is_open_clip(module):
        return Preprocess.from_open_clip(getattr(module.visual, "preprocess_cfg", {}), size)
    if huggingface.is_huggingface(module):
        kind = module.config.model_type
        colours = HUGGINGFACE_COLOURS.get(kind, (IMAGENET_MEAN, IMAGENET_STD))
        keeps_shape = detection.is_detector(module) or segmentation.is_segmenter(module)
        fit: Fit = "border" if keeps_shape else "squash"
        return Preprocess(size, *colours, interpolation="bilinear", fit=fit)
    return Preprocess(size, interpolation="bilinear", fit="crop", resize=round(min(size) * 256 / 224))


def _whole_patches(preprocessing: Preprocess, patch: Sequence[int]) -> Preprocess:
    """The same steps, without the rows and columns too narrow for a patch, which a patch convolution ignores."""
    height, width = preprocessing.size
    rows, columns = height % patch[0], width % patch[1]
    return replace(preprocessing, size=(height - rows, width - columns), dropped=(rows, columns))


def _labels(view: View, labels: Sequence[str] | Mapping[int, str] | str | Path | None) -> Sequence[str] | None:
    count, outputs = view.num_classes, view.num_outputs
    if isinstance(view, Detector):
        return (*_names_of_objects(view, labels), detection.NO_OBJECT)
    if labels is not None:
        return read_labels(labels, count)
    network = chain.network_of(view.module)
    if huggingface.is_huggingface(network):
        names = _names_of_config(network) or {}
        return None if len(names) != outputs or count != len(names) else read_labels(names, count)
    return imagenet_labels(network, outputs)


def _names_of_objects(view: Detector, labels: Any) -> Sequence[str]:
    """The classes of a detector, besides "no object"."""
    names: Mapping[int, str] = view.module.config.id2label  # type: ignore[union-attr, assignment]
    if labels is None and all(name == f"LABEL_{i}" for i, name in names.items()):
        labels = [f"class {i}" for i in range(view.num_classes - 1)]
    return read_labels(names if labels is None else labels, view.num_classes - 1)


def _output(view: View) -> Output:
    module: Any = chain.network_of(view.module)
    if view.num_outputs == 1 or (isinstance(module, zero_shot.ZeroShot) and module.bias is not None):
        return "sigmoid"
    if huggingface.is_huggingface(module):
        multi = getattr(module.config, "problem_type", None) == "multi_label_classification"
        return "sigmoid" if multi else "softmax"
    return "softmax"
