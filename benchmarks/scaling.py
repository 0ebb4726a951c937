"""How time and memory grow with tokens, depth, classes, images, masks and targets, with the exponent of each.

Run: python benchmarks/scaling.py [--only tokens,depth,…] [--methods gen_att,…] [--plot FILE.png] [--out FILE.csv]
     python benchmarks/scaling.py --large [--methods gen_att,…] [--model vit_base_patch16_224] [--side 1024]

A series grows one size of a ViT-Ti/16 with random weights and keeps the others; for tokens it has four blocks, since
depth is a series of its own. Memory is what a call adds to what the process holds (on CUDA: to its tensors). A series
ends where its next point would take longer than ``--seconds`` or more memory than is free, by the growth of the last
two. The exponent is the slope of log time, or memory, over the last three points: 1 is linear.

``--large`` explains one image of ``--side`` pixels by every method of a single backward pass and prints the peak of the
process, the network included, which must not exceed ``--most`` GiB. ``--methods`` takes patterns such as '*.plus'.
Needs Linux, whose kernel tells peaks.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import seconds
from torch import Tensor

import vitrail
from vitrail.calls import split_list
from vitrail.engine.scheduler import empty_cache, free_memory
from vitrail.methods.registry import build_method, get_method, list_methods
from vitrail.models.view import View

NETWORK = "vit_tiny_patch16_224"
TRACED = ("decompx.skipplus", "full_grad_plus", "attn_lrp", "gen_att", "rollout", "alti")
PATHS = ("integrated_gradients",)  # of 50 passes; on axes that do not change this number
BUDGETS = {"tis": "masks", "posterior": "masks", "rise": "masks", "kernel_shap": "samples"}
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2}
LONG = 5.0  # seconds of a call that is not repeated
NOISE = 1.0  # MiB that a call may seem to add without adding any


@dataclass(frozen=True)
class Axis:
    """What grows, through which sizes, and the methods that are measured."""

    name: str
    sizes: tuple[int, ...]
    methods: tuple[str, ...]
    label: str


AXES = [
    Axis("tokens", (196, 400, 784, 1600, 3136, 6400, 16384), TRACED + PATHS, "patches"),
    Axis("depth", (3, 6, 12, 24, 48), TRACED + PATHS, "blocks"),
    Axis("classes", (10, 100, 1000, 10_000, 100_000), ("decompx.skipplus", "gen_att"), "classes"),
    Axis("images", (1, 2, 4, 8, 16, 32), TRACED + PATHS, "images of a batch"),
    Axis("masks", (64, 128, 256, 512, 1024, 2048), tuple(BUDGETS), "masks"),
    Axis("targets", (1, 2, 4, 8, 16, 32), ("decompx.skipplus", "gen_att"), "targets of an image"),
]


@dataclass(frozen=True)
class Point:
    """A call of a series."""

    axis: str
    method: str
    size: int
    seconds: float
    mebibytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(axis.name for axis in AXES), help="axes, comma-separated")
    parser.add_argument("--methods", default="*", help="names or patterns, comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=60, help="the longest call of a series")
    parser.add_argument("--small", action="store_true", help="two points of a series, of a tiny network")
    parser.add_argument("--out", type=Path, help="a CSV file with all points")
    parser.add_argument("--plot", type=Path, help="a picture of all series")
    parser.add_argument("--large", action="store_true", help="one large image instead of series")
    parser.add_argument("--model", default="vit_base_patch16_224", help="of the large image: a name of timm")
    parser.add_argument("--side", type=int, default=1024, help="pixels of the large image")
    parser.add_argument("--most", type=float, default=22, help="GiB that the large image may take")
    options = parser.parse_args()
    unknown = {*split_list(options.only)} - {axis.name for axis in AXES}
    if unknown:
        parser.error(f"unknown axes: {', '.join(sorted(unknown))}; expected some of {', '.join(a.name for a in AXES)}")
    warnings.simplefilter("ignore")  # random weights
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    if options.large:
        measure_large(options)
    else:
        measure_series(options)


# --- series ---------------------------------------------------------------------------------------------------------


def measure_series(options: argparse.Namespace) -> None:
    """Prints a row for each series; writes and draws them all."""
    print("\n| what grows | method | from … to | seconds | exponent | MiB | exponent |\n|---|---|---|---|---|---|---|")
    series = []
    for axis in AXES:
        for method in axis.methods:
            if axis.name in split_list(options.only) and chosen(method, options.methods):
                series.append(points_of(axis, method, options))
                print(row(series[-1]), flush=True)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [column.name for column in fields(Point)], lineterminator="\n")
            table.writeheader()
            table.writerows(asdict(point) for points in series for point in points)
    if options.plot:
        plot(series, options.plot)


def chosen(method: str, patterns: str) -> bool:
    return any(fnmatch(method, pattern) for pattern in split_list(patterns))


def points_of(axis: Axis, method: str, options: argparse.Namespace) -> list[Point]:
    """The points of a series, smallest first, as far as time and memory reach."""
    points: list[Point] = []
    for size in axis.sizes[:2] if options.small else axis.sizes:
        empty_cache()
        if len(points) > 1 and not affordable(points, size, options):
            break
        call = prepared(axis.name, method, size, options)
        if not points:
            call()  # what is imported and made once
        spent, added = measured(call, options.device)
        if spent < LONG:  # noise counts most where little does
            spent = min(spent, *(seconds(call) for _ in range(3 if spent < 1 else 1)))
        points.append(Point(axis.name, method, size, spent, added))
    return points


def affordable(points: Sequence[Point], size: int, options: argparse.Namespace) -> bool:
    """Whether a call of the next size fits into the time and the memory there is, if it grows as the last did."""
    last, factor = points[-1], size / points[-1].size
    spent, added = (
        getattr(last, what) * factor ** max(1.0, exponent(points[-2:], what)) for what in ("seconds", "mebibytes")
    )
    return spent <= options.seconds and added * 2**20 <= free_memory(torch.device(options.device))


def prepared(axis: str, method: str, size: int, options: argparse.Namespace) -> Callable[[], object]:
    """A call of this size."""
    network: dict[str, Any] = {
        "tokens": {"img_size": 16 * math.isqrt(size), "depth": 4},
        "depth": {"depth": size},
        "classes": {"num_classes": size},
        "targets": {"num_classes": 100},
    }.get(axis, {})
    view = random_view(NETWORK, options, **{"num_classes": 10, **network})
    images = noise(view, size if axis == "images" else 1)
    if axis == "targets":
        return lambda: vitrail.explain(view, images[0], method, targets=list(range(size)))
    built = build_method(method, view, **({BUDGETS[method]: size} if axis == "masks" else {}))
    return lambda: built.attribute(images, target=0)


def random_view(name: str, options: argparse.Namespace, **network: Any) -> View:
    torch.manual_seed(0)
    network = {**(SMALL if options.small else {}), **network}
    return vitrail.load(name, pretrained=False, device=options.device, **network)


def noise(view: View, count: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.rand((count, 3, *view.size), generator=draw).mul(2).sub(1).to(view.device)


def measured(call: Callable[[], object], device: str) -> tuple[float, float]:
    """The seconds of a call, and the MiB that it adds at most to what is held before."""
    before = held_from_now(device)
    spent = seconds(call)
    return spent, peak(device) - before


def held_from_now(device: str) -> float:
    """MiB that are in use; the peak starts anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident("VmRSS")


def peak(device: str) -> float:
    """MiB that were in use at most."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else resident("VmHWM")


def resident(what: str) -> float:
    """MiB of physical memory, now (VmRSS) or at most (VmHWM)."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def exponent(points: Sequence[Point], what: str) -> float:
    """That of the power law through the points; NaN for a single one."""
    if len(points) < 2:
        return math.nan
    floor = NOISE if what == "mebibytes" else 0
    values = [max(getattr(point, what), floor) for point in points]
    return float(np.polyfit(np.log([point.size for point in points]), np.log(values), 1)[0])


def row(points: Sequence[Point]) -> str:
    first, last = points[0], points[-1]
    time, memory = (exponent(points[-3:], what) for what in ("seconds", "mebibytes"))
    return (
        f"| {first.axis} | `{first.method}` | {first.size:,} … {last.size:,} | {first.seconds:.3g} … "
        f"{last.seconds:.3g} | {time:.2f} | {first.mebibytes:,.0f} … {last.mebibytes:,.0f} | {memory:.2f} |"
    )


def plot(series: Sequence[Sequence[Point]], path: Path) -> None:
    """A panel of time above one of memory for each axis, at most three side by side."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    axes = [axis for axis in AXES if any(points[0].axis == axis.name for points in series)]
    methods = dict.fromkeys(points[0].method for points in series)
    colours = dict(zip(methods, (*colormaps["tab10"].colors, "black"), strict=False))
    across = min(len(axes), 3)
    down = math.ceil(len(axes) / across)
    with rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3 * across, 3.8 * down + 0.5), layout="constrained")
        panels = figure.subplots(2 * down, across, squeeze=False)
        for index, axis in enumerate(axes):
            below, beside = divmod(index, across)
            shown = [points for points in series if points[0].axis == axis.name]
            reached = max(point.size for points in shown for point in points)
            ticks = [size for size in axis.sizes if size <= reached]
            for row, (what, unit, least) in enumerate((("seconds", "seconds", 0), ("mebibytes", "MiB", NOISE))):
                panel = panels[2 * below + row, beside]
                heights = [[max(getattr(point, what), least) for point in points] for points in shown]
                for points, line in zip(shown, heights, strict=True):
                    sizes = [point.size for point in points]
                    panel.plot(sizes, line, ".-", linewidth=1.2, color=colours[points[0].method])
                panel.set(xscale="log", yscale="log", ylabel="" if beside else unit)
                low, high = min(map(min, heights)), max(map(max, heights))
                panel.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))  # whole decades
                panel.yaxis.set(major_locator=LogLocator(), minor_locator=NullLocator())
                panel.xaxis.set_minor_locator(NullLocator())
                panel.set_xticks(ticks, [f"{size:,}" if row else "" for size in ticks], fontsize=6.5)
                panel.grid(alpha=0.25)
            panel.set_xlabel(axis.label)
        for panel in panels.flat:
            panel.set_visible(panel.has_data())
        lines = [panels[0, 0].plot([], [], ".-", color=colour)[0] for colour in colours.values()]
        figure.legend(lines, list(colours), loc="outside lower center", ncols=2 * across, frameon=False, fontsize=7)
        figure.suptitle("Time and memory of a call", fontsize=9)
        figure.savefig(path, dpi=110)


# --- a large image --------------------------------------------------------------------------------------------------


def measure_large(options: argparse.Namespace) -> None:
    """Prints a row for each method; fails where one takes more memory than it may."""
    view = random_view(options.model, options, img_size=options.side)
    image = noise(view, 1)
    tokens = math.prod(view.grid)
    print(f"{options.model}, random weights, one image of {options.side} × {options.side} pixels, {tokens:,} patches\n")
    print("| method | seconds | GiB at most |\n|---|---|---|")
    above = []
    for name in single_backward(view, options.methods):
        method = build_method(name, view)
        empty_cache()
        held_from_now(options.device)
        spent = seconds(lambda method=method: method.attribute(image, target=0))
        gibibytes = peak(options.device) / 1024
        print(f"| `{name}` | {spent:.1f} | {gibibytes:.1f} |", flush=True)
        if gibibytes > options.most:
            above.append(name)
    if above:
        raise SystemExit(f"more than {options.most:g} GiB: {', '.join(above)}")


def single_backward(view: View, patterns: str) -> list[str]:
    """The methods of one forward and one backward pass that can explain a model."""
    costs = {name: info.cost for name, info in list_methods().items() if chosen(name, patterns)}
    return [name for name, cost in costs.items() if cost == (1, 1) and not get_method(name).unsupported(view)]


if __name__ == "__main__":
    main()
