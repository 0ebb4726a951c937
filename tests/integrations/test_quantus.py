"""Methods as Quantus's ``explain_func``; where Quantus is installed, inside it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
from scipy.stats import spearmanr
from tests import families
from torch import nn

import vitrail
from vitrail import VitrailError
from vitrail.integrations.quantus import LogitsModule, explain
from vitrail.methods.registry import build_method
from vitrail.metrics import measure

CLASSES = np.array([1, 2])
METHOD = "gen_att"


def pictures(name: str) -> np.ndarray:
    return families.images(name, 2).numpy()


def expected(module: nn.Module, images: np.ndarray) -> np.ndarray:
    """The maps of a new view, (B, rows, columns)."""
    maps = build_method(METHOD, vitrail.wrap(module)).attribute(torch.as_tensor(images), target=CLASSES.tolist())
    return maps.numpy()


def redraw(module: nn.Module) -> None:
    """Gives the last block and the head other weights, in place, as Quantus does."""
    torch.manual_seed(0)
    parts = [part for part in module.modules() if isinstance(part, nn.Linear)]
    for part in parts[-5:]:
        part.reset_parameters()


def on_patches(maps: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Sums over the pixels of each patch."""
    count, _, height, width = maps.shape
    rows, columns = grid
    return maps.reshape(count, rows, height // rows, columns, width // columns).sum((2, 4))


def test_maps_are_spread_over_the_pixels() -> None:
    module, images = families.build("timm_vit_not_square"), pictures("timm_vit_not_square")
    maps = explain(module, images, CLASSES, METHOD, device="cpu")
    assert (maps.shape, maps.dtype) == ((2, 1, *images.shape[2:]), np.float32)
    np.testing.assert_allclose(on_patches(maps, (3, 5)), expected(module, images), rtol=1e-4, atol=1e-7)
    assert explain(module, images, CLASSES).shape == maps.shape  # by the default method


def test_parameters_are_those_of_the_method() -> None:
    module, images = families.build("timm_vit"), pictures("timm_vit")
    few, more = (explain(module, images, CLASSES, "rise", masks=masks) for masks in (4, 8))
    assert not np.allclose(few, more)
    with pytest.raises(VitrailError, match="maskz"):
        explain(module, images, CLASSES, "rise", maskz=4)


@pytest.mark.parametrize("name", ["timm_vit", "hf_vit"])
def test_weights_that_change_in_place_are_seen(name: str) -> None:
    """Quantus draws the weights of one copy anew, layer by layer."""
    module, images = families.build(name), pictures(name)
    grid = families.find(name).grid
    model = LogitsModule(vitrail.wrap(module)) if name.startswith("hf") else module
    before = explain(model, images, CLASSES, METHOD)
    randomised = copy.deepcopy(model)
    assert np.array_equal(explain(randomised, images, CLASSES, METHOD), before)
    redraw(randomised)
    after = explain(randomised, images, CLASSES, METHOD)
    network = randomised.network if isinstance(randomised, LogitsModule) else randomised
    np.testing.assert_allclose(on_patches(after, grid), expected(network, images), rtol=1e-4, atol=1e-7)
    assert not np.allclose(after, before)
    assert np.array_equal(explain(model, images, CLASSES, METHOD), before)


def test_a_view_is_a_module_of_logits() -> None:
    module, images = families.build("hf_vit").train(), torch.as_tensor(pictures("hf_vit"))
    view = vitrail.wrap(module)
    model = LogitsModule(view)
    assert (model.training, module.training) == (False, True)
    torch.testing.assert_close(model(images), view.logits(images))
    assert {id(p) for p in model.parameters()} == {id(p) for p in module.parameters()}


def test_a_head_that_a_view_was_given_is_copied_with_it() -> None:
    torch.manual_seed(0)
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, patch_size=8, depth=1)
    model = LogitsModule(vitrail.wrap(backbone, head=nn.Linear(192, 5), pool="token"))
    images = pictures("timm_vit")
    before, randomised = explain(model, images, CLASSES, METHOD), copy.deepcopy(model)
    assert isinstance(randomised.head, nn.Linear)
    randomised.head.reset_parameters()
    assert not np.allclose(explain(randomised, images, CLASSES, METHOD), before)
    assert np.array_equal(explain(model, images, CLASSES, METHOD), before)


# --- inside Quantus -------------------------------------------------------------------------------------------------


def called(metric: Any, model: nn.Module, images: np.ndarray, **kwargs: Any) -> Any:
    return metric(
        model=model, x_batch=images, y_batch=CLASSES, explain_func=explain, device="cpu",
        explain_func_kwargs={"method": METHOD}, **kwargs,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ["timm_vit", "hf_vit"])
@pytest.mark.parametrize("order", ["top_down", "independent"])
def test_randomised_models_are_explained_anew(name: str, order: str) -> None:
    quantus = pytest.importorskip("quantus")
    module, images = families.build(name), pictures(name)
    model = LogitsModule(vitrail.wrap(module)) if name.startswith("hf") else module
    scores = called(quantus.MPRT(layer_order=order, disable_warnings=True), model, images)

    before = np.abs(expected(module, images)).reshape(2, -1)
    changed = copy.deepcopy(module)
    original = {key: value.clone() for key, value in module.state_dict().items()}
    layers = [part for _, part in changed.named_modules() if hasattr(part, "reset_parameters")]
    similarities = []
    for layer in reversed(layers) if order == "top_down" else layers:
        if order == "independent":
            changed.load_state_dict(original)
        torch.manual_seed(43)
        layer.reset_parameters()
        after = np.abs(expected(changed, images)).reshape(2, -1)
        similarities.append([float(spearmanr(a, b).statistic) for a, b in zip(before, after, strict=True)])
    assert list(scores.pop("original")) == pytest.approx([1, 1])
    assert len(scores) == len(layers) > 10
    np.testing.assert_allclose([*scores.values()], similarities, atol=0.02)  # near ties, rounded otherwise
    assert min(map(min, similarities)) < 0.9


@pytest.mark.full
def test_metrics_of_quantus_measure_methods() -> None:
    quantus = pytest.importorskip("quantus")
    module, images = families.build("timm_vit"), pictures("timm_vit")
    view = vitrail.wrap(module)
    sparseness = called(quantus.Sparseness(disable_warnings=True), module, images)
    maps = torch.as_tensor(explain(module, images, CLASSES, METHOD))[:, 0]
    ours = [score.value for score in measure("sparseness", view, torch.as_tensor(images), maps, CLASSES.tolist())]
    assert sparseness == pytest.approx(ours, abs=1e-3)
    moved = called(quantus.MaxSensitivity(nr_samples=2, disable_warnings=True), module, images)
    assert len(moved) == 2
    assert min(moved) > 0
    other = called(quantus.RandomLogit(num_classes=5, seed=1, disable_warnings=True), module, images)
    assert max(other) < 1


@pytest.mark.full
def test_quantus_compares_methods_by_name() -> None:
    quantus = pytest.importorskip("quantus")
    module, images = families.build("timm_vit"), pictures("timm_vit")
    results = quantus.evaluate(
        metrics={"sparse": quantus.Sparseness(disable_warnings=True)},
        xai_methods=dict.fromkeys(("gen_att", "decompx.skipplus"), explain),
        model=module, x_batch=images, y_batch=CLASSES, explain_func_kwargs={}, agg_func=np.mean,
    )  # fmt: skip
    assert {*results} == {"gen_att", "decompx.skipplus"}
    assert results["gen_att"]["sparse"] != results["decompx.skipplus"]["sparse"]


@pytest.mark.full
def test_quantus_calls_a_model_of_hugging_face_through_its_view() -> None:
    quantus = pytest.importorskip("quantus")
    module, images = families.build("hf_vit"), pictures("hf_vit")
    metric = quantus.PixelFlipping(features_in_step=1024, disable_warnings=True)
    curves = called(metric, LogitsModule(vitrail.wrap(module)), images)
    assert np.shape(curves) == (2, 3)
    assert np.isfinite(curves).all()
