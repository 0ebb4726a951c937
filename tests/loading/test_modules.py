"""Hugging Face folders, and modules that one already has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.helpers import viewed
from tests.loading.given import NAME, TINY, picture
from torch import nn

import vitrail
from vitrail import VitrailError

# Hugging Face folders


def _processor(kind: str) -> Any:
    import transformers

    return getattr(transformers, kind)(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hf_vit", "ViTImageProcessor"), ("hf_dinov2", "ViTImageProcessor"), ("hf_swin", None), ("hf_vit", None)],
)
def test_a_huggingface_folder(name: str, kind: str | None, tmp_path: Path) -> None:
    module = families.build(name)
    module.config.id2label = {i: f"kind {i}" for i in range(families.CLASSES)}
    module.save_pretrained(tmp_path)
    if kind:
        _processor(kind).save_pretrained(tmp_path)
    view = vitrail.load(f"hf:{tmp_path}")
    images = families.images(name, 2)
    torch.testing.assert_close(view.logits(images), module(images).logits.detach())
    assert view.size == families.find(name).image_size
    assert view.label(4) == "kind 4"
    assert (view.preprocessing.mean == (0.1, 0.2, 0.3)) == (kind is not None)


def test_a_huggingface_folder_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.build("hf_vit").save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert vitrail.load("hf:./mine").num_classes == families.CLASSES


def test_a_headless_huggingface_folder_says_how_to_add_a_head(tmp_path: Path) -> None:
    families.build("hf_dinov2").base_model.save_pretrained(tmp_path)
    with pytest.raises(VitrailError, match=r"classifier.weight.*vitrail.wrap\(backbone, head="):
        vitrail.load(f"hf:{tmp_path}")


def test_bad_huggingface_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(VitrailError, match=r"could not build"):
        vitrail.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(VitrailError, match=r"could not build"):
        vitrail.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(VitrailError, match=r"could not build"):
        vitrail.load(f"hf:{tmp_path}")


@pytest.mark.parametrize("options", [{"checkpoint": "w.pth"}, {"pretrained": False}, {"num_classes": 3}])
def test_options_that_huggingface_folders_do_not_take(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(VitrailError, match=r"own weights|own head"):
        vitrail.load(f"hf:{tmp_path}", **options)


# Modules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential is not supported"),
        ("vit", "takes an nn.Module, but got str"),
        (None, "takes an nn.Module"),
    ],
)
def test_wrap_takes_networks_it_knows(given: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(given)


def test_wrap_refuses_a_view() -> None:
    with pytest.raises(VitrailError, match=r"view.module"):
        vitrail.wrap(viewed("timm_vit")[2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"mean": (0.5, 0.5)},
        {"std": (0, 1, 1)},
        {"img_size": 0},
        {"img_size": (1, 2, 3)},
        {"img_size": 99},
        {"img_size": 32.5},
        {"img_size": "32"},
        {"output": "none"},
    ],
)
def test_wrong_options_of_wrap(options: dict[str, Any]) -> None:
    with pytest.raises(VitrailError):
        vitrail.wrap(viewed("timm_vit")[1], **options)


@pytest.mark.parametrize("name", ["timm_vit", "hf_vit"])
def test_a_head_of_another_width_is_refused_by_wrap(name: str) -> None:
    backbone = viewed(name)[1]
    width = viewed(name)[2].describe().embedding.weight.shape[0]
    with pytest.raises(VitrailError, match=rf"head= takes 63 numbers, but .* gives {width} per token"):
        vitrail.wrap(backbone, head=nn.Linear(63, 5), pool="token")
    assert vitrail.wrap(backbone, head=nn.Linear(width, 5), pool="token").num_classes == 5


def test_a_timm_module_is_not_named_after_weights_it_may_not_have() -> None:
    made = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=5)
    assert vitrail.wrap(made).name == "vit_tiny_patch16_224"


def test_one_output_is_two_classes() -> None:
    made = timm.create_model(NAME, num_classes=1, **TINY).eval()
    families.randomize(made, 5)
    view = vitrail.wrap(made, labels=["healthy", "ill"])
    z = made(picture()).detach()
    torch.testing.assert_close(view.class_scores(view.logits(picture())), torch.cat([-z, z], 1))
    chances = view.probabilities(view.logits(picture()))
    torch.testing.assert_close(chances, torch.cat([1 - z.sigmoid(), z.sigmoid()], 1))
    torch.testing.assert_close(chances.sum(), torch.tensor(1.0))
    ill, healthy = (vitrail.explain(view, picture()[0], target=name) for name in ("ill", "healthy"))
    assert ill.probability + healthy.probability == pytest.approx(1)
    torch.testing.assert_close(ill.map, -healthy.map)
    assert sorted(label for _, label, _ in ill.top) == ["healthy", "ill"]
    with pytest.raises(VitrailError, match=r"0…1"):
        view.class_index(2)


def test_multi_label_heads_use_the_sigmoid() -> None:
    module = families.build("hf_vit")
    module.config.problem_type = "multi_label_classification"
    view = vitrail.wrap(module)
    logits = view.logits(families.images("hf_vit", 1))
    torch.testing.assert_close(view.probabilities(logits), logits.sigmoid())
    plain = vitrail.wrap(module, output="softmax")
    torch.testing.assert_close(plain.probabilities(logits), logits.softmax(1))


def _altered(part: str, new: Callable[[nn.Module], nn.Module], **options: Any) -> nn.Module:
    """A tiny timm model with another module in the place of one of its parts."""
    made = timm.create_model(NAME, num_classes=7, **TINY, **options).eval()
    made.set_submodule(part, new(made.get_submodule(part)))
    return made


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_altered("head", lambda old: nn.Sequential(old, nn.ReLU())), "as a head only one linear layer is known"),
        (_altered("head", lambda _: nn.Identity()), "no classification head"),
        (_altered("blocks.0.attn.qkv", nn.Sequential), "expected a linear layer"),
        (_altered("blocks.1.mlp.fc1", nn.Sequential), "expected a linear layer"),
        (_altered("head", lambda old: old, in_chans=1), "1 colour channels"),
    ],
)
def test_strange_parts_are_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(module)


def test_a_view_is_told_in_a_line() -> None:
    view = vitrail.wrap(timm.create_model(NAME, num_classes=7, **TINY))
    assert repr(view) == f"<ViT {view.name}: 7 classes, 32×32 pixels>"
