"""Is the agreement of ``ex.trust()`` calibrated? Its rank correlation, over images, with pixel insertion − deletion.

Run: python benchmarks/trust.py scenes photo [NAME=CHECKPOINT:FOLDER …] [--images 100] [--method …] [--plot FILE.csv]
``scenes`` and ``photo`` are the embedded models, on generated scenes and on the images of --photos. A further model is
a timm name with a checkpoint and a folder of images: vit_tiny_patch16_224=weights.safetensors:photos/. The removal part
of trust is left out, since it measures what deletion measures. Intervals: bootstrap over images. ``--plot`` writes a
row per image, which ``python tools/pictures.py trust`` draws.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.stats import spearmanr

import vitrail
from vitrail.data import ImageFolder, Scenes
from vitrail.models.view import View


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--photos", type=Path, help="images for the embedded model photo")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--method", default="decompx.skipplus")
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    for spec in options.models:
        view, pictures = opened(spec, options)
        curves = [f"{name}(steps={options.steps})" for name in ("insertion", "deletion")]
        values = []
        for start in range(0, len(pictures), 32):
            for ex in vitrail.explain(view, pictures[start : start + 32], options.method):
                scores = ex.score(curves)
                values.append((ex.trust().agreement, scores[curves[0]] - scores[curves[1]]))
        agreement, quality = np.array(values).T
        rho, low, high = correlation(agreement, quality)
        print(f"{view.name}: {len(values)} images, agreement {agreement.mean():.2f}, insertion − deletion "
              f"{quality.mean():.3f}, Spearman {rho:.2f} [{low:.2f}, {high:.2f}]", flush=True)  # fmt: skip
        rows += [(view.name, f"{a:.4f}", f"{q:.4f}") for a, q in values]
    if options.plot:
        with options.plot.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("model", "agreement", "quality"), *rows])


def opened(spec: str, options: Any) -> tuple[View, list[Any]]:
    """The model of a specification and its images."""
    draw = np.random.default_rng(0)
    if spec == "scenes":
        scenes = Scenes(options.images, seed=77, objects=2)
        return vitrail.load("scenes", device=options.device), [Image.fromarray(scene.image) for scene in scenes]
    if spec == "photo":
        view, folder = vitrail.load("photo", device=options.device), options.photos
    else:
        name, _, rest = spec.partition("=")
        checkpoint, _, folder = rest.partition(":")
        size = {"img_size": 224} if "dinov2" in name else {}
        view = vitrail.load(name, checkpoint=checkpoint, device=options.device, **size)
    data = ImageFolder(folder)
    images = [data.path(position) for position in range(len(data))]
    return view, [images[i] for i in draw.permutation(len(images))[: options.images]]


def correlation(left: np.ndarray, right: np.ndarray) -> tuple[float, float, float]:
    """Spearman's ρ with its 95 % bootstrap interval."""
    draw = np.random.default_rng(0)
    picks = [draw.integers(len(left), size=len(left)) for _ in range(2000)]
    low, high = np.percentile([spearmanr(left[pick], right[pick])[0] for pick in picks], [2.5, 97.5])
    return float(spearmanr(left, right)[0]), float(low), float(high)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
