"""Measures how honest the error bars of `posterior` are: against a run with many masks, and over seeds.

Example:
    python benchmarks/coverage.py --data DIR --images 8 [--pairs scenes,photo]
`DIR` is the folder of `vitrail bench leaderboard --data DIR`. For each pair it prints the share of patches whose 90 %
interval holds the value of a run with `--reference` masks and another seed, the standard deviation of the differences
in units of the error, and the median error over the standard deviation of the maps over seeds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.bench.run import load_model, open_plan_data
from vitrail.bench.suite import open_suite
from vitrail.methods.registry import build_method

QUANTILE = 1.6449  # of the normal distribution, 90 % two-sided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--pairs", default="scenes,samples,photo,photographs,pets,imagenette")
    parser.add_argument("--masks", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--reference", type=int, default=8192)
    options = parser.parse_args()
    for pair in open_suite("leaderboard", options.data, ["posterior"]).pairs:
        if pair.plan is None or pair.name not in options.pairs.split(","):
            continue
        view = load_model(pair.plan.models[0])
        data = open_plan_data(replace(pair.plan, images=options.images))
        pixels = torch.stack([view.preprocess(data[i].image) for i in range(len(data))])
        reference = build_method("posterior", view, masks=options.reference, seed=1000).explain(pixels)
        runs = [
            build_method("posterior", view, masks=options.masks, seed=seed).explain(pixels)
            for seed in range(options.seeds)
        ]
        maps, errors = (torch.stack([getattr(run, name) for run in runs]).double() for name in ("map", "error"))
        scaled = (maps - reference.map.double()) / errors
        covered = (scaled.abs() < QUANTILE).double()
        print(
            f"{pair.name}: {len(data)} images, coverage {covered.mean():.3f} (least image "
            f"{covered.mean((0, 2, 3)).min():.3f}), differences {scaled.std():.2f} errors, "
            f"errors {(errors.mean(0) / maps.std(0)).median():.2f} of the deviation over seeds, "
            f"R² {torch.stack([run.extras['r2'] for run in runs]).mean():.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
