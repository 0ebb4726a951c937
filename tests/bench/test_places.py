"""Runs about the annotated object of each image: ``--target region`` and ``--target box``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests import families
from tests.common import noise
from tests.families import OBJECTS, WIDTH
from tests.helpers import sure_detector
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.bench.cluster import Worker
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import open_plan_data, run
from vitrail.bench.store import Store
from vitrail.cli.board import board_of
from vitrail.cli.program import app
from vitrail.data import DATA_SETS, Example, InMemory, Object, Scenes, data_set
from vitrail.models.detection import Detector
from vitrail.report import tables
from vitrail.report.report import report

METHODS, METRICS = ["decompx", "random"], ["insertion(steps=2)", "pointing_game"]


@pytest.fixture
def segmenter(tmp_path: Path) -> ModelSpec:
    """A segmenter of the ten shapes, in a folder."""
    families.build("hf_patches").save_pretrained(tmp_path / "model")
    weight = torch.randn(len(Scenes.labels), WIDTH, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, tmp_path / "head.safetensors")
    options = {"head": str(tmp_path / "head.safetensors"), "pool": "patches", "labels": list(Scenes.labels)}
    return ModelSpec(f"hf:{tmp_path / 'model'}", options)


@pytest.fixture(scope="module")
def detector() -> Detector:
    return sure_detector()


def drawn(detector: Detector) -> InMemory:
    """Three images with an object where the model detects one; in the second it stands elsewhere."""
    examples = []
    for seed in range(3):
        image = noise(48, 32, seed)
        best = detector.boxes(detector.preprocess(image))[0]
        box = (0.0, 0.0, 3.0, 3.0) if seed == 1 else best.box
        examples.append(Example(f"image-{seed}", image, best.target, (Object(best.target, box),)))
    return InMemory(examples, labels=OBJECTS)


def of_regions(segmenter: ModelSpec) -> Plan:
    return Plan([segmenter], "scenes:2@1", METHODS, METRICS, target="region", batch_size=4)


def of_boxes() -> Plan:
    return Plan([ModelSpec("detector")], "samples:3", METHODS, METRICS, target="box")


def test_a_run_of_regions_has_the_values_of_evaluate_and_is_resumed(segmenter: ModelSpec, tmp_path: Path) -> None:
    plan = of_regions(segmenter)
    count = len(open_plan_data(plan))
    first = run(plan, tmp_path / "run", positions=range(1))
    assert (first.images, first.rows, first.errors) == (1, 4, 0)
    rest = run(plan, tmp_path / "run")
    assert (rest.images, rest.known, rest.rows) == (count - 1, 1, 4 * (count - 1))
    assert run(plan, tmp_path / "run").rows == 0
    view = vitrail.load(segmenter.name, **segmenter.options)
    expected = vitrail.evaluate(view, plan.data, METHODS, METRICS, target="region")
    order = ["image", "method", "metric"]
    rows = Store(tmp_path / "run").rows().sort_values(order)
    expected = expected.sort_values(order)
    assert np.allclose(rows["value"], expected["value"], rtol=1e-5)
    assert rows["target"].tolist() == rows["label"].tolist() == expected["target"].tolist()
    assert set(rows["explained"]) == {"region"}
    assert len(Store(tmp_path / "run").maps()) == 2 * count
    assert Store(tmp_path / "run").plan() == plan
    again = run(replace(plan, target="label"), tmp_path / "run")
    assert again.rows == 4 * count, "another question"


def test_a_run_of_regions_is_reported(segmenter: ModelSpec, tmp_path: Path) -> None:
    run(of_regions(segmenter), tmp_path / "run")
    summary, paths = report([tmp_path / "run"], tmp_path / "report", ["html", "md"])
    assert "the class of the annotated object in its region explained" in tables.markdown(summary)
    assert all(path.stat().st_size for path in paths)


def test_a_worker_measures_regions(segmenter: ModelSpec) -> None:
    """What a cluster runs, in this process."""
    plan = of_regions(segmenter)
    worker = Worker(plan, segmenter, {}, lambda spec: vitrail.load(spec.name, **spec.options), False, open_plan_data)
    worker.prepare()
    buffer, outcome = worker.measure([0])
    assert (outcome.images, outcome.errors, len(buffer.rows)) == (1, 0, 4)
    assert {row["explained"] for row in buffer.rows} == {"region"}


def test_images_without_a_detection_are_left_out_with_a_count(detector: Detector, tmp_path: Path) -> None:
    """Each is one row with its reason, which a resumed run knows and ``--retry`` asks for again."""
    data, plan = drawn(detector), of_boxes()
    outcome = run(plan, tmp_path / "run", load=lambda spec: detector, data=data)
    assert (outcome.images, outcome.rows, outcome.errors, outcome.failed) == (2, 2 * 4 + 1, 1, 1)
    assert outcome.first_error == "the model detects nothing that fits an annotated box of the image's class."
    store = Store(tmp_path / "run")
    (row,) = store.rows().query("error.notna()").to_dict("records")
    assert (row["image"], row["method"], row["explained"]) == ("image-1", "", "box")
    board = board_of(plan, store, data.ids)
    assert board.complete
    assert board.line("detector") == "detector: 2/3 images, 1 left out"
    known = run(plan, tmp_path / "run", load=lambda spec: detector, data=data)
    assert (known.images, known.known, known.rows, known.errors, known.failed_before) == (0, 2, 0, 0, 1)
    retried = run(plan, tmp_path / "run", load=lambda spec: detector, data=data, retry=True)
    assert (retried.rows, retried.errors, retried.failed_before) == (1, 1, 0)
    assert len(store.rows()) == 2 * 4 + 1
    other = run(replace(plan, target="label"), tmp_path / "run", load=lambda spec: detector, data=data)
    assert (other.images, other.failed) == (3, 0), "the image is left out where its box is asked about, only"
    summary, _ = report([tmp_path / "run"], tmp_path / "report", ["md"])
    assert [group.count for group in summary.results.errors] == [1]
    assert "1 × the image was left out (detector; first image-1): the model detects nothing" in tables.markdown(summary)


def test_what_has_no_places_is_refused_before_anything_is_written(segmenter: ModelSpec, tmp_path: Path) -> None:
    plan = of_regions(segmenter)
    for changes, message in (
        ({"models": [ModelSpec("scenes")]}, "scenes has no output per patch"),
        ({"models": [ModelSpec("scenes")], "target": "box"}, "scenes detects no boxes"),
        ({"data": "samples:20"}, "within its mask, but none of the first 16 images of samples has one"),
        ({"target": "regions"}, 'target must be "predicted", "label", "region" or "box", but got \'regions\''),
    ):
        with pytest.raises(VitrailError, match=message):
            run(replace(plan, **changes), tmp_path / "run")
        assert not Store(tmp_path / "run").exists


def test_the_command_line_takes_places(segmenter: ModelSpec, tmp_path: Path) -> None:
    model = ["--model", segmenter.name, "--head", segmenter.options["head"], "--pool", "patches"]
    asked = ["--data", "scenes:2@1", "--methods", "random", "--metrics", "pointing_game", "--target", "region"]
    result = CliRunner().invoke(app, ["bench", *model, *asked, "--out", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0, result.output
    (about,) = json.loads(result.stdout)["runs"]
    assert (about["measured"], about["failed"]) == (len(vitrail.data.open_data("scenes:2@1")), 0)
    assert set(Store(tmp_path / "run").rows()["explained"]) == {"region"}


def test_the_command_line_counts_what_is_left_out(detector: Detector, tmp_path: Path) -> None:
    detector.module.save_pretrained(tmp_path / "yolos")
    loaded = vitrail.load(f"hf:{tmp_path / 'yolos'}")
    assert isinstance(loaded, Detector)
    with DATA_SETS.scope():
        data_set("tests_drawn")(lambda place="": drawn(loaded))
        arguments = ["--model", f"hf:{tmp_path / 'yolos'}", "--data", "tests_drawn", "--methods", "random"]
        arguments += ["--metrics", "pointing_game", "--target", "box", "--out", str(tmp_path / "run")]
        result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1, result.exception
    words = " ".join(result.output.split())
    assert "1 row could not be measured. First error: the model detects nothing that fits an annotated box" in words
    assert set(Store(tmp_path / "run").rows()["image"]) == {"image-0", "image-1", "image-2"}
