"""Annotations at the model input: objects after the resize and crop of their image, classes matched by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.base import DataSet, Example, Object
from vitrail.errors import VitrailError
from vitrail.geometry import Box, fill_boxes, tight_box
from vitrail.models.view import View


def annotated(
    view: View,
    example: Example,
    target: int,
    label: int | None,
    remap: Callable[[int], int],
    shown: Sequence[Object] | None = None,
) -> dict[str, Any]:
    """The objects of an image as a case takes them: region, boxes, others, ignore at the model input.

    The region is that of the objects of the explained class; where there are none, of the image's own class, which is
    what people drew: a wrong prediction is explained by what is there. ``shown``: that of these objects instead.
    """
    if shown is None:
        labelled = [(None if o.label is None else remap(o.label), o) for o in example.objects]
        shown = [o for index, o in labelled if index in (target, None)]
        shown = shown or [o for index, o in labelled if index == label]
    drawn = [box for box in map(drawn_box, shown) if box is not None]
    ignore = example.ignore
    return {
        "region": seen_region(view, example, shown),
        "from_masks": bool(shown) and all(o.mask is not None for o in shown),
        "boxes": view.preprocessing.boxes(drawn, example.image.size) if shown else None,
        "others": seen_region(view, example, [o for o in example.objects if o not in shown]),
        "ignore": None if ignore is None else view.preprocessing.mask(ignore).to(view.device),
    }


def own_class(view: View, example: Example, remap: Callable[[int], int]) -> int | None:
    """The image's class as the model numbers it; where it goes by area, by the area that the model sees."""
    label = example.label
    if example.by_area:
        labels = sorted({item.label for item in example.objects if item.label is not None})
        regions = {
            index: seen_region(view, example, [o for o in example.objects if o.label == index]) for index in labels
        }
        areas = {index: int(region.sum()) for index, region in regions.items() if region is not None and region.any()}
        label = max(areas, key=areas.__getitem__, default=label)  # the first of equals
    return None if label is None else remap(label)


def drawn_box(item: Object) -> Box | None:
    """Its box, or that around its mask."""
    return item.box if item.box is not None or item.mask is None else tight_box(item.mask)


def seen_region(view: View, example: Example, objects: Sequence[Object]) -> Tensor | None:
    """(H, W) bool: the pixels of the model input that show any of the objects; None without objects."""
    if not objects:
        return None
    region = torch.zeros(view.size, dtype=torch.bool)
    for item in objects:
        if item.mask is not None:
            region |= view.preprocessing.mask(item.mask)
        elif item.box is not None:
            region |= fill_boxes(view.preprocessing.boxes([item.box], example.image.size), view.size)
    return region.to(view.device)


def _matched(view: View, names: Sequence[str]) -> tuple[dict[int, int], VitrailError | None]:
    """The model's classes of these names by position, and the error for the first name that it does not have."""
    indices: dict[int, int] = {}
    first = None
    for label, name in enumerate(names):
        if not name or (first and not view.classes_named(name)):  # an error searches for similar names, which costs
            continue
        try:
            indices[label] = view.class_index(name)
        except VitrailError as error:
            first = first or error
    return indices, first


def class_map(view: View, data: DataSet) -> Callable[[int], int]:
    """From the data set's classes to the model's: by name where every name matches a single class, else by number.

    By number only where the numbers are the user's own or both have as many classes: class 3 of ten is not class 3 of
    a thousand. Numbers whose names belong to other classes are an error.
    """
    names = data.labels
    if names is None or list(names) == list(view.labels or ()):
        return lambda label: label
    indices, error = _matched(view, names)
    moved = next((label for label, index in indices.items() if label != index), None)
    if data.numbered and moved is None:
        return lambda label: label
    if error and data.numbered and moved is not None:
        raise VitrailError(
            f"{data.name} has the number {moved} for {names[moved]!r}, which is class {indices[moved]} of {view.name}: "
            "correct the numbers, or remove the names."
        )
    if error and len(names) == view.num_classes:
        return lambda label: label
    if error:
        raise VitrailError(
            f"the classes of {data.name} ({len(names)}) and {view.name} ({view.num_classes}) differ, and their names "
            f"do not match: {error} Give a model with the data set's classes, or its labels=."
        )

    def mapped(label: int) -> int:
        if label not in indices:
            raise VitrailError(f"{data.name} has a label {label}, but only the classes 0…{len(names) - 1}.")
        return indices[label]

    return mapped


def posed_class_map(model: View, view: View, data: DataSet) -> Callable[[int], int]:
    """The same for a view that was made for a question about a model: its groups have their members' labels.

    The classes of a data set are none of a score's.
    """
    if view.output == "score":
        return no_class
    remap = class_map(model, data)
    if not view.groups:
        return remap
    groups = [*view.groups, *((index,) for index in view.ungrouped)]
    places = {member: place for place, members in enumerate(groups) for member in members}
    return lambda label: places[remap(label)]


def no_class(label: int) -> int:
    """A number that no class of a model has, for a class that the model does not know."""
    return -1 - label


def known_class(label: int | None) -> int | None:
    """The same, unless the model does not know it."""
    return None if label is None or label < 0 else label
