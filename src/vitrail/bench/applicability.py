"""Before a run begins: whether each metric that its plan names can measure anything there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vitrail.bench.plan import METRICS
from vitrail.calls import split_call
from vitrail.data.annotations import annotated, own_class
from vitrail.evaluation import check_apply
from vitrail.metrics.base import Case, MapMetric

if TYPE_CHECKING:
    from vitrail.bench.run import ModelRun

FIRST = 16  # images that are looked at
ASKED = ("tokens", "label", "region", "mask", "boxes")  # needs that data or model meet; others depend on more


def check_metrics_apply(run: ModelRun) -> None:
    """Refuses a metric that none of the first images of the data can be measured by, as ``evaluate`` does.

    The list of metrics that a plan has where nobody named any is for all data: there it is no mistake. Of several
    models the first is asked, and not for its tokens: what another one lacks is a gap in a table of both.
    """
    plan = run.plan
    if run.name != plan.models[0].name or [split_call(call)[0] for call in plan.metrics] == METRICS:
        return
    needs = [one for one in ASKED if one != "tokens" or len(plan.models) == 1]
    lacking = [one for one in run.metrics.values() if isinstance(one, MapMetric) and one.info.needs in needs]
    cases: list[Case] = []
    for place in range(min(FIRST, len(run.data))):
        if not lacking:
            return
        try:
            cases.append(_case(run, place))
        except Exception:  # an image that is broken, or that the model fails on, becomes a row of the run
            continue
        lacking = [one for one in lacking if cases[-1].lacks(one.info.needs)]
    if cases:
        check_apply(lacking, cases)


def _case(run: ModelRun, place: int) -> Case:
    """An image with its annotations and a map of nothing."""
    example, view = run.data[place], run.view
    pixels = view.check_images(view.preprocess(example.image)[None])
    label = own_class(view, example, run.remap)
    with torch.no_grad():
        predicted = int(view.class_scores(view.logits(pixels)).argmax(1))
    target = predicted if label is None or "label" not in run.explained else label
    return Case(
        view=view,
        pixels=pixels,
        target=target,
        predicted=predicted,
        label=label,
        map=torch.zeros(view.size),
        **annotated(view, example, target, label, run.remap),
    )
