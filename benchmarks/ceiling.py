"""Measures how much of the attainable methods attain: token-space curves between `random`, 0, and `greedy`, 1.

Example:
    python benchmarks/ceiling.py --data DIR --out RUN [--pairs scenes,photo] [--images 32] [--methods "tis;posterior"]
`DIR` is the folder of `vitrail bench leaderboard --data DIR`; an interrupted run is resumed by the same command. The
curves are those of `token_insertion_aopc(cells=2)` and `token_deletion_aopc(cells=2)`, where regions of 2 × 2 patches
come and go, as in the search of `greedy`. For each pair it prints the values and the shares, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from vitrail.bench.run import load_model, run
from vitrail.bench.store import Store
from vitrail.bench.suite import open_suite
from vitrail.calls import join_call
from vitrail.metrics.statistics import interval

CEILINGS = {"token_insertion_aopc(cells=2)": "greedy", "token_deletion_aopc(cells=2)": "greedy(curve=deletion)"}
METHODS = "decompx.skipplus;gen_att;tis;lime;pami;shapley;posterior;posterior(masks=1024)"


def table(rows: pd.DataFrame, calls: list[str]) -> None:
    for metric, ceiling in CEILINGS.items():
        part = rows[rows["metric"] == metric].pivot_table(index="image", columns="call", values="value").dropna()
        span = (part[ceiling] - part["random"]).mean()
        ends = (f"{call} {part[call].mean():.3f}" for call in ("random", ceiling))
        print(f"  {metric}, {len(part)} images:", ", ".join(ends))
        for call in calls:
            shares = (part[call] - part["random"]) / span
            low, high = interval(shares.to_numpy())
            share = f"share {shares.mean():.2f} [{low:.2f}, {high:.2f}]"
            print(f"    {call:24} {part[call].mean():+.3f}  {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("vitrail-ceiling"))
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--pairs", default="scenes,photo,photographs,pets,imagenette")
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    calls = options.methods.split(";")
    for pair in open_suite("leaderboard", options.data, ["random", *calls, *CEILINGS.values()]).pairs:
        if pair.plan is None or pair.name not in options.pairs.split(","):
            continue
        plan = replace(pair.plan, images=options.images, metrics=list(CEILINGS), limits={}, cheap_only=())
        run(plan, options.out / pair.name, load=load_model)
        rows = Store(options.out / pair.name).rows()
        named = zip(rows["method"], map(json.loads, rows["params"]), strict=True)
        rows["call"] = [join_call(name, params) for name, params in named]
        print(pair.name)
        table(rows, calls)


if __name__ == "__main__":
    main()
