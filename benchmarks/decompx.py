"""Cost of DecompX from every start layer, and of ``explain``, in plain forward passes of the same batch.

Run: python benchmarks/decompx.py [--model vit_small_patch16_224] [--batch 4] [--repeats 15] [--device cpu]
They are timed alternately in one process; the number to look at is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics

import timm
import torch
from timing import seconds

import vitrail
from vitrail.engine.trace import trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    module = timm.create_model(options.model, pretrained=False).eval().to(options.device)
    view = vitrail.wrap(module)
    images = torch.randn(options.batch, 3, *view.size, device=options.device)
    target = torch.arange(options.batch, device=options.device)

    def forward() -> None:
        with torch.inference_mode():
            module(images)

    def decompose() -> None:
        trace(view, images, target, rule="frozen", keep={"x", "gx", "bias"})

    def explain() -> None:
        vitrail.explain(view, images, batch_size=options.batch)

    functions = {"forward": forward, "decompx": decompose, "explain": explain}
    for function in functions.values():
        function()
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            spent[name].append(seconds(function))
    medians = {name: statistics.median(values) for name, values in spent.items()}
    print(f"{options.model}, batch {options.batch}, {options.device}, {torch.get_num_threads()} threads")
    print(f"plain forward (inference mode, fused attention)       {medians['forward'] * 1e3:8.1f} ms")
    print(f"decompx, all {view.num_layers} start layers, all bias maps            {medians['decompx'] * 1e3:8.1f} ms")
    print(f"explain, default method (decompx.skipplus)            {medians['explain'] * 1e3:8.1f} ms")
    for name in ("decompx", "explain"):
        ratios = [b / a for a, b in zip(spent["forward"], spent[name], strict=True)]
        print(
            f"{name}: ratio of medians {medians[name] / medians['forward']:.2f}, "
            f"median of paired ratios {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
