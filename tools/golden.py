"""Golden values: the maps of every method and the scores of every metric, to compare two states of the code.

    python tools/golden.py write before.npz        # at one commit
    python tools/golden.py write after.npz         # at another
    python tools/golden.py compare before.npz after.npz

Six tiny families in double precision (maps and scores must agree to 1e-6, relative to their largest value) and both
embedded models in single precision (1e-5). Where a clustering may flip on rounding, rank correlation ≥ 0.999 will do.
Uses the public surface alone, so that it runs on either side of any change inside.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import families

import vitrail

FAMILIES = ("timm_vit", "timm_deit_distilled", "timm_siglip", "timm_eva02_tiny", "hf_beit_mean", "timm_swin")
DOUBLE, SINGLE, RANK = 1e-6, 1e-5, 0.999
CLUSTERED = ("tis", "vit_cx")  # one rounding may move a point to another cluster
# Small budgets where the budget is not the point.
BUDGET = {"rise": {"masks": 64}, "lime": {"samples": 96}, "kernel_shap": {"samples": 96}, "hsic": {"samples": 64}}
SMALL = {"integrated_gradients": {"steps": 8}, "smooth_grad": {"samples": 4}, "tis": {"masks": 64}, "tam": {"steps": 3}}
SMALL |= {"expected_gradients": {"samples": 4}, "bt_h": {"steps": 3}, "bt_t": {"steps": 3}, "vit_cx": {"delta": 0.5}}
SLOW = ("occlusion", "lime", "kernel_shap", "score_cam", "atman")
METRIC_METHODS = ("decompx.skipplus", "gen_att", "tis(masks=32)")
EXPLAINING_AGAIN = ("max_sensitivity(samples=2)", "model_randomization(way=independent)")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="compute all values and store them")
    write.add_argument("file", type=Path)
    write.add_argument("models", nargs="*", help="only these: families, scenes, photo, rows")
    compare = commands.add_parser("compare", help="compare two files")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return report(dict(np.load(arguments.before)), dict(np.load(arguments.after)))
    begin = time.perf_counter()
    values = dict(computed(arguments.models or [*FAMILIES, "scenes", "photo", "rows"]))
    np.savez_compressed(arguments.file, **values)
    print(f"{len(values)} values in {time.perf_counter() - begin:.0f} s")
    return 0


def computed(models: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Every value under its key ``model/method`` or ``model/metric/…``."""
    for name in filter(models.__contains__, FAMILIES):
        family = families.find(name)
        module = family.build(torch.float64)
        view = vitrail.wrap(module, **family.wrap(module))
        images = families.images(name, 2, dtype=torch.float64)
        print(name, flush=True)
        yield from maps(f"{name}/double", view, images)
        yield from scores_of_tensors(f"{name}/double", view, images)
    for name in filter(models.__contains__, ("scenes", "photo")):
        view = vitrail.load(name, device="cpu")
        examples = vitrail.data.open_data("scenes:2?objects=2")
        images = torch.stack([view.preprocess(examples[i].image) for i in range(2)])
        print(name, flush=True)
        yield from maps(f"{name}/single", view, images, SMALL)
    if "rows" in models:
        yield from scores_of_data()


def maps(place: str, view: Any, images: torch.Tensor, small: dict[str, dict[str, Any]] | None = None) -> Any:
    """The map of each method under each protocol; what a method refuses is stored as that."""
    budget = {**BUDGET, **(small or {})}
    for method, info in vitrail.list_methods().items():
        if method == "pami" or (small and method in SLOW):  # and made of what others test
            continue
        for protocol in info.protocols:
            params = {**budget.get(method, {}), **({} if protocol == "default" else {"protocol": protocol})}
            key = f"{place}/{method}/{protocol}"
            for target, against in ((None, None),) if small else ((None, None), (0, 1)):
                try:
                    explanations = vitrail.explain(view, images, method, target, against=against, **params)
                except vitrail.VitrailError:
                    yield f"{key}/{target}-{against}", np.array("refused")
                    continue
                yield f"{key}/{target}-{against}", np.stack([ex.map.numpy() for ex in explanations])
                extras = [{k: v for k, v in ex.extras.items() if k != "completeness_gap"} for ex in explanations]
                for name in extras[0]:
                    yield f"{key}/{target}-{against}/{name}", np.array([values[name] for values in extras])


def scores_of_tensors(place: str, view: Any, images: torch.Tensor) -> Any:
    """The metrics that need a map alone, under each protocol."""
    draw = torch.Generator().manual_seed(0)
    height, width = images.shape[-2:]
    grid = (height // 8, width // 8)
    map_ = torch.rand(2, *grid, generator=draw, dtype=torch.float64)
    masks = torch.zeros(2, height, width, dtype=torch.bool)
    masks[:, : height // 2, : width // 2] = True
    for metric, info in vitrail.list_metrics().items():
        if info.needs in ("method", "completeness"):
            continue
        known: dict[str, Any] = {"label": 1}
        known |= {"boxes": [[(0, 0, width / 2, height / 2)]] * 2} if info.needs == "boxes" else {"masks": masks}
        known |= {"others": ~masks} if info.needs == "objects" else {}
        for protocol in info.protocols:
            params = {} if protocol == "default" else {"protocol": protocol}
            try:
                scored = vitrail.metrics.measure(metric, view, images, map_, 1, **known, **params)
            except vitrail.VitrailError:
                yield f"{place}/metrics/{metric}/{protocol}", np.array("refused")
                continue
            yield f"{place}/metrics/{metric}/{protocol}", np.array([result.value for result in scored])


def scores_of_data() -> Any:
    """Rows of ``evaluate`` on both embedded models, the metrics that explain again included."""
    named = [m for m, info in vitrail.list_metrics().items() if info.needs not in ("method", "mask", "boxes", "region")]
    for model, data, target in (("scenes", "scenes:3?objects=2", "label"), ("photo", "scenes:2", "predicted")):
        annotated = [m for m, info in vitrail.list_metrics().items() if info.needs in ("mask", "boxes", "region")]
        chosen = [m for m in named if model == "scenes" or vitrail.list_metrics()[m].needs != "objects"]
        chosen = [f"{m}(steps=28)" if "steps" in vitrail.list_metrics()[m].params else m for m in chosen]
        metrics = [*chosen, *(annotated if model == "scenes" else []), *EXPLAINING_AGAIN]
        view = vitrail.load(model, device="cpu")
        examples = vitrail.data.open_data(data)
        source = examples if model == "scenes" else [examples[i].image for i in range(len(examples))]
        print(model, "rows", flush=True)
        rows = vitrail.evaluate(view, source, METRIC_METHODS, metrics, target=target)
        for (method, params, metric), group in rows.groupby(["method", "params", "metric"], sort=False):
            yield f"{model}/single/rows/{method}{params}/{metric}", group["value"].to_numpy(dtype=float)


def report(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> int:
    """Prints what differs; 0 where nothing does."""
    missing, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    worst: list[tuple[float, str]] = []
    failed = []
    for key in sorted(before.keys() & after.keys()):
        difference = apart(before[key], after[key])
        limit = DOUBLE if "/double/" in key else SINGLE
        worst.append((difference, key))
        if difference <= limit:
            continue
        method = key.split("/")[2].partition(".")[0]
        if method in CLUSTERED and same_ranks(before[key], after[key]):
            continue
        failed.append((difference, key))
    print(f"{len(worst)} values compared; the largest differences:")
    for difference, key in sorted(worst, reverse=True)[:8]:
        print(f"  {difference:.1e}  {key}")
    for title, keys in (("missing", missing), ("new", new)):
        if keys:
            print(f"{len(keys)} {title}: {', '.join(keys[:8])}")
    for difference, key in sorted(failed, reverse=True):
        print(f"DIFFERS {difference:.1e}  {key}")
    return int(bool(failed or missing))


def apart(before: np.ndarray, after: np.ndarray) -> float:
    """The largest difference, relative to the largest value; infinite where shapes or refusals differ."""
    if before.shape != after.shape or before.dtype.kind != after.dtype.kind:
        return float("inf")
    if before.dtype.kind == "U":
        return 0.0
    if not np.array_equal(np.isnan(before), np.isnan(after)):
        return float("inf")
    scale = max(float(np.nanmax(np.abs(before), initial=0.0)), 1e-9)
    return float(np.nanmax(np.abs(before.astype(float) - after.astype(float)), initial=0.0)) / scale


def same_ranks(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether every map keeps its order, or nearly."""
    if before.shape != after.shape or before.ndim < 3:
        return before.shape == after.shape
    return all(spearmanr(a.ravel(), b.ravel()).statistic >= RANK for a, b in zip(before, after, strict=True))


if __name__ == "__main__":
    sys.exit(main())
