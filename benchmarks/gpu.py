"""Speed and memory of explanations on a GPU beside the limit of the same process.

Run: python benchmarks/gpu.py [--only limits,graphs,batches,single,masks,pixels,curves,memory] [--out DIR]
The limit of a line is what a bare network of the same weights takes for the passes that the method needs, in bf16 and
with nothing recorded. ``--small`` runs every part with a tiny network and few masks, on any device, to see that it
runs. ``graphs`` compares captured traces with eager ones bit by bit. Goals that are missed are followed by a profile:
the kernels that took longest, and how long the device waited. With ``--out``, all is written to DIR/gpu.json too. What
lower precision costs is measured by benchmarks/agreement.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timing import seconds
from torch import Tensor, nn

import vitrail
from vitrail.data import Scenes
from vitrail.engine import captured
from vitrail.methods.registry import build_method
from vitrail.models.vit import ViT

WARM = 4  # calls before the first that counts: graphs are captured at the third
PROFILED = 12  # kernels in a profile


@dataclass(frozen=True)
class Line:
    """One line of the table: a rate (higher is better) or a time or memory (lower is better)."""

    what: str
    unit: str
    ours: float
    limit: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ours >= self.goal if self.unit == "img/s" else self.ours <= self.goal

    def __str__(self) -> str:
        limit, goal = ("–" if value is None else f"{value:,.4g}" for value in (self.limit, self.goal))
        met = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"{self.what:44} {self.ours:10,.4g} {self.unit:6} limit {limit:>8}  goal {goal:>8}  {met}"


@dataclass
class Bench:
    """What the parts share: networks, images, and what was measured."""

    device: str
    small: bool
    lines: list[Line] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    colds: dict[str, list[float]] = field(default_factory=dict)

    def size(self, full: int, small: int) -> int:
        return small if self.small else full

    @cached_property
    def module(self) -> nn.Module:
        return network(self, "vit_base_patch16_224")

    @cached_property
    def view(self) -> ViT:
        return vitrail.wrap(self.module)  # type: ignore[return-value]

    @cached_property
    def images(self) -> Tensor:
        """256 normalised scenes."""
        scenes = Scenes(self.size(64, 2), seed=1)
        pictures = [self.view.preprocess(Image.fromarray(scenes[i].image)) for i in range(len(scenes))]
        return torch.stack(pictures).repeat(self.size(4, 2), 1, 1, 1).to(self.device)

    def add(self, line: Line, call: Callable[[], object] | None = None) -> None:
        """Prints a line and, where its goal is missed, the profile of a call."""
        self.lines.append(line)
        print(line, flush=True)
        if line.met is False and call is not None and not self.small:
            self.profiles[line.what] = profile(call)

    def rate(self, precision: str, batch: int, backward: bool, layers: float = 1.0) -> float:
        """Images per second of the bare network; ``layers``: the share of the blocks that gradients go through."""
        key = (precision, batch, backward, layers)
        if key not in self._rates:
            self._rates[key] = batch / bare(self, precision, batch, backward, layers)
        return self._rates[key]

    @cached_property
    def _rates(self) -> dict[tuple[str, int, bool, float], float]:
        return {}

    def forwards(self, count: int) -> float:
        """Milliseconds of so many bare forward passes in bf16, at the rate of a large batch."""
        return 1000 * count / self.rate("bf16", self.size(256, 4), False)


def network(bench: Bench, name: str, **options: Any) -> nn.Module:
    """A network with random weights; a tiny one in its place where the run is small."""
    torch.manual_seed(0)
    if bench.small:
        options = {**options, "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 2}
    return timm.create_model(name, pretrained=False, **options).eval().to(bench.device)


def timed(call: Callable[[], object], times: int = 7, warm: int = WARM) -> float:
    """The median of the seconds of some calls, after others."""
    for _ in range(warm):
        call()
    return statistics.median(seconds(call) for _ in range(times))


def bare(bench: Bench, precision: str, batch: int, backward: bool, layers: float) -> float:
    """Seconds of a bare pass of the module, with gradients of its tokens where ``backward``."""
    images = bench.images[:1].expand(batch, -1, -1, -1).contiguous()
    module: Any = copy.deepcopy(bench.module).to(torch.bfloat16) if precision == "bf16" else bench.module
    images = images.to(next(module.parameters()).dtype)
    first = round(len(module.blocks) * (1 - layers))

    def passes() -> None:
        if not backward:
            with torch.inference_mode():
                module(images)
            return
        with torch.no_grad():
            x = module.pos_drop(module._pos_embed(module.patch_embed(images)))
            for block in module.blocks[:first]:
                x = block(x)
        x = x.requires_grad_()
        out = x
        for block in module.blocks[first:]:
            out = block(out)
        torch.autograd.grad(module.forward_head(module.norm(out))[:, 0].sum(), x)

    for parameter in module.parameters():
        parameter.requires_grad_(False)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        return timed(passes, bench.size(10, 2), bench.size(4, 1))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def limits(bench: Bench) -> None:
    """The bare network."""
    many, some = bench.size(256, 4), bench.size(64, 2)
    for precision in ("bf16", "tf32", "fp32"):
        bench.add(Line(f"bare forward, batch {many}, {precision}", "img/s", bench.rate(precision, many, False)))
    for precision in ("bf16", "tf32", "fp32"):
        what = f"bare forward + backward, batch {some}, {precision}"
        bench.add(Line(what, "img/s", bench.rate(precision, some, True)))


def batches(bench: Bench) -> None:
    """White-box methods on a batch of 64."""
    some = bench.size(64, 2)
    whole, half = (bench.rate("bf16", some, True, layers) for layers in (1.0, 0.5))
    images = bench.images[:some]
    for name, limit, goal in (
        ("decompx.skipplus", half, 3500),
        ("gen_att", whole, 0.6 * whole),
        ("full_grad_plus", whole, 0.6 * whole),
        ("attn_lrp", whole, 0.6 * whole),
        ("vtranm", whole, 0.6 * whole),
    ):
        for precision in ("full", "auto"):
            method = build_method(name, bench.view, precision=precision)
            call = lambda m=method: m.attribute(images)  # noqa: E731
            rate = some / timed(call, bench.size(7, 1), bench.size(WARM, 1))
            auto = precision == "auto"
            bench.add(Line(f"{name}, batch {some}, {precision}", "img/s", rate, limit, goal if auto else None), call)


def graphs(bench: Bench) -> None:
    """Whether captured work gives what eager work does, bit by bit: on the same images, others, with other weights."""
    images, others = bench.images[:2], bench.images[2:4]
    few = bench.size(64, 8)
    for name, params in (
        *((name, {}) for name in ("decompx.skipplus", "gen_att", "full_grad_plus", "attn_lrp", "vtranm", "legrad")),
        *((name, {"masks": few}) for name in ("tis", "rise", "posterior")),
        ("hsic", {"samples": few}),
        ("occlusion", {}),
        ("atman", {}),
    ):
        for precision in ("auto", "full"):
            view = vitrail.wrap(copy.deepcopy(bench.module))
            method = build_method(name, view, precision=precision, **params)
            first = method.attribute(images)
            for _ in range(WARM):
                method.attribute(images)
            outcomes = {"same images": torch.equal(first, method.attribute(images))}
            replayed = method.attribute(others, [1, 2])
            outcomes["a target"] = torch.equal(method.attribute(others, [1, 2]), replayed)
            outcomes["other images"] = torch.equal(
                eager(lambda m=method: m.attribute(others)), method.attribute(others)
            )
            with torch.no_grad():
                for parameter in view.module.parameters():
                    parameter.mul_(1.01)
            outcomes["other weights"] = torch.equal(
                eager(lambda m=method: m.attribute(images)), method.attribute(images)
            )
            uses = captured._scores if params or name in ("occlusion", "atman") else captured._traces
            outcomes["captured"] = any(use.captures for use in uses.values())
            bench.graphs.append({"method": name, "precision": precision, **outcomes})
            wrong = [outcome for outcome, right in outcomes.items() if not right]
            print(f"graph of {name}, {precision}: {'not ' + ', '.join(wrong) if wrong else 'bit-equal'}", flush=True)
            captured.forget()


def eager(call: Callable[[], Tensor]) -> Tensor:
    """What a call gives where nothing is captured."""
    before = captured.LARGEST, captured.MOST_SCORED
    captured.LARGEST = captured.MOST_SCORED = 0
    try:
        return call()
    finally:
        captured.LARGEST, captured.MOST_SCORED = before


def single(bench: Bench) -> None:
    """One image, the first calls apart: whatever is compiled or captured must not hit them."""
    method, image = build_method("decompx.skipplus", bench.view), bench.images[:1]
    colds = [1000 * seconds(lambda: method.attribute(image)) for _ in range(5)]
    bench.colds["decompx.skipplus"] = colds
    first = ", ".join(f"{spent:.1f}" for spent in colds)
    print(f"one image, decompx.skipplus, the first calls: {first} ms", flush=True)
    picture = Image.fromarray(Scenes(1, seed=2)[0].image)
    limit = 1000 * bare(bench, "bf16", 1, True, 0.5)
    other = build_method("gen_att", bench.view)
    for what, call in (
        ("one image, decompx.skipplus", lambda: method.attribute(image)),
        ("one image, vitrail.explain of a picture", lambda: vitrail.explain(bench.view, picture)),
        ("one image, gen_att", lambda: other.attribute(image)),
    ):
        goal = 6.0 if what.endswith("skipplus") else None
        bench.add(Line(what, "ms", 1000 * timed(call, bench.size(20, 1), bench.size(WARM, 1)), limit, goal), call)


def masks(bench: Bench) -> None:
    """Mask methods on one image, and TIS on sixteen."""
    count = bench.size(1024, 8)
    tis = build_method("tis", bench.view, masks=count)
    half = bench.forwards(count) / 2  # half of the tokens
    for together in (1, bench.size(16, 2)):
        images = bench.images[:together]
        call = lambda i=images: tis.attribute(i)  # noqa: E731
        spent = 1000 * timed(call, bench.size(7, 1), bench.size(3, 1)) / together
        goal = 50 if together == 1 else 46
        bench.add(Line(f"tis, {count} masks, {together} together", "ms", spent, half, goal), call)
    image, patches = bench.images[:1], math.prod(bench.view.grid)
    for name, passes, goal, params in (
        ("atman", patches, 30, {}),
        ("occlusion", patches, 30, {}),
        ("hsic", bench.size(500, 8), 1.4, {"samples": bench.size(500, 8)}),
        ("kernel_shap", bench.size(1000, 8), 1.4, {"samples": bench.size(1000, 8)}),
        ("pami", 1500, 1.4, {}),
    ):
        method = build_method(name, bench.view, **params)
        call = lambda m=method: m.attribute(image)  # noqa: E731
        spent = 1000 * timed(call, bench.size(5, 1), bench.size(3, 1))
        if name == "pami":
            passes = int(method.explain(image).extras["masks"][0])
        limit = bench.forwards(passes)
        bench.add(Line(f"{name}, {passes} passes", "ms", spent, limit, goal if goal > 2 else goal * limit), call)


def pixels(bench: Bench) -> None:
    """Integrated Gradients."""
    some, steps = bench.size(64, 2), bench.size(50, 2)
    limit = bench.rate("bf16", some, True) / steps
    for precision in ("full", "auto"):
        method, images = build_method("integrated_gradients", bench.view, steps=steps, precision=precision), None
        images = bench.images[: some if precision == "auto" else max(some // 8, 1)]
        call = lambda m=method, i=images: m.attribute(i)  # noqa: E731
        rate = len(images) / timed(call, bench.size(2, 1), 1)
        goal = 60 if precision == "auto" else None
        bench.add(
            Line(f"integrated_gradients, {steps} steps, {precision}", "img/s", rate, limit, goal),
            lambda m=method: m.attribute(bench.images[: bench.size(8, 1)]),
        )


def curves(bench: Bench) -> None:
    """Insertion and deletion of 64 images."""
    some, steps = bench.size(64, 2), bench.size(224, 4)
    pictures = [scene.image for scene in Scenes(some, seed=1)]
    metrics = [f"insertion(steps={steps})", f"deletion(steps={steps})"]
    call = lambda: vitrail.evaluate(bench.view, pictures, ["random"], metrics)  # noqa: E731
    limit = bench.forwards(2 * some * steps) / 1000
    bench.add(Line("insertion + deletion", "s", timed(call, bench.size(2, 1), 1), limit, 3.0), call)


def memory(bench: Bench) -> None:
    """Peak memory at 1,370 tokens, and the time of ALTI at 3,136."""
    large = vitrail.wrap(network(bench, "vit_large_patch14_dinov2", img_size=518, num_classes=1000))
    images = torch.randn(bench.size(4, 1), 3, *large.size, device=bench.device)
    for name, goal in (("gen_att", 8.0), ("decompx.skipplus", None), ("vtranm", None)):
        method = build_method(name, large)
        held = peak(lambda m=method: m.attribute(images))
        bench.add(Line(f"{name}, ViT-L/14, 518 px, batch 4", "GiB", held, goal=goal))
    del large
    wide = vitrail.wrap(network(bench, "vit_small_patch16_224", img_size=896))
    images = torch.randn(1, 3, *wide.size, device=bench.device)
    alti = build_method("alti", wide)
    call = lambda: alti.attribute(images)  # noqa: E731
    bench.add(Line("alti, ViT-S/16, 3136 tokens", "ms", 1000 * timed(call, bench.size(3, 1), 1), goal=300), call)


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part for part in (limits, graphs, batches, single, masks, pixels, curves, memory)
}


def peak(call: Callable[[], object]) -> float:
    """GiB that a call holds at most beyond what was held before; NaN without a GPU."""
    if not torch.cuda.is_available():
        call()
        return float("nan")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def profile(call: Callable[[], object]) -> dict[str, Any]:
    """The kernels that took longest in one call, and the time in which the device had nothing to do."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    spent = seconds(call)
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = recorded.key_averages()
    kernels = sorted((e for e in events if e.self_device_time_total > 0), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels if e.device_type.name == "CUDA") / 1e6
    launches = sum(e.count for e in events if e.key in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx"))
    waits = sum(e.count for e in events if e.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    times = f"{1000 * spent:.1f} ms, device busy {1000 * busy:.1f} ms"
    print(f"    {times}, {launches} launches, {waits} waits of the host")
    listed = [e for e in kernels if e.device_type.name == "CUDA"][:PROFILED]
    hosts = sorted((e for e in events if e.device_type.name == "CPU"), key=lambda e: -e.self_cpu_time_total)
    hosts = hosts[:PROFILED]
    for event in listed:
        print(f"    {event.self_device_time_total / 1000:9.2f} ms {event.count:6d} × {event.key[:110]}")
    for event in hosts:
        print(f"    {event.self_cpu_time_total / 1000:9.2f} ms {event.count:6d} × host {event.key[:80]}")
    return {
        "seconds": spent,
        "busy": busy,
        "launches": launches,
        "waits": waits,
        "kernels": [(e.key, e.count, e.self_device_time_total / 1e6) for e in listed],
        "hosts": [(e.key, e.count, e.self_cpu_time_total / 1e6) for e in hosts],
    }


@contextmanager
def timing_of(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"[{name}: {time.perf_counter() - begin:.0f} s]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny network and few masks")
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    warnings.simplefilter("ignore")  # random weights, small images
    bench = Bench(options.device, options.small)
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{name}, torch {torch.__version__}, numpy {np.__version__}, {torch.get_num_threads()} threads", flush=True)
    failed = []
    for part in options.only.split(","):
        with timing_of(part):
            try:
                PARTS[part](bench)
            except Exception as error:  # one part must not cost the others their time on the device
                if options.small:
                    raise
                failed.append(part)
                print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
    print("\n".join(["", "All lines:", *map(str, bench.lines)]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = [{**asdict(line), "met": line.met} for line in bench.lines]
        report = {"device": name, "torch": torch.__version__, "lines": lines, "profiles": bench.profiles}
        report |= {
            "graphs": bench.graphs,
            "first_calls_ms": bench.colds,
            "failed": failed,
        }
        (options.out / "gpu.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
