"""Measures the choices of every method: each parameter with a few values is varied alone, by insertion − deletion.

Examples:
    python benchmarks/defaults.py measure --data DIR --images 40 --out RUN [--shard 1/8]
    python benchmarks/defaults.py measure --data DIR --images 8 --out RUN --methods shapley --pairs photo --steps 14
    python benchmarks/defaults.py table --out RUN > docs/results/defaults_later.csv
`DIR` is the folder of `vitrail bench leaderboard --data DIR`. `measure` resumes. The table has a line per choice: its
mean minus that of the default on each pair, paired by image, with the 95 % interval, over the images that all choices
of the method have; what was not measured is left out. Measure again after a default has changed: the rows of a run hold
no parameters that were defaults.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np

from vitrail.bench.run import load_model, run
from vitrail.bench.shard import Shard
from vitrail.bench.store import Store
from vitrail.bench.suite import open_suite
from vitrail.calls import join_call
from vitrail.methods.registry import ALIASES, METHODS, get_method
from vitrail.metrics.statistics import interval

METRIC = "insertion_minus_deletion(steps={})"
PAIRS = ("photographs", "pets", "imagenette", "scenes", "photo")
SKIPPED = {"precision", "source"}  # how it is computed, and a paper's control
BUDGET = {"rise": {"masks": 1000}, "kernel_shap": {"samples": 500}, "lime": {"samples": 500}, "tis": {"masks": 512},
          "shapley": {"permutations": 4}}  # fmt: skip
NUMBERS: dict[str, tuple[Any, ...]] = {"start_layer": (1, 4), "ratio": (0.1, 0.25), "delta": (0.05, 0.2), "cells": (7,),
                                       "layer": (-2, -4)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["measure", "table", "list"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--methods", help="only these, separated by commas; default: all")
    parser.add_argument("--parameters", help="vary only these, separated by commas; default: all")
    parser.add_argument("--steps", type=int, default=56, help="of insertion and deletion")
    parser.add_argument("--out", type=Path, default=Path("vitrail-defaults"))
    parser.add_argument("--shard")
    options = parser.parse_args()
    wanted = variants(*(chosen.split(",") if chosen else () for chosen in (options.methods, options.parameters)))
    if options.step == "list":
        print("\n".join(call for calls in wanted.values() for call in calls))
    elif options.step == "measure":
        measure(options, [call for calls in wanted.values() for call in calls])
    else:
        table(options, wanted)


def variants(methods: Collection[str] = (), parameters: Collection[str] = ()) -> dict[str, list[str]]:
    """The calls of each method: the default first, then with one parameter changed. Empty = all."""
    names = [*METHODS.entries(), *dict.fromkeys(name for name in ALIASES.values() if "." in name), "decompx.skipplus",
             "full_grad_plus.skipplus"]  # fmt: skip
    calls = {}
    for name in dict.fromkeys(methods or names):
        budget = BUDGET.get(name, {})
        settings = [budget, *({**budget, **choice} for choice in choices(name, parameters))]
        calls[name] = [join_call(name, dict(sorted(setting.items()))) for setting in settings]  # as a run stores them
    return calls


def choices(name: str, parameters: Collection[str]) -> Iterator[dict[str, Any]]:
    factory = get_method(name)
    types, defaults = factory.parameter_types(), factory.parameters()
    for parameter, default in defaults.items():
        if parameter in SKIPPED or (parameters and parameter not in parameters):
            continue
        numbers = () if isinstance(default, str) else NUMBERS.get(parameter, ())
        for value in [*values_of(types.get(parameter)), *numbers]:
            if value != default and not (value == "head" and default is None):
                yield {parameter: value}


def values_of(kind: Any) -> list[Any]:
    """The values of a parameter that has few."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) if get_origin(part) is Literal for value in get_args(part)]


def measure(options: argparse.Namespace, calls: list[str]) -> None:
    warnings.simplefilter("ignore")
    for pair in open_suite("leaderboard", options.data, calls).pairs:
        if pair.plan is not None and pair.name in options.pairs.split(","):
            metric = METRIC.format(options.steps)
            plan = replace(pair.plan, metrics=[metric], images=options.images, cheap_only=(), limits={})
            outcome = run(
                plan,
                options.out / pair.name,
                load=load_model,
                shard=None if options.shard is None else Shard.parse(options.shard),
            )
            print(pair.name, f"{outcome.rows} rows in {outcome.seconds:.0f} s,", outcome.first_error, flush=True)


def table(options: argparse.Namespace, wanted: dict[str, list[str]]) -> None:
    pairs = [name for name in options.pairs.split(",") if (options.out / name).is_dir()]
    values = {name: by_call(Store(options.out / name)) for name in pairs}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [f"{name}{part}" for name in pairs for part in ("", " low", " high", " images")]
    writer.writerow(["method", "choice", *columns])
    for calls in wanted.values():
        default, *others = calls
        measured = {name: complete(values[name], calls) for name in pairs}
        if not any(measured.values()):
            continue
        means = [measured[name].get(default) for name in pairs]
        writer.writerow([default, "default", *(cell for mean in means for cell in absolute(mean))])
        for call in others:
            cells = [cell for name in pairs for cell in paired(measured[name].get(call), measured[name].get(default))]
            if any(cells):
                writer.writerow([default, call, *cells])


def by_call(store: Store) -> dict[str, dict[str, float]]:
    """Call → image → value."""
    rows = store.rows(["image", "params", "value"])
    values: dict[str, dict[str, float]] = {}
    for row in rows[rows["error"].isna()].itertuples():
        values.setdefault(join_call(row.method, json.loads(row.params)), {})[row.image] = row.value
    return values


def complete(values: dict[str, dict[str, float]], calls: list[str]) -> dict[str, dict[str, float]]:
    """The values of a method's calls, of the images that all of them have, so that all means are of the same ones."""
    known = {call: values[call] for call in calls if call in values}
    images = sorted(set.intersection(*map(set, known.values()))) if known else []
    return {call: {image: by_image[image] for image in images} for call, by_image in known.items()}


def absolute(values: dict[str, float] | None) -> list[str]:
    if not values:
        return [""] * 4
    return [*(f"{number:.3f}" for number in mean_and_interval(list(values.values()))), str(len(values))]


def paired(values: dict[str, float] | None, others: dict[str, float] | None) -> list[str]:
    if not values or not others:
        return [""] * 4
    differences = [values[image] - others[image] for image in values]
    return [*(f"{number:+.3f}" for number in mean_and_interval(differences)), str(len(differences))]


def mean_and_interval(numbers: list[float]) -> tuple[float, float, float]:
    array = np.array(numbers)
    return float(array.mean()), *interval(array)


if __name__ == "__main__":
    main()
