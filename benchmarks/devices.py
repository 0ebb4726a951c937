"""Whether mask methods give the same maps on another device: rank correlation with the maps on the CPU.

Run: python benchmarks/devices.py [--device cuda] [--model scenes] [--images 3]
Each method runs with its defaults and one seed: masks, clusters and noise must be the same on every device, and only
rounding may differ. A second run on the device must be bitwise identical to the first.
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
    reference, view = (vitrail.load(options.model, device=device) for device in ("cpu", options.device))
    pictures = [Image.fromarray(scene.image) for scene in Scenes(options.images, seed=0)]
    images = torch.stack([reference.preprocess(picture) for picture in pictures])
    known = list_methods()
    for name in supported_methods(reference):
        if known[name].family != "mask":
            continue
        maps = attribute(view, name, images)
        identical = torch.equal(maps, attribute(view, name, images))
        pairs = zip(attribute(reference, name, images), maps, strict=True)
        agreement = [float(spearmanr(expected.flatten(), actual.flatten()).statistic) for expected, actual in pairs]
        repeated = "bitwise identical" if identical else "NOT bitwise identical"
        print(f"{name}: rank correlation at least {min(agreement):.4f}; second run {repeated}", flush=True)


def attribute(view: View, name: str, images: torch.Tensor) -> torch.Tensor:
    return build_method(name, view).attribute(images, 0).cpu()


if __name__ == "__main__":
    main()
