"""The place of an image's annotated object: the region of a segmentation that shows it, or a detector's box of it.

Each image has a place of its own, and with it a view of its own that answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.data.annotations import class_map, drawn_box, known_class, no_class, own_class, seen_region
from vitrail.data.base import DataSet, Example, Object
from vitrail.errors import VitrailError
from vitrail.geometry import box_iou
from vitrail.models.questions import as_detector, in_mask, of_box
from vitrail.models.view import View

Kind = Literal["region", "box"]
KINDS: tuple[Kind, ...] = ("region", "box")
LEAST_OVERLAP = 0.5  # of an annotated box and that of its detection: intersection over union, at least
LEAST_PROBABILITY = 0.5  # of a detection: at least as sure as not

_WITHIN = {"region": "within its mask", "box": "by the box that detects it"}
_ANNOTATIONS = {"region": "masks", "box": "boxes or masks"}


class NoPlaceError(VitrailError):
    """An image has no such place, so that it is left out."""


@dataclass(frozen=True, eq=False)
class ObjectPlace:
    """What is asked about an image: the view of the place, the class, and the objects there."""

    view: View
    target: int | None  # None = what the model says there
    objects: Sequence[Object]


def any_place(view: View, kind: Kind) -> View:
    """The view of some place, or an error if the model has no such places."""
    return in_mask(view, torch.ones(view.size)) if kind == "region" else of_box(view, 0)


def place_of(view: View, kind: Kind, example: Example, pixels: Tensor, remap: Callable[[int], int]) -> ObjectPlace:
    """The place of the objects of an image's own class in the model input (3, H, W).

    A region holds all of them; a box is that of the detection which fits any of them best.
    """
    label = own_class(view, example, remap)
    objects = [item for item in example.objects if item.label is None or remap(item.label) == label]
    target = known_class(label)
    if kind == "region":
        return _region(view, target, example, [item for item in objects if item.mask is not None])
    return _box(view, target, example, objects, pixels)


def _region(view: View, target: int | None, example: Example, objects: Sequence[Object]) -> ObjectPlace:
    region = seen_region(view, example, objects)
    if region is None:
        raise NoPlaceError("no object of the image's class has a mask.")
    if not region.any():
        raise NoPlaceError("the object lies outside the part of the image that the model sees.")
    return ObjectPlace(in_mask(view, region), target, objects)


def _box(view: View, target: int | None, example: Example, objects: Sequence[Object], pixels: Tensor) -> ObjectPlace:
    drawn = [
        (item, seen)
        for item in objects
        if (box := drawn_box(item)) is not None
        for seen in view.preprocessing.boxes([box], example.image.size)
    ]
    if not drawn:
        raise NoPlaceError("no object of the image's class has a box in the part of the image that the model sees.")
    detections = as_detector(view).boxes(pixels, LEAST_PROBABILITY)
    fits = [
        (box_iou(detection.box, seen), detection, item)
        for detection in detections
        if target in (None, detection.target)
        for item, seen in drawn
    ]
    overlap, detection, item = max(fits, key=lambda fit: fit[0], default=(0.0, None, None))
    if detection is None or item is None or overlap <= LEAST_OVERLAP:
        raise NoPlaceError("the model detects nothing that fits an annotated box of the image's class.")
    return ObjectPlace(of_box(view, detection.query), detection.target, [item])


def check_annotated(kind: Kind, data: DataSet, first: Iterable[Example]) -> None:
    """Refuses data without what places are made of."""
    lacking = 0
    for example in first:
        if any((item.mask if kind == "region" else drawn_box(item)) is not None for item in example.objects):
            return
        lacking += 1
    if lacking:
        raise VitrailError(
            f'target="{kind}" explains the annotated object of each image {_WITHIN[kind]}, but none of the first '
            f'{lacking} images of {data.name} has one: use data with {_ANNOTATIONS[kind]}, or target="predicted".'
        )


def place_map(view: View, kind: Kind, data: DataSet) -> Callable[[int], int]:
    """From the data set's classes to the model's; where they differ, a box is that of any class."""
    any_place(view, kind)  # a model without places is refused for that
    try:
        return class_map(view, data)
    except VitrailError:
        if kind == "region":
            raise
        return no_class
