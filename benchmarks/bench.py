"""Overhead of the benchmark runner over ``vitrail.evaluate``.

Run: python benchmarks/bench.py [--images 12] [--model scenes] [--data scenes]
Measures the same images, methods and metrics by ``vitrail.evaluate`` and by ``vitrail.bench`` into a new folder,
alternating, and compares the fastest of several repeats.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from timing import seconds

import vitrail
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run

METHODS = ("decompx.skipplus", "gen_att", "raw_attention", "grad_cam", "tis(masks=256)", "random")
METRICS = ("insertion(steps=32)", "deletion(steps=32)", "aopc(steps=10)", "token_deletion_accuracy", "sparseness")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--data", default="scenes")
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    view = vitrail.load(options.model)
    plan = Plan([ModelSpec(options.model)], options.data, METHODS, METRICS, images=options.images)
    evaluate_seconds, bench_seconds = [], []
    for _ in range(options.repeats):
        evaluate_seconds.append(
            seconds(lambda: vitrail.evaluate(view, options.data, METHODS, METRICS, images=options.images))
        )
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            bench_seconds.append(seconds(lambda out=out: run(plan, out, load=lambda spec: view)))
    fastest, bench = min(evaluate_seconds), min(bench_seconds)
    print(f"evaluate {fastest:.2f} s, bench {bench:.2f} s: ratio {bench / fastest:.3f}")


if __name__ == "__main__":
    main()
