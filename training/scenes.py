"""Trains the embedded model `scenes` on generated images: `python training/scenes.py --out FOLDER`."""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from kept_tokens import choose_patches, features, predict
from optimisers import Optimiser, learning_rate
from shipping import save_half
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vitrail.data import Scenes

ARCHITECTURE = {"img_size": 64, "patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 10}
PATCHES = 64
TRAIN_SEED, TEST_SEED = 1, 1_000_001


def _draw_part(indices: range, seed: int, objects: int | None) -> tuple[np.ndarray, np.ndarray]:
    scenes = Scenes(indices.stop, seed, objects)[indices.start :]
    targets = np.zeros((len(scenes), len(Scenes.labels)), dtype=np.float32)
    for target, scene in zip(targets, scenes, strict=True):
        target[[item.label for item in scene.objects]] = 1
    return np.stack([scene.image.transpose(2, 0, 1) for scene in scenes]), targets


def draw(count: int, seed: int, objects: int | None = None) -> tuple[Tensor, Tensor]:
    """uint8 images (n, 3, 64, 64) and a one for each class present (n, 10), drawn on all cores."""
    parts = [range(start, min(start + 500, count)) for start in range(0, count, 500)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = list(pool.map(_draw_part, parts, repeat(seed), repeat(objects)))
    images, targets = zip(*drawn, strict=True)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(targets))


def scale(images: Tensor) -> Tensor:
    """uint8 to −1 … 1: mean and standard deviation one half."""
    return images.float() / 127.5 - 1


def vary(images: Tensor) -> Tensor:
    """Turn, mirror and recolour a batch: no class depends on any of these."""
    if random.random() < 0.5:
        images = images.flip(3)
    return images.rot90(random.randrange(4), (2, 3))[:, random.sample(range(3), 3)]


def patches_to_keep() -> int:
    """All in half of the batches, else between half and all."""
    return PATCHES if random.random() < 0.5 else random.choice([32, 40, 48, 56])


def report(model: VisionTransformer, test: dict[int, tuple[Tensor, Tensor]]) -> str:
    lines = []
    for objects, (images, targets) in test.items():
        top = predict(model, scale(images)).topk(objects, dim=1).indices
        right = targets.gather(1, top).sum(dim=1) == objects
        lines.append(f"{objects}-object scenes all found {100 * right.float().mean():.2f} %")
    return ", ".join(lines)


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.time()
    images, targets = (part.to(device) for part in draw(arguments.images, TRAIN_SEED))
    test = {objects: tuple(part.to(device) for part in draw(arguments.test, TEST_SEED, objects)) for objects in (1, 2)}
    print(f"drew {len(images)} images in {time.time() - start:.0f} s", flush=True)
    model = VisionTransformer(**ARCHITECTURE).to(device)
    optimiser = Optimiser(model, average=0.999)
    if device == "cuda":
        for block in model.blocks:
            block.compile(dynamic=False)
    averaged = VisionTransformer(**ARCHITECTURE).to(device).eval()
    start, reported = time.time(), 0
    while (progress := (time.time() - start) / arguments.seconds) < 1:
        chosen = torch.randint(len(images), (arguments.batch,), device=device)
        kept = choose_patches(arguments.batch, PATCHES, patches_to_keep(), device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model.head(features(model, scale(vary(images[chosen])), kept)[:, 0])
        binary_cross_entropy_with_logits(logits.float(), targets[chosen]).backward()
        optimiser.step(learning_rate(progress, arguments.rate))
        if progress > reported / 10:
            reported += 1
            averaged.load_state_dict(optimiser.averaged)
            print(f"{progress:.0%}, {optimiser.steps} steps: {report(averaged, test)}", flush=True)
    averaged.load_state_dict(optimiser.averaged)
    print(f"end, {optimiser.steps} steps of {arguments.batch}: {report(averaged, test)}", flush=True)
    save_half(averaged.state_dict(), arguments.out / "scenes.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for scenes.safetensors")
    parser.add_argument("--seconds", type=float, default=150, help="length of the schedule, drawing not counted")
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--test", type=int, default=4000, help="held-out scenes of one and of two objects")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-3)
    train(parser.parse_args())
