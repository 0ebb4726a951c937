"""What a CPU gains from bf16: the time of mask methods in full precision and by default.

Run: python benchmarks/bf16.py [--models photo,vit_small_patch16_224,vit_base_patch16_224] [--threads 1] [--times 3]
Models of timm have random weights. Both precisions take turns in one process; the shortest of ``--times`` calls counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable

import torch
from timing import seconds

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.core.precision import cpu_multiplies_bf16
from vitrail.methods.registry import build_method
from vitrail.models import embedded
from vitrail.models.view import View
from vitrail.samples import SAMPLES, open_sample

METHODS = "tis(masks=256),posterior,rise(masks=256)"


def tasks(view: View) -> dict[str, Callable[[], object]]:
    """What is measured, for one picture."""
    picture = open_sample(SAMPLES[0])
    images = view.preprocess(picture)[None]
    target = view.logits(images).argmax(1)
    return {
        call: (lambda method=method, params=params: build_method(method, view, **params).attribute(images, target))
        for call in split_list(METHODS)
        for method, params in [split_call(call)]
    }


def shortest(task: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds in full precision and by default."""
    turns: dict[str, list[float]] = {"full": [], "auto": []}
    for _ in range(times + 1):  # the first is a warm-up
        for precision, taken in turns.items():
            os.environ["VITRAIL_PRECISION"] = precision
            taken.append(seconds(task))
    return min(turns["full"][1:]), min(turns["auto"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="photo,vit_small_patch16_224,vit_base_patch16_224")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # random weights
    torch.set_num_threads(options.threads)
    gains = "multiplies bf16" if cpu_multiplies_bf16() else "does not multiply bf16: both columns are float32"
    print(f"{platform.machine()} CPU, which {gains}; {options.threads} threads, torch {torch.__version__}\n")
    print("| model | what | `full` | `auto` | × faster |\n|---|---|---|---|---|")
    for name in split_list(options.models):
        view = vitrail.load(name) if name in embedded.names() else vitrail.load(name, pretrained=False)
        for what, task in tasks(view).items():
            full, auto = shortest(task, options.times)
            print(f"| {view.name} | `{what}` | {full:.2f} s | {auto:.2f} s | {full / auto:.1f} |", flush=True)


if __name__ == "__main__":
    main()
