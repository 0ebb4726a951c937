"""How half-precision weights change explanations, measured by rank correlation of the maps.

Run: python benchmarks/precision.py [--model photo] [--data scenes:3] [--methods "lrp, rise(masks=256)"] [--device cpu]
Every method explains the float32 model's prediction for each image: with float32 weights, with bfloat16 or float16
weights, and with the same rounded weights stored in float32. "arithmetic" compares the last two and isolates the effect
of computing in half precision; "weights" compares with the float32 model and isolates the effect of rounding the
weights. Prints the mean and the minimum over the images.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.data import open_data
from vitrail.methods.registry import supported_methods
from vitrail.metrics.statistics import rank_correlation

DTYPES = ("bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="photo")
    parser.add_argument("--data", default="scenes:3")
    parser.add_argument("--methods", help="comma-separated methods (default: all that the model supports)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    views = {name: vitrail.load(options.model, device=options.device, dtype=name) for name in ("float32", *DTYPES)}
    for name in DTYPES:
        rounded = vitrail.load(options.model, device=options.device, dtype=name)
        views[f"{name} in float32"] = rounded.to(dtype=torch.float32)
    data = open_data(options.data)
    images = [data[i].image for i in range(len(data))]
    targets = [explanation.target for explanation in vitrail.explain(views["float32"], images, "random")]
    calls = split_list(options.methods) if options.methods else supported_methods(views["float32"])
    print(f"{options.model} on {options.device}, {len(images)} images of {options.data}: mean (minimum)")
    for call in calls:
        (method, params), maps, seconds = split_call(call), {}, {}
        for name, view in views.items():
            begin = time.perf_counter()
            maps[name] = [explanation.map for explanation in vitrail.explain(view, images, method, targets, **params)]
            seconds[name] = (time.perf_counter() - begin) / len(images)
        cells = [f"float32 {seconds['float32']:.2f} s"]
        for name in DTYPES:
            arithmetic = agreement(maps[name], maps[f"{name} in float32"])
            weights = agreement(maps[name], maps["float32"])
            cells.append(f"{name} {seconds[name]:.2f} s, arithmetic {arithmetic}, weights {weights}")
        print(f"{call:28}  {'   '.join(cells)}", flush=True)


def agreement(actual: list[Tensor], expected: list[Tensor]) -> str:
    values = [rank_correlation(*pair) for pair in zip(actual, expected, strict=True)]
    return f"{statistics.mean(values):.4f} ({min(values):.4f})"


if __name__ == "__main__":
    main()
