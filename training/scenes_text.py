"""Trains the embedded model `scenes-text` on captioned scenes: `python training/scenes_text.py --out FOLDER`.

The image tower starts from the weights of `scenes`, which knows the shapes; what it must learn is which colour goes
with which shape. A picture is the mean of its patches, so the embeddings of captions are kept apart: were that of "a
red star" the sum of red and star, a red star and a blue ring would look like a red ring and a blue star. For most of
the run the patches are taught too: the embedding of a patch on an object is compared with the caption of that object.
Runs on one core of a CPU; the same command goes on from the last save.
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
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from vitrail.data.captions import ACROSS, ANYTHING, COLOURS, DOWN, SIZES, CaptionedScene, CaptionedScenes, describe
from vitrail.data.drawing import SHAPES
from vitrail.models.captions import CaptionModel, WordTokenizer

WEIGHTS = Path(__file__).parent.parent / "src" / "vitrail" / "weights"
TRAIN_SEED, TEST_SEED = 2, 1_000_002
SIDE = 8  # patches
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
NUMBERS = {caption: number for number, caption in enumerate(CAPTIONS)}
PLAIN = [caption[0] == caption[3] == caption[4] == -1 < min(caption[1:3]) for caption in CAPTIONS]  # "a red star"


def text_of(caption: tuple[int, ...]) -> str:
    size, colour, shape, across, down = caption
    names = ("", *SHAPE_NAMES)[shape + 1] or ANYTHING, ("", *COLOUR_NAMES)[colour + 1], ("", *SIZE_NAMES)[size + 1]
    return describe(*names, ("", *ACROSS)[across + 1] or ("", *DOWN)[down + 1])


@dataclass
class Drawn:
    """Scenes as tensors.

    Attributes:
        images: uint8 (n, 3, 64, 64).
        objects: (n, 3, 5), numbers by ``DISTINCT``; −1 = on neither side, −2 = there is no such object.
        owners: (n, 8, 8), the object that covers most of a patch, −1 = none covers a quarter.
    """

    images: Tensor
    objects: Tensor
    owners: Tensor

    def __getitem__(self, chosen: Tensor) -> Drawn:
        return Drawn(self.images[chosen], self.objects[chosen], self.owners[chosen])


def _draw_part(indices: range, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scenes = CaptionedScenes(indices.stop, seed)[indices.start :]
    table = np.full((len(scenes), OBJECTS, len(DISTINCT)), -2, dtype=np.int8)
    owners = np.stack([_owners(scene) for scene in scenes])
    for row, scene in zip(table, scenes, strict=True):
        for place, item in enumerate(scene.objects):
            sides = [next((names.index(side) for side in item.places if side in names), -1) for names in (ACROSS, DOWN)]
            look = SIZE_NAMES.index(item.size), COLOUR_NAMES.index(item.colour), SHAPE_NAMES.index(item.shape)
            row[place] = *look, *sides
    return np.stack([scene.image.transpose(2, 0, 1) for scene in scenes]), table, owners


def _owners(scene: CaptionedScene) -> np.ndarray:
    masks = np.stack([item.mask for item in scene.objects])
    covered = masks.reshape(len(masks), SIDE, 8, SIDE, 8).mean((2, 4))
    return np.where(covered.max(0) < 0.25, -1, covered.argmax(0)).astype(np.int8)


def draw(count: int, seed: int) -> Drawn:
    """Scenes on all cores."""
    parts = [range(start, min(start + 250, count)) for start in range(0, count, 250)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        drawn = zip(*pool.map(_draw_part, parts, [seed] * len(parts)), strict=True)
        images, objects, owners = (torch.from_numpy(np.concatenate(arrays)) for arrays in drawn)
    return Drawn(images, objects, owners)


def vary(scenes: Drawn) -> Drawn:
    """Mirrors, turns and recolours a batch, and says of its objects what is true afterwards."""
    images, owners = scenes.images, scenes.owners.long()
    size, colour, shape, across, down = scenes.objects.long().unbind(2)
    if random.random() < 0.5:
        images, owners, across = images.flip(3), owners.flip(2), _other_side(across)
    if random.random() < 0.5:
        images, owners, down = images.flip(2), owners.flip(1), _other_side(down)
    if random.random() < 0.5:
        images, owners, across, down = images.transpose(2, 3), owners.transpose(1, 2), down, across
    channels = random.choice(list(permutations(range(3))))
    renamed = torch.tensor([_recoloured(number, channels) for number in range(6)])
    colour = torch.where(colour < 0, colour, renamed[colour.clamp(min=0)])
    return Drawn(images[:, list(channels)], torch.stack([size, colour, shape, across, down], dim=2), owners)


def _other_side(side: Tensor) -> Tensor:
    return torch.where(side < 0, side, 1 - side)


def _recoloured(colour: int, channels: tuple[int, ...]) -> int:
    """The colour that a colour becomes when channel i is the former channels[i]."""
    bright = [(0,), (0, 1), (1,), (1, 2), (2,), (0, 2)]  # channels of red, yellow, green, cyan, blue and magenta
    return bright.index(tuple(place for place in range(3) if channels[place] in bright[colour]))


def truth(objects: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K): whether a caption is true of some object, and whether that is clear: it may be on neither side."""
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
    """The right caption against a wrong colour, a wrong shape, and a colour and a shape of two different objects."""
    model.eval()
    embeddings = torch.cat([model.vision(scale(part)) for part in test.images.split(250)])
    captions = torch.tensor(CAPTIONS)
    scores = normalize(embeddings, dim=1) @ normalize(model.text(tokens), dim=1).T
    is_true, is_clear = truth(test.objects.long(), captions)
    logits = scores * model.logit_scale.exp() + model.logit_bias
    plain = torch.tensor(PLAIN)
    lowest = scores[:, plain].masked_fill(~is_true[:, plain], 9).amin(1)
    highest = scores[:, plain].masked_fill(is_true[:, plain], -9).amax(1)
    right = ((logits > 0) == is_true)[is_clear]
    hits = []
    for row, objects in zip(scores, test.objects.tolist(), strict=True):
        present = {(item[1], item[2]) for item in objects if item[0] >= 0}
        for colour, shape in present:
            dice, (colours, shapes) = random.Random(len(hits)), map(set, zip(*present, strict=True))
            swapped = [(c, s) for c, s in product(colours, shapes) if (c, s) not in present]
            swapped = [(c, s) for c, s in swapped if c == colour or s == shape] or swapped
            new_colours = [(c, shape) for c in range(6) if c not in colours]
            new_shapes = [(colour, s) for s in range(10) if s not in shapes]
            rivals = [dice.choice(rivals) for rivals in (new_colours, new_shapes, swapped or new_colours)]
            values = [float(row[NUMBERS[-1, c, s, -1, -1]]) for c, s in [(colour, shape), *rivals]]
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


def prepare(folder: Path, images: int, test: int) -> tuple[Drawn, Drawn]:
    """Scenes to train on and held-out ones, drawn once."""
    cache = folder / "scenes-text.npz"
    if not cache.exists():
        parts = [draw(images, TRAIN_SEED), draw(test, TEST_SEED)]
        np.savez(cache, *(array.numpy() for part in parts for array in (part.images, part.objects, part.owners)))
        print(f"drew {images} scenes", flush=True)
    arrays = [torch.from_numpy(array) for array in np.load(cache).values()]
    return Drawn(*arrays[:3]), Drawn(*arrays[3:])


def overlap(texts: Tensor) -> Tensor:
    """How far from orthogonal embeddings of length 1 are: the squared cosines to all others, in the mean."""
    return (texts @ texts.T - torch.eye(len(texts))).square().sum() / len(texts)


def spread(model: CaptionModel, tokens: Tensor, steps: int = 300) -> None:
    """Trains the text tower alone until the plain captions are nearly orthogonal."""
    optimiser = torch.optim.AdamW(model.text.parameters(), 1e-3)
    for _ in range(steps):
        loss = overlap(normalize(model.text(tokens[torch.tensor(PLAIN)]), dim=1))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    print(f"squared cosines of a caption to all others: {float(loss.detach()):.3f}", flush=True)


def loss_of(model: CaptionModel, tokens: Tensor, scenes: Drawn, progress: float) -> Tensor:
    """Which captions are true of each scene, and at first which one belongs to each patch."""
    plain = torch.tensor([caption for caption, is_plain in zip(CAPTIONS, PLAIN, strict=True) if is_plain])
    captions = torch.cat([plain, longer_captions(scenes.objects, 96)])
    rows = torch.tensor([NUMBERS[tuple(caption)] for caption in captions.tolist()])
    images, count = scenes.images, patches_to_keep(progress)
    kept = None if count == PATCHES else choose_patches(len(images), PATCHES, count, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        patches = features(model.vision, scale(images), kept)[:, 1:].float()
    embeddings = normalize(model.vision.head(patches.mean(1)), dim=1)
    texts = normalize(model.text(tokens[rows]), dim=1)
    logits = embeddings @ texts.T * model.logit_scale.exp() + model.logit_bias
    is_true, is_clear = truth(scenes.objects, captions)
    weight = is_clear * torch.where(torch.arange(len(captions)) < len(plain), 1.0, 0.5)
    loss = binary_cross_entropy_with_logits(logits, is_true.float(), weight, reduction="sum") / len(images)
    loss = loss + overlap(texts[: len(plain)])
    return loss + 2 * patch_loss(model, patches, scenes, kept, texts[: len(plain)]) if progress < 0.7 else loss


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    data, test = prepare(arguments.out, arguments.images, arguments.test)
    card = json.loads((WEIGHTS / "scenes-text.json").read_text(encoding="utf-8"))
    tokens = WordTokenizer(card["words"], card["fillers"])([text_of(caption) for caption in CAPTIONS])
    model, averaged, saved = build(card), build(card), arguments.out / "scenes-text.pt"
    state = torch.load(saved, weights_only=True) if saved.exists() else None
    if state is None:
        spread(model, tokens)
    else:
        model.load_state_dict(state["model"])
    optimiser, spent = Optimiser(model, average=0.995), 0.0
    if state is not None:
        optimiser.load(state["optimiser"])
        spent = state["spent"]
    reported = spent
    while spent < arguments.seconds:
        begin, progress = time.time(), spent / arguments.seconds
        scenes = vary(data[torch.randint(len(data.images), (arguments.batch,))])
        loss = loss_of(model, tokens, scenes, progress)
        loss.backward()
        optimiser.step(learning_rate(progress, arguments.rate))
        spent += time.time() - begin
        if spent - reported > arguments.every or spent >= arguments.seconds:
            reported = spent
            averaged.load_state_dict(averaged.state_dict() | optimiser.averaged)
            results = f"loss {float(loss.detach()):.3f}: {report(averaged, tokens, test)}"
            print(f"{spent:.0f} s, {optimiser.steps} steps, {results}", flush=True)
            torch.save({"model": model.state_dict(), "optimiser": optimiser.state(), "spent": spent}, f"{saved}.part")
            os.replace(f"{saved}.part", saved)
            save_half(averaged.state_dict(), arguments.out / "scenes-text.safetensors")


def patch_loss(model: CaptionModel, tokens: Tensor, scenes: Drawn, kept: Tensor | None, texts: Tensor) -> Tensor:
    """Which caption belongs to a patch that lies on an object: cross-entropy over the plain ones."""
    owners = scenes.owners.flatten(1)
    owners = owners if kept is None else owners.gather(1, kept)
    colour, shape = (scenes.objects[..., column].gather(1, owners.clamp(min=0)) for column in (1, 2))
    on_object = owners >= 0
    embeddings = normalize(model.vision.head(tokens[on_object]), dim=1)
    number = (colour * len(SHAPE_NAMES) + shape)[on_object]
    return cross_entropy(embeddings @ texts.T * model.logit_scale.exp(), number)


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
