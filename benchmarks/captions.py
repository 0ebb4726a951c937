"""Captions with a known answer: does an explanation of "a red star" find it beside a blue star and a red ring?

Run: python benchmarks/captions.py [--methods NAME,NAME] [--scenes 100] [--few 10] [--captions 1000] [--out FILE.md]
Caption: the share of objects whose caption scores higher than three wrong ones: a colour that is not in the picture, a
shape that is not, and, where there is such a caption, the colour of one object with the shape of another.
Sizes, places: the share of objects of which the true size or side is preferred to the opposite one; 50 % is chance, and
the mean over the words is taken, because more objects are small than large.
Pointing: the share of maps whose largest patch (pixel maps are averaged over each patch) overlaps the named object, in
pictures of two objects of one colour, of two objects of one shape, and of three objects: red star, red ring, blue star.
Discriminativity, in the latter: of the evidence for "a red star" on the star and the other object, the share on the
star. Methods that ask the network often are measured on --few scenes of each kind.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from answers import asks_often, default_calls, share
from PIL import Image
from pointing import hit
from torch import Tensor

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.data import CaptionedScene, CaptionedScenes, captions
from vitrail.data.captions import COLOURS, describe
from vitrail.data.drawing import SHAPES
from vitrail.files import save_atomically
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.models.view import View

SEED = 2_000_001  # neither of training nor of testing
KINDS = {"one colour": (2, "colour"), "one shape": (2, "shape"), "three objects": (3, "colour")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", help="default: all that depend on the class, and three that do not")
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--captions", type=int, default=1000, help="scenes on which captions are told apart")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    begin, view = time.time(), vitrail.load("scenes-text", device=options.device)
    right, count = caption_accuracy(view, CaptionedScenes(options.captions, SEED))
    accuracy = f"Right caption of four: {right:.2%} of {count} objects in {options.captions} scenes."
    words = word_accuracy(view, CaptionedScenes(options.captions, SEED))
    for kind, names in (("Sizes", captions.SIZES), ("Places", (*captions.ACROSS, *captions.DOWN))):
        shares = ", ".join(f"{name} {words[name]:.1%}" for name in names)
        accuracy += f" {kind} told from their opposites: {np.mean([words[name] for name in names]):.1%} ({shares})."
    print(accuracy, flush=True)
    calls = split_list(options.methods) if options.methods else default_calls()
    rows = []
    for call in calls:
        name, params = split_call(call)
        method = build_method(name, view, **params)
        scenes = options.few if asks_often(method) else options.scenes
        rows.append({"method": call, "scenes": scenes, **measure(view, method, scenes)})
        print(rows[-1], flush=True)
    text = report(pd.DataFrame(rows), accuracy, options, time.time() - begin)
    print(text)
    if options.out:
        save_atomically(options.out, lambda file: file.write(text.encode()))


def pixels(view: View, scenes: Iterable[CaptionedScene]) -> Tensor:
    return torch.stack([view.preprocess(Image.fromarray(scene.image)) for scene in scenes])


def caption_accuracy(view: View, scenes: CaptionedScenes) -> tuple[float, int]:
    """How often the caption of an object is the best of four, and the number of objects."""
    hits, numbers = [], {label: number for number, label in enumerate(CaptionedScenes.labels)}
    for start in range(0, len(scenes), 100):
        batch = scenes[start : start + 100]
        with torch.no_grad():
            logits = view.logits(pixels(view, batch)).cpu()
        for row, scene in zip(logits, batch, strict=True):
            for item in scene.objects:
                wrong = [numbers[text] for text in wrong_captions(scene, item.colour, item.shape, len(hits))]
                hits.append(bool((row[item.label] > row[wrong]).all()))
    return float(np.mean(hits)), len(hits)


def word_accuracy(view: View, scenes: CaptionedScenes) -> dict[str, float]:
    """Word for a size or a side → how often the caption with it is preferred, where it is true, to the opposite one."""
    pairs = (tuple(captions.SIZES), captions.ACROSS, captions.DOWN)
    opposite = {word: other for pair in pairs for word, other in (pair, pair[::-1])}
    hits: dict[str, list[bool]] = {word: [] for word in opposite}
    for start in range(0, len(scenes), 100):
        batch = scenes[start : start + 100]
        asked = [
            (number, word, *(_with_word(item, name) for name in (word, opposite[word])))
            for number, scene in enumerate(batch)
            for item in scene.objects
            for word in (item.size, *item.places)
        ]
        further = view.asked_about([text for *_, true, false in asked for text in (true, false)])
        with torch.no_grad():
            logits = further.logits(pixels(view, batch)).cpu()
        for number, word, true, false in asked:
            hits[word].append(
                bool(logits[number, further.class_index(true)] > logits[number, further.class_index(false)])
            )
    return {word: float(np.mean(values)) for word, values in hits.items()}


def _with_word(item: captions.CaptionedObject, word: str) -> str:
    size, place = (word, "") if word in captions.SIZES else ("", word)
    return describe(item.shape, item.colour, size, place)


def wrong_captions(scene: CaptionedScene, colour: str, shape: str, seed: int) -> list[str]:
    """Three captions that are not true of any object of the scene."""
    dice, present = random.Random(seed), {(item.colour, item.shape) for item in scene.objects}
    colours, shapes = {item.colour for item in scene.objects}, {item.shape for item in scene.objects}
    other_colours = [(other, shape) for other in COLOURS if other not in colours]
    other_shapes = [(colour, other) for other in SHAPES if other not in shapes]
    mixed = sorted(pair for pair in product(colours, shapes) if pair not in present)
    mixed = [pair for pair in mixed if colour in pair or shape in pair] or mixed
    chosen = [dice.choice(other_colours), dice.choice(other_shapes)]
    chosen.append(dice.choice([pair for pair in mixed or other_colours if pair not in chosen]))
    return [describe(shape, colour) for colour, shape in chosen]


def measure(view: View, method: Method, count: int) -> dict[str, float]:
    """Pointing in each kind of scene, and how the evidence for the first of three objects is shared out."""
    results: dict[str, float] = {}
    for kind, (objects, shared) in KINDS.items():
        hits, shares = [], []
        for scene, maps in explained(view, method, CaptionedScenes(count, SEED, objects, shared)):
            masks = [torch.from_numpy(item.mask) for item in scene.objects]
            hits += [hit(values, mask)[0] for values, mask in zip(maps, masks, strict=True)]
            shares.append([share(maps[0], masks[0], other) for other in masks[1:]])
        results[kind] = float(np.mean(hits))
        if objects == 3:
            same_colour, same_shape = np.mean(shares, axis=0)
            results |= {"from the red ring": float(same_colour), "from the blue star": float(same_shape)}
    return results


def explained(
    view: View, method: Method, scenes: CaptionedScenes, batch: int = 10
) -> Iterator[tuple[CaptionedScene, Tensor]]:
    """Each scene with the maps of its captions."""
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        images = pixels(view, [scene for scene in part for _ in scene.objects])
        maps = method.attribute(images, [item.label for scene in part for item in scene.objects]).cpu()
        yield from zip(part, maps.split([len(scene.objects) for scene in part]), strict=True)


def report(table: pd.DataFrame, accuracy: str, options: argparse.Namespace, seconds: float) -> str:
    """The table in Markdown, methods measured on as many scenes together: few scenes rank nothing."""
    table = table.sort_values(["scenes", "three objects"], ascending=False, kind="stable")
    columns = [column for column in table.columns if column not in ("method", "scenes")]
    lines = [
        "# captions",
        "",
        f"`python benchmarks/captions.py --scenes {options.scenes} --few {options.few} --captions {options.captions}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, vitrail {vitrail.__version__}, torch {torch.__version__}, {platform.machine()} "
        f"{options.device}, {seconds:.0f} s. {accuracy}",
        "",
        f"{options.scenes} scenes of three objects are {3 * options.scenes} maps, {options.few} are {3 * options.few}: "
        f"there one map is {1 / (3 * options.few):.2f}, so those rows show that a method works and rank nothing.",
        "",
        "The model was taught with masks which caption belongs to a patch, so its patches know their object: methods "
        "may point better here than on a model that saw captions alone.",
        "",
        f"| method | scenes of each kind | pointing: {' | '.join(columns)} |".replace(
            "from the red ring", "share of the red star, from the red ring"
        ),
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for _, row in table.iterrows():
        cells = [f"{row[column]:.2f}" for column in columns]
        lines.append(f"| `{row['method']}` | {row['scenes']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
