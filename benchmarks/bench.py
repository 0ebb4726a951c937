"""What the benchmark runner costs beyond the evaluation it runs.

Run: python benchmarks/bench.py [--images 12] [--model scenes] [--data scenes]
The same images, methods and metrics once by ``vitrail.evaluate`` and once by ``vitrail.bench`` into a fresh folder,
in one run, the faster of two each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from timing import seconds

import vitrail
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.data import open_data

METHODS = ("decompx.skipplus", "gen_att", "raw_attention", "grad_cam", "tis(masks=256)", "random")
METRICS = ("insertion(steps=32)", "deletion(steps=32)", "aopc(steps=10)", "token_deletion_accuracy", "sparseness")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--data", default="scenes")
    options = parser.parse_args()
    view = vitrail.load(options.model)
    plan = Plan([ModelSpec(options.model)], options.data, METHODS, METRICS, images=options.images)
    data = open_data(options.data).subset(options.images)
    bare = min(seconds(lambda: vitrail.evaluate(view, data, METHODS, METRICS)) for _ in range(2))
    spent = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            spent.append(seconds(lambda where=folder: run(plan, Path(where) / "run", load=lambda spec: view)))
    print(f"evaluate {bare:.2f} s, bench {min(spent):.2f} s: ratio {min(spent) / bare:.3f}")


if __name__ == "__main__":
    main()
