"""Maps inside pytorch-grad-cam: its ROAD and confidence metrics, its pictures, and its own CAMs beside ours."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from torch import Tensor

import vitrail
from vitrail.engine.maps import enlarged, min_max
from vitrail.methods.registry import build_method
from vitrail.models.view import View

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:__array_wrap__"),  # it gives tensors to NumPy's functions
]
pytest.importorskip("pytorch_grad_cam")
CLASSES = [1, 2, 0]


def peer(path: str) -> Any:
    """Something of the library, by its path there."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"pytorch_grad_cam.{module}".rstrip(".")), name)


def explained(name: str) -> tuple[View, Tensor, np.ndarray, list[Any]]:
    """A view, images, their maps as that library has them, (B, H, W) in 0…1, and its targets."""
    view, images = vitrail.wrap(families.build(name)), families.images(name, 3)
    maps = np.stack([ex.heatmap().numpy() for ex in vitrail.explain(view, images, "gen_att", target=CLASSES)])
    return view, images, maps, [peer("utils.model_targets.ClassifierOutputTarget")(index) for index in CLASSES]


def class_logits(view: View, images: Tensor) -> np.ndarray:
    return view.logits(images)[range(3), CLASSES].detach().numpy()


@pytest.mark.parametrize("name", ["timm_vit_not_square", "hf_vit"])
def test_road_removes_the_top_of_a_map(name: str) -> None:
    view, images, maps, targets = explained(name)
    road = peer("metrics.road.ROADMostRelevantFirst")(percentile=75)
    scores, removed = road(images, maps, targets, view.logits, return_visualization=True)
    np.testing.assert_allclose(scores, class_logits(view, removed) - class_logits(view, images), rtol=1e-3, atol=1e-5)
    for before, after, values in zip(images, removed, maps, strict=True):
        changed = (before != after).any(0).numpy()
        assert (changed == (values >= np.percentile(values, 75))).all()


def test_road_averages_both_orders() -> None:
    view, images, maps, targets = explained("timm_vit")
    torch.manual_seed(0)  # it adds noise
    most, least, combined = (
        peer(f"metrics.road.{kind}")(percentiles=[20, 80])(images, maps, targets, view.logits)
        for kind in ("ROADMostRelevantFirstAverage", "ROADLeastRelevantFirstAverage", "ROADCombined")
    )
    np.testing.assert_allclose(combined, (least - most) / 2, atol=0.03)
    assert np.abs(combined).max() > 0.1


def test_confidence_is_measured_on_the_product_of_map_and_image() -> None:
    view, images, maps, targets = explained("timm_vit")
    drop = peer("metrics.cam_mult_image.DropInConfidence")()(images, maps, targets, view.logits)
    change = class_logits(view, images * torch.as_tensor(maps)[:, None]) - class_logits(view, images)
    np.testing.assert_allclose(drop, np.maximum(-change, 0), rtol=1e-3, atol=1e-5)


def test_a_heatmap_is_drawn_over_a_photograph() -> None:
    view = vitrail.wrap(families.build("timm_vit"))
    photo = Image.effect_noise((60, 40), 64).convert("RGB")
    ex = vitrail.explain(view, photo, "gen_att")
    image = np.asarray(ex.image, dtype=np.float32) / 255
    drawn = peer("utils.image.show_cam_on_image")(image, ex.heatmap(outside=0).numpy(), use_rgb=True)
    assert (drawn.shape, drawn.dtype) == ((40, 60, 3), np.uint8)


@pytest.mark.parametrize(
    ("theirs", "ours", "params"),
    [
        ("GradCAM", "grad_cam", {}),
        ("GradCAMElementWise", "grad_cam_elementwise", {}),
        ("HiResCAM", "hires_cam", {}),
        ("GradCAMPlusPlus", "grad_cam_pp", {}),
        ("XGradCAM", "xgrad_cam", {}),
        ("LayerCAM", "layer_cam", {}),
        ("ScoreCAM", "score_cam", {"variant": "library"}),
    ],
)
def test_cams_are_those_of_the_library(theirs: str, ours: str, params: dict[str, Any]) -> None:
    name = "timm_vit"
    module, images = families.build(name), families.images(name, 3)
    view = vitrail.wrap(module)
    targets = [peer("utils.model_targets.ClassifierOutputTarget")(index) for index in CLASSES]

    def to_grid(tokens: Tensor) -> Tensor:
        return tokens[:, view.num_prefix :].unflatten(1, view.grid).permute(0, 3, 1, 2)

    cam = peer(theirs)(model=module, target_layers=[module.blocks[-1].norm1], reshape_transform=to_grid)
    expected = cam(input_tensor=images, targets=targets)
    maps = build_method(ours, view, **params).attribute(images, target=CLASSES)
    for values, theirs_values in zip(maps, expected, strict=True):
        heat = min_max(enlarged(values.double(), view.size)).numpy()
        np.testing.assert_allclose(heat, theirs_values, atol=1e-4)
