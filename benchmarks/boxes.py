"""Boxes with a known answer: does an explanation of a box find the object in it beside another one?

Run: python training/yolos.py --out FOLDER
     python benchmarks/boxes.py --checkpoint FOLDER [--methods NAME,NAME] [--scenes 100] [--few 10] [--out FILE.md]
The question is "why this box?" of the surest box that fits each object of a scene of two: its class is right, and
the overlap is at least one half. Scenes in which both have one count. Pointing: the share of maps whose largest patch
(pixel maps are averaged over each patch) overlaps the object in the box. Discriminativity: of the evidence on the two
objects, the share on that in the box. Whether the answer is the right one is asked of the model: how far the
probability of the box falls when its own object is painted over, and when the other one is. Methods that ask the
network often are measured on --few scenes.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answers import answer, asks_often, few_note, painted, share
from PIL import Image
from pointing import hit
from torch import Tensor

import vitrail
from vitrail.data import Scenes
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.models.detection import Detection, Detector

SEED = 2_000_003  # neither of training nor of testing
BATCH = 10
COLUMNS = {"pointing": "pointing", "share": "share of the object in the box, from the other"}
DEPENDENT = (
    "`raw_attention` and `rollout` do not depend on the class, but they read the attention of the detection token, so "
    "they depend on the box."
)


@dataclass(frozen=True, eq=False)
class Question:
    """One box of a scene: the model input, the detection token and class, the object in the box and the other one."""

    scene: int
    pixels: Tensor
    query: int
    label: int
    own: Tensor
    other: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a YOLOS of Hugging Face")
    parser.add_argument("--methods", help="default: all that depend on the class, and three that do not")
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    begin, view = time.time(), vitrail.load(f"hf:{options.checkpoint}", device=options.device)
    if not isinstance(view, Detector) or view.labels[:-1] != Scenes.labels:
        raise SystemExit(f"{options.checkpoint} holds no detector of scenes: train one with training/yolos.py.")
    questions, facts = questions_of(view, options.scenes)

    def of_method(name: str, params: dict[str, Any]) -> tuple[int, dict[str, list[float]]]:
        methods = {query: build_method(name, view.of_box(query), **params) for query in range(view.num_queries)}
        few = asks_often(methods[0])
        return measure(methods, [question for question in questions if not few or question.scene < options.few])

    notes = [few_note("scenes of two boxes", options.few), DEPENDENT]
    answer("boxes", of_method, COLUMNS, facts, notes, options, begin)


def questions_of(view: Detector, count: int) -> tuple[list[Question], str]:
    """The boxes of the first scenes of two objects in which both are detected, and how well the model does."""
    questions: list[Question] = []
    fits, number, seen = [], 0, 0
    for scene in Scenes(10 * count, SEED, objects=2):
        pixels, seen = view.preprocess(Image.fromarray(scene.image)), seen + 1
        detections = view.boxes(pixels)
        best = [surest(detections, item.label, item.box) for item in scene.objects]
        fits += [detection is not None for detection in best]
        if all(best):
            masks = [torch.from_numpy(item.mask) for item in scene.objects]
            for detection, own, other in zip(best, masks, masks[::-1], strict=True):
                assert detection is not None
                questions.append(Question(number, pixels, detection.query, detection.target, own, other))
            number += 1
        if number == count:
            break
    if not questions:
        raise SystemExit("the model detects both objects in none of the scenes: train it for longer.")
    facts = (
        f"The surest box of the right class fits {np.mean(fits):.1%} of {len(fits)} objects in {seen} scenes (overlap "
        f"at least one half); in {number} of these scenes both, which are those below. {causes(view, questions)}"
    )
    return questions, facts


def surest(detections: list[Detection], label: int, box: tuple[int, int, int, int]) -> Detection | None:
    """The surest detection of a class that fits a box; detections are sorted."""
    return next((found for found in detections if found.target == label and overlap(found.box, box) >= 0.5), None)


def overlap(box: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Intersection over union."""
    first, second = np.array(box), np.array(other)
    shared = np.clip(np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2]), 0, None).prod()
    return float(shared / ((first[2:] - first[:2]).prod() + (second[2:] - second[:2]).prod() - shared))


@torch.no_grad()
def causes(view: Detector, questions: list[Question]) -> str:
    """How far the probability of a box falls without its object, and without the other one."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for question in questions:
        pictures = [question.pixels, *(painted(question.pixels, mask) for mask in (question.own, question.other))]
        box = view.of_box(question.query)
        probabilities = box.probabilities(box.logits(torch.stack(pictures)))[:, question.label].tolist()
        for kind, probability in zip(("whole", "without own", "without other"), probabilities, strict=True):
            kinds[kind].append(probability)
    means = {kind: float(np.mean(values)) for kind, values in kinds.items()}
    return (
        f"The mean probability of the class of a box is {means['whole']:.2f}; with its own object painted over "
        f"{means['without own']:.2f}, with the other one {means['without other']:.2f}."
    )


def measure(methods: dict[int, Method], questions: list[Question]) -> tuple[int, dict[str, list[float]]]:
    """The number of scenes, and for each the mean over its two boxes of pointing and of discriminativity."""
    values: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for query, method in methods.items():
        of_query = [question for question in questions if question.query == query]
        for batch in (of_query[start : start + BATCH] for start in range(0, len(of_query), BATCH)):
            maps = method.attribute(torch.stack([question.pixels for question in batch]), [q.label for q in batch])
            for question, map_ in zip(batch, maps.float().cpu(), strict=True):
                pointed = hit(map_, question.own)[0]
                values[question.scene].append((pointed, share(map_, question.own, question.other)))
    means = np.array([np.mean(pair, axis=0) for pair in values.values()])
    return len(means), {"pointing": means[:, 0].tolist(), "share": means[:, 1].tolist()}


if __name__ == "__main__":
    main()
