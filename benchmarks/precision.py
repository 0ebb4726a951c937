"""How much half-precision weights change an explanation: rank correlation with the maps of the float32 model.

Run: python benchmarks/precision.py [--model photo] [--data scenes:3] [--methods "lrp, rise(masks=256)"] [--device cpu]
Every method explains the float32 model's prediction for each image, once with float32 weights and once with the same
weights in bfloat16 and in float16; printed are the mean over the images, the lowest of them, and the seconds per image.
"""

from __future__ import annotations

import argparse
import statistics
import time

import vitrail
from vitrail.data import open_data
from vitrail.methods.registry import supported_methods
from vitrail.metrics.calls import split_call, split_list
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
            alike = [rank_correlation(*pair) for pair in zip(maps[name], maps["float32"], strict=True)]
            told.append(f"{name} {statistics.mean(alike):.4f} ({min(alike):.4f}) {seconds[name]:.2f} s")
        print(f"{call:28}  {'   '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
