"""Throughput from files to pictures, beside the limits of the same run.

Run: python benchmarks/pipeline.py [images] [drawing] [start] [--model NAME] [--count 512] [--data DIR] [--device auto]

- images: photographs per second that are decoded, resized, and passed forwards and backwards through the network, each
  by itself; and that ``explain`` and ``evaluate`` take, of which the slowest of these is the limit.
- drawing: ``overlay``, ``picture`` and ``save``, one after another and in threads.
- start: ``vitrail explain`` in a new process, with warm files; and what importing torch and timm takes of it.

The photographs are those in DIR, else noise under the bundled ones, all 500 × 375 pixels; where there are too few, they
are used again. Without a name, everything is measured.
"""

from __future__ import annotations

import argparse
import io
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import seconds

import vitrail
from vitrail.api import images_at_once
from vitrail.data.images import read_image
from vitrail.explanation import Explanation
from vitrail.models.view import View
from vitrail.pipeline import ahead, threads
from vitrail.samples import SAMPLES, open_sample

SIZE = (500, 375)
PARTS = ("images", "drawing", "start")


def photographs(count: int, folder: Path, data: Path | None) -> list[Path]:
    """JPEG files: those of a folder in turn, or pictures made here."""
    if data is not None:
        paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        if not paths:
            raise SystemExit(f"there is no .jpg in {data}")
        return list(islice(cycle(paths), count))
    dice, paths = np.random.default_rng(0), []
    for number in range(min(count, 64)):
        picture = open_sample(SAMPLES[number % 3]).resize(SIZE, Image.Resampling.BICUBIC)
        noisy = np.asarray(picture, dtype=np.float32) + dice.normal(0, 8, (SIZE[1], SIZE[0], 1))
        paths.append(folder / f"{number}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return list(islice(cycle(paths), count))


def best_rate(work: Callable[[], object], count: int, times: int = 3) -> float:
    """Items per second, the best of several calls after a first one."""
    work()
    return count / min(seconds(work) for _ in range(times))


def core_rate(work: Callable[[Any], object], items: Sequence[Any], times: int = 3) -> float:
    """Items per second that a processor core spends on them one by one, whatever else the machine does."""

    def spent() -> float:
        begin = time.process_time()
        for item in items:
            work(item)
        return time.process_time() - begin

    spent()
    return len(items) / min(spent() for _ in range(times))


def in_threads(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Does the work as vitrail does: in its threads, in order."""
    with closing(ahead((partial(work, item) for item in items), 4 * threads())) as tasks:
        for task in tasks:
            task.result()


def line(name: str, rate: float, limit: float | None = None, unit: str = "images/s") -> None:
    share = "" if limit is None else f"  {rate / limit:6.1%} of the limit"
    print(f"  {name:<58}{rate:9.1f} {unit}{share}", flush=True)


def network_rate(view: View, pixels: torch.Tensor, size: int, backward: bool) -> float:
    """Images per second through the bare network, in the precision of its weights."""
    module: Any = view.module
    batch = pixels[:size].to(view.device, view.dtype)

    def forward() -> None:
        with torch.inference_mode():
            module(batch)

    def both() -> None:
        images = batch.clone().requires_grad_()
        torch.autograd.grad(module(images).sum(), images)

    repeats = max(1, min(8, 512 // size) if view.device.type == "cuda" else 1)

    def repeated() -> None:
        for _ in range(repeats):
            both() if backward else forward()

    return best_rate(repeated, repeats * size)


def measure_images(view: View, paths: Sequence[Path], method: str | None, batch_size: int | None) -> None:
    size, count = images_at_once(view, batch_size), len(paths)
    pictures = [read_image(path) for path in paths[:64]]
    pictures = list(islice(cycle(pictures), count))
    pixels = torch.stack([view.preprocess(picture) for picture in pictures[:size]])
    few = min(count, 64)
    print(f"{count} photographs of {pictures[0].width} × {pictures[0].height} (the first), batches of {size}")
    line("decode, of one core", core_rate(read_image, paths[:few]))
    line("resize and normalise, of one core", core_rate(view.preprocess, pictures[:few]))
    decode = best_rate(lambda: in_threads(read_image, paths), count)
    resize = best_rate(lambda: in_threads(view.preprocess, pictures), count)
    line(f"decode, {threads()} threads", decode)
    line(f"resize and normalise, {threads()} threads", resize)
    line("network: forward", network_rate(view, pixels, size, backward=False))
    network = network_rate(view, pixels, size, backward=True)
    line("network: forward and backward", network)

    tensors = pixels[torch.arange(count) % size]
    explain: Callable[[Any], object] = partial(vitrail.explain, view, method=method, batch_size=batch_size)
    prepared = best_rate(lambda: explain(tensors), count)
    line("explain, of preprocessed tensors", prepared, network)
    limit = min(resize, prepared)
    line("explain, of PIL images", best_rate(lambda: explain(pictures), count), limit)
    both = 1 / (1 / decode + 1 / resize)
    line("explain, of files", best_rate(lambda: explain(list(paths)), count), min(both, prepared))
    print("  (limits: the slower of reading in these threads, and of explain on tensors; of that, the network)")
    files = list(dict.fromkeys(paths))[: max(8, size)]
    evaluate = partial(vitrail.evaluate, view, files, method, "insertion(steps=8)", batch_size=batch_size)
    rate = best_rate(evaluate, len(files))
    line("evaluate, insertion of 8 steps, of files", rate)


def measure_drawing(view: View, paths: Sequence[Path], folder: Path) -> None:
    explanations: list[Explanation] = vitrail.explain(view, list(paths[:64]))
    view.known_weights = view.weights_hash()  # hashed once, as the command line does
    print(f"{len(explanations)} explanations, drawn at {explanations[0].overlay().size}")
    count = len(explanations)

    def saved(item: tuple[int, Explanation]) -> None:
        item[1].save(folder / f"{item[0]}.png")

    def encoded(picture: Image.Image) -> None:
        picture.save(io.BytesIO(), "PNG", compress_level=3)

    works: list[tuple[str, Callable[[Any], object], list[Any]]] = [
        ("overlay", Explanation.overlay, explanations),
        ("picture (overlay, caption, legend)", Explanation.picture, explanations),
        ("PNG of a picture", encoded, [explanation.picture() for explanation in explanations]),
        ("save (picture, PNG, JSON, both on disk)", saved, list(enumerate(explanations))),
    ]
    for name, work, items in works:
        alone = core_rate(work, items)
        together = best_rate(lambda work=work, items=items: in_threads(work, items), count)  # type: ignore[misc]
        line(f"{name}, of one core", alone, unit="per second")
        line(f"{name}, {threads()} threads", together, alone * threads(), unit="per second")


def measure_start(path: Path, folder: Path, repeats: int = 5) -> None:
    def run(*arguments: str) -> tuple[float, float]:
        """Wall-clock seconds, and those that the cores worked."""
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - begin, worked

    explain = ("-m", "vitrail", "explain", str(path), "--out", str(folder / "out"), "--device", "cpu")
    commands = {
        "import torch": ("-c", "import torch"),
        "import torch, timm": ("-c", "import torch, timm"),
        "vitrail --help": ("-m", "vitrail", "--help"),
        "vitrail explain photo.jpg --no-trust": (*explain, "--no-trust"),
        "vitrail explain photo.jpg": explain,
    }
    print("new processes on the CPU: medians of several, after a first one")
    for name, arguments in commands.items():
        first, _ = run(*arguments)
        wall, worked = (
            statistics.median(times) for times in zip(*(run(*arguments) for _ in range(repeats)), strict=True)
        )
        print(f"  {name:<58}{wall:9.2f} s, {worked:.2f} s of work  (the first: {first:.2f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a timm name, with random weights")
    parser.add_argument("--method", help="default: that of explain")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--batch", type=int, help="default: by device")
    parser.add_argument("--data", type=Path, help="a folder of photographs")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: expected {', '.join(PARTS)}")
    parts = options.parts or PARTS
    view = vitrail.load(options.model, pretrained=False, device=options.device)
    device = torch.cuda.get_device_name(view.device) if view.device.type == "cuda" else "CPU"
    print(f"{options.model} on {device}, {threads()} reading threads, {torch.get_num_threads()} of torch, {view.dtype}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = photographs(options.count, folder, options.data)
        if "images" in parts:
            measure_images(view, paths, options.method, options.batch)
        if "drawing" in parts:
            measure_drawing(view, paths, folder)
        if "start" in parts:
            measure_start(paths[0], folder)


if __name__ == "__main__":
    main()
