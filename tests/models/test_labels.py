"""Names of classes, and classes by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import viewed
from tests.models.tiny import load_tiny
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.models.view import View

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
        ("Great_White-Shark", 0),
        ("tiger-cat", 2),
    ],
)
def test_a_class_is_found(target: Any, index: int, animals: View) -> None:
    assert animals.class_index(target) == index


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tiger", "matches 2 classes.*1: tiger shark; 2: tiger cat"),
        ("tigre cat", "Did you mean 'tiger cat'"),
        ("xylophone", "has no class 'xylophone'.* 5 classes"),
        ("", "the name of a class is empty"),
        (5, "no class 5 .*0…4"),
        (-1, "no class -1 .*0…4"),
        ("-1", "no class -1 .*0…4"),
        ("--1", "has no class '--1'"),
        ("7", "no class 7"),
        (1.5, "an integer or a name, but got 1.5"),
        (None, "an integer or a name"),
    ],
)
def test_a_class_is_not_found(target: Any, message: str, animals: View) -> None:
    with pytest.raises(VitrailError, match=message):
        animals.class_index(target)


def test_names_that_contain_the_word_are_proposed_first() -> None:
    labels = ["fur coat", "plate", "bobcat", "Persian cat", "crane"]
    view = vitrail.wrap(viewed("timm_vit", torch.float32)[1], labels=labels)
    with pytest.raises(VitrailError, match=r"Did you mean 'Persian cat', 'bobcat'\?"):
        view.class_index("cat")


def test_a_name_without_labels_asks_for_a_number() -> None:
    view = viewed("timm_vit", torch.float32)[2]
    assert view.label(2) == "class 2"
    with pytest.raises(VitrailError, match=r"has no class names: give a number 0…4"):
        view.class_index("cat")


@pytest.mark.parametrize("name", ["vit_base_patch16_clip_224.openai", "eva02_base_patch16_clip_224"])
def test_an_embedding_of_a_clip_tower_is_no_set_of_classes(name: str) -> None:
    with pytest.raises(VitrailError, match="have no classes"):
        vitrail.load(name)
