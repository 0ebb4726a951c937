"""Tests the papers' claims on a model and images that stand in for the papers' own; no number is a reproduction.

Examples:
    python tools/claims.py run --data DIR --out RUNS --dry-run
    python tools/claims.py run --data DIR --out RUNS [--only 'tis-*'] [--images N] [--shard I/N]
    cp RUNS/claims.json docs/results/ && python tools/tables.py
`DIR` is the folder of `vitrail bench leaderboard --data DIR`. A run resumes. Shards only measure, each its part of the
images; the same command without --shard measures what is missing and writes RUNS/claims.json, from which
`tools/tables.py` makes the tables of docs/claims.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vitrail.bench.plan import ModelSpec
from vitrail.bench.run import load_model
from vitrail.bench.shard import Shard
from vitrail.calls import split_call
from vitrail.data.imagenet import imagenet_classes
from vitrail.data.label_tables import read_table
from vitrail.data.paths import find_file
from vitrail.files import save_atomically
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.metrics.base import Metric, build_metric
from vitrail.metrics.perturbation import Area, InsertionMinusDeletion, Removal
from vitrail.metrics.robustness import MaxSensitivity
from vitrail.metrics.sanity import ModelRandomization
from vitrail.metrics.tokens import TokenCurve
from vitrail.models.labels import plain_name
from vitrail.models.view import View
from vitrail.papers.catalogue import Claim, PaperTarget, find_target, targets
from vitrail.papers.metrics import ImpactScores, paper_metrics
from vitrail.papers.plans import PlannedRun, parse_model, plan_runs, prepare, select
from vitrail.papers.reproduction import Reproduction, reproduce

VIT_TI, DINOV2 = "ViT-Ti/16, ImageNet", "DINOv2 ViT-S/14, pets"
MODELS = {
    VIT_TI: "vit_tiny_patch16_224?checkpoint={models}/vit_tiny_patch16_224_imagenet1k.safetensors"
    "&labels={models}/imagenet1k_labels.txt",
    DINOV2: "vit_small_patch14_dinov2?checkpoint={models}/dinov2_vits14_pets37.safetensors"
    "&labels={models}/pets37_labels.txt&img_size=224",
}
IMAGES = {  # requirement → what is given in its place
    "imagenet": "folder:{data}/imagenette-boxes",
    "imagenet_s": "folder:{data}/pets?table={out}/breeds.tsv",
    "segmentation": "folder:{data}/pets?table={out}/breeds.tsv",
    "pets": "folder:{data}/pets",
}
BREEDS = "breeds.tsv"
MEMORY = 0.9  # of a GPU, for all shards together


@dataclass(frozen=True)
class StandIn:
    """What is measured of a target: the columns of one of its models, with another in its place."""

    target: str
    key: str  # of the paper's model
    images: int
    data: tuple[str, ...] = ()  # only the columns of these data sets, by key
    model: str = VIT_TI

    @property
    def name(self) -> str:
        return f"{self.target}-{self.key}"


STAND_INS = (  # cheap ones first: a run that is cut short holds them
    StandIn("vit_cx-redundancy", "vit", 64),
    *(StandIn(f"skipplus-figure{i}", "vit8", 128, ("imagenet", "imagenet_s")) for i in (9, 7, 10, 11, 2, 4, 8, 3, 12)),
    StandIn("vtranm-table3", "vit", 128),
    StandIn("vtranm-table4", "vit", 128),
    StandIn("vtranm-table2", "deit", 128),
    StandIn("libragrad-table1", "vit", 128, ("imagenet",)),
    StandIn("libragrad-table1", "pets", 64, model=DINOV2),
    StandIn("tis-figure4", "vit", 64),
    StandIn("vit_cx-overdetermination", "vit", 128),
    StandIn("vit_cx-sanity", "vit", 16),
    StandIn("tis-table3", "vit", 32),
    StandIn("vit_cx-table2", "deit", 24),
    StandIn("tis-figure3", "vit", 128),
    StandIn("vit_cx-table1", "vit", 32),
    StandIn("tis-ratio", "vit", 24),
    StandIn("tis-masks", "vit", 24),
    StandIn("tis-table4", "vit", 8),
    StandIn("tis-table1", "vit", 24),
)
TESTED = {stand_in.target for stand_in in STAND_INS}
WITHOUT = {  # targets with claims that nothing stands in for
    "tis-table2": "its claims, on the same stand-in, are those of tis-table1",
    "vit_cx-figure1": "it has one picture per column, and a claim takes six to be decided",
    "vtranm-table1": "there is no model of CIFAR-10 or CIFAR-100",
    "skipplus-figure6": "there are no images with a zebra and an elephant",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["run"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", metavar="GLOB", help="targets")
    parser.add_argument("--images", type=int, help="of each target; default: by its cost")
    parser.add_argument("--shard", metavar="I/N")
    parser.add_argument("--quick", action="store_true", help="few steps and masks: the numbers are meaningless")
    parser.add_argument("--dry-run", action="store_true", help="print what would be measured, in forward passes")
    options = parser.parse_args(arguments)
    chosen = [stand_in for stand_in in STAND_INS if fnmatchcase(stand_in.target, options.only)]
    if options.images is not None:
        chosen = [replace(stand_in, images=options.images) for stand_in in chosen]
    warnings.simplefilter("ignore")
    write_breeds(options.data / "data" / "pets", options.out / BREEDS)
    if options.dry_run:
        estimate(chosen, options)
    else:
        run(chosen, options)


def run(stand_ins: list[StandIn], options: argparse.Namespace) -> None:
    shard = None if options.shard is None else Shard.parse(options.shard)
    if shard is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(MEMORY / shard.count)
    for stand_in in stand_ins:
        start = time.perf_counter()
        result = reproduce(
            stand_in.target,
            data_of(stand_in, options),
            model_of(stand_in, options),
            stand_in.images,
            options.out / stand_in.name,
            only=(stand_in.key, *stand_in.data),
            quick=options.quick,
            shard=shard,
            load=loaded,
        )
        print(f"{stand_in.name}: {time.perf_counter() - start:.0f} s", flush=True)
        for cell in result.failed if shard is None else ():
            print(f"{cell.row}, {cell.column}: {cell.error or 'no image counts'}", file=sys.stderr)
        if shard is None:
            add(options.out / "claims.json", stand_in, result)


def data_of(stand_in: StandIn, options: argparse.Namespace) -> dict[str, str]:
    target = find_target(stand_in.target)
    places = {"data": options.data / "data", "out": options.out.resolve()}
    return {need.name: IMAGES[need.name].format(**places) for need in target.needs() if need.name in IMAGES}


def model_of(stand_in: StandIn, options: argparse.Namespace) -> str:
    return f"{stand_in.key}={MODELS[stand_in.model].format(models=options.data / 'models')}"


@cache
def _loaded(text: str) -> View:
    return load_model(parse_model(text))


def loaded(spec: ModelSpec) -> View:
    """A model, once for all targets."""
    return _loaded(spec.name + "?" + "&".join(f"{name}={value}" for name, value in spec.options.items()))


def write_breeds(pets: Path, table: Path) -> None:
    """A table of the pets whose breed is one of ImageNet's classes, by its number there."""
    index = {plain_name(name): i for i, names in enumerate(imagenet_classes()[1]) for name in names.split(",")}
    listing = read_table(find_file([pets / "labels.tsv"], "the table of the pets", pets, "check --data"))
    breeds = [(row.file, plain_name((listing.labels or ())[row.label or 0])) for row in listing.rows]
    lines = [f"{file}\t{index[breed]}\n" for file, breed in breeds if breed in index]
    table.parent.mkdir(parents=True, exist_ok=True)
    save_atomically(table, lambda file: file.write(("file\tindex\n" + "".join(lines)).encode()))


# The summary


def add(path: Path, stand_in: StandIn, result: Reproduction) -> None:
    """Puts a stand-in into the summary, in place of an earlier one."""
    known = json.loads(path.read_text(encoding="utf-8"))["measured"] if path.exists() else {}
    summary = {**known, stand_in.name: summarised(stand_in, result)}
    places = [*targets()]
    names = sorted(summary, key=lambda name: places.index(summary[name]["target"]))
    left_out = {name: WITHOUT.get(name, "it makes no claim") for name in places if name not in TESTED}
    content = {"measured": {name: summary[name] for name in names}, "left_out": left_out}
    save_atomically(path, lambda file: file.write(json.dumps(content, indent=1, ensure_ascii=False).encode()))


def summarised(stand_in: StandIn, result: Reproduction) -> dict[str, Any]:
    """The claims about the columns that were measured; the others are only named."""
    target, measured = find_target(stand_in.target), result.columns()
    about = {verdict.claim.text: verdict.claim for verdict in result.verdicts}
    claims = result.as_dict()["claims"]
    return {
        "target": stand_in.target,
        "model": stand_in.model,
        "instead_of": target.models[stand_in.key].label,
        "images": {column: max(cell.n for cell in result.cells if cell.column == column) for column in measured},
        "directions": {column: result.directions[column] for column in measured},
        "claims": [rounded(claim) for claim in claims if is_about(about[claim["text"]], target, measured)],
        "untested": [claim["text"] for claim in claims if not is_about(about[claim["text"]], target, measured)],
    }


def is_about(claim: Claim, target: PaperTarget, columns: list[str]) -> bool:
    """Whether a claim is about these columns of a target."""
    if claim.columns:
        return any(fnmatchcase(column, pattern) for column in columns for pattern in claim.columns)
    return all(column.label in columns for column in target.columns if f"'{column.label}'" in claim.test)


def rounded(value: Any) -> Any:
    """Six digits, so that the file says nothing about rounding errors of a machine."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


# The cost


def estimate(stand_ins: list[StandIn], options: argparse.Namespace) -> None:
    """Prints the forward passes of each target; a backward pass counts as two."""
    total = 0.0
    with paper_metrics():
        for stand_in in stand_ins:
            only = (stand_in.key, *stand_in.data)
            model = [model_of(stand_in, options)]
            data = data_of(stand_in, options)
            selection = select(find_target(stand_in.target), data, model, stand_in.images, only, options.quick)
            views, data_sets = prepare(selection, loaded)
            runs = plan_runs(selection, views)
            work = [(passes(run, views[run.model.key]), len(data_sets[run.data.key])) for run in runs]
            total += sum(count * images for count, images in work)
            parts = " + ".join(f"{images} images × {count:,.0f}" for count, images in work)
            print(f"{stand_in.name}: {parts} = {sum(count * images for count, images in work):,.0f}")
    print(f"{total:,.0f} forward passes of 224 × 224 pixels")


def passes(run: PlannedRun, view: View) -> float:
    """Forward passes per image."""

    def cost(method: Method) -> float:
        forwards, backwards = method.passes()
        return 5000 if method.params.get("source") == "random" else forwards + 2 * backwards

    methods = [build_method(name, view, **params) for name, params in map(split_call, run.plan.methods)]
    metrics = [build_metric(name, **params) for name, params in map(split_call, run.plan.metrics)]
    curves: dict[object, float] = {}
    again = 0.0  # how often a method explains the image once more
    for metric in metrics:
        curves |= curves_of(metric)
        if isinstance(metric, MaxSensitivity):
            again += metric.samples
        elif isinstance(metric, ModelRandomization):
            again += view.num_layers + 1
        elif isinstance(metric, ImpactScores):
            again += 1
    return sum((1 + again) * cost(method) + sum(curves.values()) for method in methods)


def curves_of(metric: Metric) -> dict[object, float]:
    """What a metric reads of each map → forward passes; equal curves are read once."""
    if isinstance(metric, Area):
        ways = ["insertion", "deletion"] if isinstance(metric, InsertionMinusDeletion) else [metric.way]
        return {(way, metric.baseline, metric.protocol, metric.steps): metric.steps for way in ways}
    if isinstance(metric, Removal):
        return {(metric.least_first, metric.baseline, metric.steps): metric.steps + 1}
    if isinstance(metric, TokenCurve):
        return {metric.way: 5.5}  # ten points with half of the patches in the mean
    return {}


if __name__ == "__main__":
    main()
