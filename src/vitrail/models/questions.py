"""Views of the same model that answer another question than its head: groups of classes, similarity, regions, boxes,
any function.

A question is made of values that JSON can hold, so that a stored explanation can ask it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.memory import out_of_memory
from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture, Dense, Head, Linear, Norm, converted
from vitrail.errors import VitrailError
from vitrail.models.detection import Detector
from vitrail.models.view import View
from vitrail.models.vit import ViT

Measure = Literal["cosine", "dot"]
# The tokens (B, n, d) after the final norm, the pooled vectors (B, D), the logits (B, C) → (B,); the first two are None
# for models that cannot be seen into.
Answer = Callable[[Any, Any, Tensor], Tensor]


def ask(view: View, question: Mapping[str, Any]) -> View:
    """The view that a stored question was asked of."""
    match question:
        case {"kind": "groups", "groups": groups}:
            return grouped(view, groups)
        case {"kind": "similarity", "embeddings": embeddings, "measure": measure}:
            return compared(view, embeddings, measure)
        case {"kind": "region", "weights": weights}:
            return within(view, weights)
        case {"kind": "box", "query": query}:
            return of_box(view, query)
        case {"kind": "function", "name": name}:
            raise VitrailError(f"the function {name!r} was explained, which is not stored: give its view as model=.")
    raise VitrailError(f"unknown question {question.get('kind')!r}: the file is of another version of vitrail.")


def grouped(view: View, groups: Mapping[str, Sequence[int]]) -> View:
    """A view whose first classes are groups of classes, followed by the classes that are in no group."""
    if view.is_embedding:
        raise view.without_classes()
    members = tuple(tuple(indices) for indices in groups.values())
    taken = {index for indices in members for index in indices}
    labels = (*groups, *(view.label(index) for index in range(view.num_classes) if index not in taken))
    question = {"kind": "groups", "groups": {name: list(indices) for name, indices in groups.items()}}
    return view.asking(question, labels, groups=members)


def embedding(view: View, measure: Measure, token: int | None = None) -> ViT:
    """A view whose outputs are the channels of what the head reads, or of one token; of length 1 for the cosine."""
    head = partial(_embedding_head, measure=measure, token=token, is_embedding=view.is_embedding)
    return _with_head(_comparable(view), head, {"kind": "embedding", "measure": measure, "token": token})


@torch.inference_mode()
def embed(view: View, measure: Measure, images: Tensor, token: int | None = None) -> Tensor:
    """(B, D): the embeddings of preprocessed images, in at least single precision."""
    asked = embedding(view, measure, token)
    walk = Walk(converted(asked.architecture(), asked.precision))
    return walk.encode(walk.embed(asked.check_images(images, asked.precision)))


def compared(view: View, embeddings: Mapping[str, Sequence[float]], measure: Measure) -> ViT:
    """A view whose outputs are the similarities to embeddings, one for each name."""
    weights = torch.tensor([list(values) for values in embeddings.values()], dtype=torch.float64)
    question = {"kind": "similarity", "embeddings": dict(embeddings), "measure": measure}
    head = partial(_comparing_head, weights=weights, measure=measure, is_embedding=view.is_embedding)
    return _with_head(_comparable(view), head, question, [f"similarity to {name}" for name in embeddings])


def within(view: View, weights: Sequence[float]) -> ViT:
    """A view whose logits are those of a region, a mean over its outputs by their ``weights``."""
    view, grid = segmenting(view)
    if len(weights) != math.prod(grid):
        raise VitrailError(f"the region is one of {len(weights)} outputs, but {view.name} has {math.prod(grid)}.")
    head = partial(_region_head, weights=torch.tensor(list(weights), dtype=torch.float64))
    asked = replace(view, describe=partial(_described, view.describe, head))
    return asked.asking({"kind": "region", "weights": list(weights)}, view.labels)


def in_mask(view: View, mask: Tensor) -> ViT:
    """A view whose logits are those of the pixels of a ``mask`` (H, W) of the model input."""
    return within(view, patch_weights(mask, segmenting(view)[1]).tolist())


def segmenting(view: View) -> tuple[ViT, tuple[int, int]]:
    """The view and the (rows, columns) of its outputs, or an error if it has no output per patch."""
    head = view.architecture().head if isinstance(view, ViT) else None
    if not isinstance(view, ViT) or head is None or head.pool not in ("patches", "queries"):
        raise VitrailError(
            f"{view.name} has no output per patch, so that there are no regions to ask about: wrap a backbone with its "
            'segmentation head, vitrail.wrap(backbone, head=nn.Linear(…), pool="patches"), or load an EoMT.'
        )
    return view, view.grid if head.queries is None else head.queries.cells


def of_box(view: View, query: int) -> Detector:
    """A view of the class of a box."""
    return as_detector(view).of_box(query)


def as_detector(view: View) -> Detector:
    """The view, or an error if it is not one of a detector."""
    if not isinstance(view, Detector):
        raise VitrailError(f"{view.name} detects no boxes: load a YOLOS, YolosForObjectDetection of Hugging Face.")
    return view


def patch_weights(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The weights (N,) of the patches in a mean over pixels, ``mask`` (H, W): the adjoint of bilinear interpolation.

    The mean of an interpolated map over the pixels is the sum of the map's values, each times its weight.
    """
    rows, columns = (_interpolation(edge, cells) for edge, cells in zip(mask.shape, grid, strict=True))
    pixels = mask.cpu().double()
    return (rows.T @ pixels @ columns / pixels.sum()).flatten()


def _interpolation(pixels: int, cells: int) -> Tensor:
    """(pixels, cells): how linear interpolation makes the values of pixels from those of cells."""
    basis = torch.eye(cells, dtype=torch.float64, device="cpu")[None]
    return F.interpolate(basis, size=pixels, mode="linear", align_corners=False)[0].T


def answering(view: View, answer: Answer, name: str) -> View:
    """A view whose output is any function of what the network computes."""
    question = {"kind": "function", "name": name}
    checked = partial(_checked, answer, name)
    if not isinstance(view, ViT):
        return view.asking(question, (name,), output="score", answer=checked)
    return _with_head(view, partial(replace, answer=checked), question, (name,))


def _comparable(view: View) -> ViT:
    """The view, or an error if its images have no embedding."""
    if isinstance(view, Detector):  # nothing is trained by what its patches are after the last block
        raise VitrailError(
            f"{view.name} is a detector, which has an embedding for each box and none for the image: ask about a box, "
            "or compare images with a backbone or a classifier."
        )
    if not isinstance(view, ViT):
        raise VitrailError(f"{view.name} has no embedding that can be compared: expected a plain Vision Transformer.")
    return view


def _with_head(
    view: ViT, change: Callable[[Head], Head], question: dict[str, Any], labels: Sequence[str] | None = None
) -> ViT:
    return view.asking(question, labels, output="score", describe=partial(_described, view.describe, change))


def _described(describe: Callable[[], Architecture], change: Callable[[Head], Head]) -> Architecture:
    parts = describe()
    return replace(parts, head=change(parts.head))


def _embedding_head(head: Head, measure: Measure, token: int | None, is_embedding: bool) -> Head:
    head = _pooled(head, is_embedding)
    if token is not None:
        if head.pool not in ("token", "mean"):
            raise VitrailError(f"its head pools by {head.pool!r}, so that a patch has no embedding: leave patch= out.")
        head = replace(head, pool="token", token=token)
    like = head.linears[0].weight
    return _comparing_head(head, torch.eye(like.shape[1], device=like.device, dtype=like.dtype), measure, False)


def _pooled(head: Head, is_embedding: bool) -> Head:
    """The head of the embedding of an image: what the head reads or, where its outputs are one, what it says.

    A head that reads every patch becomes one that reads their mean.
    """
    if is_embedding:
        (projection,) = head.linears
        outputs = torch.eye(projection.weight.shape[0], device=projection.weight.device, dtype=projection.weight.dtype)
        return replace(head, dense=(*head.dense, Dense(projection)), linears=(Linear(outputs),))
    if head.pool not in ("patches", "queries"):
        return head
    first = head.dense[0].linear if head.dense else head.linears[0]
    return replace(head, pool="mean", dense=(), linears=(first,), queries=None)


def _comparing_head(head: Head, weights: Tensor, measure: Measure, is_embedding: bool) -> Head:
    if head.pool == "pair":
        raise VitrailError(
            "a distilled model reads two tokens with two heads and has no single embedding: use a model with one head."
        )
    head = _pooled(head, is_embedding)
    like = head.linears[0].weight
    # a copy: embeddings of images are no weights of the model, which may be drawn anew, and are not rounded to half
    weights = weights.to(like.device, torch.promote_types(like.dtype, torch.float32), copy=True)
    width = weights.shape[1]
    unit = Norm(width, 0.0, weights.new_full((width,), width**-0.5), rms=True)  # x / |x|
    return replace(head, linears=(Linear(weights, None),), unit=unit if measure == "cosine" else None)


def _region_head(head: Head, weights: Tensor) -> Head:
    return replace(head, weights=weights.to(head.linears[0].weight))


def _checked(answer: Answer, name: str, tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
    try:
        values = answer(tokens, pooled, logits)
    except Exception as error:  # it is any function
        if out_of_memory(error):  # which the scheduler answers with fewer images
            raise
        blind = "" if tokens is not None else ", of a model that gives it no tokens and no pooled vectors"
        reason = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
        shown = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        raise VitrailError(f"{name} failed{blind} ({shown}).") from error
    if not isinstance(values, Tensor) or tuple(values.shape) != (len(logits),) or not values.is_floating_point():
        shape = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise VitrailError(
            f"{name} must return a number for each image, floats of shape ({len(logits)},), not {shape}."
        )
    if torch.is_grad_enabled() and logits.requires_grad and not values.requires_grad:
        raise VitrailError(
            f"{name} cannot be differentiated: compute it with torch from its arguments, or use a method "
            "that only asks for its values, such as rise."
        )
    return values
