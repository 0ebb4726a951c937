"""Segments of a picture: connected parts to which a segmentation model gives one class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.operations import Blind, Walk
from vitrail.core.queries import class_map
from vitrail.models.questions import segmenting
from vitrail.models.view import View


class Segment(NamedTuple):
    """A class, and the numbers of the cells of the class map that are connected and have it."""

    target: int
    label: str
    cells: list[int]


def predicted_map(view: View, pixels: Tensor) -> Tensor:
    """(rows, columns): the class at each cell of the outputs, of a model input (3, H, W)."""
    view, grid = segmenting(view)
    parts, last = view.architecture(), _Last()
    with torch.no_grad():
        walk = Walk(parts, recorder=last)
        walk.encode(view.embed(pixels[None]))
        depth, head = len(parts.blocks), parts.head
        assert last.x is not None
        if head.pool == "queries":
            scores = class_map(walk, last.x, head, depth)
        else:
            patches = walk.norm(last.x, head.norm, depth)[:, walk.prefix :]
            scores = walk.linear(walk.features(patches, head, depth), head.linears[0], depth)
    return scores[0].argmax(1).unflatten(0, grid).cpu()


def find_segments(view: View, pixels: Tensor) -> list[Segment]:
    """The segments of a model input (3, H, W), the largest first."""
    from scipy import ndimage

    classes = predicted_map(view, pixels).numpy()
    segments = []
    for target in np.unique(classes).tolist():
        numbers, count = ndimage.label(classes == target)
        segments += [
            Segment(target, view.label(target), np.flatnonzero(numbers == number).tolist())
            for number in range(1, count + 1)
        ]
    return sorted(segments, key=lambda segment: -len(segment.cells))


class _Last(Blind):
    """Keeps the stream after the last block."""

    x: Tensor | None = None

    def see(self, name: str, layer: int, x: Tensor) -> Tensor:
        self.x = x if name == "x" else self.x
        return x
