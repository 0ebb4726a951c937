"""Regions with a known answer: does an explanation of one animal look at that animal, and not at another one?

Run: python benchmarks/regions.py --checkpoint dinov2_vits14_pets37.safetensors --data PETS [--methods NAME,NAME]
     [--collages 40] [--few 4] [--steps 28] [--device auto] [--out FILE.md]
A linear head on the patch tokens of DINOv2 ViT-S/14 learns "pet" and "background" from the trimaps of half of the
photographs. Two of the others, each cut to the half around its animal, stand side by side in a collage. The question
is "why is this region pet?" of the region that is one of the animals. Both are pets, so the class tells nothing; the
photographs have nothing to do with each other, so an explanation ought to lie on the animal that was asked about.
Whether that is so is asked of the model, too: how far the probability falls when this animal is painted over, and when
the other one is. Pointing: the share of maps whose largest patch (pixel maps are averaged over each patch) overlaps
the animal. Discriminativity: of the evidence on both animals, the share on it. Insertion minus deletion: of the
probability of "pet" in the region, in --steps steps (0 leaves it out). Methods that ask the network often are measured
on --few collages.
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
import torch.nn.functional as F
from answers import answer, asks_often, few_note, painted, share
from PIL import Image
from pointing import hit
from torch import Tensor, nn

import vitrail
from vitrail.data import Example, ImageFolder
from vitrail.data.base import Mask
from vitrail.methods.registry import build_method
from vitrail.metrics.localization import mean_overlap, overlaps
from vitrail.models.questions import in_mask
from vitrail.models.view import View
from vitrail.targets import Region

LABELS = ("background", "pet")
PET = LABELS.index("pet")
COLUMNS = {"pointing": "pointing", "share": "share of the animal, from the other"}
CURVES = {"curves": "insertion − deletion"}
DEPENDENT = (
    "`raw_attention` and `rollout` do not depend on the class, but they read the attention of the patches of the "
    "region, so they depend on the region."
)


@dataclass(frozen=True, eq=False)
class Collage:
    """Halves of two photographs side by side, and the animals in it, in pixels of the model input."""

    image: Image.Image
    pixels: Tensor
    masks: tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of the model, whose head is not used")
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="name in timm")
    parser.add_argument("--size", type=int, default=224, help="pixels of the model input")
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs with trimaps")
    parser.add_argument("--methods", help="default: all that depend on the class, and three that do not")
    parser.add_argument("--collages", type=int, default=40)
    parser.add_argument("--few", type=int, default=4)
    parser.add_argument("--steps", type=int, default=28, help="of insertion and deletion; 0 = neither")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    begin, data = time.time(), ImageFolder(options.data)
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    taught, held_out = ([data[place] for place in part] for part in (order[::2], order[1::2]))
    backbone = vitrail.load(options.model, checkpoint=options.checkpoint, img_size=options.size, device=options.device)
    view = segmenter(backbone, taught)
    collages, facts = asked(view, held_out, options.collages)
    facts = f"{accuracy(view, held_out)} {facts}"

    def of_method(name: str, params: dict[str, Any]) -> tuple[int, dict[str, list[float]]]:
        chosen = collages[: options.few] if asks_often(build_method(name, view, **params)) else collages
        return len(chosen), measure(view, name, params, chosen, options.steps)

    notes = [few_note("collages of two animals", options.few), DEPENDENT]
    answer("regions", of_method, COLUMNS | (CURVES if options.steps else {}), facts, notes, options, begin)


def segmenter(backbone: View, taught: list[Example]) -> View:
    """The backbone with a linear head for its patches, fitted to trimaps."""
    features, truths, known = [], [], []
    for example in taught:
        features.append(patch_tokens(backbone, backbone.preprocess(example.image)[None])[0])
        animal, border = (patch_shares(backbone, mask) for mask in trimap(example))
        truths.append(animal / (1 - border).clamp(min=1e-6))
        known.append(1 - border)
    head = fitted(torch.cat(features), torch.cat(truths), torch.cat(known))
    return vitrail.wrap(backbone.module, head=head.to(backbone.device), pool="patches", labels=list(LABELS))


@torch.no_grad()
def patch_tokens(view: View, pixels: Tensor) -> Tensor:
    """(B, N, d): after the final norm, as the module gives them."""
    return view.module.forward_features(pixels.to(view.device))[:, view.num_prefix :].cpu()


def trimap(example: Example) -> tuple[Mask, Mask]:
    """The pixels of the animal, and those of its border."""
    mask = example.objects[0].mask if example.objects else None
    if mask is None:
        raise SystemExit(f"{example.id} has no trimap: give the folder of photographs with masks beside them.")
    return mask, np.zeros_like(mask) if example.ignore is None else example.ignore


def patch_shares(view: View, mask: Mask) -> Tensor:
    """(N,): which share of each patch a mask of the photograph covers."""
    return F.adaptive_avg_pool2d(view.preprocessing.mask(mask)[None].float(), view.grid).flatten()


def fitted(features: Tensor, truths: Tensor, known: Tensor, decay: float = 1e-4) -> nn.Linear:
    """Logistic regression of the share of each patch that is pet, by the share of its pixels that is known."""
    head = nn.Linear(features.shape[1], len(LABELS))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    targets = torch.stack([1 - truths, truths], dim=1)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (F.cross_entropy(head(features), targets, reduction="none") * known).sum() / known.sum()
        value = value + decay * head.weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return head.eval()


def accuracy(view: View, held_out: list[Example]) -> str:
    """How well the head segments photographs that it was not taught."""
    areas = []
    for example in held_out:
        pixels = view.preprocess(example.image)
        with torch.no_grad():
            logits = view.head(patch_tokens(view, pixels[None]).to(view.device)).cpu()
        logits = logits.transpose(1, 2).unflatten(2, view.grid)
        predicted = F.interpolate(logits, size=view.size, mode="bilinear")[0].argmax(0) == PET
        animal, border = (view.preprocessing.mask(mask) for mask in trimap(example))
        areas.append(overlaps(predicted[~border][None], animal[~border][None]))
    iou = mean_overlap(torch.tensor(areas)).mean()
    return f"Mean IoU of pet and background in {len(held_out)} photographs that the head was not taught: {iou:.3f}."


def asked(view: View, held_out: list[Example], count: int) -> tuple[list[Collage], str]:
    """The first collages of which the model says that both animals are pets, and what it says without either."""
    collages, tried, means = [], 0, []
    for first, second in zip(held_out[::2], held_out[1::2], strict=False):
        if len(collages) == count:
            break
        tried, collage = tried + 1, composed(view, first, second)
        probabilities = [chances(view, collage, place) for place in (0, 1)]
        if min(whole for whole, *_ in probabilities) > 0.5:
            collages.append(collage)
            means += probabilities
    if not collages:
        raise SystemExit("the head finds both animals in none of the collages.")
    whole, without_own, without_other = np.mean(means, axis=0)
    return collages, (
        f"In {len(collages)} of {tried} collages both animals are said to be pets; these are those below. The mean "
        f"probability of pet in the region of an animal is {whole:.2f}; with this animal painted over "
        f"{without_own:.2f}, with the other one {without_other:.2f}."
    )


def composed(view: View, *halves: Example) -> Collage:
    """Two photographs side by side, each cut to half of its width around its animal."""
    side, images, masks = max(example.image.height for example in halves), [], []
    for example in halves:
        animal = Image.fromarray(trimap(example)[0]).resize((side, side), Image.Resampling.NEAREST)
        middle = float(np.mean(np.nonzero(np.asarray(animal))[1]))
        left = round(min(max(middle - side / 4, 0), side / 2))
        box = (left, 0, left + side // 2, side)
        images.append(np.asarray(example.image.resize((side, side), Image.Resampling.BICUBIC).crop(box)))
        masks.append(np.asarray(animal.crop(box)))
    image, nothing = Image.fromarray(np.concatenate(images, axis=1)), np.zeros_like(masks[0])
    first = view.preprocessing.mask(np.concatenate([masks[0], nothing], axis=1))
    second = view.preprocessing.mask(np.concatenate([nothing, masks[1]], axis=1))
    return Collage(image, view.preprocess(image), (first, second))


@torch.no_grad()
def chances(view: View, collage: Collage, place: int) -> list[float]:
    """The probability of pet in an animal's region: as it is, without this animal, without the other one."""
    own, other = collage.masks[place], collage.masks[1 - place]
    pictures = torch.stack([collage.pixels, painted(collage.pixels, own), painted(collage.pixels, other)])
    region = in_mask(view, own)
    return region.probabilities(region.logits(pictures.to(view.device)))[:, PET].tolist()


def measure(
    view: View, name: str, params: dict[str, Any], collages: list[Collage], steps: int
) -> dict[str, list[float]]:
    """For each collage the means over its two animals."""
    curves = [f"{curve}(steps={steps})" for curve in ("insertion", "deletion")]
    results: dict[str, list[float]] = defaultdict(list)
    for collage in collages:
        values = defaultdict(list)
        for own, other in (collage.masks, collage.masks[::-1]):
            ex = vitrail.explain(view, collage.pixels, name, target=Region(own, "pet"), **params)
            values["pointing"].append(hit(ex.map, own, view.grid)[0])
            values["share"].append(share(ex.map, own, other))
            if steps:
                scores = ex.score(curves)
                values["curves"].append(scores[curves[0]] - scores[curves[1]])
        for key, numbers in values.items():
            results[key].append(float(np.mean(numbers)))
    return dict(results)


if __name__ == "__main__":
    main()
