"""``tools/leaderboard.py``: runs that hold different methods, metrics and images become one table."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from tests.report.run_folders import Made

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store
from vitrail.report.leaderboard import read_table, write_table
from vitrail.report.standings import NUMBERS

METRIC = "insertion_minus_deletion"
KEPT = ["method", "metric", "mean", "n"]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a table of its own."""
    path = Path(__file__).parents[2] / "tools" / "leaderboard.py"
    spec = importlib.util.spec_from_file_location("tools_leaderboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TABLE", tmp_path / "table.csv.gz")
    monkeypatch.setattr(module, "shipped_table", lambda: read_table(module.TABLE))
    return module


def run_of(folder: Path, values: Mapping[str, Sequence[float | None]], metric: str = METRIC, first: int = 0) -> Path:
    """A run on the pair ``scenes``: values of each method by image; None = not measured yet."""
    made, store = Made(), Store(folder / "scenes")
    (folder / "scenes").mkdir(parents=True)
    Plan([ModelSpec("scenes")], "scenes:9", list(values), [metric]).write(folder / "scenes" / "plan.toml")
    store.add_rows([
        {**made.row(first + i, method, metric, value), "key": f"{method} {metric} {first + i}"}
        for method, of_method in values.items()
        for i, value in enumerate(of_method)
        if value is not None
    ])  # fmt: skip
    return folder


def ship(tool: ModuleType, *lines: tuple[str, str, float, int]) -> None:
    """The table that comes with vitrail: (method, metric, mean, n) of the pair ``scenes``."""
    table = pd.DataFrame([{**dict.fromkeys(NUMBERS, 0.0), **dict(zip(KEPT, line, strict=True))} for line in lines])
    write_table(table.assign(pair="scenes", better="higher"), tool.TABLE)


def write(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: object
) -> dict[tuple[str, str], tuple[float, int]]:
    """(method, metric) → (mean, n) of the table after the script ran."""
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", *map(str, options)])
    tool.main()
    table = read_table(tool.TABLE)[KEPT].itertuples(index=False)
    return {(method, metric): (pytest.approx(mean, rel=1e-4), n) for method, metric, mean, n in table}


def test_partial_runs_count_on_the_images_that_all_methods_have(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(tool, ("rollout", "aopc", 0.5, 3))
    reference, rollout = [0.8, 0.6, 0.4, 0.5, 0.9, 0.7], [0.2, 0.4, None, 0.3, 0.1, 0.2]
    runs = [
        run_of(tmp_path / "a", {"decompx.skipplus": reference, "rollout": rollout}),
        run_of(tmp_path / "b", {"decompx.skipplus": [0.2], "rollout": [0.6]}, first=6),
        run_of(tmp_path / "c", {"random": [0.1] * 6 + [0.7]}),
        run_of(tmp_path / "d", {"random": [0.7, 0.9]}, "saco"),
    ]
    assert write(tool, monkeypatch, *runs, "--write") == {
        ("rollout", "aopc"): (0.5, 3),
        ("decompx.skipplus", METRIC): (3.7 / 6, 6),
        ("rollout", METRIC): (1.8 / 6, 6),
        ("random", METRIC): (1.2 / 6, 6),
        ("random", "saco"): (0.8, 2),
    }
    gaps = read_table(tool.TABLE).set_index(["method", "metric"])["gap"]
    assert gaps["rollout", METRIC] == pytest.approx(-1.9 / 6, rel=1e-4), "paired, though by several runs"


@pytest.mark.parametrize(("least", "known"), [(0.75, {"rollout"}), (0.5, {"rollout", "random"})])
def test_methods_with_few_images_are_left_out(
    least: float,
    known: set[str],
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ship(tool, ("tis", METRIC, 0.5, 4))
    run = run_of(tmp_path / "a", {"rollout": [0.2, 0.4, 0.6, 0.8], "random": [0.1, 0.3, None, None]})
    table = write(tool, monkeypatch, run, "--write", "--least", least)
    assert {method for method, _ in table} == {"tis", *known}
    assert table["rollout", METRIC] == ((0.3, 2) if "random" in known else (0.5, 4))
    said = capsys.readouterr().out
    assert ("left out: 1 with at most 2" in said) == ("random" not in known)


def test_only_rows_of_as_many_images_are_replaced(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = {("rollout", METRIC): (0.9, 2), ("random", METRIC): (0.5, 3), ("random", "saco"): (0.4, 1)}
    ship(tool, *((*key, *numbers) for key, numbers in shipped.items()))
    runs = [
        run_of(tmp_path / "a", {"rollout": [0.2, 0.4], "random": [0.1, 0.3]}),
        run_of(tmp_path / "b", {"random": [0.6, 0.8]}, "saco"),
    ]
    assert write(tool, monkeypatch, *runs) == shipped, "nothing is written unless asked for"
    assert "3 rows, 0 of them new; 1 of fewer images stay out" in capsys.readouterr().out
    assert write(tool, monkeypatch, *runs, "--write") == {
        ("rollout", METRIC): (0.3, 2),  # as many
        ("random", METRIC): (0.5, 3),  # fewer
        ("random", "saco"): (0.7, 2),  # more
    }


def test_images_are_counted_by_the_methods_that_have_a_value_on_them(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of an older version are no further method; a row of what failed, or an image that was not read, is none."""
    ship(tool, ("rollout", "aopc", 0.5, 3))
    run = run_of(tmp_path / "a", {"rollout": [0.2, 0.4, 0.6, 0.8], "random": [0.1, None, 0.3, 0.5]})
    made, store = Made(), Store(run / "scenes")
    older = [{**made.row(i, "rollout", METRIC, 0.0), "key": f"older {i}"} for i in range(2)]
    failed = {**made.row(1, "random", METRIC, float("nan")), "key": "failed", "error": "too dark"}
    unread = {**failed, "key": "unread", "method": "", "metric": "", "explained": ""}
    store.add_rows([*older, failed, unread])
    later = run_of(tmp_path / "b", {"rollout": [0.2, 0.4]})  # the last row of an image counts
    failed_later = {**failed, "key": f"random {METRIC} 0", "image": made.image(0)}  # but not in the first run
    Store(later / "scenes").add_rows([failed_later])
    assert write(tool, monkeypatch, run, later, "--write") == {
        ("rollout", "aopc"): (0.5, 3),
        ("rollout", METRIC): (1.6 / 3, 3),
        ("random", METRIC): (0.9 / 3, 3),
    }
    assert "2 methods, 3 images\n" in capsys.readouterr().out


def test_runs_without_rows_are_refused(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="the runs hold no rows of any pair of the leaderboard"):
        write(tool, monkeypatch, tmp_path, "--write")
    run = run_of(tmp_path / "a", {"random": []})
    Store(run / "scenes").add_rows([{**Made().row(0, "random", METRIC, 0.0), "key": "failed", "error": "too dark"}])
    with pytest.raises(SystemExit, match="the runs hold no rows of any pair of the leaderboard"):
        write(tool, monkeypatch, run, "--write")
    assert not tool.TABLE.exists()
