"""Metrics with the interface of torchmetrics, for training and evaluation loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric as TorchMetric
from torchmetrics.utilities.data import dim_zero_cat

from vitrail.metrics.base import Metric
from vitrail.metrics.measuring import chosen_metric, measure
from vitrail.metrics.statistics import combined, interval
from vitrail.models.loading import as_view
from vitrail.models.view import View
from vitrail.targets import ClassSpec


class Running(TorchMetric):
    """A metric with the interface of torchmetrics: ``update`` with each batch, ``compute`` for mean and interval.

    ``update`` takes the arguments of ``measure`` after the model. The values are synchronised across processes.
    """

    full_state_update = False
    values: list[Tensor]
    parts: list[Tensor]

    def __init__(self, metric: str | Metric, model: View | nn.Module | str, **params: Any) -> None:
        super().__init__()
        self.metric, self.view = chosen_metric(metric, params), as_view(model)
        self.add_state("values", default=[], dist_reduce_fx="cat")
        self.add_state("parts", default=[], dist_reduce_fx="cat")

    def update(self, images: Tensor, maps: Tensor, target: ClassSpec = None, **known: Any) -> None:
        """Measures a batch."""
        scored = measure(self.metric, self.view, images, maps, target, **known)
        self.values.append(torch.tensor([result.value for result in scored], dtype=torch.float64))
        parts = [result.parts for result in scored if result.parts is not None]
        if parts:
            self.parts.append(torch.tensor(parts, dtype=torch.float64))

    def compute(self) -> dict[str, float]:
        """The mean over the images that count, its 95 % interval, and their number."""
        values = dim_zero_cat(self.values).cpu() if len(self.values) else torch.empty(0)
        values = values[~values.isnan()]
        if not len(values):
            return {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "n": 0}
        numbers, combine = values.numpy(), None
        if len(self.parts):
            numbers, combine = dim_zero_cat(self.parts).cpu().numpy(), self.metric.combine
        low, high = interval(numbers, combine)
        return {"mean": combined(numbers, combine), "low": low, "high": high, "n": len(values)}
