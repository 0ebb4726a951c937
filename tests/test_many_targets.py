"""Several targets at once: the maps of a call for each, from fewer forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import batch, viewed

import vitrail
from vitrail.engine.scheduler import TARGETS_AT_ONCE
from vitrail.targets import Contrast, Group

CALLS = (
    "decompx.skipplus",
    "gen_att",
    "full_grad",
    "legrad",
    "lrp",
    "grad_cam",
    "alti",
    "integrated_gradients(steps=3)",
)


def explained(view: Any, images: Any, call: str, **options: Any) -> Any:
    name, params = vitrail.calls.split_call(call)
    return vitrail.explain(view, images, name, **options, **params)


@pytest.mark.parametrize("call", CALLS)
def test_each_map_is_that_of_a_call_of_its_own(call: str) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    together = explained(view, images, call, targets=[2, None, 0])
    for place, target in enumerate((2, None, 0)):
        for row, alone in zip(together, explained(view, images, call, target=target), strict=True):
            assert torch.equal(row[place].map, alone.map)
            assert (row[place].target, row[place].probability) == (alone.target, alone.probability)
            assert row[place].extras == pytest.approx(alone.extras)


@pytest.mark.parametrize("family", ["timm_swin", "hf_beit_mean", "timm_resnet"])
def test_hierarchical_models_and_black_boxes(family: str) -> None:
    view, images = viewed(family)[2], batch(family, 1)
    (row,) = vitrail.explain(view, images, "grad_cam", targets=[1, 0], against=2)
    for explanation, target in zip(row, (1, 0), strict=True):
        (alone,) = vitrail.explain(view, images, "grad_cam", target, against=2)
        assert torch.equal(explanation.map, alone.map)
        assert explanation.against == 2


def test_targets_share_forward_passes(forwards: list[int]) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    vitrail.explain(view, images, "gen_att", targets=[0, 1, 2])
    assert forwards == [2]
    forwards.clear()
    vitrail.explain(view, images, "gen_att", targets=[0] * (TARGETS_AT_ONCE + 1))
    assert forwards == [2, 2]


def test_all_is_every_class_of_the_model() -> None:
    view = viewed("timm_vit")[2]
    row = vitrail.explain(view, batch("timm_vit", 1)[0], "decompx", targets="all")
    assert [explanation.target for explanation in row] == list(range(view.num_classes))


def test_other_targets_are_in_their_places() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)[0]
    targets = [1, Group([0, 1], name="both"), Contrast(0, 2)]
    row = vitrail.explain(view, image, "decompx", targets=targets)
    assert [explanation.label for explanation in row] == [view.label(1), "both", view.label(0)]
    for explanation, target in zip(row, targets, strict=True):
        assert torch.equal(explanation.map, vitrail.explain(view, image, "decompx", target).map)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": 0, "targets": [1]}, "both given"),
        ({"targets": []}, "targets is empty"),
        ({"targets": "everything"}, 'a list of targets or "all"'),
        ({"targets": [0, 77]}, "77"),
    ],
)
def test_wrong_targets_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vitrail.VitrailError, match=sentence):
        vitrail.explain(viewed("timm_vit")[2], batch("timm_vit", 1), "decompx", **options)
