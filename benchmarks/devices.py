"""Whether mask methods say the same on another device: the rank correlation of their maps with those on the CPU.

Run: python benchmarks/devices.py [--device cuda] [--model scenes] [--images 3]
Each method runs with its defaults and one seed: masks, clusters and noise must be the same everywhere, and only
rounding may differ. The second run on the device must give the same bits as the first.
"""

from __future__ import annotations

import argparse

import torch
from PIL import Image
from scipy.stats import spearmanr

import vitrail
from vitrail.data import Scenes
from vitrail.methods.registry import build_method, list_methods, supported_methods
from vitrail.models.view import View


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--images", type=int, default=3)
    options = parser.parse_args()
    here, there = (vitrail.load(options.model, device=device) for device in ("cpu", options.device))
    pictures = [Image.fromarray(scene.image) for scene in Scenes(options.images, seed=0)]
    images = torch.stack([here.preprocess(picture) for picture in pictures])
    known = list_methods()
    for name in supported_methods(here):
        if known[name].family != "mask":
            continue
        first = explained(there, name, images)
        same = torch.equal(first, explained(there, name, images))
        pairs = zip(explained(here, name, images), first, strict=True)
        agreement = [float(spearmanr(one.flatten(), other.flatten()).statistic) for one, other in pairs]
        told = "the same bits again" if same else "not the same bits again"
        print(f"{name}: rank correlation at least {min(agreement):.4f}; {told}", flush=True)


def explained(view: View, name: str, images: torch.Tensor) -> torch.Tensor:
    return build_method(name, view).attribute(images, 0).cpu()


if __name__ == "__main__":
    main()
