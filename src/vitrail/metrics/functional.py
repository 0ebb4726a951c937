"""Metrics as functions of tensors."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitrail.methods.base import Targets
from vitrail.metrics.base import Metric
from vitrail.models.view import View


class Functional(Protocol):
    """A metric as a function: the value of each map, (B,).

    It takes what ``vitrail.metrics.measure`` takes after the metric's name, its parameters included.
    """

    def __call__(
        self,
        model: View | nn.Module | str,
        images: Tensor,
        maps: Tensor,
        target: Targets = None,
        **known: Any,
    ) -> Tensor: ...


def functional(metric: type[Metric]) -> Functional:
    """The function of a metric."""

    def function(
        model: View | nn.Module | str, images: Tensor, maps: Tensor, target: Targets = None, **known: Any
    ) -> Tensor:
        from vitrail.metrics.measuring import measure

        found = measure(metric.info.name, model, images, maps, target, **known)
        return torch.tensor([one.value for one in found], dtype=torch.float64, device="cpu")

    function.__name__ = function.__qualname__ = metric.info.name
    function.__doc__ = f"{metric.info.summary}\n\nFloat64 (B,); see ``vitrail.metrics.functional.Functional``."
    return function
