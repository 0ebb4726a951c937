"""Cost of every method in plain forward passes of the same batch, and DecompX against its literal form.

Run: python benchmarks/methods.py [--model vit_small_patch16_224] [--batch 4] [--repeats 5] [--methods '*']
Each method and a plain forward pass (inference mode, fused attention) are timed alternately in one process; the median
of the paired ratios is printed. The literal forward decomposition is the oracle of the tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timing import seconds

import vitrail
from vitrail.methods.registry import build_method, get_method

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.families import Family
from tests.oracles.decompx import decompose

MANY = 120  # passes; benchmarks/masks.py measures methods that need more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default="*")
    options = parser.parse_args()
    module = timm.create_model(options.model, pretrained=False).eval()
    view = vitrail.wrap(module)
    images, target = torch.randn(options.batch, 3, *view.size), torch.arange(options.batch)
    print(f"{options.model}, batch {options.batch}, {torch.get_num_threads()} threads; cost in forward passes:")
    for name, info in vitrail.list_methods(options.methods).items():
        if sum(info.cost) > MANY or get_method(name).unsupported(view):
            continue
        method = build_method(name, view)
        repeats = 1 if sum(info.cost) > 10 else options.repeats
        ratio = paired(lambda m=method: m.attribute(images, target), lambda: forward(module, images), repeats)
        print(f"{name:28s} {info.cost[0]:g} F + {info.cost[1]:g} B  {ratio:8.2f}", flush=True)
    if options.methods == "*":
        literal()


def forward(module: torch.nn.Module, images: torch.Tensor) -> None:
    with torch.inference_mode():
        module(images)


def paired(function: Callable[[], object], reference: Callable[[], object], repeats: int) -> float:
    """The median ratio of the two times over alternating runs, after a warm-up."""
    function(), reference()
    return statistics.median(seconds(function) / seconds(reference) for _ in range(repeats))


def literal(name: str = "vit_tiny_patch16_224", size: int = 224) -> None:
    """decompx.plus and the literal forward decomposition from every start layer, one image."""
    module = timm.create_model(name, pretrained=False, img_size=size).eval()
    view = vitrail.wrap(module)
    family = Family(name, lambda: module, (size, size), view.grid, view.num_prefix, "timm")
    images = torch.randn(1, 3, size, size)
    method = build_method("decompx.plus", view)
    literal_seconds = seconds(lambda: [decompose(family, module, images, layer) for layer in range(view.num_layers)])
    method_seconds = statistics.median(seconds(lambda: method.attribute(images, 0)) for _ in range(5))
    print(
        f"{name} at {size} px: literal decomposition from all layers {literal_seconds:.1f} s, "
        f"decompx.plus {method_seconds:.3f} s, speed-up {literal_seconds / method_seconds:.0f}×"
    )


if __name__ == "__main__":
    main()
