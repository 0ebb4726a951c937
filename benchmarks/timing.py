"""What the benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes, the device's work included."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def best(function: Callable[[], object], times: int = 3) -> float:
    """The shortest of several calls, after one to warm up."""
    function()
    return min(seconds(function) for _ in range(times))
