"""Runs that are killed, changed, shared, or meet what is broken."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tests.bench.plans import COLUMNS, own_methods, plan, same, table  # noqa: F401
from tests.families import FULL
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.bench import run as running
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run, work_of
from vitrail.bench.store import Store
from vitrail.cli.bench import watch_run
from vitrail.cli.program import app
from vitrail.data import SceneData
from vitrail.data.names import data_name
from vitrail.evaluation import build_metrics
from vitrail.methods.registry import METHODS
from vitrail.report.results import read_results

KILLS = 20 if FULL else 5


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path: Path, deterministic: bool) -> None:
    torch.set_num_threads(1)
    chosen = plan(deterministic=deterministic)
    run(chosen, tmp_path / "whole")
    images = len(vitrail.data.open_data("scenes:16@5"))
    log = tmp_path / "explained.log"
    each = log.read_text().splitlines()
    assert len(each) == images
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
    assert set(explained) == set(each), "every image was explained, and no other"
    assert len(explained) <= images + killed, "more than what was in flight was computed twice"
    left = [path.name for path in (tmp_path / "killed").rglob("*.part")]
    assert run(chosen, tmp_path / "killed").rows == 0, left


def _go(chosen: Plan, out: Path, view: vitrail.models.view.View) -> None:
    running.EVERY = 0.0
    run(chosen, out, load=lambda spec: view)
    os._exit(0)


def test_methods_that_are_finished_survive_a_kill(tmp_path: Path) -> None:
    """The last method kills the run in its first batch; what the others measured is kept, and the rest is the same."""
    torch.set_num_threads(1)
    spared = tmp_path / "spared"

    @vitrail.method("tests_deadly", cost=(9999, 0))
    def deadly(model, images, target):  # type: ignore[no-untyped-def]
        if not spared.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return images.mean(1)[:, ::8, ::8]

    methods = ["tests_deadly", "rise(masks=7)", "random", "gen_att", "rise(masks=4)", "smooth_grad(samples=3)"]
    chosen = plan(methods=methods, metrics=["sparseness", "insertion(steps=3)", "max_sensitivity(samples=1)"],
                  images=6, batch_size=4, cheap_only=["max_sensitivity"])  # fmt: skip
    view = vitrail.load("scenes")
    child = multiprocessing.get_context("fork").Process(target=_go, args=(chosen, tmp_path / "killed", view))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    kept = Store(tmp_path / "killed").rows()
    assert set(kept["method"]) == {"rise", "random", "gen_att", "smooth_grad"}
    assert kept["image"].nunique() == 4
    assert kept["error"].isna().all()
    assert len(Store(tmp_path / "killed").maps()) == 5 * 4
    spared.touch()
    run(chosen, tmp_path / "killed")
    run(chosen, tmp_path / "whole")
    same(table(tmp_path / "killed"), table(tmp_path / "whole"), exactly=True)
    maps, whole = Store(tmp_path / "killed").maps(), Store(tmp_path / "whole").maps()
    assert maps.keys() == whole.keys()
    assert all(np.array_equal(maps[name], whole[name]) for name in maps)


def test_results_are_reported_method_by_method(tmp_path: Path) -> None:
    steps: list[running.Step] = []
    run(plan(images=2, batch_size=2), tmp_path, watch=steps.append)
    assert [(step.done, len(step.rows)) for step in steps] == [(1, 0), (1, 4), (1, 4), (2, 0)]
    assert [{row["method"] for row in step.rows} for step in steps[1:3]] == [{"random"}, {"tests_noted"}]


def test_what_is_missing_is_traced_as_if_all_were(tmp_path: Path) -> None:
    """Methods share traces, whose last digits depend on what is kept: on the plan, never on what is done already."""
    chosen = plan(methods=["vtranm", "gen_att", "raw_attention"], metrics=["sparseness"], batch_size=4)
    run(chosen, tmp_path / "whole")
    whole = table(tmp_path / "whole")
    done = dict.fromkeys(whole["key"][whole["method"] != "raw_attention"])
    data = running.open_plan_data(chosen)
    model_run = running.ModelRun(chosen, "scenes", vitrail.load("scenes"), data)
    model_run.measure(None, done)
    rows = pd.DataFrame(model_run.buffer.rows).sort_values(COLUMNS).reset_index(drop=True)
    same(rows, whole[whole["method"] == "raw_attention"].reset_index(drop=True), exactly=True)


def test_the_data_is_opened_once_and_each_image_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, read = list[str](), list[int]()
    open_examples, load = running.open_examples, SceneData.load
    monkeypatch.setattr(running, "open_examples", lambda data, *rest: opened.append(data) or open_examples(data, *rest))
    monkeypatch.setattr(SceneData, "load", lambda self, position: read.append(position) or load(self, position))
    arguments = ["bench", "--data", "scenes:2@5", "--methods", "random", "--metrics", "pointing_game", "--out"]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert len(opened) == 1
    assert sorted(read) == sorted(set(read)), "the check of the metrics hands over what it has read"


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


def test_a_parameter_that_was_added_leaves_stored_rows_valid() -> None:
    """The keys of rows that were stored before metrics had ``cells``; that of other parameters at None has them."""

    def work(call: str) -> str:
        metric = build_metrics([call])[0]
        return work_of(("random", 1, {}), (metric.info.name, metric.version, metric.params), "predicted")

    token_curve = {"precision": "auto", "protocol": "default", "seed": 0}
    stored = ["token_deletion_aopc", 1, token_curve]
    assert work("token_deletion_aopc") == json.dumps([["random", 1, {}], stored, "predicted"], sort_keys=True)
    stored = ["token_deletion_aopc", 1, {**token_curve, "cells": 2}]
    assert work("token_deletion_aopc(cells=2)") == json.dumps([["random", 1, {}], stored, "predicted"], sort_keys=True)
    stored = ["insertion", 1, {**token_curve, "baseline": None, "steps": 224}]
    assert work("insertion") == json.dumps([["random", 1, {}], stored, "predicted"], sort_keys=True)


def test_a_method_that_changed_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plan(images=3), tmp_path)
    monkeypatch.setattr(METHODS["random"], "version", 2)
    assert run(plan(images=3), tmp_path).rows == 3 * 2
    monkeypatch.setattr("vitrail.models.view.View.fingerprint", lambda self: "other weights")
    assert run(plan(images=3), tmp_path).rows == 3 * 4


@pytest.mark.full
def test_two_commands_at_once_on_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["bench", "--data", "scenes:40", "--images", "24", "--methods", "tis(masks=256),random", "--metrics",
             "sparseness,insertion(steps=16)", "--target", "label", "--device", "cpu", "--out", str(out)]  # fmt: skip
    command = [sys.executable, "-c", "from vitrail.cli.program import main; main()", *words]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        for _ in range(2)
    ]
    told = [one.communicate(timeout=300) for one in both]
    assert sorted(one.returncode for one in both) == [0, 1], told
    done, refused = (next(told[i] for i, one in enumerate(both) if one.returncode == code) for code in (0, 1))
    worker = next(one.pid for one in both if one.returncode == 0)
    assert f"is locked by process {worker}" in " ".join(refused[1].split())
    assert "images measured" in done[0]
    run(Store(out).plan(), tmp_path / "alone")
    same(table(out), table(tmp_path / "alone"))
    assert table(out)["error"].isna().all()


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


def test_a_plan_that_cannot_start_leaves_the_old_one(tmp_path: Path) -> None:
    run(plan(images=2), tmp_path)
    about = Store(tmp_path).environment()
    for wrong in ({"methods": ["no_such_method"]}, {"metrics": ["no_such_metric"]}, {"target": "nonsense"}):
        with pytest.raises(VitrailError):
            run(plan(images=2, **wrong), tmp_path)
    assert Store(tmp_path).plan() == plan(images=2)
    assert Store(tmp_path).environment() == about


def test_the_same_work_in_other_words_is_done_once(tmp_path: Path) -> None:
    words = {"methods": ["random", "random(seed=0)"], "metrics": ["insertion(steps=4)", "insertion(steps=4, seed=0)"]}
    found = run(plan(data="scenes:2", images=3, **words), tmp_path)
    assert (found.images, found.rows) == (3, 3)
    more = run(plan(data="scenes:3@0", **words), tmp_path)
    assert (more.known, more.rows) == (3, more.images)
    (setting,) = read_results([tmp_path]).settings
    assert len(setting.images) == more.known + more.images, "scenes:2 and scenes:3@0 are the same data"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("scenes", "scenes:200@0", True),
        ("scenes:5@7", "scenes:9@7", True),
        ("scenes", "scenes:@7", False),
        ("scenes:5?objects=2", "scenes:5", False),
        ("folder:a/b", "folder:a/./b/", True),
        ("folder:a/b?n=3&seed=1", "folder:a/b", True),
        ("folder:a", "folder:b", False),
    ],
)
def test_data_is_known_in_other_words(one: str, other: str, same: bool) -> None:
    assert (data_name(one) == data_name(other)) == same


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
                            (["bench", "--watch", str(tmp_path / "nothing")], "not a run folder")):  # fmt: skip
        found = CliRunner().invoke(app, arguments)
        assert isinstance(found.exception, VitrailError)
        assert told in str(found.exception)


WRONG = [
    ("images = 'many'", "images = 'many', expected an integer ≥ 1"),
    ("images = 0", "images = 0, expected an integer ≥ 1"),
    ("images = true", "images = True, expected an integer"),
    ("images = 2.5", "images = 2.5, expected an integer"),
    ("seed = -1", "seed = -1, expected an integer ≥ 0"),
    ("batch_size = [4]", r"batch_size = \[4\], expected an integer"),
    ("methods = 'tis'", "methods = 'tis', expected a list of strings"),
    ("methods = [3]", r"methods = \[3\], expected a list of strings"),
    ("metrics = {a = 1}", "metrics = {'a': 1}, expected a list of strings"),
    ("cheap_only = 4", "cheap_only = 4, expected a list of strings"),
    ("target = 5", "target = 5, expected text"),
    ("protocol = ['tis']", r"protocol = \['tis'\], expected text"),
    ("indices = [1, 2]", r"indices = \[1, 2\], expected text"),
    ("maps = 'no'", "maps = 'no', expected true or false"),
    ("deterministic = 1", "deterministic = 1, expected true or false"),
    ("data = 7", "data = 7, expected text"),
    ("models = 'photo'", "models = 'photo', expected a list of names"),
    ("models = [7]", r"models = \[7\], expected a list of names"),
    ("models = [{name = 7}]", "a model of .* has name = 7, expected text"),
    ("models = [{name = 'photo', options = 3}]", "options = 3, expected a table"),
    ("models = [{name = 'vit', options = {img_size = 'big'}}]", r"the model vit of .* has img_size = 'big', expected"),
    ("models = [{name = 'vit', options = {num_classes = '3'}}]", "num_classes = '3', expected an integer"),
    ("models = [{name = 'vit', options = {checkpoint = 3}}]", "checkpoint = 3, expected text"),
]


@pytest.mark.parametrize(("line", "told"), WRONG)
def test_values_of_the_wrong_type_are_told(tmp_path: Path, line: str, told: str) -> None:
    right = {"models": "models = ['scenes']", "data": "data = 'scenes:2'"}
    right[line.split(maxsplit=1)[0]] = line
    (tmp_path / "plan.toml").write_text("\n".join(right.values()))
    with pytest.raises(VitrailError, match=rf"plan\.toml has .*{told}|{told}"):
        Plan.read(tmp_path / "plan.toml")


def test_preprocessing_of_the_wrong_type_is_told(tmp_path: Path) -> None:
    for wrong in ({"mean": 5}, {"crop_pct": "all"}, {"size": "64"}):
        with pytest.raises(VitrailError, match=r"reprocessing has|has preprocessing = .* expected values as in"):
            run(plan(models=[ModelSpec("scenes", {}, wrong)]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
