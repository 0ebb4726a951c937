"""Prints the accuracy of the models that ship, from the files in the package.

python training/evaluate.py --tiny-imagenet FOLDER --photos FOLDER
Without --tiny-imagenet or --photos that part is left out; `scenes` and `scenes-text` need no data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import scenes_text
import tiny_imagenet
import torch
from kept_tokens import predict
from scenes import TEST_SEED, draw, scale
from shipping import load_shipped
from torch import Tensor

import vitrail

WEIGHTS = Path(__file__).parent.parent / "src" / "vitrail" / "weights"


def as_input(images: np.ndarray, device: str) -> Tensor:
    return tiny_imagenet.normalise(torch.from_numpy(images).to(device).permute(0, 3, 1, 2))


def percent(right: Tensor) -> str:
    return f"{100 * right.float().mean().item():.2f} %"


def in_top(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(dim=1)


def evaluate_photo(weights: Path, device: str, folder: Path | None, photos: Path | None) -> None:
    model, _ = load_shipped(weights, "photo")
    model.to(device)
    if folder:
        images, classes = tiny_imagenet.read_images(folder / "val.npz")
        labels, inputs = torch.from_numpy(classes).to(device), as_input(images, device)
        for name, share in (("all patches", 1.0), ("half of the patches, at random", 0.5)):
            logits = predict(model, inputs, share)
            top1, top5 = (percent(in_top(logits, labels, k)) for k in (1, 5))
            print(f"photo, {len(labels)} validation images, {name}: top-1 {top1}, top-5 {top5}")
    if photos:
        pictures, classes = tiny_imagenet.read_photos(photos)
        labels = torch.tensor(classes, device=device)
        for view in (tiny_imagenet.centre_crop, tiny_imagenet.squash):
            logits = predict(model, as_input(np.stack([view(picture) for picture in pictures]), device))
            top1, top5 = (int(in_top(logits, labels, k).sum()) for k in (1, 5))
            print(f"photo, {len(labels)} photographs, {view.__name__}: top-1 {top1}, top-5 {top5}")


def evaluate_scenes(weights: Path, device: str, count: int) -> None:
    model, _ = load_shipped(weights, "scenes")
    model.to(device)
    for objects in (1, 2):
        images, targets = (part.to(device) for part in draw(count, TEST_SEED, objects))
        for name, share in (("all patches", 1.0), ("half of the patches, at random", 0.5)):
            top = predict(model, scale(images), share).topk(objects, dim=1).indices
            right = targets.gather(1, top).sum(dim=1) == objects
            print(f"scenes, {count} held-out scenes of {objects}, {name}: all in the top {objects} {percent(right)}")


def evaluate_scenes_text(count: int) -> None:
    view = vitrail.load("scenes-text", device="cpu")
    tokens = view.tokenizer([scenes_text.text_of(caption) for caption in scenes_text.CAPTIONS])
    test = scenes_text.draw(count, scenes_text.TEST_SEED)
    print(f"scenes-text, {count} held-out scenes: {scenes_text.report(view.module.model, tokens, test)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny-imagenet", type=Path, help="folder with val.npz")
    parser.add_argument("--photos", type=Path, help="folder of photographs with labels.tsv")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of the weights and cards")
    parser.add_argument("--scenes", type=int, default=4000, help="held-out scenes of one and of two objects")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    evaluate_photo(arguments.weights, device, arguments.tiny_imagenet, arguments.photos)
    evaluate_scenes(arguments.weights, device, arguments.scenes)
    evaluate_scenes_text(arguments.scenes)
