"""Weights from files, also those that are no weights."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from tests import families
from tests.models.tiny import load_tiny, picture
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError

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


@pytest.mark.parametrize(
    "keys", [("state_dict", "state_dict_ema"), ("model", "model_ema"), ("model", "state_dict"),
             ("state_dict", "model_ema", "state_dict_ema")],
)  # fmt: skip
def test_of_several_sets_of_weights_the_one_that_timm_takes(
    keys: tuple[str, ...], state: dict[str, Tensor], tmp_path: Path
) -> None:
    sets = {key: {name: value * (1 + i / 10) for name, value in state.items()} for i, key in enumerate(keys)}
    torch.save(sets, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=rf"holds .*: {keys[-1]} is taken, as timm does"):
        view = load_tiny(tmp_path / "w.pth")
    expected = timm.models.load_state_dict(str(tmp_path / "w.pth"))
    assert all(torch.equal(value, expected[name]) for name, value in view.module.state_dict().items())


def test_an_empty_average_is_not_taken(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": state, "state_dict_ema": None}, tmp_path / "w.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(load_tiny(tmp_path / "w.pth").module.state_dict()["norm.bias"], state["norm.bias"])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda w: (100 * w).char(), "blocks.0.mlp.fc1.weight torch.int8: give the weights before quantisation"),
        (lambda w: w.long(), "blocks.0.mlp.fc1.weight torch.int64"),
        (lambda w: w.to_sparse(), "sparse or without values: blocks.0.mlp.fc1.weight"),
        (lambda w: w.to("meta"), "sparse or without values: blocks.0.mlp.fc1.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    weight: Callable[[Tensor], Tensor], message: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    name = "blocks.0.mlp.fc1.weight"
    torch.save({**state, name: weight(state[name])}, tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=message):
        load_tiny(tmp_path / "w.pth")


def test_the_checkpoint_of_a_timm_head_with_dropout(state: dict[str, Tensor], tmp_path: Path) -> None:
    nested = {name.replace("head.", "head.1."): value for name, value in state.items()}
    assert "head.1.weight" in nested
    torch.save(nested, tmp_path / "w.pth")
    view = load_tiny(tmp_path / "w.pth")
    assert view.num_classes == 7
    assert torch.equal(view.module.head.weight, state["head.weight"])


TORCHVISION_HEADS = {
    "usual": lambda: nn.Sequential(OrderedDict(head=nn.Linear(16, 3))),
    "linear": lambda: nn.Linear(16, 3),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3)),
    "no bias": lambda: nn.Linear(16, 3, bias=False),
}


@pytest.mark.parametrize("form", TORCHVISION_HEADS)
def test_torchvision_heads_and_their_checkpoints(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import _api
    from torchvision.models.vision_transformer import VisionTransformer

    def tiny(weights: None = None, progress: bool = True, image_size: int = 32, num_classes: int = 1000) -> Any:
        return VisionTransformer(image_size, 16, 2, 2, 16, 16, num_classes=num_classes)

    monkeypatch.setitem(_api.BUILTIN_MODELS, "vit_tiny", tiny)
    made = tiny().eval()
    made.heads = TORCHVISION_HEADS[form]()  # as most fine-tuning scripts do it
    families.randomize(made, 0)
    expected = made.eval()(picture()).detach()
    torch.testing.assert_close(vitrail.wrap(made.train()).logits(picture()), expected)
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    if form == "no bias":
        with pytest.raises(VitrailError, match=r"1 missing \(heads.head.bias\)"):
            vitrail.load("torchvision:vit_tiny", checkpoint=tmp_path / "w.safetensors")
        return
    view = vitrail.load("torchvision:vit_tiny", checkpoint=tmp_path / "w.safetensors")
    assert view.num_classes == 3
    torch.testing.assert_close(view.logits(picture()), expected)


def test_torchvision_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import _api
    from torchvision.models.vision_transformer import VisionTransformer

    def tiny(weights: None = None, progress: bool = True, image_size: int = 32, num_classes: int = 1000) -> nn.Module:
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
    with pytest.raises(VitrailError, match=r"does not match VisionTransformer.*…") as caught:
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
@pytest.mark.parametrize("damage", ["empty", "text", "words", "zeros", "json", "png", "cut"])
def test_corrupt_files_are_called_unreadable(damage: str, suffix: str, tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "text": b"hello, this is not a checkpoint",
        "words": b"cat\ndog\nelk\n",  # an unpickler reads c as: import dog from at
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
    assert len(fix) == 3
    if kind != "evil":
        _follow(fix, tmp_path)
        assert load_tiny(tmp_path / "weights.pth").num_classes == 7


def _follow(fix: list[str], folder: Path) -> None:
    """Does what the message says."""
    run = "\n".join(fix).replace("'weights.pth'", repr(str(folder / "weights.pth")))
    exec(run, {"torch": torch})


@pytest.mark.parametrize("form", ["model", "model_state_dict", "model_ema", "state_dict beside a name", "whole"])
def test_the_fix_works_for_every_common_form(
    form: str, module: nn.Module, state: dict[str, Tensor], tmp_path: Path
) -> None:
    beside = {"args": argparse.Namespace(lr=1)}
    contents: dict[str, Any] = {
        "whole": module,
        "state_dict beside a name": {"model": "vit_tiny", "state_dict": state, **beside},
    }
    torch.save(contents.get(form, {form: state, **beside}), tmp_path / "w.pth")
    with pytest.raises(VitrailError, match=r"pickled Python objects") as caught:
        load_tiny(tmp_path / "w.pth")
    _follow([line.strip() for line in str(caught.value).splitlines()[1:]], tmp_path)
    assert load_tiny(tmp_path / "weights.pth").num_classes == 7


def test_a_bare_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=2))
    with pytest.raises(VitrailError):
        load_tiny(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"weights_only": False, "torch_dtype": "auto"}])
def test_a_pickle_in_a_huggingface_folder_is_not_run(options: dict[str, Any], tmp_path: Path) -> None:
    families.build("hf_vit").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = tmp_path / "config.json"  # transformers opens the weights to learn a dtype that is not named here
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": None}))
    torch.save({"weight": Evil(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(VitrailError):
        vitrail.load(f"hf:{tmp_path}", **options)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_size_is_resampled(tmp_path: Path) -> None:
    """Weights trained at one size fill a model of that size, whose positions timm then resamples."""
    small = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, depth=1).eval()
    save_file(small.state_dict(), tmp_path / "w.safetensors")
    view = vitrail.load("vit_tiny_patch16_224", checkpoint=tmp_path / "w.safetensors", img_size=96, depth=1)
    small.set_input_size(img_size=(96, 96))
    images = torch.randn(1, 3, 96, 96)
    assert view.grid == (6, 6)
    assert torch.allclose(view.logits(images), small(images), atol=1e-5)
