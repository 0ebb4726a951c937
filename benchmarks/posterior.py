"""Measures `posterior` against `tis`, its own prior and the sum of both: insertion − deletion, and time.

Examples:
    python benchmarks/posterior.py quality --data DIR --out RUN [--pairs pets,scenes] [--images 48]
    python benchmarks/posterior.py time [--model vit_base_patch16_224] [--device cuda] [--space tokens]
`DIR` is the folder of `vitrail bench leaderboard --data DIR`. `quality` prints means and paired differences to `tis`
with 1,024 masks; `zscore_sum` is the sum of `tis` and `decompx.skipplus`, each scaled to mean 0 and variance 1. `time`
prints milliseconds per image beyond the prior, and relative to bare encodes of as many masks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import torch
from torch import Tensor

import vitrail
from vitrail.bench.run import load_model, run
from vitrail.bench.store import Store
from vitrail.bench.suite import open_suite
from vitrail.calls import join_call
from vitrail.methods.aggregation import SkipPlus
from vitrail.methods.decomposition import DecompX
from vitrail.methods.masking import Space
from vitrail.methods.posterior import Posterior
from vitrail.methods.tis import Tis
from vitrail.metrics.statistics import interval
from vitrail.models.view import View

REFERENCE = "tis"
CALLS = [
    REFERENCE, "decompx.skipplus", "posterior", "posterior(masks=1024)", "posterior(space=tokens)",
    "posterior(masks=1024,space=tokens)", "zscore_sum(masks=256)", "zscore_sum",
]  # fmt: skip
METRICS = ["insertion_minus_deletion(steps=56)"]


@vitrail.method("zscore_sum", cost=(1026, 1), signed=True)
def zscore_sum(model: View, images: Tensor, target: Tensor, masks: int = 1024, against: Tensor | None = None) -> Tensor:
    """The sum of `tis` and `decompx.skipplus`, each with mean 0 and variance 1."""
    maps = [method.attribute(images, target, against) for method in (Tis(model, masks=masks), SkipPlus(DecompX)(model))]
    return sum((m - m.mean((1, 2), keepdim=True)) / m.std((1, 2), keepdim=True) for m in maps)  # type: ignore[return-value]


def quality(options: argparse.Namespace) -> None:
    for pair in open_suite("leaderboard", options.data, CALLS).pairs:
        if pair.plan is None or pair.name not in options.pairs.split(","):
            continue
        several = pair.name == "scenes"
        metrics = [*METRICS, "discriminativity(reading=hit)"] if several else METRICS
        plan = replace(pair.plan, images=options.images, metrics=metrics, limits={}, cheap_only=())
        run(plan, options.out / pair.name, load=load_model)
        rows = Store(options.out / pair.name).rows()
        calls = zip(rows["method"], rows["params"], strict=True)
        rows["call"] = [join_call(name, json.loads(params)) for name, params in calls]
        for metric, part in rows.groupby("metric", sort=False):
            values = part.pivot_table(index="image", columns="call", values="value").reindex(columns=CALLS)
            print(f"{pair.name}, {metric}, {len(values)} images")
            for call in CALLS:
                differences = (values[call] - values[REFERENCE]).dropna()
                low, high = interval(differences.to_numpy())
                print(
                    f"  {call:24} {values[call].mean():.4f}  {differences.mean():+.4f} [{low:+.4f}, {high:+.4f}]",
                    flush=True,
                )


def timed(work: Callable[[], object], device: str, repeats: int) -> float:
    """The median time in milliseconds, after one call that is not counted."""
    durations = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        durations.append(1000 * (time.perf_counter() - begin))
    return median(durations[1:])


@torch.no_grad()
def encode(model: View, tokens: Tensor, order: Tensor, sizes: Sequence[int], count: int) -> None:
    """As many subsets as `posterior` asks about, by themselves."""
    for size, part in zip(sizes, order.chunk(len(sizes)), strict=True):
        for _ in range(count):
            model.encode(tokens, part[:, :size])


def timing(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = vitrail.load(options.model, pretrained=False, device=options.device)
    rows, columns = model.grid
    for count in (1, 16) if options.device == "cuda" else (1,):
        images = torch.randn(count, 3, *model.size, device=options.device)
        order = torch.rand(256, rows * columns, device=options.device).argsort(1)
        tenths = range(1, 10) if options.space == "tokens" else [10]
        sizes = [round(tenth * rows * columns / 10) for tenth in tenths]
        repeats = 10 if options.device == "cuda" else 3
        whole, alone, bare = (
            timed(work, options.device, repeats) / count
            for work in (
                partial(Posterior(model, space=options.space).attribute, images),
                partial(SkipPlus(DecompX)(model).attribute, images),
                partial(encode, model, model.embed(images[:1]).detach(), order, sizes, count),
            )
        )
        print(
            f"{options.model}, {options.space}, {count} image(s) together: posterior {whole:.1f} ms per image, "
            f"prior {alone:.1f}, beyond the prior {whole - alone:.1f}; bare encodes in full precision {bare:.1f}, "
            f"ratio {(whole - alone) / bare:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "time"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("vitrail-posterior"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--pairs", default="scenes,photo,photographs,pets,imagenette")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--space", choices=get_args(Space), default="pixels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    quality(options) if options.what == "quality" else timing(options)


if __name__ == "__main__":
    main()
