"""A run folder of an earlier version (before the scheduler) is continued and reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.bench.plans import table

from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.report.report import report

STORED = Path(__file__).parent / "stored_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "run"))


def test_a_stored_run_has_nothing_left_to_measure(folder: Path) -> None:
    before = table(folder)
    outcome = run(Store(folder).plan(), folder)
    assert (outcome.known, outcome.rows, outcome.failed) == (3, 0, 0), "keys of rows stay the same"
    assert table(folder).equals(before)


def test_rows_without_newer_columns_are_read(folder: Path) -> None:
    """The column for the scale of scores came later."""
    assert table(folder)["scale"].isna().all()


def test_a_stored_run_is_continued_with_the_same_values(folder: Path) -> None:
    stored = table(folder)
    for part in sorted((folder / "rows").iterdir())[:1]:
        part.unlink()
    outcome = run(Store(folder).plan(), folder)
    assert 0 < outcome.images < 3
    again = table(folder)
    assert again["key"].equals(stored["key"])
    assert np.allclose(again["value"], stored["value"], rtol=1e-5, equal_nan=True)


def test_a_stored_run_is_reported(folder: Path, tmp_path: Path) -> None:
    summary, paths = report([folder], tmp_path / "report", ["html", "md", "tex", "csv"])
    assert summary.results.methods == ["gen_att", "tis(masks=8)", "random"]
    assert [setting.explained for setting in summary.results.settings] == ["predicted", "label"]
    rows = Store(folder).rows()
    for s, setting in enumerate(summary.results.settings):
        gen_att = rows[(rows["method"] == "gen_att") & (rows["explained"] == setting.explained)]
        means = gen_att[gen_att["metric"].isin(["sparseness", "pointing_game"])].groupby("metric")["value"].mean()
        for k, column in enumerate(summary.results.metrics):
            if column.call in means:
                assert summary.cells[s][0][k].mean == pytest.approx(means[column.call])
    assert all(path.stat().st_size for path in paths)
