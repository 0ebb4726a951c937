"""YOLOS of Hugging Face: a plain Vision Transformer whose detection tokens each say a class and a box.

The detection tokens stand behind the class token here, before the patches: attention does not know an order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.geometry import Box
from vitrail.models import huggingface
from vitrail.models.clone import evaluation_clone
from vitrail.models.translation import (
    activation,
    check_dropout,
    linear,
    needed_norm,
    norm,
    patch_convolution,
    prefix_tokens,
)
from vitrail.models.view import as_integer
from vitrail.models.vit import ViT

NO_OBJECT = "no object"
_FIRST = 1  # the first detection token, after the class token


class Detection(NamedTuple):
    """What a detection token says: a class, its probability, and a box (x0, y0, x1, y1) in pixels of the image."""

    query: int
    target: int
    label: str
    probability: float
    box: Box


@dataclass(eq=False, repr=False)
class Detector(ViT):
    """A view of a detector. Its last class is "no object".

    Its logits are those of one detection token: of the surest one in the images that it is shown, unless the view is
    that of a box.
    """

    @property
    def num_queries(self) -> int:
        """The number of detection tokens."""
        return self.num_prefix - _FIRST

    def candidates(self, logits: Tensor) -> Tensor:
        return self.class_scores(logits)[:, :-1]

    def predicted(self, logits: Tensor) -> Tensor:
        if self.groups:
            logits = torch.cat([logits[:, :-1], torch.full_like(logits[:, -1:], -torch.inf)], dim=1)
        return super().predicted(logits)

    def boxes(self, image: Image.Image | Tensor, threshold: float = 0.0) -> list[Detection]:
        """What each detection token says of an upright RGB image, or of a model input (3, H, W), the surest first.

        ``threshold``: the least probability of the class. The boxes of a model input are in its pixels.
        """
        pixels = image if isinstance(image, Tensor) else self.preprocess(image)
        left, top, right, bottom = self._seen(image)
        with torch.no_grad():
            out = evaluation_clone(self.module)(self.check_images(pixels[None]))
        centres, edges = out.pred_boxes[0].float().cpu().split(2, dim=1)
        scale, corner = torch.tensor([right - left, bottom - top] * 2), torch.tensor([left, top] * 2)
        corners = torch.cat([centres - edges / 2, centres + edges / 2], dim=1) * scale + corner
        highest, classes = self.probabilities(out.logits[0])[:, :-1].max(1)
        detections = [
            Detection(query, target, self.label(target), probability, (x0, y0, x1, y1))
            for query, (target, probability, (x0, y0, x1, y1)) in enumerate(
                zip(classes.tolist(), highest.tolist(), corners.tolist(), strict=True)
            )
        ]
        kept = [detection for detection in detections if detection.probability >= threshold]
        return sorted(kept, key=lambda detection: -detection.probability)

    def _seen(self, image: Image.Image | Tensor) -> Box:
        """The part of an image that boxes are relative to: the input with what patches drop."""
        (rows, columns), (height, width) = self.size, self.preprocessing.library_size
        if isinstance(image, Tensor):
            return 0.0, 0.0, float(width), float(height)
        left, top, right, bottom = self.preprocessing.box(image.size)
        return left, top, left + (right - left) * width / columns, top + (bottom - top) * height / rows

    def surest(self, pixels: Tensor, target: int | None = None) -> int:
        """The detection token that is the surest of a class, or of any, in a model input (3, H, W)."""
        with torch.no_grad():
            logits = evaluation_clone(self.module)(self.check_images(pixels[None])).logits[0]
        probabilities = self.probabilities(logits)
        return int((probabilities[:, :-1].amax(1) if target is None else probabilities[:, target]).argmax())

    def of_box(self, query: int) -> Detector:
        """The view of the class of one box."""
        number = as_integer(query)
        if number is None:
            raise VitrailError(f"a box is named by its number, as boxes(image) lists them, but got {query!r}.")
        if not 0 <= number < self.num_queries:
            raise VitrailError(f"there is no box {query} in {self.name}: expected 0…{self.num_queries - 1}.")
        asked = replace(self, describe=partial(_reading, self.describe, _FIRST + number))
        return asked.asking({"kind": "box", "query": number}, self.labels)


def _reading(describe: Any, token: int) -> parts.Architecture:
    architecture: parts.Architecture = describe()
    return replace(architecture, head=replace(architecture.head, token=token, choices=1))


def is_detector(module: Any) -> bool:
    """Whether it is a detector that can be seen into."""
    return huggingface.is_huggingface(module) and type(module).__name__ == huggingface.DETECTOR


def describe(module: Any, size: tuple[int, int], head: None = None, pool: None = None) -> parts.Architecture:
    """The canonical form of a YOLOS whose input is ``size`` (H, W)."""
    if head is not None:
        raise VitrailError(f"{type(module).__name__} has its own heads: leave head= and pool= out.")
    network = module.vit
    embedding = _embedding(network.embeddings, size)
    positions = _later_positions(network.encoder, size)
    blocks = tuple(_block(layer, constant) for layer, constant in zip(network.encoder.layer, positions, strict=True))
    *hidden, last = (linear(layer) for layer in module.class_labels_classifier.layers)
    end = parts.Head(
        norm(network.layernorm),
        "token",
        (last,),
        dense=tuple(parts.Dense(layer, "relu") for layer in hidden),
        token=_FIRST,
        choices=embedding.prefix.shape[0] - _FIRST,
    )
    return parts.Architecture(embedding, blocks, end)


def logits(module: Any, images: Tensor, head: None, pool: None) -> Tensor:
    """The network's own logits of its surest detection."""
    every: Tensor = module(images).logits
    surest = every.softmax(2)[..., :-1].amax(2).argmax(1)
    return every[torch.arange(len(images), device=every.device), surest]


native_size = huggingface.native_size


def takes_other_sizes(module: Any) -> bool:
    """It interpolates its positions by itself."""
    return True


adapts_to_input = takes_other_sizes


def _embedding(source: Any, size: tuple[int, int]) -> parts.Embedding:
    convolution = patch_convolution(source.patch_embeddings.projection)
    check_dropout(source, "dropout")
    prefix = prefix_tokens(source.cls_token, source.detection_tokens)
    with torch.no_grad():
        table = source.interpolation(source.position_embeddings, size)
    return parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=prefix,
        positions=_reordered(table[0].detach(), source.detection_tokens.shape[1]),
    )


def _later_positions(encoder: Any, size: tuple[int, int]) -> list[Tensor | None]:
    """What is added to the stream after each block: positions again, after all but the last, or nothing."""
    count = len(encoder.layer)
    if encoder.interpolation is None:
        return [None] * count
    with torch.no_grad():
        tables = encoder.interpolation(size).detach()
    return [*(_reordered(table[0], encoder.config.num_detection_tokens) for table in tables), None]


def _reordered(table: Tensor, detections: int) -> Tensor:
    """(n, d): class token, patches, detection tokens → class token, detection tokens, patches."""
    return torch.cat([table[:1], table[-detections:], table[1:-detections]])


def _block(layer: Any, positions: Tensor | None) -> parts.Block:
    attention, mixing = layer.attention.attention, layer.attention.output
    check_dropout(mixing, "dropout")
    check_dropout(layer.output, "dropout")
    return parts.Block(
        norm1=needed_norm(layer.layernorm_before),
        attention=parts.Attention(
            heads=attention.num_attention_heads,
            q=linear(attention.query),
            k=linear(attention.key),
            v=linear(attention.value),
            proj=linear(mixing.dense),
            scale=float(attention.scaling),
        ),
        norm2=needed_norm(layer.layernorm_after),
        mlp=parts.Mlp(
            linear(layer.intermediate.dense),
            linear(layer.output.dense),
            activation(layer.intermediate.intermediate_act_fn),
        ),
        positions=positions,
    )
