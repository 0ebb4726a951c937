"""Models by name, with options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from tests import families
from tests.models.tiny import HEADLESS, NAME, TINY, load_tiny, picture
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.models.names import kind_of_view
from vitrail.models.wrapping import outline

# Names


def test_a_timm_name_without_weights_warns_that_it_means_nothing() -> None:
    with pytest.warns(UserWarning, match=r"random weights"):
        view = vitrail.load(NAME, pretrained=False, **TINY)
    assert (view.name, view.size, view.num_classes) == (NAME, (32, 32), 1000)
    assert view.label(1) == "goldfish, Carassius auratus"
    assert not view.module.training
    assert not any(p.requires_grad for p in view.module.parameters())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit_base_patch16_244", "Did you mean vit_base_patch16_224"),
        ("vit_base_patch16_224.nonsense", "augreg2_in21k_ft_in1k"),
        ("totally unknown", "vitrail models"),
        ("", "vitrail models"),
        ("torchvision:vit_b_61", "Did you mean vit_b_16"),
        ("torchvision:", "Did you mean"),
        ("hf:./no/such/folder", "config.json"),
    ],
)
def test_an_unknown_name_is_one_error_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(VitrailError, match=hint):
        vitrail.load(name)


@pytest.mark.parametrize("name", [nn.Linear(2, 2), 5, Path("vit.pth")])
def test_only_a_text_is_a_name(name: Any) -> None:
    with pytest.raises(VitrailError, match=r"load\(\) takes a name"):
        vitrail.load(name)


@pytest.mark.parametrize("name", HEADLESS)
def test_a_backbone_without_classes_lists_weights_that_have_some(name: str) -> None:
    with pytest.raises(VitrailError, match="have no classes") as caught:
        vitrail.load(name)
    message = str(caught.value)
    assert "checkpoint=FILE" in message
    assert "num_classes=N" in message
    offered = message.partition("Weights with a head: ")[2].partition(". Or bring")[0].split(", ")
    assert offered
    for weights in offered:
        assert kind_of_view(weights) == "tokens"
        assert timm.get_pretrained_cfg(weights).num_classes >= 1000


def test_a_backbone_name_loads_with_a_checkpoint_that_has_a_head(tmp_path: Path) -> None:
    made = families.build("timm_dinov2")
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    sizes = {"img_size": (42, 56), "patch_size": 14, "embed_dim": families.WIDTH, "depth": 2, "num_heads": 2}
    view = vitrail.load("vit_small_patch14_dinov2", checkpoint=tmp_path / "w.safetensors", **sizes)
    images = families.images("timm_dinov2", 1)
    torch.testing.assert_close(view.logits(images), made(images).detach())


def test_a_head_replaces_that_of_the_checkpoint(tmp_path: Path) -> None:
    made = families.build("timm_dinov2")
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    sizes = {"img_size": (42, 56), "patch_size": 14, "embed_dim": families.WIDTH, "depth": 2, "num_heads": 2}
    probe = nn.Linear(families.WIDTH, 3)
    save_file({f"head.{name}": weight for name, weight in probe.state_dict().items()}, tmp_path / "head.safetensors")
    name, files = "vit_small_patch14_dinov2", {"checkpoint": tmp_path / "w.safetensors"}
    view = vitrail.load(name, **files, head=tmp_path / "head.safetensors", **sizes)
    images = families.images("timm_dinov2", 1)
    made.head = nn.Identity()
    torch.testing.assert_close(view.logits(images), probe(made(images)).detach())
    assert view.spec["head"] == str(tmp_path / "head.safetensors")
    with pytest.raises(VitrailError, match="head= replaces weights of a checkpoint: give checkpoint= too"):
        vitrail.load(name, head=tmp_path / "head.safetensors", **sizes)


def test_weights_that_cannot_be_fetched_are_one_quick_clear_error() -> None:
    begin = time.perf_counter()
    for name in (NAME, "hf:google/vit-base-patch16-224"):
        with pytest.raises(VitrailError, match=r"is offline, and its cache .*: give checkpoint=FILE") as caught:
            vitrail.load(name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - begin < 20


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    begin = time.perf_counter()
    for name in (NAME, "hf:google/vit-base-patch16-224"):
        with pytest.raises(VitrailError, match=r"could not load .*127\.0\.0\.1:9.* is offline") as caught:
            vitrail.load(name)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - begin < 15  # the hub's own retries take a minute
    assert not constants.HF_HUB_OFFLINE


def test_every_name_that_is_offered_can_be_seen_through() -> None:
    names = [name for name in timm.list_models("*patch16*2*") if kind_of_view(name) == "tokens"]
    assert len(names) > 30
    for name in names:
        with torch.device("meta"):
            # the blocks of Sapiens 2 have different numbers of keys
            made = timm.create_model(name, num_classes=2, **({} if "sapiens2" in name else {"depth": 1}))
        assert outline(made).num_prefix >= 0, name


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"num_classes": -3}, "num_classes must be at least 1"),
        ({"num_classes": 3}, "head.weight \\(7, 16\\), expected \\(3, 16\\)"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        ({"device": "quantum"}, "device 'quantum' cannot be used"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"output": "logit"}, 'output must be "softmax" or "sigmoid"'),
        ({"flux_capacitor": 1}, "takes no argument 'flux_capacitor'"),
        ({"img_size": -1}, "img_size|could not build"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=message):
        load_tiny(tmp_path / "w.pth", **options)


@pytest.mark.parametrize(("size", "grid"), [(48, (6, 6)), ((16, 32), (2, 4))])
def test_another_input_size(size: int | tuple[int, int], grid: tuple[int, int]) -> None:
    with pytest.warns(UserWarning, match=r"random"):
        view = vitrail.load(NAME, pretrained=False, num_classes=3, **{**TINY, "img_size": size})
    assert view.grid == grid
    assert view.preprocessing.size == (grid[0] * 8, grid[1] * 8)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_precision(dtype: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pth")
    view = load_tiny(tmp_path / "w.pth", dtype=dtype)
    assert view.dtype == view.logits(picture()).dtype
    assert str(view.dtype).endswith(str(dtype).removeprefix("torch."))


def test_embedded_models_are_complete_or_say_that_they_are_not_there() -> None:
    from vitrail.models import embedded

    if embedded.DEFAULT not in embedded.names():
        with pytest.raises(VitrailError, match=r"no embedded model 'photo'"):
            vitrail.load()
        return
    view = vitrail.load()
    assert view.num_classes == len(view.labels or ())
    with pytest.raises(VitrailError, match=r"takes no labels"):
        vitrail.load(embedded.names()[0], labels=["a"])


def test_preprocessing_of_the_user_is_kept_and_loads_again() -> None:
    settings = {"fit": "pad", "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5), "interpolation": "nearest"}
    view = vitrail.load("scenes", **settings)
    assert view.preprocessing == vitrail.load("scenes").preprocessing.changed(**settings)
    assert view.spec == {"name": "scenes", **settings}
    wrapped = vitrail.wrap(view.module, **settings, crop_pct=0.9)
    assert (wrapped.preprocessing.fit, wrapped.preprocessing.crop_pct) == ("border", 0.9)
