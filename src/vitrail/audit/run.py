"""Running an audit: the images are explained as in a benchmark run, then searched for what is wrong with them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.audit.annotations import WithObjects
from vitrail.audit.html import page
from vitrail.audit.measures import PREDICTION, REMOVAL, audit_metrics, register_metrics
from vitrail.audit.pairs import compare_pairs
from vitrail.audit.records import Records, read_records, region_name, share_in_box
from vitrail.audit.removal import measure_effect
from vitrail.audit.summary import Summary, Suspicion, find_patterns, summarise
from vitrail.bench.cluster import run_on_cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, Outcome, Step, load_model, model_hash, open_plan_data, run
from vitrail.bench.store import Store
from vitrail.calls import join_call
from vitrail.data.base import DataSet
from vitrail.errors import VitrailError
from vitrail.evaluation import build_methods, build_metrics, default_method, open_examples
from vitrail.files import write_together
from vitrail.geometry import Box
from vitrail.models.view import View
from vitrail.progress import shown

if TYPE_CHECKING:
    import pandas as pd

RUN, PAIRED = "run", "paired"  # beginnings of the names of the folders with the results of all images
PATTERNS = 8  # recurring details that are tested


@dataclass(frozen=True)
class Audit:
    """The results of an audit, and the files that were written."""

    summary: Summary
    pairs: pd.DataFrame | None
    outcome: Outcome
    files: Sequence[Path]

    @property
    def report(self) -> Path:
        """The HTML file."""
        return next(path for path in self.files if path.suffix == ".html")


def audit_images(
    model: str | View,
    data: str | DataSet,
    out: str | Path,
    *,
    method: str | None = None,
    masks: str | Path | None = None,
    boxes: str | Path | None = None,
    regions: Sequence[Box] = (),
    paired: str | None = None,
    images: int | None = None,
    seed: int = 0,
    trust: bool = True,
    batch_size: int | None = None,
    retry: bool = False,
    options: Mapping[str, Any] | None = None,
    load: Loader = load_model,
    view: View | None = None,
    watch: Callable[[Step], None] | None = None,
    cluster: str | None = None,
    workers: int | None = None,
) -> Audit:
    """Audits a model on a data set; what the folder already holds is not computed again.

    Args:
        model: a name that ``load`` accepts, with ``options``; or a view.
        data: as for ``evaluate``: a folder, "pets:DIR", …; or an open data set.
        out: the folder of the report and of what it is made from.
        method: of the explanations; None = the model's default, "decompx.skipplus" for a ViT.
        masks: a folder of masks of the objects, named as the images.
        boxes: a table of the objects' boxes, with the columns file and boxes.
        regions: boxes in shares of the width and of the height: how much of the evidence lies there, and what is
            predicted without them, for every image.
        paired: altered copies of the images, with their names.
        images: number of images to sample; None = all.
        seed: of the sampling.
        trust: measure how far to trust each map, in about 80 forward passes per image.
        batch_size: images per batch; None = by device.
        retry: retry images that failed before.
        options: of ``load``.
        load: builds the view of a model, here and in every worker of a cluster.
        view: the model of that name, if it is loaded here already.
        watch: called after every step.
        cluster: explain the images on a Ray cluster: "auto", "local", "HOST:PORT" or "ray://HOST:PORT"; the search for
            what recurs, and the report, are made here.
        workers: number of workers on the cluster; None = one per GPU, or per CPU where there are none.
    """
    if cluster is not None and not (isinstance(model, str) and isinstance(data, str)):
        raise VitrailError(
            f"the workers of the cluster at {cluster!r} load the model and open the images themselves: give both by "
            "name, or leave out cluster."
        )
    folder = Path(out)
    spec = ModelSpec(model.name if isinstance(model, View) else model, dict(options or {}))
    view = model if isinstance(model, View) else view or load(spec)
    opened = open_examples(data, images, seed)
    annotate = partial(_with_objects, masks=masks, boxes=boxes)
    annotated = annotate(opened)
    removals = [join_call(REMOVAL, dict(zip(("x0", "y0", "x1", "y1"), box, strict=True))) for box in regions]
    plan = Plan(
        models=[spec],
        data=data if isinstance(data, str) else f"folder:{opened.name}",  # a plan knows data by name only
        methods=[method or default_method(view)],
        metrics=[join_call(PREDICTION, {} if trust else {"trust": False}), *removals],
        images=images,
        seed=seed,
        target="predicted",
        batch_size=batch_size,
    )
    copies = None if paired is None else open_examples(paired, None, 0)

    def measure(
        place: str, plan: Plan, data: DataSet, annotate: Callable[[DataSet], DataSet]
    ) -> tuple[Outcome, Records]:
        # a folder of its own for each model and method: maps are stored by the name of the model alone
        chosen = build_methods(view, plan.methods)[0].call
        digest = hashlib.blake2b(f"{model_hash(view)} {chosen}".encode(), digest_size=4).hexdigest()
        store = Store(folder / f"{place}-{digest}")
        with audit_metrics():
            if cluster is None:
                outcome = run(plan, store.folder, load=lambda _: view, watch=watch, retry=retry, data=data)
            else:
                outcome = run_on_cluster(
                    plan,
                    store.folder,
                    cluster,
                    load=partial(_load_in_worker, load),
                    watch=watch,
                    retry=retry,
                    workers=workers,
                    data=data,
                    open_data=partial(_open_in_worker, annotate),
                )
            calls = [metric.call for metric in build_metrics(plan.metrics)]
        return outcome, read_records(store, view, data.ids, calls)

    outcome, records = measure(RUN, plan, annotated, annotate)
    pairs = None
    if copies is not None and paired is not None:
        copied = replace(plan, data=paired, metrics=plan.metrics[:1], images=None)
        more, altered = measure(PAIRED, copied, copies, partial(_with_objects, masks=None, boxes=None))
        outcome.add(more)
        pairs = compare_pairs(records, altered)
    _add_regions(records, regions)
    patterns, clusters = find_patterns(records)
    suspicions = _tested(view, annotated, records, patterns)
    summary = summarise(records, suspicions, clusters)
    about = {"model": view.name, "method": plan.methods[0], "data": opened.name, "skipped": len(opened) - len(records)}
    contents = _contents(summary, pairs, regions, about)
    write_together({folder / name: content for name, content in contents.items()})
    return Audit(summary, pairs, outcome, [folder / name for name in contents])


def _load_in_worker(load: Loader, spec: ModelSpec) -> View:
    """The model of a worker, whose process then knows the metrics of an audit."""
    register_metrics()
    return load(spec)


def _open_in_worker(annotate: Callable[[DataSet], DataSet], plan: Plan) -> DataSet:
    return annotate(open_plan_data(plan))


def _with_objects(data: DataSet, masks: str | Path | None, boxes: str | Path | None) -> DataSet:
    if masks is None and boxes is None:
        return data
    return WithObjects(data, None if masks is None else Path(masks), None if boxes is None else Path(boxes))


def _add_regions(records: Records, regions: Sequence[Box]) -> None:
    """Adds the share of the evidence in each region to the rows of the images."""
    evidence = records.evidence()
    for box in regions:
        records.frame[f"evidence in {region_name(box)}"] = share_in_box(evidence, box).numpy()


def _tested(view: View, data: DataSet, records: Records, patterns: Sequence[Any]) -> list[Suspicion]:
    """The recurring content, least likely by chance first, with its effect on predictions."""
    places = {name: place for place, name in enumerate(data.ids)}
    positions = [places[name] for name in records.frame["image"]]
    chosen = sorted(patterns, key=lambda pattern: (pattern.chance, -pattern.share))[:PATTERNS]
    suspicions = []
    for pattern in shown(chosen, "removing and pasting", "detail"):
        others = np.flatnonzero(records.predicted != pattern.target).tolist()
        effect = measure_effect(view, data, positions, pattern, others)
        suspicions.append(Suspicion(view.label(pattern.target), pattern, effect))
    return suspicions


def _contents(
    summary: Summary, pairs: pd.DataFrame | None, regions: Sequence[Box], about: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of a report by name."""
    images = summary.frame.drop(columns=["class", "label"])
    parquet = io.BytesIO()
    images.to_parquet(parquet, index=False)
    tables = {"images": images, "classes": summary.classes, "clusters": summary.clusters,
              "confusions": summary.confusions} | ({} if pairs is None else {"pairs": pairs})  # fmt: skip
    files = {f"{name}.csv": table.to_csv(index=False).encode("utf-8", "replace") for name, table in tables.items()}
    html = page(summary, pairs, regions, about).encode("utf-8", "replace")
    return {"report.html": html, **files, "images.parquet": parquet.getvalue()}


def check_output(out: Path, places: Sequence[str]) -> None:
    """Refuses a folder of results that is the folder of the images."""
    if out.resolve() in [Path(place).resolve() for place in places if Path(place).is_dir()]:
        raise VitrailError(f"--out {out} is the folder of the images: choose another, or results mix with them.")
