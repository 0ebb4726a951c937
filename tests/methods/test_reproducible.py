"""The same seed gives the same bits on the same device and batch; other batches give the same ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.bench.plans import plan
from tests.families import build
from tests.helpers import batch, required_parameters, viewed
from tests.properties import quick
from torch import Tensor

import vitrail
from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.methods.registry import build_method, list_methods
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.view import View

SINGLE = torch.float32


def maps(method: str, view: View, images: Tensor) -> Tensor:
    return build_method(method, view, **quick(method, view)).attribute(images, 1)


def ranked(values: Tensor) -> Tensor:
    """Values that are equal up to rounding are equal: they have the same rank, whichever is larger by a last bit."""
    return (values / values.abs().max()).double().round(decimals=5)


@pytest.mark.parametrize("method", list_methods())
def test_the_same_seed_gives_the_same_bits(method: str) -> None:
    images = batch("timm_vit", 2, SINGLE)
    shared = viewed("timm_vit", SINGLE)[2]
    first = maps(method, shared, images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        fresh = vitrail.wrap(build("timm_vit")) if not required_parameters(method, shared) else shared
        assert torch.equal(maps(method, fresh, images), first)


@pytest.mark.parametrize("method", list_methods())
def test_ranks_do_not_depend_on_the_batch(method: str) -> None:
    view, images = viewed("timm_vit", SINGLE)[2], batch("timm_vit", 3, SINGLE)
    together = maps(method, view, images)
    for place, image in enumerate(images):
        alone = maps(method, view, image[None])[0]
        if float(alone.std()) > 1e-6 * float(alone.abs().max()):  # of a constant map rounding has the ranks
            assert rank_correlation(ranked(together[place]), ranked(alone)) >= 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stored_explanation_names_what_made_it(dtype: str, tmp_path: Path) -> None:
    view = vitrail.wrap(build("timm_vit", getattr(torch, dtype)))
    photo = Image.new("RGB", (32, 32))
    path = vitrail.explain(view, photo, "rise", masks=4, seed=7).save(tmp_path / "why.png")
    about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert about["model"]["fingerprint"] == view.fingerprint()
    assert about["model"]["precision"] == dtype
    assert about["params"]["seed"] == 7
    assert about["vitrail"] == vitrail.__version__
    assert about["versions"].keys() >= {"python", "torch", "timm", "numpy"}
    again = vitrail.open(path, image=photo, check=False).save(tmp_path / "again.png")
    assert json.loads(again.with_suffix(".json").read_text(encoding="utf-8"))["model"] == about["model"]


def test_a_run_names_what_made_it(tmp_path: Path) -> None:
    run(plan(images=1, methods=["random"], metrics=["sparseness"], seed=3), tmp_path)
    about, view = Store(tmp_path).environment(), vitrail.load("scenes")
    assert about["models"] == {
        "scenes": {"fingerprint": view.fingerprint(), "precision": "float32", "half_precision": None}
    }
    assert about["versions"].keys() >= {"torch", "timm", "numpy"}
    assert Store(tmp_path).plan().seed == 3
