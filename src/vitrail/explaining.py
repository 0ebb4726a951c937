"""``explain``: from a model and pictures to explanations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.engine.modes import memory_for, own_modes
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation, tensor_hash
from vitrail.images import ImageSource, read_image
from vitrail.methods.base import Method, Targets, pick
from vitrail.methods.registry import build_method
from vitrail.models.view import View, check_floats
from vitrail.models.vit import ViT
from vitrail.progress import counted

BATCH = {"cpu": 4, "cuda": 32}


@overload
def explain(
    model: View | nn.Module | str,
    image: ImageSource | Tensor,
    method: str | None = None,
    target: Targets = None,
    *,
    against: Targets = None,
    batch_size: int | None = None,
    **params: Any,
) -> Explanation: ...


@overload
def explain(
    model: View | nn.Module | str,
    image: Sequence[ImageSource | Tensor],
    method: str | None = None,
    target: Targets = None,
    *,
    against: Targets = None,
    batch_size: int | None = None,
    **params: Any,
) -> list[Explanation]: ...


def explain(
    model: View | nn.Module | str,
    image: ImageSource | Tensor | Sequence[ImageSource | Tensor],
    method: str | None = None,
    target: Targets = None,
    *,
    against: Targets = None,
    batch_size: int | None = None,
    **params: Any,
) -> Explanation | list[Explanation]:
    """Why does the model give this image this class?

    Args:
        model: a view, a module that ``wrap`` takes, or a name that ``load`` takes.
        image: path, PIL image, uint8 array HWC, normalised tensor CHW or BCHW; a list or a batch gives a list.
        method: a name of ``list_methods``; None = "decompx.skipplus", or "vit_cx" for a hierarchical model.
        target: the class, by number or name; a list has one per image; None = the predicted one.
        against: explain the target as opposed to this class.
        batch_size: images per pass; None = by device.
        params: the method's parameters.
    """
    if "shape" in params:
        raise VitrailError("shape= is for a method's attribute(): explain() gives the map, heatmap() it on the image.")
    view = as_view(model)
    chosen = build_method(method or default_method(view), view, **params)
    several = isinstance(image, list | tuple) or (isinstance(image, Tensor) and image.ndim == 4)
    sources = list(image) if several else [image]  # type: ignore[arg-type]
    if not sources:
        raise VitrailError("no image was given: expected at least one.")
    with own_modes(view.device):
        found = list(explain_each(chosen, sources, target, against, batch_size))
    return found if several else found[0]


def explain_each(
    method: Method, sources: Sequence[Any], target: Targets, against: Targets, batch_size: int | None = None
) -> Iterator[Explanation]:
    """Explanations one after another, computed batch by batch; a bar appears if it takes longer than two seconds."""
    view = method.model
    size = images_at_once(view, batch_size)
    targets = None if target is None else pick(view, target, len(sources), "target")
    rivals = None if against is None else pick(view, against, len(sources), "against")
    if targets is not None and rivals is not None:
        _check_rivals(view, targets, rivals)
    with counted(len(sources), method.info.name, "image") as bar:
        for start in range(0, len(sources), size):
            chunk = slice(start, start + size)
            pictures = [see(view, source) for source in sources[chunk]]
            own = (None if t is None else t[chunk] for t in (targets, rivals))
            yield from _explain_batch(method, pictures, *own)
            bar.update(len(pictures))


def images_at_once(view: View, batch_size: int | None) -> int:
    """How many images go through the model together: as asked, or by its device."""
    if batch_size is None:
        return BATCH.get(view.device.type, 4)
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise VitrailError(f"batch_size must be at least 1 and a whole number, but got {batch_size!r}.")
    return int(batch_size)


@dataclass(frozen=True)
class Seen:
    """A picture and how the model sees it."""

    image: Image.Image
    pixels: Tensor  # (3, H, W), normalised
    box: tuple[float, float, float, float]
    path: str | None
    from_tensor: bool = False


def see(view: View, source: ImageSource | Tensor | Seen) -> Seen:
    """Any form of image, read and preprocessed; a tensor is taken as it is, and so is what was seen before."""
    if isinstance(source, Seen):
        return source
    if isinstance(source, Tensor):
        check_floats(source)
        source = view.preprocessing.seen(source)
        if tuple(source.shape) != (3, *view.size):
            raise VitrailError(
                f"a tensor must be a normalised image of shape (3, {view.size[0]}, {view.size[1]}) for {view.name}, "
                f"but got {tuple(source.shape)}. Use model.preprocess(image)."
            )
        if not source.isfinite().all():
            raise VitrailError("a tensor must hold finite floats (a normalised image), but got "
                               f"{int((~source.isfinite()).sum())} NaN or infinite values.")  # fmt: skip
        image = view.preprocessing.denormalise(source.detach().float().cpu())
        return Seen(image, source.detach(), (0.0, 0.0, float(view.size[1]), float(view.size[0])), None, True)
    image = read_image(source)
    path = None if isinstance(source, Image.Image | np.ndarray) else str(Path(source).resolve())
    return Seen(image, view.preprocess(image), view.preprocessing.box(image.size), path)


def as_view(model: View | nn.Module | str) -> View:
    """A view from whatever names or holds a model."""
    from vitrail.models.loading import load
    from vitrail.models.wrapping import wrap

    if isinstance(model, View):
        return model
    return load(model) if isinstance(model, str) else wrap(model)


def default_method(view: View) -> str:
    """What is used where no method is named."""
    return "decompx.skipplus" if isinstance(view, ViT) else "vit_cx"


def _explain_batch(
    method: Method, pictures: list[Seen], target: Tensor | None, against: Tensor | None
) -> Iterator[Explanation]:
    view = method.model
    begin = time.perf_counter()
    with memory_for(len(pictures)):
        images = torch.stack([p.pixels.to(view.device) for p in pictures])
        with torch.no_grad():
            logits = view.logits(images)
        check_finite(view, logits)
        classes = view.class_scores(logits).argmax(1).cpu() if target is None else target
        if against is not None:
            _check_rivals(view, classes, against)
        found = method.explain(images, classes, against)
    probabilities = view.probabilities(logits).cpu()
    maps = found.map.float().cpu()
    seconds = (time.perf_counter() - begin) / len(pictures)
    for i, picture in enumerate(pictures):
        index = int(classes[i])
        rival = None if against is None else int(against[i])
        ranked = probabilities[i].argsort(descending=True, stable=True)[:5].tolist()
        yield Explanation(
            maps[i].clone(),
            picture.image,
            view,
            method.info.name,
            {name: getattr(method, name) for name in method.parameters()},
            index,
            view.label(index),
            float(probabilities[i, index]),
            seconds,
            picture.box,
            view.name,
            rival,
            None if rival is None else view.label(rival),
            [(k, view.label(k), float(probabilities[i, k])) for k in ranked],
            {name: float(values[i]) for name, values in found.extras.items()},
            picture.path,
            method.info.signed,
            pixels=picture.pixels.cpu().clone() if picture.from_tensor else None,
            pixels_hash=tensor_hash(picture.pixels) if picture.from_tensor else None,
        )


def _check_rivals(view: View, target: Tensor, against: Tensor) -> None:
    same = target[target == against]
    if len(same):
        raise VitrailError(f"target and against are both {view.label(int(same[0]))}: nothing is left to explain.")


def check_finite(view: View, logits: Tensor) -> None:
    if logits.isfinite().all():
        return
    broken = [name for name, weight in view.module.named_parameters() if not weight.isfinite().all()]
    if broken:
        reason = f"its weights are broken ({', '.join(broken[:3])}{', …' if len(broken) > 3 else ''})"
    elif view.dtype in (torch.float16, torch.bfloat16):
        reason = f"{view.dtype} is too narrow for it (try dtype=float32)"
    else:
        reason = "its values grow beyond what numbers can hold"
    raise VitrailError(f"the logits of {view.name} are NaN or infinite: {reason}.")
