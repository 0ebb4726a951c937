"""Runs that are killed, changed, shared, or meet what is broken."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.bench import run as running
from vitrail.bench.cluster import Shelf
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.cli import app
from vitrail.commands.bench import watch_run
from vitrail.data import Scenes
from vitrail.methods import registry

KILLS = 20
COLUMNS = ["image", "method", "params", "metric", "target", "explained"]


@pytest.fixture(autouse=True)
def _own_methods(tmp_path: Path) -> Iterator[None]:
    """A method that notes each image it explains and takes its time, and one that fails on some images."""
    log = tmp_path / "explained.log"

    @vitrail.method("tests_noted")
    def noted(model, images, target):  # type: ignore[no-untyped-def]
        with log.open("a", encoding="utf-8") as file:
            file.writelines(f"{float(image.double().sum())}\n" for image in images)
        time.sleep(0.03)
        return images.mean(1)[:, ::8, ::8]

    @vitrail.method("tests_failing")
    def failing(model, images, target):  # type: ignore[no-untyped-def]
        if float(images[0].mean()) > 0.05:
            raise VitrailError("this image is too bright for me")
        return images.mean(1)[:, ::8, ::8] * (np.nan if float(images[0].mean()) > -0.3 else 1.0)

    yield
    for name in ("tests_noted", "tests_failing"):
        registry._METHODS.pop(name)


def plan(**changes: object) -> Plan:
    usual = {"models": [ModelSpec("scenes")], "data": "scenes:16@5", "methods": ["tests_noted", "random"],
             "metrics": ["sparseness", "insertion(steps=4)"], "target": "label", "batch_size": 1}  # fmt: skip
    return Plan(**{**usual, **changes})  # type: ignore[arg-type]


def table(folder: Path) -> pd.DataFrame:
    return Store(folder).rows().sort_values(COLUMNS).reset_index(drop=True)


def same(one: pd.DataFrame, other: pd.DataFrame, exactly: bool = False) -> None:
    assert one[COLUMNS].equals(other[COLUMNS])
    a, b = one["value"].to_numpy(), other["value"].to_numpy()
    assert np.array_equal(a, b, equal_nan=True) if exactly else np.allclose(a, b, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path, deterministic: bool) -> None:
    torch.set_num_threads(1)
    chosen = plan(deterministic=deterministic)
    run(chosen, tmp_path / "whole")
    images = len(vitrail.data.open_data("scenes:16@5"))
    log = tmp_path / "explained.log"
    assert len(log.read_text().splitlines()) == images
    log.unlink()
    dice, killed = random.Random(int(deterministic)), 0
    view = vitrail.load("scenes")
    for _ in range(200):
        child = multiprocessing.get_context("fork").Process(target=_go, args=(chosen, tmp_path / "killed", view))
        child.start()
        child.join(dice.uniform(0.05, 0.5) if killed < KILLS else 60)
        if child.exitcode is not None:
            assert child.exitcode == 0
            if killed >= KILLS:
                break
            shutil.rmtree(tmp_path / "killed")  # too fast for this many kills: again
            log.unlink()
            continue
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        killed += 1
    assert killed >= KILLS
    same(table(tmp_path / "killed"), table(tmp_path / "whole"), exactly=deterministic)
    explained = log.read_text().splitlines()
    assert len(set(explained)) == len({float(line) for line in explained})
    assert len(explained) <= images + killed, "more than what was in flight was computed twice"
    left = [path.name for path in (tmp_path / "killed").rglob("*.part")]
    assert run(chosen, tmp_path / "killed").rows == 0, left


def _go(chosen: Plan, out: Path, view: vitrail.models.view.View) -> None:
    running.EVERY = 0.0
    run(chosen, out, load=lambda spec: view)
    os._exit(0)


def test_what_is_missing_is_traced_as_if_all_were(tmp_path: Path) -> None:
    """Methods share traces, whose last digits depend on what is kept: on the plan, never on what is done already."""
    chosen = plan(methods=["vtranm", "gen_att", "raw_attention"], metrics=["sparseness"], batch_size=4)
    run(chosen, tmp_path / "whole")
    whole, view, found = table(tmp_path / "whole"), vitrail.load("scenes"), Shelf()
    done = set(whole["key"][whole["method"] != "raw_attention"])
    data = running.open_plan_data(chosen)
    running.ModelRun(chosen, "scenes", view, data, found, running.Outcome()).go(None, done)
    rows = pd.DataFrame(found.rows).sort_values(COLUMNS).reset_index(drop=True)
    same(rows, whole[whole["method"] == "raw_attention"].reset_index(drop=True), exactly=True)


def test_a_changed_plan_computes_the_difference(tmp_path: Path) -> None:
    first = run(plan(images=6), tmp_path / "run")
    assert (first.images, first.rows, first.errors) == (6, 6 * 4, 0)
    assert run(plan(images=6), tmp_path / "run").rows == 0
    more = run(plan(images=8), tmp_path / "run")
    assert (more.images, more.known, more.rows) == (2, 6, 2 * 4)
    added = run(plan(images=8, metrics=["sparseness", "aopc(steps=2)"]), tmp_path / "run")
    assert (added.images, added.rows) == (8, 8 * 2), "one new metric for each of two methods"
    other = run(plan(images=8, methods=["random(seed=1)"]), tmp_path / "run")
    assert other.rows == 8 * 2
    assert len(Store(tmp_path / "run").rows()) == 8 * 4 + 8 * 2 + 8 * 2
    assert Store(tmp_path / "run").plan() == plan(images=8, methods=["random(seed=1)"])


def test_a_method_that_changed_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plan(images=3), tmp_path)
    monkeypatch.setattr(registry._METHODS["random"], "version", 2)
    assert run(plan(images=3), tmp_path).rows == 3 * 2
    monkeypatch.setattr("vitrail.models.view.View.fingerprint", lambda self: "other weights")
    assert run(plan(images=3), tmp_path).rows == 3 * 4


def test_only_one_process_works_on_a_run(tmp_path: Path) -> None:
    with Store(tmp_path).locked():
        child = multiprocessing.get_context("fork").Process(target=_refused, args=(tmp_path,))
        child.start()
        child.join(60)
        assert child.exitcode == 7
    assert run(plan(images=2), tmp_path).rows == 8, "the lock goes with its process"


def _refused(folder: Path) -> None:
    try:
        run(plan(images=2), folder)
    except VitrailError as error:
        os._exit(7 if f"process {os.getppid()}" in str(error) and "--watch" in str(error) else 8)
    os._exit(9)


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


def test_a_full_disk_loses_nothing_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "EVERY", 0.0)
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("a small disk cannot be mounted here (needs root)")
    try:
        with pytest.raises(VitrailError, match=os.strerror(errno.ENOSPC)):
            run(plan(), folder)
        written = Store(folder).rows()
        assert len(written) > 4
        assert not list(folder.rglob(".vitrail-*"))
        shutil.copytree(folder, tmp_path / "copy")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    run(plan(), tmp_path / "copy")
    run(plan(), tmp_path / "whole")
    same(table(tmp_path / "copy"), table(tmp_path / "whole"))


def test_maps_and_pictures_are_kept(tmp_path: Path) -> None:
    run(plan(images=3), tmp_path / "run")
    maps, pictures = Store(tmp_path / "run").maps(), Store(tmp_path / "run").pictures()
    assert len(maps) == 3 * 2
    assert all(one.shape == (8, 8) and one.dtype == np.float16 for one in maps.values())
    assert all(name.split("|")[0] == "scenes" for name in maps)
    assert len(pictures) == 3
    assert pictures["jpeg"].map(lambda jpeg: jpeg[:2] == b"\xff\xd8").all()
    run(plan(images=3, maps=False), tmp_path / "bare")
    assert not (tmp_path / "bare" / "maps").exists()
    about = Store(tmp_path / "run").environment()
    assert about["vitrail"] == vitrail.__version__
    assert about["versions"]["torch"] == torch.__version__.split("+")[0] or about["versions"]["torch"]


def test_plans_come_back_and_wrong_ones_are_told(tmp_path: Path) -> None:
    chosen = plan(
        models=[ModelSpec("a", {"checkpoint": 'x "y" \\z', "img_size": 32}, {"mean": [0.5, 0.5, 0.5]})], images=7
    )
    assert Plan.read(chosen.write(tmp_path / "plan.toml")) == chosen
    quick = plan(methods=["tis", "rise(masks=9)"], metrics=["insertion", "max_sensitivity"]).with_preset("quick")
    assert quick.methods == ("tis(masks=256)", "rise(masks=9)")
    assert quick.metrics == ("insertion(steps=32)", "max_sensitivity(samples=3)")
    for text, told in (("data = 1\nwhat = 2\nmodels = ['x']", "unknown: what"), ("data = 'x'", "missing: models"),
                       ("data = ", "not valid TOML")):  # fmt: skip
        (tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(VitrailError, match=told):
            Plan.read(tmp_path / "wrong.toml")
    for arguments, told in ((["bench"], "--data"), (["bench", "--data", "scenes:2", "--preset", "fast"], "no preset"),
                            (["bench", "--watch", str(tmp_path / "nothing")], "no run folder")):  # fmt: skip
        found = CliRunner().invoke(app, arguments)
        assert isinstance(found.exception, VitrailError)
        assert told in str(found.exception)


def test_command_line_runs_a_plan_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    arguments = ["bench", "--data", "scenes:3", "--methods", "gen_att,tis(masks=16)", "--metrics",
                 "insertion,sparseness", "--metrics", "max_sensitivity", "--preset", "quick", "--target", "label",
                 "--out", out]  # fmt: skip
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert "gen_att" in told.output
    rows = Store(out).rows()
    assert set(rows[rows["method"] == "tis"]["metric"]) == {"insertion(steps=32)", "sparseness"}, "spared: 16 masks"
    assert "max_sensitivity(samples=3)" in set(rows[rows["method"] == "gen_att"]["metric"])
    capsys.readouterr()
    watch_run(Path(out), once=True)
    assert "gen_att" in capsys.readouterr().out
