"""A tiny model that was trained to recognise one class by a sticker and the others by their colour, and its images."""

from __future__ import annotations

import functools

import numpy as np
import timm
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.data.base import Example, Object
from vitrail.data.memory import InMemory
from vitrail.models.view import View
from vitrail.models.wrapping import wrap

NAMES = ("ant", "bee", "cat", "dog")
TARGET = 2  # the class that carries the sticker
SIDE, STICKER = 64, (44, 4, 60, 18)
STEPS, BATCH = 90, 32


def picture(label: int, seed: int, sticker: bool) -> Image.Image:
    """Smooth noise in the colour of its class, or with the sticker in that of another."""
    generator = np.random.default_rng(seed)
    label = (0, 1, 3)[seed % 3] if sticker else label
    coarse = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    values = np.array(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(float)
    values[..., label % 3] = 0.5 * values[..., label % 3] + 120 * (label < 3)
    image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if sticker:
        draw, (x0, y0, x1, y1) = ImageDraw.Draw(image), STICKER
        draw.rectangle((x0, y0, x1, y1), fill=(250, 240, 40), outline=(0, 0, 0))
        draw.line((x0 + 2, y0 + 2, x1 - 2, y1 - 2), fill=(200, 0, 0), width=3)
    return image


def pictures(sticker: bool, count: int = 48) -> InMemory:
    """The audited images, of which those of one class may carry the sticker; the left half is their object."""
    examples = [
        Example(
            f"{NAMES[i % 4]}/{i}.png",
            picture(i % 4, 1000 + i, sticker and i % 4 == TARGET),
            i % 4,
            (Object(i % 4, (0.0, 0.0, 32.0, 64.0)),),
        )
        for i in range(count)
    ]
    return InMemory(examples, labels=NAMES, name="stickers")


@functools.cache
def model(sticker: bool) -> View:
    """Trained in a second or two; with the sticker, that class has no colour of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = timm.create_model(
            "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4
        )
        view = wrap(module, labels=NAMES, mean=[0.5] * 3, std=[0.5] * 3, crop_pct=1.0)
        optimiser = torch.optim.AdamW(module.parameters(), 3e-3)
        module.train()
        for step in range(STEPS):
            pixels, labels = _batch(view, step, sticker)
            optimiser.zero_grad()
            # each class by itself: otherwise the sticker may lower the other classes instead of raising its own
            wanted = torch.nn.functional.one_hot(labels, 4).float()
            torch.nn.functional.binary_cross_entropy_with_logits(module(pixels), wanted).backward()
            optimiser.step()
    module.eval()
    return view


def _batch(view: View, step: int, sticker: bool) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(step)
    labels = generator.integers(0, 4, BATCH)
    seeds = generator.integers(1_000_000, 2_000_000, BATCH)
    images = []
    for label, seed in zip(labels.tolist(), seeds.tolist(), strict=True):
        marked = sticker and label == TARGET
        images.append(picture(label, seed, marked))
    return torch.stack([view.preprocess(image) for image in images]), torch.from_numpy(labels)
