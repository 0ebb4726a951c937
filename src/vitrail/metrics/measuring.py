"""Measuring maps that are already there: ``measure`` for tensors, and what an ``Explanation`` measures of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.calls import split_call
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Batch, resolved
from vitrail.engine.scheduler import Scheduler
from vitrail.errors import VitrailError
from vitrail.geometry import Box, check_box, clip_box, fill_boxes
from vitrail.methods.base import Method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Metric, Scored, ask_if_applicable, build_metric
from vitrail.metrics.trust import Trust, ask_trust
from vitrail.models.loading import as_view
from vitrail.models.view import View
from vitrail.targets import ClassSpec, Target, class_indices


def measure(
    metric: str | Metric,
    model: View | nn.Module | str,
    images: Tensor,
    maps: Tensor,
    target: ClassSpec = None,
    *,
    label: ClassSpec = None,
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
    scheduler = Scheduler()
    with own_modes():
        cases = _cases(view, scheduler, images, maps, target, label, masks, boxes, others, ignore)
        if chosen.info.needs == "completeness" and method is not None:
            extras = method.explain(images, [case.target for case in cases]).extras
            for i, case in enumerate(cases):
                case.extras = {name: float(values[i]) for name, values in extras.items()}
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
            return scheduler.run([chosen.ask(method, cases)])[0]
        assert isinstance(chosen, MapMetric)
        return scheduler.run([ask_if_applicable(chosen, case) for case in cases])


def measure_alone(
    metric: str, view: View, pixels: Tensor, map_: Tensor, target: int, extras: Mapping[str, float]
) -> Scored:
    """Measures one map (h, w) of one image (3, H, W) by what is known without annotations or explaining again."""
    chosen = chosen_metric(metric, {})
    if not isinstance(chosen, MapMetric):
        raise VitrailError(
            f"{chosen.info.name} explains again, which score() does not: use vitrail.metrics.measure(…, method=) or "
            "vitrail.evaluate."
        )
    scheduler = Scheduler()
    with own_modes():
        (case,) = _cases(view, scheduler, pixels, map_, target)
        case.extras = dict(extras)
        lacking = case.lacks(chosen.info.needs)
        if lacking:
            raise VitrailError(
                f"{chosen.info.name} needs {lacking}, which this explanation does not have: use "
                "vitrail.metrics.measure or vitrail.evaluate where it is known."
            )
        return scheduler.run([chosen.ask(case)])[0]


def measure_trust(
    view: View, pixels: Tensor, map_: Tensor, target: int, against: int | None, patch_share: float | None
) -> Trust:
    """What the model says about one map (h, w) of one image (3, H, W)."""
    scheduler = Scheduler()
    with own_modes():
        (case,) = _cases(view, scheduler, pixels, map_, target)
        return scheduler.run([ask_trust(case, against, patch_share)])[0]


def chosen_metric(metric: str | Metric, params: dict[str, Any]) -> Metric:
    """A metric from its name and parameters, or as it is."""
    if isinstance(metric, Metric):
        if params:
            raise VitrailError(f"{metric.info.name} is built already: its parameters cannot be given again.")
        return metric
    name, called = split_call(metric)
    twice = called.keys() & params.keys()
    if twice:
        raise VitrailError(f"{', '.join(sorted(twice))} is given twice, in {metric!r} and beside it.")
    return build_metric(name, **called, **params)


def _check_mask(name: str, mask: Any) -> None:
    if not isinstance(mask, Tensor):
        raise VitrailError(f"{name} must be a tensor, but got {type(mask).__name__}: use torch.as_tensor.")
    if mask.is_floating_point() or bool(((mask != 0) & (mask != 1)).any()):
        raise VitrailError(
            f"{name} must be true or false for each pixel, but got {mask.dtype} values: apply a threshold first."
        )


def _cases(
    view: View,
    scheduler: Scheduler,
    images: Tensor,
    maps: Tensor,
    target: ClassSpec,
    label: ClassSpec = None,
    masks: Tensor | None = None,
    boxes: Sequence[Sequence[Box]] | None = None,
    others: Tensor | None = None,
    ignore: Tensor | None = None,
) -> list[Case]:
    for name, tensor in (("images", images), ("maps", maps)):
        if not isinstance(tensor, Tensor):
            raise VitrailError(f"{name} must be a tensor, but got {type(tensor).__name__}: use torch.as_tensor.")
    pixels = view.check_images(images[None] if images.ndim == 3 else images, view.precision)
    maps = (maps[None] if maps.ndim == 2 else maps).to(pixels.device)
    count, device = len(pixels), pixels.device
    for name, values in (("maps", maps), ("masks", masks), ("boxes", boxes), ("others", others), ("ignore", ignore)):
        if values is not None and len(values) != count:
            raise VitrailError(f"{count} images were given with {len(values)} {name}: one for each is needed.")
        if name in ("masks", "others", "ignore") and values is not None:
            _check_mask(name, values)
    predicted = scheduler.run([resolved(Batch(view, pixels), Target())])[0].index
    assert predicted is not None
    targets = predicted if target is None else class_indices(view, target, count, "target")
    labels = None if label is None else class_indices(view, label, count, "label")
    cases = []
    for i in range(count):
        region = masks[i] if masks is not None else fill_boxes(boxes[i], view.size) if boxes is not None else None
        cases.append(
            Case(
                view=view,
                pixels=pixels[i : i + 1],
                map=maps[i],
                target=int(targets[i]),
                predicted=int(predicted[i]),
                label=None if labels is None else int(labels[i]),
                region=None if region is None else region.to(device, torch.bool),
                from_masks=masks is not None,
                boxes=None if boxes is None else _inside(boxes[i], view.size),
                others=None if others is None else others[i].to(device, torch.bool),
                ignore=None if ignore is None else ignore[i].to(device, torch.bool),
            )
        )
    return cases


def _inside(boxes: Sequence[Box], size: tuple[int, int]) -> list[Box]:
    """The parts of the boxes inside an input of (H, W); those outside are left out."""
    parts = (clip_box(check_box(box), size[1], size[0]) for box in boxes)
    return [part for part in parts if part is not None]
