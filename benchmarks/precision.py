"""How half-precision weights change an explanation, as rank correlations of maps.

Run: python benchmarks/precision.py [--model photo] [--data scenes:3] [--methods "lrp, rise(masks=256)"] [--device cpu]
Every method explains the float32 model's prediction for each image: with float32 weights, with bfloat16 or float16
weights, and with the same rounded weights held in float32. "arithmetic" compares the last two, so it tells what
computing in half precision would cost; "weights" compares with the float32 model, so it tells what rounding the weights
costs. Printed are the mean over the images and the lowest of them.
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
from vitrail.metrics.sanity import rank_correlation

DTYPES = ("bfloat16", "float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="photo")
    parser.add_argument("--data", default="scenes:3")
    parser.add_argument("--methods", help="names or calls, separated by commas; all that the model supports by default")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    views = {name: vitrail.load(options.model, device=options.device, dtype=name) for name in ("float32", *DTYPES)}
    for name in DTYPES:
        rounded = vitrail.load(options.model, device=options.device, dtype=name)
        views[f"{name} in float32"] = rounded.to(dtype=torch.float32)
    data = open_data(options.data)
    images = [data[i].image for i in range(len(data))]
    targets = [one.target for one in vitrail.explain(views["float32"], images, "random")]
    calls = split_list(options.methods) if options.methods else supported_methods(views["float32"])
    print(f"{options.model} on {options.device}, {len(images)} images of {options.data}: mean (lowest)")
    for call in calls:
        (method, params), maps, seconds = split_call(call), {}, {}
        for name, view in views.items():
            begin = time.perf_counter()
            maps[name] = [one.map for one in vitrail.explain(view, images, method, targets, **params)]
            seconds[name] = (time.perf_counter() - begin) / len(images)
        told = [f"float32 {seconds['float32']:.2f} s"]
        for name in DTYPES:
            arithmetic = alike(maps[name], maps[f"{name} in float32"])
            told.append(
                f"{name} {seconds[name]:.2f} s, arithmetic {arithmetic}, weights {alike(maps[name], maps['float32'])}"
            )
        print(f"{call:28}  {'   '.join(told)}", flush=True)


def alike(found: list[Tensor], expected: list[Tensor]) -> str:
    values = [rank_correlation(*pair) for pair in zip(found, expected, strict=True)]
    return f"{statistics.mean(values):.4f} ({min(values):.4f})"


if __name__ == "__main__":
    main()
