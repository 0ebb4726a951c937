"""How long the similarity of two photographs takes to split into pairs of patches, and whether they add up to it.

Run: python benchmarks/pairs.py --checkpoint dinov2_vits14_pets37.safetensors FIRST.jpg SECOND.jpg [--device cuda]
DINOv2 ViT-S/14, 224 × 224 pixels: 256 patches and 384 channels of an embedding, which take a backward pass each in
either image. What is timed is ``vitrail.similar``, reading the pictures included and loading the model not. On CUDA the
best of --times runs after a warm-up counts, on the CPU the first one; processor time is what all its cores spent on it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import timing
import torch

import vitrail
from vitrail.similarity import SimilarImages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs=2, type=Path)
    parser.add_argument("--checkpoint", type=Path, help="weights of the model; default: from the hub")
    parser.add_argument("--model", default="vit_small_patch14_dinov2")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    view = vitrail.load(options.model, checkpoint=options.checkpoint, img_size=options.size, device=options.device)
    results: list[SimilarImages] = []

    def split() -> None:
        results.append(vitrail.similar(view, *options.images, "decompx"))

    busy = time.process_time()
    first = timing.seconds(split)
    busy = time.process_time() - busy
    shortest = timing.best(split, options.times) if view.device.type == "cuda" else first
    place = torch.cuda.get_device_name() if view.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{view.name}, {options.size} pixels, on {place}, torch {torch.__version__}: {shortest:.2f} s, "
          f"the first time {first:.2f} s ({busy:.0f} s of processor time)")  # fmt: skip
    parts = results[0].first.extras
    print(f"similarity {results[0].score:.6f} = pairs of patches {parts['score_pairs']:.6f} + prefix tokens and biases "
          f"{parts['score_pairs_rest']:.6f}; off by "
          f"{results[0].score - parts['score_pairs'] - parts['score_pairs_rest']:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
