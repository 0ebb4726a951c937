"""Measures the cost of methods: `python tools/costs.py [--again] [METHOD…]` writes `src/vitrail/report/costs.csv`.

One photograph on the embedded model `photo`, on one CPU thread; on `scenes` where a method needs what only that model
has: the explainer of `vit_shapley`. Without methods, all those of the leaderboard. Methods that are in the file are
kept unless --again is given.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from PIL import Image

import vitrail
from vitrail.bench.costs import measure_cost
from vitrail.bench.suite import open_suite
from vitrail.calls import split_call, split_list
from vitrail.methods.registry import get_method

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "vitrail" / "report" / "costs.csv"
PHOTO = ROOT / "docs" / "pictures" / "cat_and_cup.jpg"
MODELS = ("photo", "scenes")  # a method is measured on the first that it can explain
FIELDS = ("method", "forwards", "images_per_second", "model", "torch")


def main() -> None:
    views = [vitrail.load(name) for name in MODELS]
    parser = argparse.ArgumentParser(description="Measures the cost of methods.")
    parser.add_argument("methods", nargs="*", help="calls such as 'gen_att(rule=frozen)'; default: the leaderboard's")
    parser.add_argument("--again", action="store_true", help="measure methods that are in the file, too")
    options = parser.parse_args()
    plan = open_suite("leaderboard").pairs[0].plan
    assert plan is not None
    known = read()
    for call in split_list(options.methods) or plan.methods:
        if options.again or call not in known:
            unsupported = get_method(split_call(call)[0]).unsupported
            view = next((view for view in views if not unsupported(view)), None)
            if view is None:
                print(f"{call}: not measured, it can explain neither {' nor '.join(MODELS)}", flush=True)
                continue
            cost = measure_cost(call, view, view.preprocess(Image.open(PHOTO))[None])
            speed = f"{cost.images_per_second:.3g}" if view is views[0] else ""  # of another model: incomparable
            numbers = f"{cost.forwards:.1f}", speed
            known[call] = dict(
                zip(FIELDS, (call, *numbers, view.name, torch.__version__.partition("+")[0]), strict=True)
            )
            print(*known[call].values(), flush=True)
            write(list(known.values()))


def read() -> dict[str, dict[str, str]]:
    if not TARGET.exists():
        return {}
    with TARGET.open(encoding="utf-8", newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def write(rows: list[dict[str, str]]) -> None:
    with TARGET.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
