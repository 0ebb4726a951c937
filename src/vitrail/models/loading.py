"""``load``: a view from a name, with its weights from the hub, a file or the package."""

from __future__ import annotations

import difflib
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.errors import VitrailError
from vitrail.models.checkpoints import load_state, read_state
from vitrail.models.view import Output, View
from vitrail.models.wrapping import wrap

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    pretrained: bool | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    output: Output | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    **model_args: Any,
) -> View:
    """A view of a model by name.

    Args:
        name: a timm name (its tag allowed), ``hf:ORG/NAME`` or ``hf:./folder`` (Hugging Face), ``torchvision:NAME``, or
            an embedded model; None = the embedded default.
        checkpoint: a file with the weights (safetensors or torch).
        labels: class names, or a file of them.
        pretrained: fetch weights; by default yes, unless ``checkpoint`` is given.
        num_classes: size of the head, where ``checkpoint`` or ``labels`` do not tell it.
        img_size: input size, if not the model's usual one.
        output: "softmax" or "sigmoid"; None = as the model says.
        device: "auto" = CUDA where there is one.
        dtype: "auto" = float32.
        model_args: passed on to the library that builds the model.
    """
    spec = {"name": name, "checkpoint": str(Path(checkpoint).resolve()) if checkpoint else None, "pretrained": pretrained,
            "num_classes": num_classes, "img_size": img_size, "output": output, **model_args}  # fmt: skip
    if isinstance(labels, str | Path):
        spec["labels"] = str(Path(labels).resolve())
    elif labels is not None:
        spec["labels"] = list(labels.values()) if isinstance(labels, Mapping) else list(labels)
    options: dict[str, Any] = {"labels": labels, "output": output}
    if name is None or name in _embedded_names():
        view = _load_embedded(name, spec)
    elif name.startswith("hf:"):
        view = _load_huggingface(name.removeprefix("hf:"), checkpoint, pretrained, img_size, options, model_args)
    elif name.startswith("torchvision:"):
        view = _load_torchvision(name, checkpoint, pretrained, num_classes, img_size, options, model_args)
    else:
        view = _load_timm(name, checkpoint, pretrained, num_classes, img_size, options, model_args)
    view.spec = {key: value for key, value in spec.items() if value is not None}
    view.module.eval()
    view.module.requires_grad_(False)
    return view.to(pick_device(device), pick_dtype(dtype))


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto" is CUDA where there is one; anything else must exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise VitrailError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}.") from None


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto" and dtype not in DTYPES:
        raise VitrailError(f"unknown dtype {dtype!r}: expected auto, {', '.join(DTYPES)}.")
    return torch.float32 if dtype == "auto" else DTYPES[dtype]


def _embedded_names() -> tuple[str, ...]:
    from vitrail.models.embedded import names

    return names()


def _load_embedded(name: str | None, spec: Mapping[str, Any]) -> View:
    from vitrail.models.embedded import load_embedded

    given = [key for key, value in spec.items() if key != "name" and value is not None]
    if given:
        raise VitrailError(f"an embedded model takes no {', '.join(given)}: give the name of another model with it.")
    return load_embedded(name)


def _load_timm(
    name: str,
    checkpoint: str | Path | None,
    pretrained: bool | None,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    options: dict[str, Any],
    model_args: dict[str, Any],
) -> View:
    import timm

    if not timm.is_model(name):
        raise _unknown_name(name)
    wants_weights = pretrained if pretrained is not None else checkpoint is None
    state = None if checkpoint is None else read_state(checkpoint)
    if num_classes is None and state is not None:
        num_classes = _classes_in(state)
    _check_has_head(name, num_classes)
    sizes = {"num_classes": num_classes, "img_size": img_size}
    arguments = {**{key: value for key, value in sizes.items() if value is not None}, **model_args}
    module = _fetch(name, lambda: timm.create_model(name, pretrained=wants_weights, **arguments))
    if state is not None:
        load_state(module, state, str(checkpoint))
    _warn_if_untrained(name, module, wants_weights, state is not None)
    return wrap(module, name=name, **options)


def _load_torchvision(
    name: str,
    checkpoint: str | Path | None,
    pretrained: bool | None,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    options: dict[str, Any],
    model_args: dict[str, Any],
) -> View:
    from torchvision import models

    short = name.removeprefix("torchvision:")
    if short not in models.list_models():
        close = difflib.get_close_matches(short, models.list_models(include=["*vit*", "*swin*"]), n=4)
        raise VitrailError(f"torchvision has no model {short!r}. Did you mean {', '.join(close) or 'vit_b_16'}?")
    state = None if checkpoint is None else read_state(checkpoint)
    wants_weights = pretrained if pretrained is not None else checkpoint is None
    if state is not None and num_classes is None:
        num_classes = _classes_in(state)
    arguments = {**model_args, **({} if num_classes is None else {"num_classes": num_classes})}
    if img_size is not None and short.startswith("vit"):
        arguments["image_size"] = img_size
    weights = "DEFAULT" if wants_weights else None
    module = _fetch(name, lambda: models.get_model(short, weights=weights, **arguments))
    if state is not None:
        load_state(module, state, str(checkpoint))
    _warn_if_untrained(name, module, wants_weights, state is not None)
    return wrap(module, name=name, img_size=None if short.startswith("vit") else img_size, **options)


def _load_huggingface(
    name: str,
    checkpoint: str | Path | None,
    pretrained: bool | None,
    img_size: int | tuple[int, int] | None,
    options: dict[str, Any],
    model_args: dict[str, Any],
) -> View:
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification
    except ImportError:
        raise VitrailError('Hugging Face models need an extra: pip install "vitrail[hf]".') from None
    if checkpoint is not None or pretrained is False:
        raise VitrailError("hf: models carry their own weights; give the folder (hf:./folder), not checkpoint=.")
    source = name
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise VitrailError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
        source = str(folder)

    def build() -> tuple[nn.Module, dict[str, Any]]:
        found: tuple[nn.Module, dict[str, Any]] = AutoModelForImageClassification.from_pretrained(
            source, output_loading_info=True, **model_args
        )
        return found

    module, info = _fetch(f"hf:{name}", build)
    lost = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
    if lost:
        raise VitrailError(
            f"hf:{name} has no weights for {', '.join(lost[:6])}: it is a backbone without a classifier. Load it with "
            f'transformers and use vitrail.wrap(backbone, head=…, pool="token"|"avg").'
        )
    processor = None
    if not Path(source).is_dir() or (Path(source) / "preprocessor_config.json").is_file():
        processor = _fetch(f"hf:{name}", lambda: AutoImageProcessor.from_pretrained(source))
    return wrap(module, name=f"hf:{name}", processor=processor, img_size=img_size, **options)


def _fetch(name: str, build: Any) -> Any:
    """Builds a model whose weights may come over the network; any failure becomes one clear error."""
    try:
        return build()
    except VitrailError:
        raise
    except KeyboardInterrupt:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise VitrailError(
            f"could not build {name} or get its weights: {reason[:300]}. If this machine is offline, give checkpoint=FILE "
            f"(timm, torchvision) or a local folder (hf:./folder), or use the embedded model: vitrail.load()."
        ) from error


def _classes_in(state: Mapping[str, torch.Tensor]) -> int | None:
    """The number of outputs of the head in a checkpoint."""
    for key in ("head.weight", "head.fc.weight", "heads.head.weight", "classifier.weight"):
        if key in state:
            return int(state[key].shape[0])
    return None


def _unknown_name(name: str) -> VitrailError:
    import timm

    stem = name.split(".")[0]
    close = difflib.get_close_matches(stem, timm.list_models(), n=4)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    known = [n for n in timm.list_pretrained(f"{stem}.*")]
    if known:
        hint = f" {stem} has the tags {', '.join(n.split('.', 1)[1] for n in known)}."
    return VitrailError(
        f"there is no model {name!r}.{hint} Names are timm's (vitrail models 'vit*'), hf:ORG/NAME, hf:./folder or "
        f"torchvision:NAME."
    )


def _check_has_head(name: str, num_classes: int | None) -> None:
    """A name whose default weights have no classes cannot be explained without more."""
    import timm

    if num_classes is not None:
        if num_classes < 1:
            raise VitrailError(f"num_classes must be at least 1 to explain a class, but got {num_classes}.")
        return
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or config.num_classes != 0:
        return
    stem = re.sub(r"(_\d+)+$", "", name.split(".")[0])
    patterns = (f"{name.split('.')[0]}.*", f"{stem}_*", f"{'_'.join(stem.split('_')[:2])}_*")
    rivals = [n for pattern in patterns for n in timm.list_pretrained(pattern) if _has_classes(n)]
    told = ", ".join(dict.fromkeys(rivals[:6])) or "none in timm"
    raise VitrailError(
        f"{name} is a backbone without classes (num_classes is 0). Weights with a head: {told}. Or bring a head of your "
        f"own: vitrail.load({name!r}, checkpoint=FILE) or num_classes=N with checkpoint=FILE."
    )


def _has_classes(name: str) -> bool:
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and bool(config.num_classes)


def _warn_if_untrained(name: str, module: nn.Module, pretrained: bool, has_checkpoint: bool) -> None:
    if has_checkpoint:
        return
    config = getattr(module, "pretrained_cfg", None) or {}
    own = config.get("num_classes") if isinstance(config, Mapping) else None
    classes = getattr(module, "num_classes", None)
    if not pretrained:
        warnings.warn(f"{name} has random weights (pretrained=False): its explanations mean nothing.", stacklevel=4)
    elif own is not None and classes is not None and own != classes:
        warnings.warn(f"{name} has a random head ({classes} classes, its weights have {own}).", stacklevel=4)
