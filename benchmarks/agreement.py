"""What ``precision="auto"`` costs: rank correlation of its maps with those of ``precision="full"``, for every method.

Run: python benchmarks/agreement.py [--models scenes,photo] [--file WEIGHTS] [--random timm names] [--images 4]
                                    [--methods "gen_att, tis(masks=64)"] [--device cuda] [--fp16] [--out FILE.csv]
``--file`` is a checkpoint of timm's vit_tiny_patch16_224; ``--random`` names architectures of timm, whose weights are
all drawn at random. On a CPU, which uses bf16 where it gains from it, methods that do not use it are left out;
``--fp16`` makes it do what a GPU does, slowly. Images are scenes; a map without any differences, which has no ranks,
counts as one where both are the same and as zero where they are not. ``--out`` writes a row for each model and method.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.core.precision import cpu_multiplies_bf16
from vitrail.data import Scenes
from vitrail.methods.registry import build_method, list_methods, supported_methods
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.view import View

FAMILIES = (
    "vit_tiny_patch16_224,deit3_small_patch16_224,vit_small_patch14_reg4_dinov2,eva02_tiny_patch14_224,"
    "beitv2_base_patch16_224,vit_small_patch16_dinov3,vit_base_patch16_siglip_224"
)
COSTLIEST = 600  # passes of a method that is tried with its defaults; of others fewer masks say the same
FEWER = {"rise": "rise(masks=256)", "kernel_shap": "kernel_shap(samples=512)", "lime": "lime(samples=512)"}


def models(options: argparse.Namespace) -> Iterator[tuple[View, str]]:
    """The models, one after the other, each with "real" or "random" weights."""
    for name in split_list(options.models):
        yield vitrail.load(name, device=options.device), "real"
    if options.file is not None:
        module = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(options.file)).eval()
        yield vitrail.wrap(module.to(options.device)), "real"
    for name in split_list(options.random):
        yield vitrail.wrap(randomised(name).to(options.device)), "random"


def randomised(name: str) -> torch.nn.Module:
    """An architecture of timm; also what starts at zero or one, such as LayerScale and score biases, is random."""
    torch.manual_seed(0)
    options = {} if timm.get_pretrained_cfg_value(name, "num_classes") else {"num_classes": 10}
    module: torch.nn.Module = timm.create_model(name, pretrained=False, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def agreement(auto: Tensor, full: Tensor) -> float:
    """Rank correlation of two maps."""
    if full.max() == full.min() or auto.max() == auto.min():
        return float(torch.equal(auto, full))
    return rank_correlation(auto, full)


def calls(view: View, wanted: str | None) -> list[str]:
    """Those asked for that the model supports, or all that have a precision; cheap ones first."""
    known, supported = list_methods(), supported_methods(view)
    if wanted:
        return [call for call in split_list(wanted) if split_call(call)[0] in supported]
    names = [name for name in supported if "precision" in known[name].params and uses_half(name, view)]
    names = [name for name in names if name in FEWER or sum(known[name].cost) <= COSTLIEST]
    return [FEWER.get(name, name) for name in sorted(names, key=lambda name: sum(known[name].cost))]


def uses_half(name: str, view: View) -> bool:
    method = build_method(name, view)
    return method.products is not None


def compared(view: View, call: str, images: Tensor, target: Tensor) -> tuple[list[float], bool]:
    """The agreement of a method's maps, image by image, and whether half precision changed any of them at all."""
    name, params = split_call(call)
    built = (build_method(name, view, **{**params, "precision": precision}) for precision in ("full", "auto"))
    full, auto = (method.attribute(images, target).cpu() for method in built)
    return [agreement(*pair) for pair in zip(auto, full, strict=True)], not torch.equal(auto, full)


def write(path: Path, rows: list[list[str]]) -> None:
    """All rows so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "weights", "method", "images", "mean", "least", "changed", "device", "torch"])
        table.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="scenes,photo", help="names for vitrail.load, comma-separated")
    parser.add_argument("--file", type=Path, help="a checkpoint of timm's vit_tiny_patch16_224")
    parser.add_argument("--random", nargs="?", const=FAMILIES, default="", help="names of timm, comma-separated")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--methods", help="calls, comma-separated (default: all that have a precision)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp16", action="store_true", help="on a CPU: what a GPU does")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # random weights
    if options.device == "cpu" and not (options.fp16 or cpu_multiplies_bf16()):
        parser.error("this CPU does not multiply bf16: --fp16 makes it do what a GPU does")
    if options.fp16:
        View.gains_from_half = True  # type: ignore[method-assign, assignment]
    scenes = [scene.image for scene in Scenes(options.images, seed=3)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, fp16" if options.fp16 else "CPU, bf16"
    rows: list[list[str]] = []
    failed = []
    for view, weights in models(options):
        begin, below, count = time.perf_counter(), [], 0
        images = torch.stack([view.preprocess(Image.fromarray(scene)) for scene in scenes]).to(options.device)
        target = view.logits(images).argmax(1)
        for call in calls(view, options.methods):
            try:
                values, changed = compared(view, call, images, target)
            except Exception as error:  # one method must not cost the others their time on the device
                failed.append(f"{call} on {view.name}: {type(error).__name__}: {error}")
                continue
            count, mean, least = count + 1, statistics.mean(values), min(values)
            if mean < 0.999:
                below.append(f"  {call:36} {mean:.5f} (least {least:.5f})")
            labels = [view.name, weights, call, str(len(values))]
            rows.append([*labels, f"{mean:.6f}", f"{least:.6f}", str(changed), device, torch.__version__])
        spent = time.perf_counter() - begin
        print(f"{view.name} ({weights}): {count} methods, {len(below)} below 0.999, {spent:.0f} s", flush=True)
        print("".join(f"{line}\n" for line in below), end="", flush=True)
        if options.out is not None:
            write(options.out, rows)
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
