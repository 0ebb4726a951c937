"""Timing helpers shared by the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of a call, including work queued on the GPU."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def best(function: Callable[[], object], times: int = 3) -> float:
    """The shortest of several calls, after a warm-up call."""
    function()
    return min(seconds(function) for _ in range(times))
