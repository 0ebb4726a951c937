"""The live table of a run, and watching one from its files."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console
from tests.bench.plans import plan
from typer.testing import CliRunner

from vitrail.bench.run import Step, run
from vitrail.bench.store import Store
from vitrail.cli import board as boards
from vitrail.cli.bench import watch_run
from vitrail.cli.board import Board, Tally, board_of, image_ids
from vitrail.cli.outputs import duration
from vitrail.cli.program import app

METHODS = ["random", "gen_att"]
METRICS = ["sparseness", "insertion(steps=4)"]


def rows(images: range, methods: list[str] = METHODS, seconds: float = 0.5) -> pd.DataFrame:
    """Rows of the plan as a store has them; the value is the number of the image."""
    return pd.DataFrame([
        {"model": "scenes", "image": str(i), "method": method, "params": json.dumps({}), "metric": metric,
         "explained": "label", "value": float(i), "seconds": seconds, "error": None}
        for i in images for method in methods for metric in METRICS
    ])  # fmt: skip


def drawn(board: Board, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(board)
    return console.export_text()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(boards, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_each_method_has_its_own_bar_and_time_left(clock: list[float]) -> None:
    board = Board(plan(methods=METHODS), 10)
    board.add(rows(range(2)))
    board.start("scenes", clock[0])
    board.add(rows(range(2, 4)))
    board.add(rows(range(4, 6), ["random"]))
    clock[0] += 12.0  # 4 images of random: 3 s each, of which 1 s is explaining
    lines = {line.split()[0]: line.split()[1:] for line in drawn(board).splitlines() if line.strip()}
    assert lines["random"][:5] == ["████····", "6/10", "0.500", "6", "s"], "4 images of 0.5 s + half of the other 2 s"
    assert lines["gen_att"][:5] == ["███·····", "4/10", "0.500", "9", "s"]
    assert board.line("scenes") == "scenes: 4/10 images, 3.00 s/image, 15 s left"
    assert lines["random"][5:7] == ["2.500", f"±{1.96 * np.arange(6).std(ddof=1) / 6**0.5:.3f}"]


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_keeps_to_the_terminal(width: int, clock: list[float]) -> None:
    long = [*METHODS, "full_grad_plus.skipplus(rule=frozen)"]
    board = Board(plan(methods=long, metrics=[*METRICS, *(f"insertion(steps={n})" for n in range(5, 20))]), 50_000)
    board.add(rows(range(3)))
    text = drawn(board, width)
    assert max(map(len, text.splitlines())) <= width
    assert "0/50000" in text
    assert "more columns" in text


def test_means_and_intervals_are_those_of_all_values() -> None:
    values = np.random.default_rng(0).normal(3, 2, 500)
    tally = Tally()
    for part in np.split(values, [1, 2, 50, 300]):
        tally.add(pd.Series([*part, np.nan]))
    assert tally.rows == 505
    assert str(tally) == f"{values.mean():.3f} ±{1.96 * values.std(ddof=1) / 500**0.5:.3f}"
    assert str(Tally()) == "–"


def test_what_failed_is_done_but_has_no_mean() -> None:
    board = Board(plan(methods=METHODS), 3)
    wrong = rows(range(3), ["random"]).assign(value=np.nan, seconds=np.nan, error="too dark")
    board.add(pd.concat([rows(range(3), ["gen_att"]), wrong]))
    assert board.complete
    assert board.errors == 6
    (line,) = [line.split() for line in drawn(board).splitlines() if line.startswith("random")]
    assert line == ["random", "████████", "3/3", "–", "–", "–", "–"]
    board = Board(plan(methods=METHODS), 3)
    board.add(pd.concat([rows(range(2)), pd.DataFrame([{"model": "scenes", "image": "2", "error": "no picture"}])]))
    assert board.complete, "an image that cannot be read is done for all methods"
    assert board.line("scenes") == "scenes: 2/3 images, 1 left out"
    (line,) = [line.split() for line in drawn(board).splitlines() if line.startswith("random")]
    assert line[:3] == ["random", "████████", "2/3"]


def test_rows_may_come_while_the_table_is_drawn() -> None:
    metrics = [f"insertion(steps={n})" for n in range(2, 30)]
    board, failed = Board(plan(methods=METHODS, metrics=metrics), 100), list[BaseException]()
    ended = False

    def draw() -> None:
        while not ended:
            try:
                drawn(board)
            except RuntimeError as error:
                failed.append(error)

    thread = Thread(target=draw)
    thread.start()
    for i, metric in enumerate(metrics):
        own = rows(range(i, i + 1)).assign(metric=metric).drop(columns="model")
        board.see(Step("scenes", i, 100, own.to_dict("records")))
    ended = True
    thread.join()
    assert failed == []


def test_a_run_is_watched_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = plan(methods=METHODS, images=4)
    run(chosen, tmp_path, positions=[0, 1])
    slept = []

    def go_on(seconds: float) -> None:
        slept.append(seconds)
        run(chosen, tmp_path, positions=[len(slept) + 1])

    monkeypatch.setattr("vitrail.cli.bench.time", SimpleNamespace(monotonic=time.monotonic, sleep=go_on))
    watch_run(tmp_path)
    assert len(slept) == 2, "one look for each of the images that were still missing"
    assert "4/4" in capsys.readouterr().out
    watch_run(tmp_path)
    assert len(slept) == 2


def test_only_what_the_plan_asks_for_counts(tmp_path: Path) -> None:
    run(plan(methods=METHODS, images=4), tmp_path)
    run(plan(methods=["random"], images=2, data="scenes:16@6"), tmp_path)
    fewer = plan(methods=["random"], images=2)
    board = board_of(fewer, Store(tmp_path), image_ids(fewer))
    assert board.complete
    assert {own.rows for own in board.tallies.values()} == {2}
    assert {key[1] for key in board.tallies} == {"random"}
    more = plan(methods=["random"], images=4, metrics=[*METRICS, "insertion(steps=5)"])
    assert not board_of(more, Store(tmp_path), image_ids(more)).complete
    far = plan(methods=["random"], data="folder:/not/on/this/machine")
    assert image_ids(far) is None
    assert not board_of(far, Store(tmp_path), None).complete


def test_errors_of_another_plan_in_the_same_folder_are_not_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / f"{name}.png")
    chosen = plan(data=str(tmp_path), methods=["random"], metrics=["sparseness"], target="label")
    assert run(chosen, tmp_path / "run").errors == 2, "pictures of a folder have no class"
    chosen = replace(chosen, target="predicted")
    assert run(chosen, tmp_path / "run").failed == 0
    board = board_of(chosen, Store(tmp_path / "run"), image_ids(chosen))
    assert board.complete
    assert board.errors == 0
    assert "could not be measured" not in drawn(board)


def test_without_a_terminal_there_are_lines_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "--data", "scenes:16@5", "--images", "4", "--methods", "random", "--metrics", "sparseness",
                 "--batch-size", "1", "--out"]  # fmt: skip
    told = CliRunner().invoke(app, [*arguments, str(tmp_path / "a")])
    assert told.output.count("s/map") == 2, "one table with its legend, at the end"
    monkeypatch.setattr("vitrail.cli.bench.LINE_EVERY", 0.0)
    told = CliRunner().invoke(app, [*arguments, str(tmp_path / "b")])
    assert [f"scenes: {i}/4 images" in told.output for i in (1, 2, 3, 4)] == [True] * 4
    assert told.output.count("s/map") == 2


def test_words_of_the_command_line(tmp_path: Path) -> None:
    assert [duration(seconds) for seconds in (0.4, 99, 130, 7200)] == ["0 s", "99 s", "2 min", "2.0 h"]
    told = CliRunner().invoke(app, ["bench", "--data", "scenes:1", "--workers", "2", "--out", str(tmp_path / "run")])
    assert told.exit_code == 1
    assert str(told.exception) == "--workers 2 is for a cluster: give --cluster too."
