"""Measures how much of the attainable methods attain: token-space curves between `random`, 0, and `greedy`, 1.

Example:
    python benchmarks/ceiling.py --data DIR --images 32 [--pairs scenes,photo] [--methods "tis;posterior"]
`DIR` is the folder of `vitrail bench leaderboard --data DIR`. Regions of 2 × 2 patches are inserted and deleted in the
order of their mean value, with tokens removed as `greedy` removes them; a curve's area is the mean probability of the
class over its steps. For each pair it prints the areas and the shares, with 95 % intervals of the insertion share.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.bench.run import load_model, open_plan_data
from vitrail.bench.suite import open_suite
from vitrail.calls import split_call
from vitrail.engine.requests import Asking, Batch, Traced
from vitrail.engine.scheduler import Scheduler
from vitrail.methods.greedy import Greedy
from vitrail.methods.masking import tokens_spec
from vitrail.methods.registry import build_method
from vitrail.metrics.statistics import interval
from vitrail.models.view import View
from vitrail.targets import Target

CEILINGS = {curve: f"greedy(curve={curve})" for curve in ("insertion", "deletion")}
METHODS = "random;decompx.skipplus;gen_att;tis;lime;pami;shapley;posterior;posterior(masks=1024)"


def areas(ceiling: Greedy, images: Tensor, classes: Tensor, maps: Tensor) -> dict[str, Tensor]:
    """(B,): the mean probability as regions come, and as they go, in the order of maps (B, rows, columns)."""
    regions = ceiling.regions().to(images.device)
    values = maps.flatten(1).to(images.device, torch.float64) @ (regions / regions.sum(1, keepdim=True)).double().T
    order = values.argsort(dim=1, descending=True, stable=True)  # (B, R)
    means = {}
    for curve in CEILINGS:
        chosen = order if curve == "insertion" else order.flip(1)
        grown = regions[chosen].cumsum(1).bool()  # (B, R, N): the first 1, 2, … R regions
        present = torch.cat([torch.zeros_like(grown[:, :1]), grown], 1)
        means[curve] = torch.stack([scores(ceiling, images[i], classes[i], sets) for i, sets in enumerate(present)])
    return means


def scores(method: Greedy, image: Tensor, target: Tensor, present: Tensor) -> Tensor:
    """0-d: the mean probability of the class over sets of patches (M, N)."""
    batch = Batch(method.model, image[None])
    asked = Target(target[None])

    def ask() -> Asking[Tensor]:
        (trace,) = yield [Traced(batch, asked, tokens_spec(method.model))]
        (subject,) = yield from method.subjects(batch, asked, trace)
        return (yield from replace(method.scorer(subject, "probability"), name="").token_sets(present))

    return Scheduler().run([ask()])[0].double().mean().cpu()


def measure(view: View, images: Tensor, classes: Tensor, calls: list[str]) -> dict[str, dict[str, Tensor]]:
    """Call → curve → (B,)."""
    results = {}
    for call in [*calls, *CEILINGS.values()]:
        name, params = split_call(call)
        maps = build_method(name, view, **params).attribute(images, classes)
        if tuple(maps.shape[1:]) != view.grid:
            maps = torch.nn.functional.adaptive_avg_pool2d(maps[:, None], view.grid)[:, 0]
        results[call] = areas(Greedy(view), images, classes, maps)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--pairs", default="scenes,photo,photographs,pets,imagenette")
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    calls = ["random", *(call for call in options.methods.split(";") if call != "random")]
    for pair in open_suite("leaderboard", options.data, ["greedy"]).pairs:
        if pair.plan is None or pair.name not in options.pairs.split(","):
            continue
        view = load_model(pair.plan.models[0])
        data = open_plan_data(replace(pair.plan, images=options.images))
        images = torch.stack([view.preprocess(data[i].image) for i in range(len(data))]).to(view.device)
        classes = view.class_scores(view.logits(images)).argmax(1)
        results = measure(view, images, classes, calls)
        print(f"{pair.name}: {len(data)} images")
        for call in results:
            text = f"  {call:24}"
            for curve, ceiling in CEILINGS.items():
                sign = 1 if curve == "insertion" else -1
                floor, top, value = (sign * results[name][curve].numpy() for name in ("random", ceiling, call))
                span = float(np.mean(top - floor))
                low, high = interval((value - floor) / span)
                share = float(np.mean(value - floor)) / span
                text += f"  {curve} {abs(float(np.mean(value))):.3f}, share {share:.2f} [{low:.2f}, {high:.2f}]"
            print(text, flush=True)


if __name__ == "__main__":
    main()
