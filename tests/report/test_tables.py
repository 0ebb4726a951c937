"""Tables and figures of a report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tests.report.run_folders import START, Made, frame_of
from typer.testing import CliRunner

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run as bench
from vitrail.bench.store import Store
from vitrail.cli.program import app
from vitrail.cli.report import report as report_command
from vitrail.engine.maps import regions
from vitrail.errors import VitrailError
from vitrail.methods.registry import METHODS
from vitrail.report import figures, html, tables
from vitrail.report.report import FORMATS, report
from vitrail.report.results import as_column, normal_call, read_results
from vitrail.report.summary import Summary, format_number, summarise_results

HOSTILE = r"$\input{x}$ & 100% #1_a {b} ~^ \ | `c` <b>*d*</b>"


def summary_of(*folders: Path) -> Summary:
    return summarise_results(read_results(folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Made().write(tmp_path / "one")


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """The least that every figure can be drawn of."""
    quality = {"rollout": 0.75, "grad_cam": 0.5, "random": 0.1}
    made = Made(quality, ("insertion(steps=8)", "deletion(steps=8)", "pointing_game"), 8)
    return made.write(tmp_path / "small")


def test_numbers_are_those_of_pandas(folder: Path) -> None:
    found = pd.read_csv(io.StringIO(tables.long_csv(summary_of(folder))))
    expected = frame_of(folder).groupby(["call", "metric"])["value"].agg(["mean", "count"])
    assert len(found) == 16
    for line in found.itertuples():
        mean, count = expected.loc[(line.method, line.metric)]
        assert line.n == count
        assert line.mean == pytest.approx(mean, rel=1e-5, nan_ok=True)
        assert not line.n or line.low <= line.mean <= line.high
    assert set(found["better"]) == {"higher", "lower"}


def test_wide_csv_has_one_line_per_method_in_the_order_of_the_plan(folder: Path) -> None:
    found = pd.read_csv(io.StringIO(tables.wide_csv(summary_of(folder))))
    assert list(found["method"]) == ["decompx.skipplus", "rollout", "grad_cam", "random"]
    assert found["deletion(steps=8) ↓"].is_monotonic_increasing
    assert found["seconds per image"].notna().all()


def test_markdown_marks_leaders_second_and_ties(tmp_path: Path) -> None:
    made = Made(quality={"decompx.skipplus": 0.8, "rollout": 0.75, "grad_cam": 0.5, "random": 0.1})
    text = tables.markdown(summary_of(made.write(tmp_path / "tied")))
    lines = {
        line.split("|")[1].strip(" `"): line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| `")
    }
    header = next(line for line in text.splitlines() if line.startswith("| method"))
    assert "insertion(steps=8) ↑" in header
    assert "deletion(steps=8) ↓" in header
    assert lines["decompx.skipplus"][0].strip().startswith("**0.")
    assert re.search(r"\*\*0\.\d+\*\* \[0\.\d+, 0\.\d+\] ≈", lines["rollout"][0])
    assert "≈" not in lines["random"][0]
    assert lines["random"][3].strip() == "–"
    assert "24 images of folder:photos" in text
    assert "/somewhere" not in text  # a report is sent to others
    apart = Made(quality={"decompx.skipplus": 0.8, "rollout": 0.6, "grad_cam": 0.5})
    text = tables.markdown(summary_of(apart.write(tmp_path / "apart")))
    row = next(line for line in text.splitlines() if line.startswith("| `rollout"))
    assert re.search(r"<ins>0\.\d+</ins> \[0\.\d+, 0\.\d+\]", row)


def test_methods_that_cannot_be_told_apart_are_marked(tmp_path: Path) -> None:
    made = Made(quality={"rollout": 0.7, "grad_cam": 0.7, "random": 0.1}, noise=0.2)
    cells = summary_of(made.write(tmp_path / "run")).cells[0]
    first, second, last = (row[0] for row in cells)
    assert {first.rank, second.rank} == {1, 2}
    assert first.tied != second.tied
    assert last.p < 0.05
    assert not last.tied


def test_few_images_have_nothing_bold_and_say_why(tmp_path: Path) -> None:
    summary = summary_of(Made(images=3).write(tmp_path / "few"))
    text, latex = tables.markdown(summary), tables.latex(summary)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert not any("**" in row or "<ins>" in row for row in rows)
    assert "Nothing is bold where fewer than 6 images were measured: insertion(steps=8), deletion(steps=8)" in text
    assert r"\textbf" not in latex
    assert {figures._shade(cell) for row in summary.cells[0] for cell in row[:2]} == {figures.UNTESTED}


def test_equal_methods_have_nothing_bold_and_say_why(tmp_path: Path) -> None:
    made = Made(quality={"rollout": 0.7, "grad_cam": 0.7}, noise=0.2, metrics=("insertion(steps=8)",))
    text = tables.markdown(summary_of(made.write(tmp_path / "run")))
    assert not any("**" in line for line in text.splitlines() if line.startswith("| `"))
    assert "Nothing is bold where no method is significantly worse than the best: insertion(steps=8)." in text


def test_latex_has_as_many_cells_as_columns(folder: Path, tmp_path: Path) -> None:
    other = Made(model="deit", metrics=("insertion(steps=8)", "pointing_game"), seed=1).write(tmp_path / "two")
    for text in (tables.latex(summary_of(folder)), tables.latex(summary_of(folder, other))):
        assert r"\toprule" in text
        assert r"\textbf{" in text
        assert r"\underline{" in text
        for body in re.findall(r"\\begin{tabular}{(\w+)}(.*?)\\end{tabular}", text, re.DOTALL):
            for line in body[1].split(r"\\"):
                line = re.sub(r"\\(toprule|midrule|bottomrule|cmidrule\(lr\){[\d-]+})", "", line).strip()
                spans = sum(int(own) - 1 for own in re.findall(r"\\multicolumn{(\d+)}", line))
                if line:
                    assert len(re.findall(r"(?<!\\)&", line)) + 1 + spans == len(body[0]), line


def test_names_mean_themselves_in_every_format(tmp_path: Path) -> None:
    made = Made(model=HOSTILE, quality={f"rise(note={HOSTILE!r})": 0.7, "rollout": 0.5, "random": 0.2})
    summary = summary_of(made.write(tmp_path / "run"))
    markdown, latex = tables.markdown(summary), tables.latex(summary)
    rows = [line for line in markdown.splitlines() if line.startswith("| `")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert "<b>" not in "".join(line for line in markdown.splitlines() if line not in rows)
    assert not re.search(r"(?<![\\a-z])[#%]", latex.split("\n", 1)[1])
    assert r"\input" not in latex
    drawn = figures.draw_all(summary, ["svg"])
    assert {"bars.svg", "radar.svg", "curves.svg", "agreement.svg"} == drawn.keys()


def test_runs_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = Made(model="deit", seed=1, images=12, metrics=("insertion(steps=8)",)).write(tmp_path / "two")
    summary = summary_of(folder, other)
    assert [one.label for one in summary.results.settings] == ["vit_tiny", "deit"]
    header = next(line for line in tables.markdown(summary).splitlines() if line.startswith("| method"))
    assert "insertion(steps=8) ↑<br>vit\\_tiny | insertion(steps=8) ↑<br>deit |" in header
    assert header.count("pointing") == 1  # not measured in the other run
    for s, own in enumerate((folder, other)):
        mean = frame_of(own).query("call == 'rollout' and metric == 'insertion(steps=8)'")["value"].mean()
        assert summary.cells[s][1][0].mean == pytest.approx(mean)


def test_runs_that_differ_in_nothing_else_are_told_by_name(tmp_path: Path) -> None:
    folders = [Made(seed=i).write(tmp_path / name) for i, name in enumerate(("a/run", "b/run"))]
    assert [one.label for one in summary_of(*folders).results.settings] == ["a/run", "b/run"]
    assert [one.label for one in summary_of(folders[0]).results.settings] == [""]


def test_both_kinds_of_class_are_two_settings(folder: Path) -> None:
    Store(folder).add_rows([{**row, "key": "l" + row["key"]} for row in Made(explained="label", seed=3).rows()])
    assert [one.label for one in summary_of(folder).results.settings] == ["predicted", "label"]


def test_methods_and_metrics_that_are_not_in_the_plan_are_left_out(folder: Path) -> None:
    rows = Made(quality={"tis": 0.9}, metrics=("insertion(steps=8)",)).rows()
    rows += Made(quality={"rollout": 0.9}, metrics=("aopc", "insertion(steps=4)")).rows()
    Store(folder).add_rows([{**row, "key": f"stale-{place}"} for place, row in enumerate(rows)])
    planned = summary_of(folder)
    assert planned.results.methods == list(Made().quality)
    assert [column.call for column in planned.results.metrics] == list(Made().metrics)
    assert planned.results.stale == 24 * 3
    assert "72 rows of methods, metrics or versions that are not in the plan are left out" in tables.markdown(planned)
    everything = summarise_results(read_results([folder], stale=True))
    assert everything.results.methods == [*Made().quality, "tis (stale)"]
    titles = [column.title for column in everything.results.metrics]
    assert titles[len(Made().metrics) :] == ["aopc (stale) ↑", "insertion(steps=4) (stale) ↑"]
    assert not any("stale" in title for title in titles[: len(Made().metrics)])
    assert everything.results.stale == 0
    assert "`tis (stale)`" in tables.markdown(everything)
    result = CliRunner().invoke(app, ["report", str(folder), "--format", "csv"])
    assert "72 rows that are not in the plan" in result.output
    assert "tis" not in (folder / "report" / "results.csv").read_text()
    CliRunner().invoke(app, ["report", str(folder), "--format", "csv", "--stale"])
    assert "tis (stale)" in (folder / "report" / "results.csv").read_text()
    assert "aopc (stale)" in (folder / "report" / "results.csv").read_text()
    assert "insertion(<wbr>steps=4) (<wbr>stale)" in html.page(everything)


def test_rows_of_an_older_version_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Plan([ModelSpec("scenes", {"device": "cpu"})], "scenes:3", ["random", "gen_att"], ["sparseness"],
                  target="predicted")  # fmt: skip
    bench(chosen, tmp_path)
    monkeypatch.setattr(METHODS["random"], "version", 2)
    older = read_results([tmp_path])
    assert (older.methods, older.stale) == (["random", "gen_att"], 0), "no rows of the present version yet"
    bench(replace(chosen, images=1), tmp_path)
    results = read_results([tmp_path])
    assert results.stale == len(older.settings[0].images)
    assert (~np.isnan(results.settings[0].values)).sum(0).ravel().tolist() == [1, results.stale]
    assert read_results([tmp_path], stale=True).methods == ["random", "gen_att", "random (stale)"]


def test_a_method_that_is_not_registered_is_known_by_its_name(tmp_path: Path) -> None:
    folder = Made(quality={"my_own": 0.5, "random": 0.1}, metrics=("my_metric(a=1)", "insertion(steps=8)"))
    path = folder.write(tmp_path / "run")
    Plan([ModelSpec("vit_tiny")], folder.data, ["my_own(a=1)", "random"], ["my_metric", "insertion(steps=8)"]).write(
        path / "plan.toml"
    )
    results = read_results([path])
    assert (sorted(results.methods), results.stale) == (["my_own", "random"], 0)
    assert sorted(column.call for column in results.metrics) == ["insertion(steps=8)", "my_metric(a=1)"]


def test_protocols_of_one_folder_are_different_metrics(tmp_path: Path) -> None:
    """Each row says by which protocol it was measured; the plan of the last call says nothing about older rows."""
    chosen = Plan([ModelSpec("scenes", {"device": "cpu"})], "scenes:2", ["random"], ["insertion(steps=4)"],
                  target="predicted")  # fmt: skip
    bench(chosen, tmp_path)
    bench(replace(chosen, protocol="tis", images=1), tmp_path)
    rows = Store(tmp_path).rows()
    values = {name: own["value"].tolist() for name, own in rows.groupby("metric")}
    assert {name: len(own) for name, own in values.items()} == {
        "insertion(steps=4)": len(rows) - 1,
        "insertion(steps=4, protocol=tis)": 1,
    }
    assert [one.call for one in read_results([tmp_path]).metrics] == ["insertion(steps=4, protocol=tis)"]
    results = read_results([tmp_path], stale=True)
    assert [one.call for one in results.metrics] == ["insertion(steps=4, protocol=tis)", "insertion(steps=4)"]
    (setting,) = results.settings
    for k, column in enumerate(results.metrics):
        found = setting.values[:, 0, k]
        assert sorted(found[~np.isnan(found)]) == sorted(values[column.call])


def test_an_unknown_metric_has_no_best(tmp_path: Path) -> None:
    summary = summary_of(Made(metrics=("my_own", "pointing_game")).write(tmp_path / "run"))
    assert {row[0].rank for row in summary.cells[0]} == {0}
    assert "my_own" in " ".join(summary.legend())


def test_scores_that_are_no_probabilities_are_told(tmp_path: Path) -> None:
    """Rows of a version without the column, and rows in which a score was scaled."""
    plain = summary_of(Made().write(tmp_path / "plain"))
    assert not any("scaled" in line for line in plain.legend())
    made = Made(seed=1).write(tmp_path / "scores")
    row = {**Made(seed=1).rows()[0], "scale": [0.2, 0.9]}
    Store(made).add_rows([{**row, "time": START.replace(year=2030)}])
    summary = summary_of(made)
    assert "Of scores that are no probabilities, scaled: empty image 0, full image 1: insertion(steps=8)." in (
        summary.legend()
    )
    axes = {column.call: column.curve_axis for column in summary.results.metrics}
    assert axes["insertion(steps=8)"] == "scaled: empty image 0, full image 1"
    assert axes["deletion(steps=8)"] == "class probability"


def test_combined_metrics_are_no_means_of_values(folder: Path) -> None:
    rows = Made(metrics=("mean_iou",)).rows()
    draw = np.random.default_rng(0)
    for row in rows:
        row["parts"], row["key"] = (draw.random(4) * 100).tolist(), "iou" + row["key"]
    Store(folder).add_rows(rows)
    summary = summarise_results(read_results([folder], stale=True))
    place = [one.call for one in summary.results.metrics].index("mean_iou")
    from vitrail.metrics.statistics import summarise

    expected = summarise(frame_of(folder).query("metric == 'mean_iou'")).set_index("method")
    for m, method in enumerate(summary.results.methods):
        cell = summary.cells[0][m][place]
        assert cell.mean == pytest.approx(expected.loc[method, "mean"])
        assert (cell.low, cell.high) == pytest.approx((expected.loc[method, "low"], expected.loc[method, "high"]))


def test_errors_are_counted_and_listed_and_no_values(tmp_path: Path) -> None:
    summary = summary_of(Made(errors=3, broken=2).write(tmp_path / "run"))
    assert tables.error_count(summary) == 5
    text = tables.markdown(summary)
    assert "## Errors: 5" in text
    assert "3 × random, insertion(steps=8) (vit\\_tiny; first photo-000): out of memory &lt;b&gt;" in text
    assert "2 × the image was left out" in text
    assert len(pd.read_csv(io.StringIO(tables.errors_csv(summary)))) == 2
    assert len(summary.results.settings[0].images) == 24


def test_cells_of_fewer_images_say_so(tmp_path: Path) -> None:
    text = tables.markdown(summary_of(Made(errors=3).write(tmp_path / "run")))
    assert "(n = 23)" in text


def test_the_newest_of_equal_rows_counts(folder: Path) -> None:
    row = {**Made().rows()[0], "key": "again", "image_hash": "another", "value": 123.0}
    Store(folder).add_rows([{**row, "time": START.replace(year=2030)}])
    results = read_results([folder])
    assert results.replaced == 1
    assert results.settings[0].values[0, 0, 0] == 123.0
    assert "1 older rows" in " ".join(summarise_results(results).legend())


def test_agreement_is_told_of_metrics_that_have_one(folder: Path) -> None:
    summary = summary_of(folder)
    (agreement,) = summary.agreement
    assert agreement.metrics == ["insertion(steps=8)", "deletion(steps=8)", "pointing_game"]
    assert agreement.of_means[0, 1] == 1
    frame = pd.read_csv(io.StringIO(tables.agreement_csv(summary)))
    assert len(frame) == 9
    assert "Do the metrics agree" in tables.markdown(summary)


def test_classes_have_their_own_cells(folder: Path) -> None:
    summary = summary_of(folder)
    rows = frame_of(folder)
    assert list(summary.classes) == ["cat", "dog", "owl"]
    mean = rows[(rows["label"] == 1) & (rows["call"] == "rollout") & (rows["metric"] == "pointing_game")][
        "value"
    ].mean()
    cell = summary.classes["dog"][0][1][2]
    assert (cell.n, cell.mean) == (8, pytest.approx(mean))


@pytest.mark.parametrize("side", [3, 2])  # of 5 × 7 patches, not all of the squares are whole
def test_curves_by_squares_are_drawn_over_the_share_of_squares(side: int) -> None:
    view = SimpleNamespace(grid=(5, 7), pools_patches=False, name="5 × 7")
    case = SimpleNamespace(view=view, on_grid=torch.randn(5, 7, generator=torch.Generator().manual_seed(0)))
    squares = regions((5, 7), side)
    for way in ("deletion", "insertion"):
        column = as_column(f"token_{way}_aopc(cells={side})")
        present = column.metric.sets(case)
        there = [int(sum(bool(square[patches].any()) for square in squares)) for patches in present]
        changed = [len(squares) - count if way == "deletion" else count for count in there]
        assert column.shares(len(present)).tolist() == pytest.approx([count / len(squares) for count in changed])
        label = f"squares of patches {'removed' if way == 'deletion' else 'inserted'} (%), most important first"
        assert figures.curve_axis(column.call, column.removes) == label
    assert as_column("token_deletion_aopc").shares(10).tolist() == pytest.approx([step / 10 for step in range(10)])


def test_figures_are_whole_and_the_same_every_time(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn by themselves, and once more for a report, which has all files by default."""
    drawn = figures.draw_all(summary_of(small_folder), figures.FORMATS)
    assert drawn.keys() == {f"{n}.{f}" for n in ("bars", "radar", "curves", "agreement") for f in figures.FORMATS}
    for name, content in drawn.items():
        if name.endswith(".png"):
            pixels = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
            assert min(pixels.shape) > 300
            assert pixels.std() > 5
        elif name.endswith(".svg"):
            assert ElementTree.fromstring(content).tag.endswith("svg")
        else:
            assert content.startswith(b"%PDF")
    report_command([small_folder])
    paths = [path for path in (small_folder / "report").rglob("*") if path.is_file()]
    assert all(path.is_file() and path.stat().st_size for path in paths)
    assert {path.suffix.lstrip(".") for path in paths} == set(FORMATS)
    assert small_folder / "report" / "report.html" in paths
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
    written = {path.name: path.read_bytes() for path in (small_folder / "report" / "figures").iterdir()}
    assert written == drawn
    report_command([small_folder], tmp_path / "out", ["md", "CSV"])
    assert (tmp_path / "out" / "report.md").is_file()
    assert not (tmp_path / "out" / "report.html").exists()


def test_figures_that_have_nothing_to_show_are_left_out(tmp_path: Path) -> None:
    made = Made(quality={"rollout": 0.5}, metrics=("pointing_game",))
    assert figures.draw_all(summary_of(made.write(tmp_path / "run")), ["png"]).keys() == {"bars.png"}


@pytest.mark.parametrize("methods", [1, 2, 40])
def test_any_number_of_methods(tmp_path: Path, methods: int) -> None:
    made = Made(quality={f"rise(masks={i + 1})": i / methods for i in range(methods)}, images=7)
    summary = summary_of(made.write(tmp_path / "run"))
    assert len(summary.drawn_methods(0, figures.LINES)) == min(methods, figures.LINES)
    assert figures.draw_all(summary, ["svg"])


def test_markdown_shows_the_figures_it_was_made_with(small_folder: Path, tmp_path: Path) -> None:
    report([small_folder], tmp_path / "out", ["md", "png"])
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\((.*?)\)", text)
    assert shown
    assert all((tmp_path / "out" / path).is_file() for path in shown)


def test_what_cannot_be_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match="no format docx: expected some of html"):
        report([folder], tmp_path / "out", ["docx"])
    with pytest.raises(VitrailError, match="holds no results"):
        report([tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(VitrailError, match="no run was given"):
        report([], tmp_path / "out")
    with pytest.raises(VitrailError, match="given twice"):
        report([folder, folder], tmp_path / "out")
    only = tmp_path / "errors"
    Store(only).add_rows([{**row, "error": "bad"} for row in Made().rows()])
    with pytest.raises(VitrailError, match="nothing was measured"):
        report([only], tmp_path / "out")
    next(iter((folder / "rows").glob("*.parquet"))).write_bytes(b"PAR1 no more")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(VitrailError, match="every part is damaged"):
        report([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_maps_plan_or_environment(tmp_path: Path) -> None:
    folder = Made(maps=False).write(tmp_path / "run")
    (folder / "plan.toml").unlink()
    (folder / "environment.json").unlink()
    report([folder], tmp_path / "out", ["html", "md"])
    assert set(read_results([folder]).settings[0].classes) == {"class 0", "class 1", "class 2"}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("rollout", "rollout"),
        ("att_cat(rule=frozen)", "att_ixg.plus(rule=frozen)"),
        ("tis(masks=1024)", "tis"),
        ("tis(masks=64)", "tis(masks=64)"),
        ("nobody(knows=it)", "nobody(knows=it)"),
    ],
)
def test_plans_and_maps_may_name_a_method_otherwise(call: str, expected: str) -> None:
    assert normal_call(call) == expected


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.1234, 3, "0.123"),
        (-1.5, 1, "−1.5"),
        (-0.0001, 3, "0.000"),
        (3e-7, None, "3.0e−07"),
        (np.nan, 3, "–"),
        (-np.inf, 3, "−∞"),
    ],
)
def test_numbers(value: float, decimals: int | None, text: str) -> None:
    assert format_number(value, decimals) == text


def test_params_of_rows_are_sorted_calls(folder: Path) -> None:
    row = {**Made().rows()[0], "key": "new", "method": "rise", "params": json.dumps({"masks": 8, "seed": 1})}
    Store(folder).add_rows([row])
    assert "rise(masks=8, seed=1) (stale)" in read_results([folder], stale=True).methods


def test_titles_of_bars_keep_their_arrow_and_leave_their_neighbour_alone(tmp_path: Path) -> None:
    calls = ("negative_auc(steps=10)", "insertion(steps=32, protocol=vit_cx)", "positive_auc(steps=10)",
             "token_insertion_accuracy", "a_metric_of_my_own_with_a_name_that_never_ends")  # fmt: skip
    made = Made(quality={"full_grad_plus.skipplus(rule=frozen)": 0.8, "random": 0.1}, metrics=calls)
    summary, figure = summary_of(made.write(tmp_path / "run")), Figure(dpi=200, layout="constrained")
    with matplotlib.rc_context(figures._STYLE):
        assert figures.bars(summary, figure)
        figure.draw_without_rendering()
    titles = [axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
    arrows = [one.arrow for one in summary.results.metrics]
    assert [title.get_text().endswith(arrow) for title, arrow in zip(titles, arrows, strict=True)] == [True] * 5
    assert "".join(titles[3].get_text().split()) == "token_insertion_accuracy↑"
    places = [title.get_window_extent() for title in titles]
    assert all(one.x1 < other.x0 for one, other in pairwise(places[:4]))
    assert all(one.x0 > 0 and one.x1 < figure.bbox.x1 for one in places)


def test_each_run_is_told_with_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = Made(quality={"rollout": 0.5}, metrics=("pointing_game", "completeness")).write(tmp_path / "few")
    many = Made(data="folder:others").write(tmp_path / "many")
    report_command([few, many], tmp_path / "both", ["csv"])
    told = capsys.readouterr().out
    assert "24 images, 1 method, 1 metric" in told
    assert "24 images, 4 methods, 4 metrics" in told
    assert "No image" not in told
    report_command([few], tmp_path / "one", ["csv"])
    assert "No image could be measured by completeness" in capsys.readouterr().out
