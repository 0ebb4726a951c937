"""Memory is bounded: a run of thousands of images holds what a run of a hundred does."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests import families
from tests.soak.outcome import Outcome, peak_memory

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.data.base import DataSet, Example

SHARE = 1.0
FEW, MANY = 100, 10_000
MIB = 2**20
BOUND = 64 * MIB  # more than a few images; rows and identifiers of many images are about 1 KiB each


class Generated(DataSet):
    """Images that are drawn when they are read."""

    name = "generated"

    def __init__(self, count: int) -> None:
        self._ids = [f"{position}.png" for position in range(count)]

    @property
    def ids(self) -> list[str]:
        return self._ids

    def load(self, position: int) -> Example:
        values = np.random.default_rng(position).integers(0, 256, (256, 320, 3), dtype=np.uint8)
        return Example(self._ids[position], Image.fromarray(values))


def measure(count: int, answers: Any) -> None:
    """In a process of its own: the seconds and the peak of a run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        families.build("hf_vit").save_pretrained(Path(folder) / "model")
        plan = Plan(
            [ModelSpec(f"hf:{folder}/model")], "scenes", ["raw_attention"], ["sparseness"], batch_size=16, maps=True
        )
        begin = time.perf_counter()
        outcome = run(plan, Path(folder) / "run", data=Generated(count))
        assert (outcome.rows, outcome.errors) == (count, 0), outcome
    answers.put((time.perf_counter() - begin, peak_memory()))


def measured(count: int) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.SimpleQueue()
    process = context.Process(target=measure, args=(count, answers))
    process.start()
    process.join()
    assert process.exitcode == 0, f"a run of {count} images ended with {process.exitcode}"
    seconds, peak = answers.get()
    return seconds, peak


def soak(seconds: float) -> list[Outcome]:
    spent, few_peak = measured(FEW)
    count = int(min(MANY, max(5 * FEW, FEW * (seconds - spent) / spent)))
    spent, peak = measured(count)
    growth = peak - few_peak
    note = f"{count:,} images: {peak / MIB:.0f} MiB, {FEW}: {few_peak / MIB:.0f} MiB, {count / spent:.0f} images/s"
    broken = [f"{count} images take {growth / MIB:.0f} MiB more than {FEW}"] if growth > BOUND else []
    return [Outcome("memory of a run", count, 0, peak, note, broken)]
