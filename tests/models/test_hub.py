"""Revisions of models on the hub: pinned on request, and recorded; the hub is a cache folder here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from tests import families
from tests.models.tiny import NAME, TINY, picture
from torch import nn
from transformers import ViTImageProcessor

import vitrail
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store, environment
from vitrail.errors import VitrailError
from vitrail.models.hub import cached_commit, split_revision

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
TAGGED = f"{NAME}.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(cache: Path, repository: str, commit: str, *references: str) -> Path:
    """The folder of a commit that ``references`` point at."""
    root = cache / f"models--{repository.replace('/', '--')}"
    for reference in references:
        path = root / "refs" / reference
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def timm_model(seed: int, **changes: Any) -> nn.Module:
    made = timm.create_model(NAME, **{**TINY, "num_classes": 1000, **changes})
    families.randomize(made, seed)
    return made.eval()


def store_timm(cache: Path, repository: str, commit: str, seed: int, *references: str) -> nn.Module:
    """A timm model with weights of a seed, as ``timm.models.push_to_hf_hub`` stores it."""
    made, folder = timm_model(seed), snapshot(cache, repository, commit, *references)
    save_file(made.state_dict(), folder / "model.safetensors")
    about = {"architecture": NAME, "num_classes": 1000, "model_args": TINY, "pretrained_cfg": {"num_classes": 1000}}
    (folder / "config.json").write_text(json.dumps(about))
    return made


def store_huggingface(cache: Path, commit: str, seed: int, *references: str) -> nn.Module:
    made = families.find("hf_vit").build()
    families.randomize(made, seed)
    folder = snapshot(cache, "org/vit", commit, *references)
    made.eval().save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return made


def test_a_revision_of_huggingface_is_pinned_and_recorded(cache: Path) -> None:
    old, new = store_huggingface(cache, OLD, 1, "v1"), store_huggingface(cache, NEW, 2, "main")
    images = families.images("hf_vit", 1)
    for name, options, commit, expected in [
        ("hf:org/vit", {}, NEW, new),
        ("hf:org/vit@main", {}, NEW, new),
        ("hf:org/vit@v1", {}, OLD, old),
        (f"hf:org/vit@{OLD}", {}, OLD, old),
        ("hf:org/vit", {"revision": "v1"}, OLD, old),
    ]:
        view = vitrail.load(name, **options)
        assert (view.commit, view.spec) == (commit, {"name": f"hf:org/vit@{commit}"})
        with torch.no_grad():
            torch.testing.assert_close(view.logits(images), expected.to(images.dtype)(images).logits)
    with pytest.raises(VitrailError, match="is offline, and its cache does not hold the weights"):
        vitrail.load("hf:org/vit@v3")


def test_a_timm_model_on_the_hub_is_loaded_by_its_repository(cache: Path) -> None:
    old, new = store_timm(cache, "me/mine", OLD, 1, "v1"), store_timm(cache, "me/mine", NEW, 2, "main")
    for name, commit, expected in [
        ("hf_hub:me/mine", NEW, new),
        ("hf-hub:me/mine@v1", OLD, old),
        (f"hf_hub:me/mine@{OLD}", OLD, old),
    ]:
        view = vitrail.load(name)
        assert (view.commit, view.spec["name"]) == (commit, f"{split_revision(name)[0]}@{commit}")
        torch.testing.assert_close(view.logits(picture()), expected(picture()).detach())


def test_the_weights_of_a_timm_name_are_pinned_too(cache: Path) -> None:
    old = store_timm(cache, f"timm/{TAGGED}", OLD, 1, "v1")
    new = store_timm(cache, f"timm/{TAGGED}", NEW, 2, "main")
    for name, commit, expected in [(NAME, NEW, new), (f"{NAME}@v1", OLD, old), (f"{TAGGED}@{OLD}", OLD, old)]:
        view = vitrail.load(name, **TINY)
        assert (view.commit, view.spec["name"]) == (commit, f"{split_revision(name)[0]}@{commit}")
        torch.testing.assert_close(view.logits(picture()), expected(picture()).detach())


def test_weights_from_elsewhere_have_no_commit(cache: Path, tmp_path: Path) -> None:
    store_timm(cache, f"timm/{TAGGED}", NEW, 2, "main")
    save_file(timm_model(3).state_dict(), tmp_path / "w.safetensors")
    view = vitrail.load(NAME, checkpoint=tmp_path / "w.safetensors", **TINY)
    assert (view.commit, view.spec["name"]) == (None, NAME)
    with pytest.raises(VitrailError, match=r"@v1 names a revision .*, without weights of the hub: leave out @v1"):
        vitrail.load(f"{NAME}@v1", checkpoint=tmp_path / "w.safetensors", **TINY)
    store_huggingface(cache, OLD, 1)
    folder = cache / "models--org--vit" / "snapshots" / OLD
    assert vitrail.load(f"hf:{folder}").spec == {"name": f"hf:{folder}"}


def test_a_saved_explanation_finds_its_commit_when_the_branch_has_moved(cache: Path, tmp_path: Path) -> None:
    store_huggingface(cache, OLD, 1, "main")
    Image.new("RGB", (40, 40), "teal").save(tmp_path / "photo.png")
    ex = vitrail.explain(vitrail.load("hf:org/vit"), tmp_path / "photo.png")
    ex.save(tmp_path / "why.png")
    assert json.loads((tmp_path / "why.json").read_text())["model"]["commit"] == OLD
    store_huggingface(cache, NEW, 2, "main")
    assert vitrail.open(tmp_path / "why.png").model.commit == OLD
    with pytest.raises(VitrailError, match="its weights changed"):
        vitrail.open(tmp_path / "why.png", model="hf:org/vit")


def test_a_run_records_the_commits_of_its_models(cache: Path, tmp_path: Path) -> None:
    store_huggingface(cache, OLD, 1, "v1")
    store_huggingface(cache, NEW, 2, "main")
    store = Store(tmp_path / "run")
    names = "hf:org/vit", "hf:org/vit@v1"
    plan = Plan(models=tuple(ModelSpec(name) for name in names), data="scenes")
    for name in names:
        store.begin(plan, environment(vitrail.load(name)))
    assert store.environment()["commits"] == {"hf:org/vit": NEW, "hf:org/vit@v1": OLD}


@pytest.mark.parametrize("name", ["org/name@", "@main", "org/name@a@b"])
def test_a_broken_revision_is_refused(name: str) -> None:
    with pytest.raises(VitrailError, match=r"a revision is written NAME@REVISION .* but got"):
        vitrail.load(f"hf:{name}")


def test_what_the_cache_does_not_hold_has_no_commit(cache: Path) -> None:
    assert cached_commit("org/vit", None) is None
    assert cached_commit("org/vit", NEW) is None
