"""What the benchmark runner costs beyond the evaluation it runs.

Run: python benchmarks/bench.py [--images 12] [--model scenes] [--data scenes]
The same images, methods and metrics once by ``vitrail.evaluate`` and once by ``vitrail.bench`` into a fresh folder,
in one run, in turn, the fastest of several each: what else the machine does falls on both.
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
    bare, spent = [], []
    for _ in range(options.repeats):
        bare.append(seconds(lambda: vitrail.evaluate(view, options.data, METHODS, METRICS, images=options.images)))
        with tempfile.TemporaryDirectory() as folder:
            spent.append(seconds(lambda where=folder: run(plan, Path(where) / "run", load=lambda spec: view)))
    print(f"evaluate {min(bare):.2f} s, bench {min(spent):.2f} s: ratio {min(spent) / min(bare):.3f}")


if __name__ == "__main__":
    main()
