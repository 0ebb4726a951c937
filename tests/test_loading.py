"""Models by name, weights from files, names of classes: what a user gives and what they are told when it is wrong."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from tests import families
from tests.helpers import viewed
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.models.names import kind_of_view
from vitrail.models.view import View

NAME = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
HEADLESS = [
    "vit_base_patch16_siglip_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch16_dinov3",
    "eva02_base_patch14_224",
]


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """A tiny timm model with seven classes."""
    made = timm.create_model(NAME, num_classes=7, **TINY)
    families.randomize(made, seed=3)
    return made.eval()


@pytest.fixture(scope="module")
def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def load_tiny(checkpoint: Path, **options: Any) -> View:
    return vitrail.load(NAME, checkpoint=checkpoint, **{**TINY, **options})


def picture() -> Tensor:
    return torch.linspace(-2, 2, 3 * 32 * 32).view(1, 3, 32, 32)


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


def test_weights_that_cannot_be_fetched_are_one_quick_clear_error() -> None:
    begin = time.perf_counter()
    for name in (NAME, "hf:google/vit-base-patch16-224"):
        with pytest.raises(VitrailError, match=r"offline, give checkpoint=FILE") as caught:
            vitrail.load(name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - begin < 20


def test_every_name_that_is_offered_can_be_seen_through() -> None:
    names = [name for name in timm.list_models("*patch16*2*") if kind_of_view(name) == "tokens"]
    assert len(names) > 30
    for name in names:
        with torch.device("meta"):
            made = timm.create_model(name, depth=1, num_classes=2)
        assert vitrail.wrap(made).num_prefix >= 0, name


# Checkpoints


def _prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


FORMS = {
    "bare": lambda s: s,
    "model": lambda s: {"model": s, "epoch": 3},
    "state_dict": lambda s: {"state_dict": s, "optimizer": {"lr": 0.1}},
    "model_state_dict": lambda s: {"model_state_dict": s},
    "ema": lambda s: {"model_ema": s},
    "parallel": lambda s: _prefixed(s, "module."),
    "compiled": lambda s: _prefixed(s, "_orig_mod."),
    "lightning": lambda s: {"state_dict": _prefixed(s, "model.")},
    "parallel compiled": lambda s: {"model": _prefixed(s, "module._orig_mod.")},
    "compiled parallel": lambda s: _prefixed(s, "_orig_mod.module."),
    "half": lambda s: {name: value.half() for name, value in s.items()},
    "parameters": lambda s: {name: nn.Parameter(value) for name, value in s.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_torch_checkpoints_in_every_common_form(
    form: str, module: nn.Module, state: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save(FORMS[form](state), tmp_path / "w.pth")
    view = load_tiny(tmp_path / "w.pth")
    assert view.num_classes == 7  # read from the checkpoint
    assert view.dtype == torch.float32
    tolerance = 1e-2 if form == "half" else 1e-5
    torch.testing.assert_close(view.logits(picture()), module(picture()).detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors(prefix: str, module: nn.Module, state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(_prefixed(state, prefix), tmp_path / "w.safetensors")
    view = load_tiny(tmp_path / "w.safetensors")
    torch.testing.assert_close(view.logits(picture()), module(picture()).detach())


def test_torchvision_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import _api
    from torchvision.models.vision_transformer import VisionTransformer

    def tiny(weights: None = None, image_size: int = 32, num_classes: int = 1000) -> nn.Module:
        assert weights is None
        return VisionTransformer(image_size, 16, 2, 2, 16, 16, num_classes=num_classes)

    monkeypatch.setitem(_api.BUILTIN_MODELS, "vit_tiny", tiny)
    made = tiny(num_classes=3).eval()
    families.randomize(made, 0)
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    view = vitrail.load("torchvision:vit_tiny", checkpoint=tmp_path / "w.safetensors")
    assert (view.name, view.num_classes) == ("torchvision:vit_tiny", 3)
    torch.testing.assert_close(view.logits(picture()), made(picture()).detach())


def test_what_does_not_fit_is_listed(state: dict[str, Tensor], tmp_path: Path) -> None:
    wrong = dict(state)
    wrong["blocks.7.norm1.weight"] = wrong.pop("blocks.0.norm1.weight")
    wrong["norm.bias"] = torch.zeros(9)
    torch.save(wrong, tmp_path / "w.pth")
    with pytest.raises(VitrailError) as caught:
        load_tiny(tmp_path / "w.pth")
    message = str(caught.value)
    assert "1 missing (blocks.0.norm1.weight)" in message
    assert "1 not in the model (blocks.7.norm1.weight)" in message
    assert "norm.bias (9,), expected (16,)" in message


def test_a_checkpoint_without_a_head_says_that_the_head_is_missing(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({name: value for name, value in state.items() if not name.startswith("head.")}, tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=r"missing \(head.weight, head.bias\)"):
        load_tiny(tmp_path / "w.pth")


def test_the_checkpoint_of_another_model_shows_only_some_of_the_many_differences(tmp_path: Path) -> None:
    torch.save(families.build("timm_eva02_tiny").state_dict(), tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=r"does not fit VisionTransformer.*…") as caught:
        load_tiny(tmp_path / "w.pth")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_refused_by_name(value: float, state: dict[str, Tensor], tmp_path: Path) -> None:
    broken = {name: tensor.clone() for name, tensor in state.items()}
    broken["blocks.0.mlp.fc1.weight"][3, 2] = value
    torch.save(broken, tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=r"NaN or infinite values in blocks.0.mlp.fc1.weight"):
        load_tiny(tmp_path / "w.pth")


def _cut(tmp_path: Path) -> bytes:
    torch.save({"a": torch.zeros(500)}, tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()[:1000]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".bin"])
@pytest.mark.parametrize("damage", ["empty", "text", "zeros", "json", "png", "cut"])
def test_corrupt_files_are_called_unreadable(damage: str, suffix: str, tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "text": b"hello, this is not a checkpoint",
        "zeros": bytes(4000),
        "json": b'{"a": 1}',
        "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "cut": _cut(tmp_path),
    }
    path = tmp_path / f"w{suffix}"
    path.write_bytes(contents[damage])
    with pytest.raises(VitrailError, match=r"is not a readable (torch checkpoint|safetensors file)") as caught:
        load_tiny(path)
    assert str(path) in str(caught.value)
    assert "pickled" not in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, {"model": {"epoch": 3}}])
def test_files_without_tensors(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=r"holds no tensors|expected a mapping"):
        load_tiny(tmp_path / "w.pth")


@pytest.mark.parametrize("path", ["none.pth", "."])
def test_there_is_no_such_file(path: str, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"no checkpoint file"):
        load_tiny(tmp_path / path)


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, place: Path):
        self.place = str(place)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", ["arguments", "evil", "numpy"])
def test_pickled_objects_are_not_run_and_the_fix_is_named(
    kind: str, zipped: bool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    made = {"arguments": argparse.Namespace(lr=1), "evil": Evil(tmp_path / "ran"), "numpy": np.float64(3)}
    path = tmp_path / "checkpoint.pth.tar"
    torch.save({"state_dict": state, "args": made[kind]}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(VitrailError, match=r"pickled Python objects") as caught:
        load_tiny(path)
    assert not (tmp_path / "ran").exists()
    fix = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert len(fix) == 2
    if kind != "evil":  # the two lines do what they say
        run = "\n".join(fix).replace("'weights.pth'", repr(str(tmp_path / "weights.pth")))
        exec(run, {"torch": torch})
        assert load_tiny(tmp_path / "weights.pth").num_classes == 7


def test_a_bare_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=2))
    with pytest.raises(VitrailError):
        load_tiny(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


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
        ({"flux_capacitor": 1}, "flux_capacitor"),
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


# Labels


@pytest.mark.parametrize("form", ["list", "array", "mapping", "text keys", "txt", "txt with mark", "json list", "json"])
def test_labels_in_every_form(form: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "w.pth")
    names = ["ant", "bee", "cat", "dog", "élan", "fox", "gnu"]
    text = "\n".join(names) + "\n\n"
    (tmp_path / "l.txt").write_text(text, encoding="utf-8")
    (tmp_path / "m.txt").write_text(text, encoding="utf-8-sig")
    (tmp_path / "list.json").write_text(json.dumps(names))
    (tmp_path / "map.json").write_text(json.dumps({str(i): n for i, n in reversed(list(enumerate(names)))}))
    given: dict[str, Any] = {
        "list": names,
        "array": np.array(names),
        "mapping": {i: names[i] for i in (3, 1, 2, 0, 6, 5, 4)},
        "text keys": {str(i): n for i, n in enumerate(names)},
        "txt": tmp_path / "l.txt",
        "txt with mark": str(tmp_path / "m.txt"),
        "json list": tmp_path / "list.json",
        "json": tmp_path / "map.json",
    }
    view = load_tiny(tmp_path / "w.pth", labels=given[form])
    assert list(view.labels or ()) == names
    again = load_tiny(tmp_path / "w.pth", labels=json.loads(json.dumps(view.spec))["labels"])
    assert again.labels == view.labels


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["a", "b"], "2 names, but the model has 5 classes"),
        ({0: "a", 1: "b", 7: "c"}, "0…4, each once"),
        ({"cat": 0}, "class numbers as keys"),
        ({None: "x"}, "class numbers as keys"),
        ([["n01", "tench"]] * 5, "one text per class"),
        ({"a", "b"}, "a list, a mapping or a file"),
        (5, "a list, a mapping or a file"),
        ("missing.txt", "cannot read the labels file"),
    ],
)
def test_wrong_labels(content: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(viewed("timm_vit", torch.float32)[1], labels=content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.json", b"[1,", "not valid JSON"),
        ("l.json", b'"cat"', "a list of names or a mapping"),
        ("l.json", b'{"0": ["n01", "tench"], "1": 1, "2": 2, "3": 3, "4": 4}', "one text per class"),
        ("l.txt", b"\xff\xfe\x00", "cannot read"),
        ("l.txt", b"", "0 names"),
    ],
)
def test_wrong_label_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(viewed("timm_vit", torch.float32)[1], labels=tmp_path / name)


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


# Classes by name


ANIMALS = ["great white shark, white shark", "tiger shark", "tiger cat", "tabby, tabby cat", "7"]


@pytest.fixture(scope="module")
def animals() -> View:
    return vitrail.wrap(viewed("timm_vit", torch.float32)[1], labels=ANIMALS)


@pytest.mark.parametrize(
    ("target", "index"),
    [
        (3, 3),
        (np.int64(3), 3),
        (torch.tensor(3), 3),
        ("3", 3),
        ("tiger cat", 2),
        ("TIGER Shark", 1),
        (" white shark ", 0),
        ("great white shark, white shark", 0),
        ("tabby", 3),
        ("tabby c", 3),
        ("great", 0),
        ("tiger s", 1),
    ],
)
def test_a_class_is_found(target: Any, index: int, animals: View) -> None:
    assert animals.class_index(target) == index


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tiger", "fits 2 classes.*1: tiger shark; 2: tiger cat"),
        ("tigre cat", "Did you mean 'tiger cat'"),
        ("xylophone", "has no class 'xylophone'.* 5 classes"),
        ("", "has no class ''"),
        (5, "no class 5 .*0…4"),
        (-1, "no class -1 .*0…4"),
        ("-1", "no class -1 .*0…4"),
        ("--1", "has no class '--1'"),
        ("7", "no class 7"),
        (1.5, "a whole number or a name, but got 1.5"),
        (None, "a whole number or a name"),
    ],
)
def test_a_class_is_not_found(target: Any, message: str, animals: View) -> None:
    with pytest.raises(VitrailError, match=message):
        animals.class_index(target)


def test_a_name_without_labels_asks_for_a_number() -> None:
    view = viewed("timm_vit", torch.float32)[2]
    assert view.label(2) == "class 2"
    with pytest.raises(VitrailError, match=r"has no class names: give a number 0…4"):
        view.class_index("cat")


@pytest.mark.parametrize("name", ["vit_base_patch16_clip_224.openai", "eva02_base_patch16_clip_224"])
def test_an_embedding_of_a_clip_tower_is_no_set_of_classes(name: str) -> None:
    with pytest.raises(VitrailError, match="have no classes"):
        vitrail.load(name)


def test_a_checkpoint_of_another_size_is_resampled(tmp_path: Path) -> None:
    """Weights trained at one size fill a model of that size, whose positions timm then resamples."""
    small = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, depth=1).eval()
    save_file(small.state_dict(), tmp_path / "w.safetensors")
    view = vitrail.load("vit_tiny_patch16_224", checkpoint=tmp_path / "w.safetensors", img_size=96, depth=1)
    small.set_input_size(img_size=(96, 96))
    images = torch.randn(1, 3, 96, 96)
    assert view.grid == (6, 6)
    assert torch.allclose(view.logits(images), small(images), atol=1e-5)
