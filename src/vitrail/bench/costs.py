"""The cost of a method in forward passes of its model, which transfers to other machines better than seconds do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.calls import split_call
from vitrail.methods.registry import build_method, get_method
from vitrail.models.view import View

PASSES = 600  # budget per method; a method that needs more runs once
REPEATS = 15
REFERENCE_RUNS = 5  # forward passes before and after each run of the method


@dataclass(frozen=True)
class Cost:
    """What one explanation of one image costs, its prediction included."""

    forwards: float
    images_per_second: float  # on this machine


def measure_cost(call: str, view: View, image: Tensor) -> Cost:
    """The cost of a method on an image (1, 3, H, W): the median ratio to plain forward passes that alternate with it.

    Both are in full precision: not every CPU gains from half.
    Times are those of the process, on one thread, so that other processes on the machine hardly matter.
    """
    name, params = split_call(call)
    if "precision" in get_method(name).parameters():
        params = {"precision": "full", **params}
    method = build_method(name, view, **params)
    repeats = max(1, min(REPEATS, int(PASSES / max(1, sum(method.passes())))))

    def forward() -> None:
        with torch.inference_mode():
            view.module(image)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if repeats > 1:
            method.attribute(image)
            forward()
        ratios, spent = [], []
        for _ in range(repeats):
            passes = [_seconds(forward) for _ in range(REFERENCE_RUNS)]
            spent.append(_seconds(lambda: method.attribute(image)))
            passes += [_seconds(forward) for _ in range(REFERENCE_RUNS)]
            ratios.append(spent[-1] / statistics.median(passes))
    finally:
        torch.set_num_threads(threads)
    return Cost(statistics.median(ratios), 1 / statistics.median(spent))


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
