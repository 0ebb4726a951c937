"""Measures the cost of the methods in `docs/results`: `python tools/costs.py` writes `docs/costs.csv`.

One photograph on the embedded model `photo`, on one CPU thread. A method and a plain forward pass of the module
alternate, and the median of the paired ratios is recorded: it transfers to other machines better than seconds do. The
forward pass that determines the predicted class is included.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

import vitrail
from vitrail.calls import split_call
from vitrail.methods.registry import build_method

FOLDER = Path(__file__).parents[1] / "docs"
TARGET = FOLDER / "costs.csv"
PHOTO = FOLDER / "pictures" / "cat_and_cup.jpg"
PASSES = 600  # budget per method; a method that needs more runs once


def main() -> None:
    torch.set_num_threads(1)
    view = vitrail.load()
    image = view.preprocess(Image.open(PHOTO))[None]

    def forward() -> None:
        with torch.inference_mode():
            view.module(image)

    facts = (view.name, torch.__version__.partition("+")[0])
    lines = [("method", "forwards", "model", "torch")]
    for call in measured():
        name, params = split_call(call)
        method = build_method(name, view, **params)
        repeats = max(1, min(15, int(PASSES / max(1, sum(method.passes())))))
        ratio = paired(lambda method=method: method.attribute(image), forward, repeats)
        lines.append((call, f"{ratio:.1f}", *facts))
        print(*lines[-1], flush=True)
    with TARGET.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def measured() -> list[str]:
    """The methods of all result tables, in their order."""
    tables = [list(csv.DictReader(path.open(encoding="utf-8"))) for path in sorted((FOLDER / "results").glob("*.csv"))]
    return list(dict.fromkeys(row["method"] for table in tables for row in table))


def paired(function: Callable[[], object], reference: Callable[[], object], repeats: int) -> float:
    """The median ratio of the two times over alternating runs, after a warm-up unless it is a single long run."""
    if repeats > 1:
        function(), reference()
    ratios = []
    for _ in range(repeats):
        before = [seconds(reference) for _ in range(5)]
        spent = seconds(function)
        ratios.append(spent / statistics.median(before + [seconds(reference) for _ in range(5)]))
    return statistics.median(ratios)


def seconds(function: Callable[[], object]) -> float:
    """CPU time, so that other processes on the machine hardly matter."""
    start = time.process_time()
    function()
    return time.process_time() - start


if __name__ == "__main__":
    main()
