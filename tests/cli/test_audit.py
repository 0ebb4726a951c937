"""``vitrail audit`` on the command line."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console
from tests.cli.common import LABELS, Run, error_line, noise

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, Outcome, Step, run
from vitrail.cli.audit import Lines
from vitrail.cli.bench import ModelLoader
from vitrail.data.base import DataSet
from vitrail.models.view import View


@pytest.fixture
def folder(place: Path) -> Path:
    for i in range(6):
        (place / "data" / LABELS[i % 2]).mkdir(parents=True, exist_ok=True)
        noise(i).save(place / "data" / LABELS[i % 2] / f"{i}.png")
    return place / "data"


def test_an_audit_and_its_files(vit: Run, tiny: list[str], folder: Path, place: Path) -> None:
    result = vit("audit", folder, *tiny, "--out", "report", "--region", "0,0,0.4,0.4")
    assert result.code == 0, result.err
    assert "Accuracy" in result.out
    assert "No class is suspicious" in result.out
    assert "6 images explained, 0 known before" in result.out
    table = pd.read_csv(place / "report" / "images.csv")
    assert len(table) == 6
    assert set(table["true"]) == set(LABELS[:2])
    assert "evidence in 0,0,0.4,0.4" in table.columns
    assert (place / "report" / "report.html").is_file()
    again = vit("audit", folder, *tiny, "--out", "report", "--region", "0,0,0.4,0.4")
    assert "0 images explained, 6 known before" in again.out


def test_progress_without_a_terminal(
    vit: Run, tiny: list[str], folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.cli.audit.LINE_EVERY", -1.0)  # every step has its line
    asked = ("audit", folder, *tiny, "--no-trust", "--paired", folder, "--out", place / "report")
    lines = [line for line in vit(*asked).out.splitlines() if " of 6 images" in line]
    assert sum(line.startswith("6 of 6 images, about ") for line in lines) == 2, "the copies have lines of their own"
    lines = [line for line in vit(*asked).out.splitlines() if " of 6 images" in line]
    assert lines == 2 * [f"{done} of 6 images" for done in range(1, 7)], "known before"


def test_the_time_left_is_that_of_images_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(done: int, images: range | None = None, seconds: float = 0.0) -> str:
        clock.now += seconds
        rows = [{"image": str(i)} for i in images or ()]
        lines.see(Step("scenes", done, 100, rows))
        return console.export_text().strip()

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("vitrail.cli.audit.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("vitrail.cli.audit.LINE_EVERY", 30.0)
    console = Console(file=io.StringIO(), record=True, width=80)
    lines = Lines(console, now=0.0, last=0.0)
    assert steps(20, seconds=29) == ""
    assert steps(40, seconds=2) == "40 of 100 images", "known from an earlier call"
    assert steps(50, range(40, 50), seconds=20) == ""
    assert steps(60, range(50, 60), seconds=20) == "60 of 100 images, about 80 s left"
    assert steps(100, range(60, 100), seconds=80) == "100 of 100 images, about 0 s left"
    assert steps(0, seconds=1) == "", "altered copies"
    assert steps(10, range(10), seconds=40) == "10 of 100 images, about 6 min left"


def test_the_model_is_loaded_once_here_and_once_by_a_worker(
    vit: Run, tiny: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_by_a_worker(
        plan: Plan, place: Path, address: str, *, load: Loader, open_data: Callable[[Plan], DataSet], **_: object
    ) -> Outcome:
        loaded.append("worker")
        return run(plan, place, load=load, data=open_data(plan))

    def counted(loader: ModelLoader, spec: ModelSpec) -> View:
        loaded.append("model")
        return load(loader, spec)

    loaded: list[str] = []
    load = ModelLoader.__call__
    monkeypatch.setattr(ModelLoader, "__call__", counted)
    monkeypatch.setattr("vitrail.audit.run.run_on_cluster", run_by_a_worker)
    result = vit("audit", folder, *tiny, "--no-trust", "--cluster", "auto")
    assert result.code == 0, result.err
    assert loaded == ["model", "worker", "model"]


def test_a_broken_image_is_counted_and_the_others_are_audited(vit: Run, tiny: list[str], place: Path) -> None:
    (place / "data").mkdir()
    for i in range(3):
        noise(i).save(place / "data" / f"{i}.png")
    (place / "data" / "broken.png").write_bytes((place / "data" / "0.png").read_bytes()[:1000])
    result = vit("audit", "data", *tiny, "--no-trust", "--out", "report")
    assert result.code == 1
    assert "1 image could not be explained" in result.out
    table = pd.read_csv(place / "report" / "images.csv")
    assert list(table["image"]) == ["0.png", "1.png", "2.png"]
    assert table["true"].isna().all(), "no folder is a class"


def test_a_region_of_a_single_image(vit: Run, tiny: list[str], folder: Path, photo: Path) -> None:
    result = vit("audit", folder, *tiny, "--no-trust", "--images", 2, "--region", f"{photo}=0,0,0.5,0.5")
    assert result.code == 0, result.err
    assert "photo.png: without the region" in result.out


def test_boxes_tell_object_from_background(vit: Run, tiny: list[str], folder: Path, place: Path) -> None:
    lines = [f'{LABELS[i % 2]}/{i}.png,"0,0,30,40"' for i in range(6)]
    (place / "boxes.csv").write_text("\n".join(["file,boxes", *lines]))
    assert vit("audit", folder, *tiny, "--no-trust", "--boxes", "boxes.csv", "--out", "report").code == 0
    table = pd.read_csv(place / "report" / "images.csv")
    assert table["object"].between(0, 1).all()
    assert (table["object"] + table["background"]).sub(1).abs().max() < 1e-9


def test_wrong_options_are_one_line(vit: Run, tiny: list[str], folder: Path) -> None:
    assert "no region" in error_line(vit("audit", folder, *tiny, "--region", "left"))
    assert "is the folder of the images" in error_line(vit("audit", folder, *tiny, "--out", folder))
    assert "which is no file" in error_line(vit("audit", folder, *tiny, "--region", "x.png=0,0,0.5,0.5"))
