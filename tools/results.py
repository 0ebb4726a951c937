"""Measures methods on a data set and writes a table: mean, 95 % confidence interval, number of images.

Examples:
    python tools/results.py scenes --model scenes --data scenes:1000 --target label
    python tools/results.py pets --model vit_small_patch14_dinov2 --checkpoint FILE --labels FILE \
        --img-size 224 --data folder:DIR
Writes NAME.md and NAME.csv to docs/results (or --out). Metrics that re-explain images are measured on --again images;
with --add only those are measured and added to the existing table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import vitrail
from vitrail.calls import join_call, split_call
from vitrail.evaluation import open_examples
from vitrail.metrics import build_metric, summarise

METHODS = [
    "decompx.skipplus",
    "decompx",
    "full_grad_plus.skipplus(rule=frozen)",
    "att_cat(rule=frozen)",
    "att_cat",
    "gen_att",
    "trans_att",
    "vtranm",
    "tam",
    "bt_h",
    "rollout",
    "raw_attention",
    "grad_cam",
    "integrated_gradients",
    "tis",
    "vit_cx",
    "vit_cx(layer=attention)",
    "rise",
    "random",
]
AREAS = ["insertion", "deletion", "insertion_minus_deletion"]
METRICS = ["positive_auc", "negative_auc", "aopc", "log_odds", "token_deletion_accuracy", "token_insertion_accuracy",
           "token_deletion_aopc", "token_insertion_aopc", "sparseness", "completeness"]  # fmt: skip
ON_BOXES = ["pointing_game", "energy_pointing_game", "box_localization", "box_localization(kind=max_box_acc)"]
ON_MASKS = [*ON_BOXES, "pixel_accuracy", "mean_iou", "mean_ap", "segmentation_ap"]
ON_OBJECTS = ["discriminativity", "discriminativity(reading=hit)"]
KNOWN = {"nothing": [], "boxes": ON_BOXES, "masks": ON_MASKS, "objects": ON_MASKS + ON_OBJECTS}
COLUMNS = 4  # metrics per table
AGAIN = ["max_sensitivity", "model_randomization", "model_randomization(way=independent, reading=ssim)", "infidelity"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--labels")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int)
    parser.add_argument("--target", choices=["predicted", "label"], default="predicted")
    parser.add_argument("--known", choices=["nothing", "boxes", "masks", "objects"], default="nothing")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, help="steps of insertion and deletion (default: 224)")
    parser.add_argument("--again", type=int, default=50, help="number of images for --again-metrics")
    parser.add_argument("--again-metrics", default=",".join(AGAIN), help="metrics that re-explain images")
    parser.add_argument("--again-methods", help="methods measured by --again-metrics (default: all)")
    parser.add_argument("--add", action="store_true", help="measure only --again-metrics and add them to NAME.csv")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if options.add:
        rows = again(options)
        heading = (options.out / f"{options.name}.md").read_text(encoding="utf-8").split("\n|")[0].splitlines()
        heading += ["", "Added:", "", *facts(options, time.perf_counter() - begin, rows)[:-1], ""]
        write(pd.concat([pd.read_csv(options.out / f"{options.name}.csv"), named(summarise(rows))]), options, heading)
    else:
        measure_all(options, begin)
    print(f"done in {time.perf_counter() - begin:.0f} s")


def measure_all(options: argparse.Namespace, begin: float) -> None:
    """The whole table, written before and after the metrics that re-explain images."""
    areas = AREAS if options.steps is None else [f"{name}(steps={options.steps})" for name in AREAS]
    metrics = areas + METRICS + KNOWN[options.known]
    rows = measured(options, options.methods, metrics, options.images)
    spent = time.perf_counter() - begin
    print(f"{len(rows)} rows in {spent:.0f} s", flush=True)
    title = [f"# {options.name}", ""]
    write(named(summarise(rows)), options, [*title, *facts(options, spent, rows), ""])
    if options.again:
        rows = pd.concat([rows, again(options)])
        write(named(summarise(rows)), options, [*title, *facts(options, time.perf_counter() - begin, rows), ""])


def again(options: argparse.Namespace) -> pd.DataFrame:
    return measured(options, options.again_methods or options.methods, options.again_metrics, options.again)


def measured(options: argparse.Namespace, methods: str, metrics: Any, images: int | None) -> pd.DataFrame:
    """The rows of all images, divided among the workers."""
    if options.jobs == 1:
        return share(options, methods, metrics, images, 0)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        return pd.concat(pool.map(partial(share, options, methods, metrics, images), range(options.jobs)))


def share(options: argparse.Namespace, methods: str, metrics: Any, images: int | None, job: int) -> pd.DataFrame:
    warnings.simplefilter("ignore")
    arguments = {name: getattr(options, name) for name in ("checkpoint", "labels", "img_size")}
    view = vitrail.load(options.model, **{name: value for name, value in arguments.items() if value is not None})
    data = open_examples(options.data, images, seed=0)[job :: options.jobs]
    return vitrail.evaluate(view, data, methods, metrics, target=options.target)


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Methods and their parameters as calls."""
    calls = [join_call(name, json.loads(params)) for name, params in zip(table["method"], table["params"], strict=True)]
    return table.assign(method=calls).drop(columns="params")


def write(table: pd.DataFrame, options: argparse.Namespace, heading: list[str]) -> None:
    """NAME.csv with every number, NAME.md with a row per method."""
    table.round(6).to_csv(options.out / f"{options.name}.csv", index=False)
    cells = {(line["method"], line["metric"]): cell(line) for line in table.to_dict("records")}
    methods, metrics = list(dict.fromkeys(table["method"])), list(dict.fromkeys(table["metric"]))
    counts = table.groupby("metric", sort=False)["n"].max()
    lines = list(heading)
    for start in range(0, len(metrics), COLUMNS):
        group = metrics[start : start + COLUMNS]
        heads = [f"{name} {arrow(name)} (n = {counts[name]})" for name in group]
        lines += ["| method | " + " | ".join(heads) + " |", "|---" * (len(group) + 1) + "|"]
        lines += [f"| `{m}` | " + " | ".join(cells.get((m, name), "–") for name in group) + " |" for m in methods]
        lines.append("")
    (options.out / f"{options.name}.md").write_text("\n".join(lines), encoding="utf-8")


def cell(line: dict[str, Any]) -> str:
    return "–" if pd.isna(line["mean"]) else f"{line['mean']:.3f} [{line['low']:.3f}, {line['high']:.3f}]"


def arrow(metric: str) -> str:
    name, params = split_call(metric)
    return "↑" if build_metric(name, **params).higher_is_better else "↓"


def facts(options: argparse.Namespace, spent: float, rows: pd.DataFrame) -> list[str]:
    """Command, date, versions and device; paths are reduced to their last component."""
    words = [word if not Path(word).exists() else Path(word).name for word in sys.argv[1:]]
    words = [re.sub(r"^(\w+):.*/([^/]+)$", r"\1:\2", word) for word in words]
    words = [word if re.fullmatch(r"[\w.,:/=+-]+", word) else f'"{word}"' for word in words]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "timm", "captum", "torchmetrics"))
    return [
        f"`python tools/results.py {' '.join(words)}`",
        "",
        f"{datetime.date.today()}, vitrail {vitrail.__version__}, {versions}, {device}.",
        f"{rows['image'].nunique()} images, {len(rows)} rows in {spent:.0f} s. Explained: the {options.target} class.",
        "Cells: mean [95 % interval]; – = does not apply or was not measured.",
    ]


if __name__ == "__main__":
    main()
