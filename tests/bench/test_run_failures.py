"""Runs that meet what is broken: images, methods, a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.bench.plans import own_methods, plan, same, table  # noqa: F401
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.bench import run as running
from vitrail.bench.plan import METRICS
from vitrail.bench.run import ModelRun, run
from vitrail.bench.store import Store
from vitrail.cli.program import app, main
from vitrail.data import SceneData, Scenes
from vitrail.data.base import Example
from vitrail.report.report import report
from vitrail.report.results import read_results


def test_what_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    for i, scene in enumerate(Scenes(8, seed=2)):
        Image.fromarray(scene.image).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"not a picture")
    chosen = plan(data=f"folder:{tmp_path}", methods=["tests_failing", "random"], target=None, batch_size=4)
    found = run(chosen, tmp_path / "run")
    rows = Store(tmp_path / "run").rows()
    broken = rows[rows["error"].notna()]
    unreadable = broken[broken["method"] == ""]
    assert list(unreadable["image"]) == ["3.png"]
    assert "3.png" in unreadable["error"].iloc[0]
    failed = broken[broken["method"] == "tests_failing"]
    assert failed["error"].str.contains("too bright|NaN").all()
    assert {"too bright", "NaN"} <= {w for e in failed["error"] for w in ("too bright", "NaN") if w in e}
    assert found.errors == len(broken) > 4
    fine = rows[rows["error"].isna()]
    assert set(fine[fine["method"] == "random"]["image"]) == {f"{i}.png" for i in range(8) if i != 3}
    assert len(rows) == 1 + 7 * 2 * 2
    assert run(chosen, tmp_path / "run").rows == 0, "failures are not tried again"
    Image.fromarray(Scenes(1)[0].image).save(tmp_path / "3.png")
    again = run(chosen, tmp_path / "run", retry=True)
    assert again.images >= 1
    assert "3.png" in set(Store(tmp_path / "run").rows()["image"])
    told = CliRunner().invoke(
        app, ["bench", str(tmp_path / "run" / "plan.toml"), "--out", str(tmp_path / "run"), "--retry"]
    )
    assert told.exit_code == 1
    assert "could not be measured" in told.output


@pytest.mark.parametrize("error", [ValueError("svd did not converge"), IndexError("no block 12"), MemoryError("much")])
def test_an_error_of_any_kind_is_a_row(
    tmp_path: Path, error: Exception, method_that_raises: list[BaseException]
) -> None:
    method_that_raises.append(error)
    chosen = plan(images=3, methods=["tests_raising", "random"], batch_size=2)
    found = run(chosen, tmp_path)
    assert (found.images, found.rows, found.errors) == (3, 3 * 2 * 2, 3 * 2)
    rows = Store(tmp_path).rows()
    failed = rows[rows["error"].notna()]
    assert set(failed["method"]) == {"tests_raising"}
    assert set(failed["error"]) == {f"{type(error).__name__}: {error}"}
    assert rows.loc[rows["method"] == "random", "value"].notna().all()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(3)])
def test_who_stops_a_run_is_heard(tmp_path: Path, stop: BaseException, method_that_raises: list[BaseException]) -> None:
    method_that_raises.append(stop)
    with pytest.raises(type(stop)):
        run(plan(images=2, methods=["random", "tests_raising"]), tmp_path)


def test_sigterm_saves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what was being written when it came."""

    def unhandled(*_: object) -> None:  # or SIGTERM would end all tests
        raise AssertionError("nobody handles SIGTERM")

    def interrupted(keeper: Store, rows: Sequence[Mapping[str, Any]]) -> None:
        if not asked:
            asked.append(len(rows))
            signal.raise_signal(signal.SIGTERM)
        add_rows(keeper, rows)

    asked, add_rows = list[int](), Store.add_rows
    monkeypatch.setattr(Store, "add_rows", interrupted)
    monkeypatch.setattr(running, "EVERY", 0.1)
    arguments = ["bench", "--data", "scenes:16@5", "--methods", "tests_noted", "--metrics", "sparseness", "--target",
                 "label", "--batch-size", "1", "--out", str(tmp_path / "run")]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["vitrail", *arguments])
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 143
    assert "everything written so far is complete" in capsys.readouterr().err
    measured = len((tmp_path / "explained.log").read_text().splitlines())
    assert asked == [measured]
    assert 0 < len(Store(tmp_path / "run").rows()) == measured < 16
    assert not list((tmp_path / "run").rglob(".vitrail-*"))
    told = CliRunner().invoke(app, arguments)
    assert f"{measured} known before" in told.output, "the same command goes on"


def test_names_that_are_not_utf_8(tmp_path: Path, pictures: Path) -> None:
    """An image, and a broken one, are named by escapes everywhere."""
    (pictures / "2.png").rename(pictures / os.fsdecode(b"\xff.png"))
    (pictures / "1.png").rename(pictures / os.fsdecode(b"\xfe.png"))
    chosen = plan(data=str(pictures), methods=["random"], metrics=["sparseness"], target=None)
    found = run(chosen, tmp_path / "run")
    assert (found.images, found.errors) == (2, 1)
    rows = Store(tmp_path / "run").rows()
    assert sorted(rows["image"]) == ["0.png", r"\xfe.png", r"\xff.png"]
    assert r"\xfe.png' is not an image" in rows["error"].dropna().iloc[0]
    assert run(chosen, tmp_path / "run").rows == 0
    assert report([tmp_path / "run"], tmp_path / "out", ["html", "csv"])[1]


def test_a_folder_whose_own_name_is_not_utf_8_is_refused_before_anything_is_written(
    tmp_path: Path, pictures: Path
) -> None:
    strange = pictures.rename(tmp_path / os.fsdecode(b"p\xff"))
    arguments = ["bench", "--data", str(strange), "--model", "scenes", "--out", str(tmp_path / "run")]
    told = CliRunner().invoke(app, arguments)
    assert isinstance(told.exception, VitrailError)
    assert "expected text in UTF-8" in str(told.exception)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def method_that_raises() -> list[BaseException]:
    """The method tests_raising, which raises what is put into the list."""
    given: list[BaseException] = []

    @vitrail.method("tests_raising")
    def raising(model, images, target):  # type: ignore[no-untyped-def]
        raise given[0]

    return given


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures, one of them broken."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, scene in enumerate(Scenes(3, seed=2)):
        Image.fromarray(scene.image).save(folder / f"{i}.png")
    (folder / "1.png").write_bytes(b"not a picture")
    return folder


def test_errors_of_an_earlier_call_are_told_again(tmp_path: Path, pictures: Path) -> None:
    arguments = ["bench", "--data", str(pictures), "--model", "scenes", "--methods", "random", "--metrics",
                 "sparseness", "--out", str(tmp_path / "run")]  # fmt: skip
    for measured in (2, 0):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 1
        assert f"{measured} images measured" in told.output
        assert "1 could not be measured" in told.output
        assert "1.png" in told.output
    assert "an earlier call" in told.output
    Image.new("RGB", (64, 64), "red").save(pictures / "1.png")
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert "could not be measured" not in told.output


def test_a_repaired_image_is_no_error_any_more(tmp_path: Path, pictures: Path) -> None:
    good = (pictures / "0.png").read_bytes()
    chosen = plan(data=str(pictures), methods=["random"], metrics=["sparseness"], target=None)

    def errors() -> list[str]:
        rows = Store(tmp_path / "run").rows()
        return rows.loc[rows["error"].notna(), "image"].tolist()

    run(chosen, tmp_path / "run")
    assert errors() == ["1.png"]
    Image.new("RGB", (64, 64), "red").save(pictures / "1.png")
    (pictures / "0.png").write_bytes(b"broken now")
    found = run(chosen, tmp_path / "run")
    assert (found.images, found.rows, found.failed) == (1, 2, 1)
    assert errors() == ["0.png"]
    (pictures / "0.png").write_bytes(good)
    assert run(chosen, tmp_path / "run").rows == 0, "what is known of this content is still there"
    assert errors() == []
    assert len(Store(tmp_path / "run").rows()) == 3
    assert read_results([tmp_path / "run"]).errors == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing_that_was_written(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "EVERY", 0.0)
    with pytest.raises(VitrailError, match=os.strerror(errno.ENOSPC)):
        run(plan(), small_disk)
    written = Store(small_disk).rows()
    assert len(written) > 4
    assert not list(small_disk.rglob(".vitrail-*"))
    shutil.copytree(small_disk, tmp_path / "copy")
    run(plan(), tmp_path / "copy")
    run(plan(), tmp_path / "whole")
    same(table(tmp_path / "copy"), table(tmp_path / "whole"))


def test_a_full_disk_is_told_on_the_command_line(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "EVERY", 0.0)
    check_full_disk(small_disk, monkeypatch, capsys)


def test_a_disk_that_fills_is_told_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same where no small disk can be mounted: the parts of the third image do not fit."""
    monkeypatch.setattr(running, "EVERY", 0.0)
    sync, synced = os.fsync, list[int]()

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    check_full_disk(tmp_path / "run", monkeypatch, capsys)


def check_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["vitrail", "bench", "--data", "scenes:16@5", "--methods", "random", "--metrics", "sparseness",
                 "--target", "label", "--batch-size", "1", "--out", str(folder)]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 1
    rows = Store(folder).rows()
    assert len(rows)
    kept = f"{rows['image'].nunique()} images with {len(rows)} rows measured so far, kept in"
    assert kept in " ".join(said.out.split())
    told = " ".join(said.err.split())
    assert told.count("Error:") == 1
    assert os.strerror(errno.ENOSPC) in told
    assert "Traceback" not in told


@pytest.mark.parametrize("metrics", ["pointing_game", "sparseness,pointing_game"])
def test_a_metric_that_the_data_offers_nothing_for_is_refused_as_by_evaluate(
    tmp_path: Path, pictures: Path, metrics: str
) -> None:
    arguments = ["bench", "--data", str(pictures), "--model", "scenes", "--methods", "random", "--out"]
    out = tmp_path / "run"
    told = CliRunner().invoke(app, [*arguments, str(out), "--metrics", metrics])
    assert told.exit_code == 1
    assert str(told.exception).startswith("pointing_game needs boxes or masks, which none of the first 2 images offers")
    assert "measured" not in told.output
    CliRunner().invoke(app, [*arguments, str(out), "--metrics", "sparseness"])
    before, known = Store(out).plan(), len(Store(out).rows())
    told = CliRunner().invoke(app, [*arguments, str(out), "--metrics", metrics])
    assert told.exit_code == 1, "a run that goes on is refused too"
    assert (Store(out).plan(), len(Store(out).rows())) == (before, known), "and keeps what it has"


def test_metrics_that_nobody_named_may_apply_to_nothing(tmp_path: Path, pictures: Path) -> None:
    chosen = plan(data=str(pictures), methods=["random"], metrics=METRICS, images=1, target=None).with_preset("quick")
    assert run(chosen, tmp_path / "run").rows > len(METRICS) // 2


def test_a_metric_that_some_of_the_first_images_lack_is_measured_on_the_others(tmp_path: Path) -> None:
    class OneDrawn(SceneData):
        def load(self, position: int) -> Example:
            found = super().load(position)
            return found if position == 3 else replace(found, objects=())

    chosen, opened = plan(metrics=["pointing_game"], methods=["random"], images=None), OneDrawn(6)
    worker = ModelRun(chosen, "scenes", vitrail.load("scenes"), opened)
    worker.check_metrics()
    worker.data = opened[:3]
    with pytest.raises(VitrailError, match="pointing_game needs boxes or masks, which none of the first 3 images"):
        worker.check_metrics()


@pytest.mark.parametrize("wrong", [["--data", "no/such/folder"], ["--model", "no_such_model"], ["--target", "lable"]])
def test_a_call_that_cannot_begin_leaves_no_folder(tmp_path: Path, wrong: list[str]) -> None:
    arguments = ["bench", "--data", "scenes:2", "--methods", "random", "--metrics", "sparseness", *wrong, "--out"]
    assert CliRunner().invoke(app, [*arguments, str(tmp_path / "run")]).exit_code == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    assert CliRunner().invoke(app, [*arguments, str(tmp_path / "kept")]).exit_code == 1
    assert (tmp_path / "kept").is_dir(), "a folder of someone else stays"


@pytest.mark.parametrize("metric", ["deletion(steps=0)", "insertion(steps=-3,protocol=tis)", "positive_auc(steps=0)"])
def test_steps_of_which_there_are_none_are_refused_before_anything_is_measured(tmp_path: Path, metric: str) -> None:
    with pytest.raises(VitrailError, match="steps must be at least 1"):
        run(plan(metrics=[metric], methods=["random"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
