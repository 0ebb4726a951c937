"""Trains the embedded model `scenes-text` on captioned scenes: `python training/scenes_text.py --out FOLDER`.

The image tower starts from the weights of `scenes`, which knows the shapes; what it must learn is to keep the colour
of each. Runs on one core of a CPU; the same command goes on from the last save.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path

import numpy as np
import torch
from kept_tokens import choose_patches, features
from optimisers import Optimiser, learning_rate
from safetensors.torch import load_file
from scenes import PATCHES, scale
from shipping import save_half
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from vitrail.data.captions import ACROSS, ANYTHING, COLOURS, DOWN, SIZES, CaptionedScenes, describe
from vitrail.data.drawing import SHAPES
from vitrail.models.captions import CaptionModel, WordTokenizer

WEIGHTS = Path(__file__).parent.parent / "src" / "vitrail" / "weights"
TRAIN_SEED, TEST_SEED = 2, 1_000_002
OBJECTS = 3  # at most in a scene
DISTINCT = ("size", "colour", "shape", "across", "down")  # columns of the tables of objects and captions

SIZE_NAMES, COLOUR_NAMES, SHAPE_NAMES = list(SIZES), list(COLOURS), list(SHAPES)
# A caption as numbers, one for each column; −1 = not mentioned.
CAPTIONS = [
    (size, colour, shape, across, down)
    for size, colour, shape in product(range(-1, 2), range(-1, 6), range(-1, 10))
    for across, down in ((-1, -1), (0, -1), (1, -1), (-1, 0), (-1, 1))
    if (size, colour, shape, across, down) != (-1,) * 5
]
PLAIN = [caption[0] == caption[3] == caption[4] == -1 < min(caption[1:3]) for caption in CAPTIONS]  # "a red star"


def text_of(caption: tuple[int, ...]) -> str:
    size, colour, shape, across, down = caption
    names = ("", *SHAPE_NAMES)[shape + 1] or ANYTHING, ("", *COLOUR_NAMES)[colour + 1], ("", *SIZE_NAMES)[size + 1]
    return describe(*names, ("", *ACROSS)[across + 1] or ("", *DOWN)[down + 1])


@dataclass
class Drawn:
    """uint8 images (n, 3, 64, 64) and their objects (n, 3, 5): numbers by ``DISTINCT``; −1 = on neither side, −2 = none."""

    images: Tensor
    objects: Tensor


def _draw_part(indices: range, seed: int) -> tuple[np.ndarray, np.ndarray]:
    scenes = CaptionedScenes(indices.stop, seed)[indices.start :]
    table = np.full((len(scenes), OBJECTS, len(DISTINCT)), -2, dtype=np.int8)
    for row, scene in zip(table, scenes, strict=True):
        for place, item in enumerate(scene.objects):
            sides = [next((names.index(side) for side in item.places if side in names), -1) for names in (ACROSS, DOWN)]
            look = SIZE_NAMES.index(item.size), COLOUR_NAMES.index(item.colour), SHAPE_NAMES.index(item.shape)
            row[place] = *look, *sides
    return np.stack([scene.image.transpose(2, 0, 1) for scene in scenes]), table


def draw(count: int, seed: int) -> Drawn:
    """Scenes on all cores."""
    parts = [range(start, min(start + 250, count)) for start in range(0, count, 250)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        images, objects = zip(*pool.map(_draw_part, parts, [seed] * len(parts)), strict=True)
    return Drawn(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(objects)).long())


def vary(images: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """Mirrors, turns and recolours a batch, and says of its objects what is true afterwards."""
    size, colour, shape, across, down = objects.unbind(2)
    if random.random() < 0.5:
        images, across = images.flip(3), _other_side(across)
    if random.random() < 0.5:
        images, down = images.flip(2), _other_side(down)
    if random.random() < 0.5:
        images, across, down = images.transpose(2, 3), down, across
    channels = random.choice(list(permutations(range(3))))
    renamed = torch.tensor([_recoloured(number, channels) for number in range(6)])
    colour = torch.where(colour < 0, colour, renamed[colour.clamp(min=0)])
    return images[:, list(channels)], torch.stack([size, colour, shape, across, down], dim=2)


def _other_side(side: Tensor) -> Tensor:
    return torch.where(side < 0, side, 1 - side)


def _recoloured(colour: int, channels: tuple[int, ...]) -> int:
    """The colour that a colour becomes when channel i is the former channels[i]."""
    bright = [(0,), (0, 1), (1,), (1, 2), (2,), (0, 2)]  # channels of red, yellow, green, cyan, blue and magenta
    return bright.index(tuple(place for place in range(3) if channels[place] in bright[colour]))


def truth(objects: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K): whether a caption is true of some object, and whether that is clear (an object may be on neither side)."""
    objects, captions = objects[:, :, None], captions[None, None]
    silent, exists = captions < 0, objects[..., :1] >= 0
    agrees = ((objects == captions) | silent).all(3)
    open_ = ((objects == captions) | silent | (objects == -1)).all(3) & exists[..., 0]
    is_true = agrees.any(1)
    return is_true, is_true | ~open_.any(1)


def longer_captions(objects: Tensor, count: int) -> Tensor:
    """Captions of objects of the batch that mention other things than "a red star" does, every second one altered."""
    present = objects[(objects[..., 0] >= 0)]
    chosen = present[torch.randint(len(present), (count,))].clone()
    chosen[torch.arange(1, count, 2)] = _altered(chosen[1::2])
    hidden = torch.rand(count, len(DISTINCT)) < torch.tensor([0.5, 0.3, 0.3, 0.6, 0.6])
    hidden[:, 4] |= ~hidden[:, 3]  # one side at most
    chosen[hidden] = -1
    return chosen[(chosen >= 0).any(1)]


def _altered(captions: Tensor) -> Tensor:
    """One word replaced by another of its kind."""
    captions = captions.clone()
    kinds = torch.randint(len(DISTINCT), (len(captions),))
    choices = torch.tensor([2, 6, 10, 2, 2])[kinds]
    captions[torch.arange(len(captions)), kinds] = (torch.rand(len(captions)) * choices).long()
    return captions


@torch.inference_mode()
def report(model: CaptionModel, tokens: Tensor, test: Drawn) -> str:
    """The right caption against a wrong colour, a wrong shape and another object's colour or shape."""
    model.eval()
    embeddings = torch.cat([model.vision(scale(part)) for part in test.images.split(250)])
    captions = torch.tensor(CAPTIONS)
    scores = normalize(embeddings, dim=1) @ normalize(model.text(tokens), dim=1).T
    is_true, is_clear = truth(test.objects, captions)
    logits = scores * model.logit_scale.exp() + model.logit_bias
    plain = torch.tensor(PLAIN)
    lowest = scores[:, plain].masked_fill(~is_true[:, plain], 9).amin(1)
    highest = scores[:, plain].masked_fill(is_true[:, plain], -9).amax(1)
    right = ((logits > 0) == is_true)[is_clear]
    where, hits = {caption: number for number, caption in enumerate(CAPTIONS)}, []
    for row, objects in zip(scores, test.objects.tolist(), strict=True):
        present = {(item[1], item[2]) for item in objects if item[0] >= 0}
        for colour, shape in present:
            wrong = [pair for pair in product({c for c, _ in present}, {s for _, s in present}) if pair not in present]
            others = [(c, shape) for c in range(6) if (c, shape) not in present and (c, shape) not in wrong]
            others += [(colour, s) for s in range(10) if (colour, s) not in present and (colour, s) not in wrong]
            rivals = (wrong + random.Random(len(hits)).sample(others, 3))[:3]
            values = [float(row[where[-1, c, s, -1, -1]]) for c, s in [(colour, shape), *rivals]]
            hits.append(values[0] > max(values[1:]))
    model.train()
    return (
        f"right of four {100 * np.mean(hits):.2f} %, every caption of a scene before all others "
        f"{100 * (lowest > highest).float().mean():.2f} %, yes or no right {100 * right.float().mean():.2f} %"
    )


def build(card: dict) -> CaptionModel:
    """The model with the blocks of `scenes`."""
    model = CaptionModel(card["architecture"], card["text"])
    known = {key: value.float() for key, value in load_file(WEIGHTS / "scenes.safetensors").items()}
    model.vision.load_state_dict({k: v for k, v in known.items() if not k.startswith("head.")}, strict=False)
    return model


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    card = json.loads((WEIGHTS / "scenes-text.json").read_text(encoding="utf-8"))
    cache, saved = arguments.out / "scenes-text.npz", arguments.out / "scenes-text.pt"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not cache.exists():
        parts = [draw(arguments.images, TRAIN_SEED), draw(arguments.test, TEST_SEED)]
        np.savez(cache, *(array.numpy() for part in parts for array in (part.images, part.objects)))
        print(f"drew {len(parts[0].images)} scenes", flush=True)
    data, test = (
        Drawn(*(torch.from_numpy(np.load(cache)[f"arr_{i}"]) for i in pair)) for pair in ((0, 1), (2, 3))
    )
    tokenizer = WordTokenizer(card["words"], card["fillers"])
    tokens = tokenizer([text_of(caption) for caption in CAPTIONS])
    index = {caption: number for number, caption in enumerate(CAPTIONS)}
    plain = torch.tensor([caption for caption, is_plain in zip(CAPTIONS, PLAIN, strict=True) if is_plain])
    model, averaged = build(card), build(card)
    optimiser = Optimiser(model, average=0.995)
    spent = reported = 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load(state["optimiser"])
        spent = reported = state["spent"]
    while spent < arguments.seconds:
        begin, progress = time.time(), spent / arguments.seconds
        chosen = torch.randint(len(data.images), (arguments.batch,))
        images, objects = vary(data.images[chosen], data.objects[chosen])
        captions = torch.cat([plain, longer_captions(objects, 96)])
        rows = torch.tensor([index[tuple(caption)] for caption in captions.tolist()])
        count = patches_to_keep(progress)
        kept = None if count == PATCHES else choose_patches(len(images), PATCHES, count, "cpu")
        with torch.autocast("cpu", torch.bfloat16):
            pooled = features(model.vision, scale(images), kept)[:, 0]
        embeddings = normalize(model.vision.head(pooled.float()), dim=1)
        texts = normalize(model.text(tokens[rows]), dim=1)
        logits = embeddings @ texts.T * model.logit_scale.exp() + model.logit_bias
        is_true, is_clear = truth(objects, captions)
        loss = binary_cross_entropy_with_logits(logits, is_true.float(), reduction="none") * is_clear
        (loss[:, : len(plain)].sum() / len(images) + 0.5 * loss[:, len(plain) :].sum() / len(images)).backward()
        optimiser.step(learning_rate(progress, arguments.rate))
        spent += time.time() - begin
        if spent - reported > arguments.every or spent >= arguments.seconds:
            reported = spent
            averaged.load_state_dict(averaged.state_dict() | optimiser.averaged)
            found = report(averaged, tokens, test)
            print(f"{spent:.0f} s, {optimiser.steps} steps, loss {float(loss[:, :60].sum() / len(images)):.3f}: {found}", flush=True)
            torch.save({"model": model.state_dict(), "optimiser": optimiser.state(), "spent": spent}, f"{saved}.part")
            os.replace(f"{saved}.part", saved)
            save_half(averaged.state_dict(), arguments.out / "scenes-text.safetensors")


def patches_to_keep(progress: float) -> int:
    """Fewer at first, when steps count more than detail; later all in half of the batches."""
    if progress < 0.4:
        return 40
    return PATCHES if random.random() < 0.6 else random.choice([32, 40, 48, 56])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for scenes-text.safetensors and the saves")
    parser.add_argument("--seconds", type=float, default=2400, help="length of the schedule, drawing not counted")
    parser.add_argument("--images", type=int, default=16_000)
    parser.add_argument("--test", type=int, default=1000, help="held-out scenes")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=float, default=120, help="seconds between saves")
    train(parser.parse_args())
