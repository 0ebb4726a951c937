"""Overhead of the mask methods over the forward passes they need.

Run: python benchmarks/masks.py [--model vit_tiny_patch16_224] [--masks 1024] [--delta 0.02] [--device cpu]
TIS is compared with bare encodes of half of the tokens at the best of several chunk sizes, ViT-CX with 2K + 1 bare
forward passes, in one process, best of three. Memory is what one call adds to the peak of a fresh process that has
loaded the model. On CUDA both run in bf16 and in fp32, their maps are compared by rank correlation, and 64 images are
explained in one batch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor

import timm
import torch
from PIL import Image
from scipy.stats import spearmanr
from timing import best, seconds

import vitrail
from vitrail.data import Scenes
from vitrail.methods.registry import build_method
from vitrail.models.vit import ViT

CHUNKS = (16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--masks", type=int, default=1024)
    parser.add_argument("--delta", type=float, default=0.02)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    calls = {"tis": {"masks": options.masks}, "vit_cx": {"delta": options.delta}}
    cuda = options.device == "cuda"
    # measured first: a child process inherits the peak memory of its parent
    memory = {} if cuda else {name: memory_of(options.model, name, params) for name, params in calls.items()}
    view, image = prepared(options.model, options.device)
    print(f"{options.model} (random weights), {options.device}, {torch.get_num_threads()} threads")
    if cuda:
        for name, params in calls.items():
            compare_precisions(view, image, name, params)
        return
    measure_tis(view, image, options.masks)
    measure_vit_cx(view, image, options.delta)
    for name, added in memory.items():
        print(f"{name} in a fresh process: peak memory + {added:.0f} MB")


def prepared(model: str, device: str) -> tuple[ViT, torch.Tensor]:
    torch.manual_seed(0)
    view = vitrail.wrap(timm.create_model(model, pretrained=False).eval().to(device))
    return view, view.preprocess(Image.fromarray(Scenes(1, seed=0)[0].image))[None].to(device)


def memory_of(model: str, name: str, params: dict[str, float]) -> float:
    """MB that one call adds to the peak memory of a fresh process with the model."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(added_by, model, name, params).result()


def added_by(model: str, name: str, params: dict[str, float]) -> float:
    view, image = prepared(model, "cpu")
    before = peak()
    build_method(name, view, **params).attribute(image, 0)
    return peak() - before


def compare_precisions(view: ViT, image: torch.Tensor, name: str, params: dict[str, float]) -> None:
    """One image in bf16 and fp32, the rank correlation of the two maps, and 64 images in one batch."""
    maps, timings = {}, []
    for precision in ("full", "auto"):
        method = build_method(name, view, precision=precision, **params)
        attribution = [method.explain(image, 0) for _ in range(3)][-1]  # warm-up
        maps[precision] = attribution.map.flatten().cpu()
        spent = min(seconds(lambda method=method: method.explain(image, 0)) for _ in range(10))
        timings.append(f"{'bf16' if precision == 'auto' else 'fp32'} {1000 * spent:.1f} ms")
    pictures = [Image.fromarray(scene.image) for scene in Scenes(64, seed=1)]
    images = torch.stack([view.preprocess(picture) for picture in pictures]).to(image.device)
    method.explain(images, 0)
    torch.cuda.reset_peak_memory_stats()
    rate = 64 / seconds(lambda: method.explain(images, 0))
    agreement = spearmanr(maps["full"], maps["auto"]).statistic
    peak_memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name} ({int(attribution.extras['masks'])} masks): {', '.join(timings)}; rank correlation {agreement:.6f}")
    print(f"  64 images in bf16: {rate:.1f} images/s, peak memory {peak_memory:.1f} GiB")


def measure_tis(view: ViT, image: torch.Tensor, masks: int) -> None:
    patches = view.grid[0] * view.grid[1]
    keep = torch.rand((masks, patches), device=image.device).argsort(1)[:, : patches // 2]
    with torch.inference_mode():
        tokens = view.embed(image)

        def bare(chunk: int) -> None:
            for start in range(0, masks, chunk):
                view.encode(tokens, keep[start : start + chunk])

        floor = min(best(lambda c=chunk: bare(c)) for chunk in CHUNKS)
    spent = best(lambda: build_method("tis", view, masks=masks).attribute(image, 0))
    print(f"tis, {masks} masks: {spent:.2f} s; bare encodes {floor:.2f} s; ratio {spent / floor:.2f}")


def measure_vit_cx(view: ViT, image: torch.Tensor, delta: float) -> None:
    method, attributions = build_method("vit_cx", view, delta=delta), []
    spent = best(lambda: attributions.append(method.explain(image, 0)))
    forwards = 2 * int(attributions[0].extras["masks"]) + 1
    with torch.inference_mode():

        def bare(chunk: int) -> None:
            for start in range(0, forwards, chunk):
                view.logits(image.expand(min(chunk, forwards - start), -1, -1, -1))

        floor = min(best(lambda c=chunk: bare(c)) for chunk in CHUNKS)
    print(
        f"vit_cx, {forwards // 2} masks: {spent:.2f} s; {forwards} bare forwards {floor:.2f} s; "
        f"ratio {spent / floor:.2f}"
    )


def peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
