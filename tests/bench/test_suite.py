"""Suites: what the leaderboard measures, shards of a run, metrics with a limit, and the command."""

from __future__ import annotations

import csv
import itertools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tests.bench.plans import COLUMNS
from torch import Tensor
from typer.testing import CliRunner

from vitrail import VitrailError
from vitrail.bench import costs
from vitrail.bench import suite as suites
from vitrail.bench.costs import measure_cost
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.bench.shard import Shard
from vitrail.bench.store import Store
from vitrail.bench.suite import every_method, open_suite
from vitrail.calls import split_call
from vitrail.cli.board import board_of
from vitrail.cli.program import app
from vitrail.data import open_data
from vitrail.engine.requests import Asking
from vitrail.methods.registry import ALIASES, METHODS, build_method, get_method
from vitrail.metrics import agreement
from vitrail.metrics.base import METRICS, Case, build_metric
from vitrail.models.loading import load

PLAN = Plan([ModelSpec("scenes")], "scenes:4@3", ["gen_att", "random"], ["sparseness", "saco(groups=3)"],
            target="label", limits={"saco": 2}, maps=False)  # fmt: skip
SMALL = """
reference = ["gen_att", "random"]
cheap_only = []
[parameters]
[limits]
sparseness = 2
[metrics]
curves = ["insertion_minus_deletion(steps=4)"]
maps = ["sparseness"]
[[pairs]]
name = "scenes"
title = "Scenes"
about = "shapes"
model = {name = "scenes"}
data = "scenes:3@1"
target = "label"
metrics = ["curves", "maps"]
[[pairs]]
name = "elsewhere"
title = "Elsewhere"
about = "what is not here"
data = "{folder}/data/pets"
metrics = ["curves"]
[pairs.model]
name = "photo"
"""
PLUGIN = """
import torch, vitrail

@vitrail.method("tests_suite_rows")
def rows(model, images, target):
    return torch.arange(model.grid[0], dtype=torch.float32)[:, None].expand(len(images), *model.grid).contiguous()
"""


def test_the_leaderboard_has_every_method_and_metric() -> None:
    plans = [pair.plan for pair in open_suite("leaderboard").pairs if pair.plan is not None]
    assert [plan.data.partition(":")[0] for plan in plans] == ["scenes", "samples"]
    calls = plans[0].methods
    names = {split_call(call)[0] for call in calls}
    assert names >= set(METHODS.entries())
    assert names >= {name for name in ALIASES.values() if "." in name}
    assert {f"{name}.skipplus" for name in METHODS.entries() if f"{name}.skipplus" in names} >= {"decompx.skipplus"}
    view = load("scenes")
    for call in calls:
        name, params = split_call(call)
        build_method(name, view, **params)
        assert ("rule" in get_method(name).parameters()) == (f"{name}(rule=frozen)" in calls)
    measured = {split_call(call)[0] for call in plans[0].metrics}
    assert measured == set(METRICS.entries())
    for call in plans[0].metrics:
        name, params = split_call(call)
        build_metric(name, **params)
    assert set(plans[0].limits) <= measured


def test_parameters_of_a_method_are_those_of_the_suite() -> None:
    calls = every_method({"rise": {"masks": 7}})
    assert "rise(masks=7)" in calls
    assert "rise" not in calls


def test_pairs_whose_files_are_there_are_measured(tmp_path: Path) -> None:
    missing = {pair.name: pair.missing for pair in open_suite("leaderboard", tmp_path).pairs if pair.plan is None}
    assert missing["pets"] == f"{tmp_path}/data/pets"
    (tmp_path / "data" / "photos").mkdir(parents=True)
    missing = {pair.name: pair.missing for pair in open_suite("leaderboard", tmp_path).pairs if pair.plan is None}
    assert missing["photographs"] == f"{tmp_path}/data/imagenet-sample"
    (tmp_path / "data" / "imagenet-sample").mkdir()
    (tmp_path / "models").mkdir()
    for name in ("vit_tiny_patch16_224_imagenet1k.safetensors", "imagenet1k_labels.txt"):
        (tmp_path / "models" / name).touch()
    plans = {pair.name: pair.plan for pair in open_suite("leaderboard", tmp_path, ["gen_att"]).pairs}
    plan = plans["photographs"]
    assert plan is not None
    assert plan.data == f"{tmp_path}/data/photos + {tmp_path}/data/imagenet-sample"
    assert plan.models[0].options["labels"] == f"{tmp_path}/models/imagenet1k_labels.txt"
    assert plan.methods == ("gen_att",)
    with pytest.raises(VitrailError, match="is not a folder: leaderboard expects"):
        open_suite("leaderboard", tmp_path / "nowhere")


def test_a_metric_with_a_limit_is_measured_on_the_first_images(tmp_path: Path) -> None:
    outcome = run(PLAN, tmp_path)
    ids, rows = open_data(PLAN.data).ids, Store(tmp_path).rows()
    assert set(rows[rows["metric"] == "saco(groups=3)"]["image"]) == set(ids[:2])
    assert set(rows[rows["metric"] == "sparseness"]["image"]) == set(ids)
    assert outcome.rows == len(rows) == 2 * (len(ids) + 2)
    assert board_of(PLAN, Store(tmp_path), ids).complete
    assert run(PLAN, tmp_path).rows == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_does_not_depend_on_maps_is_asked_once_per_image(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    falls = agreement._falls

    def counted(case: Case, absent: Tensor, space: Any, output: str, name: str) -> Asking[Tensor]:
        asked.append(name)
        return (yield from falls(case, absent, space, output, name))

    metrics = ["idsds", "faithfulness_correlation(runs=8)", "faithfulness_correlation(runs=8, seed=1)"]
    plan = replace(
        PLAN, methods=["gen_att", "random"], metrics=metrics, images=2, limits={}, deterministic=deterministic
    )
    alone = {}
    for method in plan.methods:
        run(replace(plan, methods=[method]), tmp_path / method)
        rows = Store(tmp_path / method).rows()
        alone |= dict(zip(rows["key"], rows["value"], strict=True))
    monkeypatch.setattr(agreement, "_falls", counted)
    run(plan, tmp_path / "both")
    assert Counter(asked)["idsds"] == 2 * (2 if deterministic else 1)
    assert Counter(asked)["faithfulness_correlation"] == 2 * Counter(asked)["idsds"]
    rows = Store(tmp_path / "both").rows()
    assert dict(zip(rows["key"], rows["value"], strict=True)) == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_a_limit_must_be_a_number_of_images() -> None:
    with pytest.raises(VitrailError, match=r"limits = .*expected a table of metrics and numbers"):
        Plan([ModelSpec("scenes")], "scenes:4", limits={"road": 0})


def test_shards_give_the_rows_of_a_whole_run(tmp_path: Path) -> None:
    run(PLAN, tmp_path / "whole")
    shards = [Shard.parse(f"{number}/3") for number in (1, 2, 3)]
    threads = [
        threading.Thread(target=run, args=(PLAN, tmp_path / "parts"), kwargs={"shard": shard}) for shard in shards
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole, parts = (
        Store(tmp_path / name).rows().sort_values(COLUMNS).reset_index(drop=True) for name in ("whole", "parts")
    )
    assert parts[[*COLUMNS, "key"]].equals(whole[[*COLUMNS, "key"]])
    pd.testing.assert_series_equal(parts["value"], whole["value"], rtol=1e-5)
    assert run(PLAN, tmp_path / "parts").rows == 0


def test_a_shard_excludes_itself_and_whole_runs_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    with store.locked("1-of-2"):
        with Store(tmp_path / "run").locked("2-of-2"):
            pass
        for shard in ("1-of-2", None):
            with pytest.raises(VitrailError, match="is locked by process"), Store(tmp_path / "run").locked(shard):
                pass
    with store.locked(), pytest.raises(VitrailError, match="is locked"), Store(tmp_path / "run").locked("1-of-2"):
        pass


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(VitrailError, match=r"a shard is i/n with i from 1 to n"):
        Shard.parse(text)


def test_every_image_is_in_one_shard() -> None:
    parts = [list(Shard(number, 4).of(range(10))) for number in (1, 2, 3, 4)]
    assert sorted(position for part in parts for position in part) == list(range(10))


def test_costs_are_ratios_to_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(costs.time, "process_time", lambda: next(clock))  # everything takes a second
    view = load("scenes")
    image = view.preprocess(open_data("scenes:1")[0].image)[None]
    threads = torch.get_num_threads()
    assert measure_cost("random", view, image) == costs.Cost(forwards=1, images_per_second=1)
    assert torch.get_num_threads() == threads


def test_a_method_of_a_plugin_joins_the_leaderboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_suite: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGIN)
    done = CliRunner().invoke(app, ["bench", "leaderboard", "--plugin", "mine.py", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "Elsewhere is left out: there is no DIR/data/pets." in done.output
    folder = tmp_path / "vitrail-leaderboard"
    with open(folder / "leaderboard.csv", newline="") as file:
        rows = [(row["pair"], row["method"], row["metric"], row["n"]) for row in csv.DictReader(file)]
    images = str(len(open_data("scenes:3@1")))
    methods = ("tests_suite_rows", "gen_att", "random")
    assert {row for row in rows if row[1] in methods} >= {
        ("scenes", method, metric, count)
        for method in methods
        for metric, count in (("insertion_minus_deletion(steps=4)", images), ("sparseness", "2"))
    }
    page = (folder / "leaderboard.html").read_text()
    assert "tests_suite_rows" in page
    assert "yours" in page
    again = CliRunner().invoke(app, ["bench", "leaderboard", "--plugin", "mine.py", "--device", "cpu"])
    assert f"0 images measured, {images} known before" in again.output


def test_only_the_chosen_rows_of_the_leaderboard_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_suite: None
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--pairs", "scenes", "--metrics", "sparseness", "--methods", "random", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", "leaderboard", *options, "--out", "board"])
    assert done.exit_code == 0, done.output
    assert "Elsewhere" not in done.output
    rows = Store(tmp_path / "board" / "scenes").rows()
    assert set(rows["metric"]) == {"sparseness"}
    assert set(rows["method"]) == {"random"}
    assert rows["image"].nunique() == 2, "its limit holds"
    more = CliRunner().invoke(app, ["bench", "leaderboard", *options[4:], "--pairs", "scenes", "--out", "board"])
    assert more.exit_code == 0, more.output
    rows = Store(tmp_path / "board" / "scenes").rows()
    assert set(rows["metric"]) == {"sparseness", "insertion_minus_deletion(steps=4)"}, (
        "the folder can be measured further"
    )


def test_choosing_rows_takes_none_from_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_suite: None
) -> None:
    """What the folder holds of other pairs, metrics and methods stands on the page, too."""
    monkeypatch.chdir(tmp_path)
    here = SMALL.replace('"{folder}/data/pets"', '"scenes:2@2"').replace('"photo"', '"scenes"')
    (suites.files("vitrail.bench") / "leaderboard.toml").write_text(here)

    def table(*options: str) -> dict[tuple[str, ...], dict[str, str]]:
        done = CliRunner().invoke(app, ["bench", "leaderboard", "--device", "cpu", "--out", "board", *options])
        assert done.exit_code == 0, done.output
        assert all(title in (tmp_path / "board" / "leaderboard.html").read_text() for title in ("Scenes", "Elsewhere"))
        with open(tmp_path / "board" / "leaderboard.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        return {(row["pair"], row["method"], row["metric"]): row for row in rows}

    whole = table("--methods", "gen_att,random,rollout")
    measured_here = {key for key in whole if key[2].endswith("(steps=4)")}  # what comes with vitrail has 56 steps
    assert len(measured_here) == 6
    assert table("--methods", "random", "--pairs", "scenes", "--metrics", "sparseness") == whole


def test_metrics_and_pairs_of_the_leaderboard_are_chosen_by_name_or_call() -> None:
    wanted = ["insertion(steps=56)", "box_localization", "discriminativity"]
    suite = open_suite("leaderboard", None, ["random"], wanted, ["samples", "scenes", "pets"])
    plans = {pair.name: pair.plan.metrics if pair.plan else pair.missing for pair in suite.pairs}
    assert plans == {
        "scenes": (
            "insertion(steps=56)", "box_localization", "box_localization(kind=max_box_acc)",
            "discriminativity", "discriminativity(reading=hit)",
        ),
        "samples": ("insertion(steps=56)",),
        "pets": "DIR/data/pets",
    }  # fmt: skip
    (pair,) = open_suite("leaderboard", None, ["random"], ["discriminativity"], ["samples"]).pairs
    assert pair.plan is None
    assert pair.missing == "metric discriminativity in its plan"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "photo"], "leaderboard determines its models and images: leave out --model"),
        (["--images", "3", "--metrics", "sparseness"], "leave out --images"),
        (["--metrics", "saco"], "--metrics saco is not in this plan: expected "),
        (["--pairs", "scenes,nowhere"], "--pairs nowhere is not in this plan: expected "),
        (["--data", "nowhere"], "'nowhere' is not a folder"),
        (["--shard", "3/2"], "a shard is i/n"),
        (["--methods", "no_such_method"], "no_such_method"),
    ],
)
def test_a_wrong_leaderboard_is_one_error(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_suite: None
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "leaderboard", *options, "--device", "cpu"])
    assert isinstance(done.exception, VitrailError)
    assert message in str(done.exception)
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.fixture
def small_suite(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("suites")
    (folder / "leaderboard.toml").write_text(SMALL)
    monkeypatch.setattr(suites, "files", lambda package: folder)
    monkeypatch.setattr(costs, "REPEATS", 1)
    monkeypatch.setattr(costs, "REFERENCE_RUNS", 1)


def test_methods_that_only_some_models_have_are_left_out_elsewhere() -> None:
    pairs = {pair.name: pair for pair in open_suite("leaderboard", None, ["vit_shapley", "random"]).pairs}
    assert pairs["scenes"].plan is not None
    assert pairs["scenes"].plan.methods == ("vit_shapley", "random")
    assert all(pair.plan.methods == ("random",) for name, pair in pairs.items() if name != "scenes" and pair.plan)
