"""Tables with known answers, in miniature: the scripts run, and what they measure is what they say."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torchvision.ops import generalized_box_iou

from vitrail.data import Scenes

ROOT = Path(__file__).parents[2]
Script = Callable[..., str]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of `benchmarks` or `training`; none stays imported, since their names are plain words."""
    before = set(sys.modules)
    for folder in ("benchmarks", "training"):
        monkeypatch.syspath_prepend(ROOT / folder)
    yield import_module
    for name in set(sys.modules) - before:
        source = getattr(sys.modules[name], "__file__", None)
        if source is not None and Path(source).parent in (ROOT / "benchmarks", ROOT / "training"):
            del sys.modules[name]


@pytest.fixture
def run(
    scripts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    """Runs a script with arguments, and returns what it prints."""

    def with_arguments(name: str, *arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        module = scripts(name)
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return with_arguments


def cells(table: str, method: str) -> list[str]:
    """The cells of a row."""
    (row,) = re.findall(rf"^\| `{re.escape(method)}` \| (.*) \|$", table, re.MULTILINE)
    return row.split(" | ")


# Boxes


@pytest.fixture
def yolos(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("yolos")


@pytest.mark.parametrize("objects", [1, 2, None])
def test_tokens_are_matched_as_by_the_hungarian_algorithm(yolos: ModuleType, objects: int | None) -> None:
    scenes, generator = yolos.draw(24, 7, objects), torch.Generator().manual_seed(0)
    logits = torch.randn(24, 5, 11, generator=generator)
    boxes = torch.rand(24, 5, 4, generator=generator) * 0.4 + 0.2
    config = yolos.build(5).config
    matched = yolos.match(config, logits, boxes, scenes)
    for number in range(24):
        count = int((scenes.labels[number] >= 0).sum())
        truth = scenes.boxes[number, :count]
        right = logits[number].softmax(1)[:, scenes.labels[number, :count]]
        overlap = generalized_box_iou(yolos.corners(boxes[number]), yolos.corners(truth))
        cost = 5 * torch.cdist(boxes[number], truth, p=1) - right - 2 * overlap
        tokens, places = linear_sum_assignment(cost)
        assert matched[number, places].tolist() == tokens.tolist()
        assert matched[number, 0] != matched[number, 1]


def test_the_loss_is_that_of_the_library(yolos: ModuleType) -> None:
    scenes = yolos.draw(6, 3)
    model = yolos.build(5).eval()
    labels = [
        {"class_labels": classes[classes >= 0], "boxes": boxes[classes >= 0]}
        for classes, boxes in zip(scenes.labels, scenes.boxes, strict=True)
    ]
    with torch.no_grad():
        expected = model(pixel_values=yolos.scale(scenes.images), labels=labels).loss
        found = yolos.loss_of(model.config, *yolos.outputs(model, scenes.images), scenes)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_boxes_turn_with_the_image(yolos: ModuleType) -> None:
    scenes = yolos.draw(1, 5, 2)
    masks = torch.stack([torch.from_numpy(item.mask) for item in Scenes(1, 5, 2)[0].objects])
    scenes.images = (masks[0] * 255).byte().expand(1, 3, -1, -1).clone()
    pictures = set()
    for _ in range(200):
        varied = yolos.vary(scenes)
        left, top, right, bottom = (yolos.corners(varied.boxes[0, 0]) * 64).round().int().tolist()
        rows, columns = (varied.images[0, 0] > 0).nonzero().unbind(1)
        assert (left, top, right, bottom) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        pictures.add(varied.images[0, 0].numpy().tobytes())
    assert len(pictures) == 8


def test_average_precision_counts_what_is_missed_and_what_is_wrong(yolos: ModuleType) -> None:
    scores, hits = torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, False, True, False])
    assert yolos.average_precision(scores, hits, 2) == pytest.approx((1 + 2 / 3) / 2)
    assert yolos.average_precision(scores, hits, 4) == pytest.approx((1 + 2 / 3) / 4)


def test_a_detector_is_trained_and_its_boxes_are_measured(yolos: ModuleType, run: Script, tmp_path: Path) -> None:
    folder, spent, kept = tmp_path / "yolos", 0.0, []
    for steps in (1, 2):  # the second run goes on from the save of the first
        options = {"images": 8, "test": 2, "detections": 3, "batch": 4, "rate": 1e-3, "every": 0.0}
        yolos.train(Namespace(out=folder, seconds=spent + 1e-9, **options))
        saved = torch.load(folder / "training.pt", weights_only=True)
        assert (saved["optimiser"]["steps"], saved["spent"] > spent) == (steps, True)
        spent = saved["spent"]
        kept.append((folder / "model.safetensors").read_bytes())
    assert kept[0] != kept[1]
    yolos.train(Namespace(out=folder, seconds=spent, **options))  # at its end already
    assert (folder / "model.safetensors").read_bytes() == kept[1]
