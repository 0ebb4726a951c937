"""Metrics in people's own loops: ``measure`` for tensors, ``Running`` with update and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.engine.modes import memory_for, own_modes
from vitrail.engine.scoring import together
from vitrail.errors import VitrailError
from vitrail.explaining import as_view
from vitrail.methods.base import Method, Targets, pick, predicted
from vitrail.metrics.annotations import clipped, painted
from vitrail.metrics.base import (
    Box,
    Case,
    MapMetric,
    MethodMetric,
    Metric,
    Scored,
    asked_all,
    build_metric,
)
from vitrail.metrics.calls import split_call
from vitrail.models.view import View, at_least


def measure(
    metric: str | Metric,
    model: View | nn.Module | str,
    images: Tensor,
    maps: Tensor,
    target: Targets = None,
    *,
    label: Targets = None,
    masks: Tensor | None = None,
    boxes: Sequence[Sequence[Box]] | None = None,
    others: Tensor | None = None,
    ignore: Tensor | None = None,
    method: Method | None = None,
    **params: Any,
) -> list[Scored]:
    """Measures maps (B, h, w) of normalised images (B, 3, H, W), one result per image.

    Args:
        metric: a name of ``list_metrics`` or a metric; ``params`` are its parameters.
        model: what was explained.
        images: what the model saw.
        maps: what is measured, on patches or at the size of the input.
        target: the explained class, one or one per image; None = the predicted one.
        label: the true class, where the metric wants it.
        masks: (B, H, W) bool at the size of the input: the objects of the explained class.
        boxes: per image, instead of masks, their boxes (x0, y0, x1, y1) in pixels of the input, outside of which they
            are cut.
        others: (B, H, W) bool: objects of other classes.
        ignore: (B, H, W) bool: pixels of unknown class.
        method: the method that made the maps, for metrics that explain again.
    """
    chosen = chosen_metric(metric, params)
    view = as_view(model)
    with own_modes(view.device), memory_for(1):
        cases = _cases(view, images, maps, target, label, masks, boxes, others, ignore)
        if chosen.info.needs == "completeness" and method is not None:
            found = method.explain(images, [case.target for case in cases]).extras
            for i, case in enumerate(cases):
                case.extras = {name: float(values[i]) for name, values in found.items()}
        lacking = [case.lacks(chosen.info.needs) for case in cases]
        if all(lacking):
            raise VitrailError(f"{chosen.info.name} needs {lacking[0]}, which was not given.")
        if isinstance(chosen, MethodMetric):
            if not isinstance(method, Method):
                raise VitrailError(
                    f"{chosen.info.name} explains again: give it the method= (an object) that made the maps."
                )
            if method.model is not view:
                raise VitrailError(f"the method {method.info.name} explains another model than the one given.")
            return chosen.measure(method, cases)
        assert isinstance(chosen, MapMetric)
        return [scored[0] for scored in together([asked_all([chosen], case) for case in cases])]


def measure_alone(
    metric: str, view: View, pixels: Tensor, found: Tensor, target: int, extras: Mapping[str, float]
) -> Scored:
    """Measures one map (h, w) of one image (3, H, W) by what is known without annotations or explaining again."""
    chosen = chosen_metric(metric, {})
    if not isinstance(chosen, MapMetric):
        raise VitrailError(
            f"{chosen.info.name} explains again, which score() does not: use vitrail.metrics.measure(…, method=) or "
            "vitrail.evaluate."
        )
    with own_modes(view.device), memory_for(1):
        (case,) = _cases(view, pixels, found, target)
        case.extras = dict(extras)
        lacking = case.lacks(chosen.info.needs)
        if lacking:
            raise VitrailError(
                f"{chosen.info.name} needs {lacking}, which this explanation does not have: use "
                "vitrail.metrics.measure or vitrail.evaluate where it is known."
            )
        return together([asked_all([chosen], case)])[0][0]


def chosen_metric(metric: str | Metric, params: dict[str, Any]) -> Metric:
    """A metric from its name and parameters, or as it is."""
    if isinstance(metric, Metric):
        if params:
            raise VitrailError(f"{metric.info.name} is built already: its parameters cannot be given again.")
        return metric
    name, own = split_call(metric)
    twice = own.keys() & params.keys()
    if twice:
        raise VitrailError(f"{', '.join(sorted(twice))} is given twice, in {metric!r} and beside it.")
    return build_metric(name, **own, **params)


def _check_mask(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise VitrailError(f"{name} must be a tensor, but got {type(given).__name__}: use torch.as_tensor.")
    if given.is_floating_point() or bool(((given != 0) & (given != 1)).any()):
        raise VitrailError(f"{name} must be true or false for each pixel, but got {given.dtype} values: cut it first.")


def _cases(
    view: View,
    images: Tensor,
    maps: Tensor,
    target: Targets,
    label: Targets = None,
    masks: Tensor | None = None,
    boxes: Sequence[Sequence[Box]] | None = None,
    others: Tensor | None = None,
    ignore: Tensor | None = None,
) -> list[Case]:
    for name, tensor in (("images", images), ("maps", maps)):
        if not isinstance(tensor, Tensor):
            raise VitrailError(f"{name} must be a tensor, but got {type(tensor).__name__}: use torch.as_tensor.")
    with at_least(torch.float32):  # as methods see them
        pixels = view.check_images(images[None] if images.ndim == 3 else images)
    maps = (maps[None] if maps.ndim == 2 else maps).to(pixels.device)
    count = len(pixels)
    for name, given in (("maps", maps), ("masks", masks), ("boxes", boxes), ("others", others), ("ignore", ignore)):
        if given is not None and len(given) != count:
            raise VitrailError(f"{count} images were given with {len(given)} {name}: one for each is needed.")
        if name in ("masks", "others", "ignore") and given is not None:
            _check_mask(name, given)
    with memory_for(count):
        top = predicted(view, pixels)
    targets = top if target is None else pick(view, target, count, "target")
    labels = None if label is None else pick(view, label, count, "label")
    cases = []
    for i in range(count):
        region = masks[i] if masks is not None else painted(boxes[i], view.size) if boxes is not None else None
        cases.append(
            Case(
                view,
                pixels[i : i + 1],
                maps[i],
                int(targets[i]),
                int(top[i]),
                None if labels is None else int(labels[i]),
                None if region is None else region.to(pixels.device, torch.bool),
                masks is not None,
                None if boxes is None else clipped(boxes[i], view.size),
                None if others is None else others[i].to(pixels.device, torch.bool),
                None if ignore is None else ignore[i].to(pixels.device, torch.bool),
            )
        )
    return cases
