"""How often methods point at the right one of two objects: scenes with two shapes, each explained once.

Run: python benchmarks/pointing.py [--methods tis,vit_cx,rise] [--scenes 200] [--device auto]
A hit: the maximum patch of the map (pixel maps are averaged over each patch) overlaps the mask of the target shape.
"both" is the share of scenes in which both maps hit, "pixel" the share of maps whose maximum, after bilinear
upsampling, lies on the shape.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.data import Scenes
from vitrail.methods.registry import build_method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="tis,vit_cx,rise")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    view = vitrail.load("scenes", device=options.device)
    for call in split_list(options.methods):
        name, params = split_call(call)
        method, hits = build_method(name, view, **params), []
        for scene in Scenes(options.scenes, seed=77, objects=2):
            image = view.preprocess(Image.fromarray(scene.image))
            maps = method.attribute(torch.stack([image, image]), [item.label for item in scene.objects]).cpu()
            pairs = zip(maps, scene.objects, strict=True)
            hits.append([hit(values, torch.from_numpy(item.mask)) for values, item in pairs])
        patch, pixel = np.moveaxis(np.array(hits), -1, 0)  # (scenes, objects) each
        print(f"{call}: hit {patch.mean():.1%}, both {patch.all(1).mean():.1%}, pixel {pixel.mean():.1%}", flush=True)


def hit(values: Tensor, mask: Tensor, grid: tuple[int, int] = (8, 8)) -> tuple[bool, bool]:
    """Whether the maximum patch of a map overlaps the mask, and whether its maximum pixel lies on it."""
    size = (mask.shape[0], mask.shape[1])
    patches = F.adaptive_avg_pool2d(values[None], grid).flatten()
    touched = F.adaptive_max_pool2d(mask[None].float(), grid).flatten()
    enlarged = F.interpolate(values[None, None], size=size, mode="bilinear")
    return bool(touched[patches.argmax()]), bool(mask.flatten()[enlarged.argmax()])


if __name__ == "__main__":
    main()
