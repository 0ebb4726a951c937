"""Tables with known answers, in miniature: the scripts run, and what they measure is what they say."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.optimize import linear_sum_assignment
from tests.common import noise
from tests.families import randomize
from torchvision.ops import generalized_box_iou

import vitrail
from vitrail.data import Scenes
from vitrail.models.detection import Detection, Detector

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


# What the tables share


def test_the_share_of_an_object(scripts: Callable[[str], ModuleType]) -> None:
    share = scripts("answers").share
    own, other, beside = torch.zeros(3, 4, 4, dtype=torch.bool)
    own[0, :2], other[2, :1], beside[3] = True, True, True
    values = torch.zeros(4, 4)
    values[own], values[other], values[beside] = 3.0, 2.0, 50.0
    assert share(values, own, other) == pytest.approx(6 / 8)
    assert share(values, other, own) == pytest.approx(2 / 8)
    assert share(-values, own, other) == 0.5  # what speaks against is no evidence
    values[other] = -9.0
    assert share(values, own, other) == 1


def test_what_is_painted_over_has_the_mean_colour(scripts: Callable[[str], ModuleType]) -> None:
    pixels, mask = torch.rand(3, 4, 4), torch.rand(4, 4) < 0.5
    painted = scripts("answers").painted(pixels, mask)
    assert torch.equal(painted[:, ~mask], pixels[:, ~mask])
    assert torch.allclose(painted[:, mask], pixels.mean((1, 2))[:, None].expand(-1, int(mask.sum())))


PAGE = """# boxes

`python benchmarks/boxes.py --out {name}.md`

2026-11-18, vitrail 0.2.0, torch 2.11.0, x86_64 cuda, {seconds} s. All found. None lost.

Means over scenes.

| method | images | pointing | share |
|---|---|---|---|
{rows}
"""
FIRST = PAGE.format(
    name="first", seconds=91, rows="| `a` | 9 | 0.90 [0.8, 1.0] | 0.1 |\n| `b(x=1)` | 2 | 1.00 [1, 1] | 0.2 |"
)
SECOND = PAGE.format(
    name="second", seconds=7, rows="| `c` | 9 | 0.95 [0.9, 1.0] | 0.3 |\n| `a` | 9 | 0.50 [0.4, 0.6] | 0.4 |"
)


def test_pages_are_merged(run: Script, tmp_path: Path) -> None:
    first, second, out = (tmp_path / f"{name}.md" for name in ("first", "second", "out"))
    first.write_text(f"{FIRST}\nRefused: `d`: no gradients.\n")
    second.write_text(SECOND)
    run("answers", first, second, "--out", out)
    page = out.read_text()
    assert re.findall(r"^\| `(.*?)`", page, re.MULTILINE) == ["c", "a", "b(x=1)"]
    assert cells(page, "a") == ["9", "0.50 [0.4, 0.6]", "0.4"]  # of the later page
    assert (page.count("python benchmarks/boxes.py"), page.count("All found. None lost.")) == (2, 1)
    assert page.endswith("\n\nRefused: `d`: no gradients.\n")
    run("answers", out, second, first, "--out", out)  # the merged page is one like the others
    assert cells(out.read_text(), "a") == ["9", "0.90 [0.8, 1.0]", "0.1"]
    assert out.read_text().replace(FIRST.splitlines()[-2], "").count("\n") == page.count("\n")


def test_pages_that_measured_otherwise_are_not_merged(run: Script, tmp_path: Path) -> None:
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text(FIRST)
    second.write_text(SECOND.replace("Means over scenes.", "Means over four scenes."))
    with pytest.raises(SystemExit, match="differ in more than methods"):
        run("answers", first, second, "--out", first)
    assert first.read_text() == FIRST


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


def test_a_training_goes_on_from_the_last_save(yolos: ModuleType, tmp_path: Path) -> None:
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


@pytest.fixture
def detector(yolos: ModuleType, tmp_path: Path) -> Path:
    yolos.save(yolos.build(3), tmp_path / "detector")
    return tmp_path / "detector"


def test_boxes_are_measured(
    scripts: Callable[[str], ModuleType],
    run: Script,
    detector: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boxes = scripts("boxes")
    drawn = enumerate(Scenes(20, boxes.SEED, objects=2))

    def true_boxes(view: Detector, image: torch.Tensor) -> list[Detection]:
        """Those of the objects, which an untrained detector does not find; in the second scene the last one is lost."""
        number, scene = next(drawn)
        return [
            Detection(query, item.label, "", 0.9, item.box if (number, query) != (1, 1) else (0, 0, 1, 1))
            for query, item in enumerate(scene.objects)
        ]

    monkeypatch.setattr(Detector, "boxes", true_boxes)
    calls = "decompx.skipplus,random,occlusion,vit_shapley"
    run("boxes", "--checkpoint", detector, "--scenes", 2, "--few", 1, "--device", "cpu", "--methods", calls,
        "--out", tmp_path / "boxes.md")  # fmt: skip
    page = (tmp_path / "boxes.md").read_text()
    assert "fits 83.3% of 6 objects in 3 scenes" in page
    assert "in 2 of these scenes both" in page
    assert [cells(page, call)[0] for call in calls.split(",")[:3]] == ["2", "2", "1"]
    assert cells(page, "random")[2] == "0.50 [0.50, 0.50]"  # the same map for both boxes
    assert cells(page, "decompx.skipplus")[2] != "0.50 [0.50, 0.50]"
    assert "\nRefused: `vit_shapley`: " in page


def test_pointing_and_share_of_boxes(scripts: Callable[[str], ModuleType]) -> None:
    boxes = scripts("boxes")
    questions = [
        boxes.Question(number, torch.rand(3, 64, 64), query, item.label, *masks)
        for number, scene in enumerate(Scenes(3, 5, objects=2))
        for query, item in enumerate(scene.objects)
        for masks in [[torch.from_numpy(scene.objects[place].mask) for place in (query, 1 - query)]]
    ]
    own = {query: [question.own for question in questions if question.query == query] for query in (0, 1)}

    def method(masks: list[torch.Tensor]) -> Any:
        return SimpleNamespace(attribute=lambda pixels, labels: torch.stack(masks).float())

    assert boxes.measure({query: method(own[query]) for query in (0, 1)}, questions) == (
        3, {"pointing": [1, 1, 1], "share": [1, 1, 1]},
    )  # fmt: skip
    count, swapped = boxes.measure({query: method(own[1 - query]) for query in (0, 1)}, questions)
    assert (count, swapped["share"]) == (3, [0, 0, 0])


def test_a_box_fits_from_an_overlap_of_one_half(scripts: Callable[[str], ModuleType]) -> None:
    boxes, truth = scripts("boxes"), (0, 0, 8, 8)
    half, less = (0.0, 0.0, 4.0, 8.0), (0.0, 0.0, 3.9, 8.0)
    assert boxes.overlap(half, truth) == 0.5
    assert boxes.overlap((8, 0, 16, 8), truth) == 0
    detections = [Detection(number, label, "", 0.5, box) for number, (label, box) in
                  enumerate([(2, less), (1, half), (2, half), (2, truth)])]  # fmt: skip
    assert boxes.surest(detections, 2, truth) is detections[2]
    assert boxes.surest(detections, 3, truth) is None


def test_a_detector_that_finds_nothing_is_refused(run: Script, detector: Path) -> None:
    with pytest.raises(SystemExit, match="detects both objects in none of the scenes"):
        run("boxes", "--checkpoint", detector, "--scenes", 1, "--device", "cpu")


# Regions


def small_vit(folder: Path, randomised: bool) -> list[Any]:
    """Arguments of a model of a few patches, with weights in a file."""
    torch.manual_seed(0)
    module = timm.create_model("test_vit", img_size=64)
    if randomised:
        randomize(module, 0)
    save_file(module.state_dict(), folder / "weights.safetensors")
    return ["--model", "test_vit", "--size", 64, "--checkpoint", folder / "weights.safetensors", "--device", "cpu"]


def test_regions_are_measured(run: Script, tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    rng, (rows, columns) = np.random.default_rng(0), np.mgrid[:64, :64]
    for number in range(8):  # bright discs, the "animals", in the dark
        pixels, (row, column) = rng.integers(0, 90, (64, 64, 3)), rng.integers(20, 44, 2)
        distance = np.hypot(rows - row, columns - column)
        pixels[distance < 16] += [150, 120, 60]
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "pets" / f"{number}.jpg", quality=95)
        trimap = np.where(distance < 15, 1, np.where(distance < 17, 3, 2))
        Image.fromarray(trimap.astype(np.uint8)).save(tmp_path / "pets" / f"{number}.png")
    calls = ["decompx", "random", "occlusion", "vit_shapley"]
    run("regions", *small_vit(tmp_path, randomised=False), "--data", tmp_path / "pets", "--collages", 2, "--few", 1,
        "--steps", 2, "--methods", ",".join(calls), "--out", tmp_path / "regions.md")  # fmt: skip
    page = (tmp_path / "regions.md").read_text()
    assert "in 4 photographs that the head was not taught" in page
    whole, without, other = map(float, re.findall(r"animal is (.*?); .*? over (.*?), .*? one (.*?)\.\s", page)[0])
    assert without < 0.5 < min(whole, other)
    assert [cells(page, call)[0] for call in calls[:3]] == ["2", "2", "1"]
    assert cells(page, "decompx")[1] == "1.00 [1.00, 1.00]"
    assert float(cells(page, "decompx")[2].split()[0]) > 0.8
    assert cells(page, "random")[2] == "0.50 [0.50, 0.50]"  # the same map for both animals
    assert len(cells(page, "random")) == 4
    assert "\nRefused: `vit_shapley`: " in page


# Pairs


def test_pairs_add_up_to_the_similarity(run: Script, tmp_path: Path) -> None:
    pictures = [tmp_path / "first.png", tmp_path / "second.png"]
    for seed, path in enumerate(pictures):
        noise(64, 64, seed).save(path)
    out = run("pairs", *small_vit(tmp_path, randomised=True), *pictures)
    (numbers,) = re.findall(r"similarity (\S+) = .*? (-?[\d.]+) \+ .*? (-?[\d.]+); off by (\S+)\n", out)
    similarity, pairs, rest, gap = map(float, numbers)
    view = vitrail.load("test_vit", checkpoint=tmp_path / "weights.safetensors", img_size=64, device="cpu")
    images = torch.stack([view.preprocess(Image.open(path)) for path in pictures])
    with torch.no_grad():
        embeddings = view.module.forward_head(view.module.forward_features(images), pre_logits=True)
    assert similarity == pytest.approx(float(torch.cosine_similarity(*embeddings, dim=0)), abs=1e-5)
    assert pairs + rest == pytest.approx(similarity, abs=1e-5)
    assert abs(gap) < 1e-5
    assert re.search(r"64 pixels, on CPU, \d+ threads, .*: (\d+\.\d\d) s, the first time \1 s", out)
