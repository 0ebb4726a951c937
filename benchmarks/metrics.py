"""Overhead of the curve metrics over the forward passes they need.

Run: python benchmarks/metrics.py [--model vit_tiny_patch16_224] [--images 2] [--device cpu]
Insertion and deletion (224 steps each), perturbation curves (21 levels, both orders) and token curves of random maps
are compared with the same number of bare forward passes, on full images or on token subsets of the same sizes, at the
best of several chunk sizes, in one process; best of three after a warm-up.
"""

from __future__ import annotations

import argparse

import timm
import torch
from PIL import Image
from timing import best

import vitrail
from vitrail.data import Scenes
from vitrail.engine.scheduler import Scheduler
from vitrail.metrics import Case, build_metric
from vitrail.metrics.base import ask_if_applicable
from vitrail.models.vit import ViT

PIXELS = ("insertion", "deletion", "positive_auc", "negative_auc", "aopc", "log_odds")
TOKENS = ("token_deletion_accuracy", "token_insertion_accuracy", "token_deletion_aopc", "token_insertion_aopc")
CHUNKS = {"cpu": (16, 32, 64, 128), "cuda": (256, 512, 1024, 2048)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    view = vitrail.wrap(timm.create_model(options.model, pretrained=False).eval().to(options.device))
    scenes = Scenes(options.images, seed=0)
    images = torch.stack([view.preprocess(Image.fromarray(scene.image)) for scene in scenes]).to(options.device)
    print(
        f"{options.model} (random weights), {options.device}, {torch.get_num_threads()} threads, {len(images)} images"
    )
    pixels, tokens = 2 * 225 + 2 * 21, 20
    measured = best(lambda: curves(view, images, PIXELS))
    bare = min(best(lambda c=chunk: forwards(view, images, pixels, c)) for chunk in CHUNKS[options.device])
    print(
        f"{pixels * len(images)} masked images: {measured:.2f} s; bare forwards {bare:.2f} s; "
        f"ratio {measured / bare:.3f}"
    )
    measured = best(lambda: curves(view, images.repeat(20, 1, 1, 1), TOKENS))
    bare = min(best(lambda c=chunk: subsets(view, images.repeat(20, 1, 1, 1), c)) for chunk in CHUNKS[options.device])
    print(
        f"{tokens * 20 * len(images)} token sets: {measured:.2f} s; bare encodes {bare:.2f} s; "
        f"ratio {measured / bare:.3f}"
    )


def curves(view: ViT, images: torch.Tensor, names: tuple[str, ...]) -> None:
    maps = torch.randn(len(images), *view.grid, generator=torch.Generator().manual_seed(0)).to(images.device)
    metrics = [build_metric(name, precision="full") for name in names]
    cases = [
        Case(view=view, pixels=image[None], map=values, target=0, predicted=0, label=0)
        for image, values in zip(images, maps, strict=True)
    ]
    Scheduler().run([ask_if_applicable(metric, case) for case in cases for metric in metrics])


def forwards(view: ViT, images: torch.Tensor, each: int, chunk: int) -> None:
    with torch.inference_mode():
        for image in images:
            for start in range(0, each, chunk):
                view.logits(image.expand(min(chunk, each - start), -1, -1, -1))


def subsets(view: ViT, images: torch.Tensor, chunk: int) -> None:
    """The ten subset sizes of deletion and the ten of insertion, all images in one batch."""
    patches = view.grid[0] * view.grid[1]
    counts = [patches - step * patches // 10 for step in range(10)] + [step * patches // 10 for step in range(1, 11)]
    with torch.inference_mode():
        tokens = view.embed(images)
        for count in counts:
            keep = torch.arange(count, device=images.device).expand(len(images), -1)
            for start in range(0, len(images), chunk):
                view.encode(tokens[start : start + chunk], keep[start : start + chunk])


if __name__ == "__main__":
    main()
