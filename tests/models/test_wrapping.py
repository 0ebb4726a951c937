"""Hugging Face folders, and modules that one already has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tests import families
from tests.helpers import viewed
from tests.models.tiny import NAME, TINY, picture
from torch import nn

import vitrail
from vitrail import VitrailError
from vitrail.engine.trace import trace

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
    with pytest.raises(VitrailError, match=r"has no classes.*give it a head \(head= and pool=\)"):
        vitrail.explain(f"hf:{tmp_path}", torch.zeros(3, 32, 32))
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Dinov2ForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
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


def _photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (53, 71, 3), dtype=np.uint8))


def _cropping(edge: int, resize: int) -> Any:
    """A processor whose images are not of the size the model was built for, as DINOv2's (224 and 518) are not."""
    import transformers

    return transformers.BitImageProcessor(size={"shortest_edge": resize}, crop_size={"height": edge, "width": edge})


@pytest.mark.parametrize("name", ["hf_dinov2", "hf_dinov2_registers", "hf_beit_mean", "hf_swinv2"])
def test_the_processors_size_is_followed_as_the_pipeline_of_transformers_does(name: str, tmp_path: Path) -> None:
    from transformers import pipeline

    module = families.build(name)
    module.config.id2label = {i: f"kind {i}" for i in range(families.CLASSES)}
    module.save_pretrained(tmp_path)
    _cropping(24, 30).save_pretrained(tmp_path)
    answers = pipeline("image-classification", model=str(tmp_path), device="cpu")(_photo(), top_k=families.CLASSES)
    for view in (vitrail.load(f"hf:{tmp_path}", device="cpu"), vitrail.wrap(module, processor=_cropping(24, 30))):
        assert view.size == (24, 24)
        with torch.no_grad():
            chances = view.probabilities(view.logits(view.preprocess(_photo())[None]))[0]
        assert {view.label(i): pytest.approx(float(chance), abs=1e-5) for i, chance in enumerate(chances)} == {
            answer["label"]: answer["score"] for answer in answers
        }
        assert view.label(int(chances.argmax())) == answers[0]["label"]


@pytest.mark.parametrize("name", ["hf_vit", "hf_deit", "hf_clip", "hf_siglip"])
def test_a_size_that_the_pipeline_cannot_run_is_refused_unless_it_is_asked_for(name: str) -> None:
    module, processor = families.build(name), _cropping(24, 30)
    made = processor(_photo(), return_tensors="pt")["pixel_values"]
    with pytest.raises((ValueError, RuntimeError)):
        module(made)
    with pytest.raises(VitrailError, match=r"built for images of 32×32 and cannot take the 24×24.*img_size=\(24, 24\)"):
        vitrail.wrap(module, processor=processor)
    view = vitrail.wrap(module, processor=processor, img_size=24)
    expected = module(made, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(view.logits(view.preprocess(_photo())[None]), expected)
    native = vitrail.wrap(module, processor=processor, img_size=32)  # the same part of the picture, in more pixels
    assert (native.size, native.preprocessing.resize) == ((32, 32), 40)


def test_a_folder_with_code_of_its_own_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoConfig": "code.C", "AutoModelForImageClassification": "code.M"}}'
    )
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises(VitrailError, match=r"trust_remote_code.*load\(\) never runs.*vitrail.wrap"):
            vitrail.load(f"hf:{tmp_path}", **options)
    assert not asked
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [{"checkpoint": "w.pth"}, {"pretrained": False}, {"num_classes": 3}])
def test_options_that_huggingface_folders_do_not_take(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(VitrailError, match=r"own weights|keeps the head"):
        vitrail.load(f"hf:{tmp_path}", **options)


# Modules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential is no model of timm.*img_size=, mean= and std="),
        ("vit", "takes an nn.Module, but got str"),
        (None, "takes an nn.Module"),
    ],
)
def test_wrap_takes_modules_and_must_know_their_inputs(given: Any, message: str) -> None:
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
    backbone = viewed(name, torch.float32)[1]
    width = viewed(name, torch.float32)[2].describe().embedding.weight.shape[0]
    with pytest.raises(VitrailError, match=rf"head= takes 63 features, but .* has {width}: expected"):
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
        (_altered("head", lambda old: nn.Sequential(old, nn.ReLU())), "a head must end in a linear layer"),
        (_altered("blocks.0.attn.qkv", nn.Sequential), "expected a linear layer"),
        (_altered("blocks.1.mlp.fc1", nn.Sequential), "expected a linear layer"),
        (_altered("head", lambda old: old, in_chans=1), "1 colour channels"),
    ],
)
def test_strange_parts_are_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(module)


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_avg", "hf_vit", "hf_dinov2", "torchvision_vit"])
@pytest.mark.parametrize("form", ["dropout", "two layers"])
def test_heads_of_several_layers(form: str, name: str) -> None:
    module, images = families.build(name), families.images(name, 2)
    place = {"timm": "head", "hf": "classifier", "torchvision": "heads"}[families.find(name).library]
    width = 2 * families.WIDTH if name == "hf_dinov2" else families.WIDTH
    layers: list[nn.Module] = [nn.Dropout(0.5), nn.Linear(width, 3)]
    if form == "two layers":
        layers = [nn.Linear(width, 12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 3)]
    setattr(module, place, nn.Sequential(*layers))
    families.randomize(module, seed=4)
    module.eval()
    expected = module(images)
    view = vitrail.wrap(module.train())
    torch.testing.assert_close(view.logits(images), getattr(expected, "logits", expected))
    assert view.num_classes == 3
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5


def test_a_view_is_told_in_a_line() -> None:
    view = vitrail.wrap(timm.create_model(NAME, num_classes=7, **TINY))
    assert repr(view) == f"<ViT {view.name}: 7 classes, 32×32 pixels>"
