"""Metrics with the interface of torchmetrics, for training and evaluation loops."""

from __future__ import annotations

import copy
import math
import uuid
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchmetrics import Metric as TorchMetric
from torchmetrics.utilities.data import dim_zero_cat

from vitrail.geometry import Box
from vitrail.methods.base import Method
from vitrail.metrics.base import Metric
from vitrail.metrics.measuring import chosen_metric, measure
from vitrail.metrics.statistics import combined, interval
from vitrail.models.loading import as_view
from vitrail.models.view import View
from vitrail.targets import ClassSpec


class Running(TorchMetric):
    """A metric with the interface of torchmetrics: ``update`` with each batch, ``compute`` for mean and interval.

    ``update`` takes the arguments of ``measure`` after the model. The values are synchronised across processes. A
    clone measures the same model, not a copy of it.
    """

    full_state_update = False
    values: list[Tensor]  # of the images that count
    parts: list[Tensor]  # likewise, flat, where the metric has some

    def __init__(self, metric: str | Metric, model: View | nn.Module | str, **params: Any) -> None:
        super().__init__()
        self.metric, self.view = chosen_metric(metric, params), as_view(model)
        self.add_state("values", default=[], dist_reduce_fx="cat")
        self.add_state("parts", default=[], dist_reduce_fx="cat")
        # a MetricCollection updates only one of several metrics whose states were equal after the first batch
        self.add_state("identity", torch.tensor(list(uuid.uuid4().bytes)), dist_reduce_fx="max")

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """Whether larger values are better, for torchmetrics' trackers."""
        return self.metric.higher_is_better

    def update(
        self,
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
    ) -> None:
        """Measures a batch."""
        scored = measure(
            self.metric, self.view, images, maps, target,
            label=label, masks=masks, boxes=boxes, others=others, ignore=ignore, method=method,
        )  # fmt: skip
        counted = [result for result in scored if not math.isnan(result.value)]
        self.values.append(self._state([result.value for result in counted]))
        self.parts.append(self._state([number for result in counted for number in result.parts or ()]))

    def compute(self) -> dict[str, float]:
        """The mean over the images that count, its 95 % interval, and their number."""
        values, parts = (dim_zero_cat(state).cpu() if len(state) else torch.empty(0) for state in self._lists())
        if not len(values):
            return {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "n": 0}
        numbers, combine = values.numpy(), None
        if len(parts):
            numbers, combine = parts.view(len(values), -1).numpy(), self.metric.combine
        low, high = interval(numbers, combine)
        return {"mean": combined(numbers, combine), "low": low, "high": high, "n": len(values)}

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gathers the values of all processes; one that had no images takes part with none."""
        for state in self._lists():
            if isinstance(state, list) and not state:
                state.append(self._state([]))  # torchmetrics would send an empty tensor of another precision
        super().sync(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.view)] = self.view
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def _lists(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.values, self.parts

    def _state(self, numbers: list[float]) -> Tensor:
        """On the device of the metric, where processes exchange it; Apple's has no double precision."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(numbers, dtype=dtype, device=self.device)
