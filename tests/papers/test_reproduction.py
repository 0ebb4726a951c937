"""Every target end to end, on miniature data in the real layout with tiny networks in place of the papers'."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from tests.families import few
from tests.papers.miniatures import DEPTH, certain, make_data, stand_in

from vitrail.bench.store import Store
from vitrail.cli.reproduce import show_result
from vitrail.data.names import data_name
from vitrail.data.scenes import Scenes
from vitrail.methods import vit_cx
from vitrail.papers import catalogue as papers
from vitrail.papers.catalogue import LAYER, PaperTarget, targets
from vitrail.papers.cells import PaperCell, identity, metric_identity
from vitrail.papers.claims import MISSING, TableValues, judge
from vitrail.papers.figures import _summary
from vitrail.papers.metrics import paper_metrics
from vitrail.papers.reproduction import Reproduction, reproduce


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def few_random_masks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vit_cx, "RANDOM_MASKS", 6)
        yield


def given(target: PaperTarget, data: dict[str, str]) -> dict[str, str]:
    return {one.name: data[one.name] for one in target.needs() if not one.optional}


def quick(name: str, data: dict[str, str], out: Path, **changes: object) -> Reproduction:
    target = targets()[name]
    few = None if target.data.keys() & {"figure1", "animals"} else 2  # pictures of which each has a column
    options = {"images": few, "quick": True, "load": stand_in, **changes}
    return reproduce(name, given(target, data), out=out, **options)  # type: ignore[arg-type]


def expected_cells(target: PaperTarget) -> set[tuple[str, str]]:
    """Row and column of every cell, by the table alone."""
    rows = []
    for row in target.methods:
        rows += [row.replace(LAYER, str(layer)) for layer in range(DEPTH)] if LAYER in row else [row]
    return {(row, one.label) for row in rows for one in target.columns if one.applies(row)}


def stored(result: Reproduction) -> pd.DataFrame:
    folders = [path.parent for path in sorted(result.folder.glob("*/plan.toml"))]
    return pd.concat([Store(folder).rows() for folder in folders]).set_index("key")


def check_origin(cell: PaperCell, rows: pd.DataFrame, target: PaperTarget) -> None:
    """The cell's rows are those of its method, model, metric and class, and make its value."""
    (column,) = [one for one in target.columns if one.label == cell.column]
    own = rows.loc[list(cell.keys)]
    assert len(own) >= 1
    name, params = identity(cell.method)
    assert set(own["method"]) == {name}
    assert set(own["params"]) == {params}
    assert set(own["model"]) == {target.models[column.model].name}
    with paper_metrics():
        assert set(own["metric"]) == {metric_identity(cell.metric)}
    assert set(own["explained"]) == {column.explained}
    assert set(own["data"]) == {data_name(cell.data)}
    assert own["error"].isna().all()
    if column.reading == "mean" and own["parts"].isna().all():
        assert cell.measured == pytest.approx(own["value"].dropna().mean() * column.scale, rel=1e-12)


@pytest.mark.parametrize("name", few([*targets()], 4))
def test_every_cell_is_measured(name: str, data: dict[str, str], tmp_path: Path) -> None:
    target = targets()[name]
    sure = name == "vit_cx-overdetermination"  # there must be images on which every mask suffices
    result = quick(name, data, tmp_path, **({"load": certain} if sure else {}))
    assert {(cell.row, cell.column) for cell in result.cells} == expected_cells(target)
    assert len(result.cells) == len(expected_cells(target))
    assert not result.failed
    rows = stored(result)
    for cell in result.cells:
        assert math.isfinite(cell.measured), cell
        assert cell.published == target.value(cell.row, cell.column)
        check_origin(cell, rows, target)
    told = json.loads((result.folder / "result.json").read_text(encoding="utf-8"))
    assert len(told["cells"]) == len(result.cells) == len(pd.read_csv(result.folder / "table.csv"))
    assert {one["text"] for one in told["claims"]} == {one.text for one in target.claims}
    assert not any(verdict.decided for verdict in result.verdicts), "so few images decide nothing"
    measured: dict[str, dict[str, float]] = {}
    for cell in result.cells:
        measured.setdefault(cell.column, {})[cell.row] = cell.measured
    values = TableValues(measured, result.directions)
    assert all(judge(claim, values).holds is not None for claim in target.claims), "claims name cells that exist"


def test_published_numbers_do_not_enter(data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = quick("vtranm-table4", data, tmp_path / "a")
    known = dict(targets())
    invented = {row: [777.0] * len(own) for row, own in known["vtranm-table4"].published.items()}
    known["vtranm-table4"] = replace(known["vtranm-table4"], published=invented)
    monkeypatch.setattr(papers, "targets", lambda: known)
    after = quick("vtranm-table4", data, tmp_path / "b")
    assert [cell.measured for cell in after.cells] == [cell.measured for cell in before.cells]
    assert {cell.published for cell in after.cells} == {777.0}
    assert all(cell.difference == cell.measured - 777 for cell in after.cells)


def test_what_is_there_is_not_measured_again(data: dict[str, str], tmp_path: Path) -> None:
    first = quick("tis-figure4", data, tmp_path)
    parts = sorted(tmp_path.rglob("part-*"))
    again = quick("tis-figure4", data, tmp_path)
    assert sorted(tmp_path.rglob("part-*")) == parts
    assert [cell.keys for cell in again.cells] == [cell.keys for cell in first.cells]
    more = quick("tis-figure4", data, tmp_path, images=3)
    assert {cell.n for cell in more.cells} == {3}
    assert {cell.n for cell in quick("tis-figure4", data, tmp_path).cells} == {2}, "rows of other images must not count"


def test_figures_keep_their_maps(data: dict[str, str], tmp_path: Path) -> None:
    result = quick("vit_cx-figure1", data, tmp_path)
    maps = Store(result.folder / "vit-figure1-predicted").maps()
    assert len(maps) == len(result.rows()) * 4
    assert not [*quick("tis-table3", data, tmp_path).folder.rglob("*.safetensors")]


def test_a_radar_is_drawn_beside_its_table(data: dict[str, str], tmp_path: Path) -> None:
    result = quick("skipplus-figure4", data, tmp_path)
    assert {path.name for path in result.folder.glob("radar.*")} == {"radar.pdf", "radar.png", "radar.svg"}
    summary = _summary(result.target, {(cell.row, cell.column): cell for cell in result.cells})
    assert [one.label for one in summary.results.settings] == ["EVA-L", "ViT-B/8", "MURA"]
    assert [one.call for one in summary.results.metrics][:5] == [
        "del. accuracy", "del. AOPC", "ins. accuracy", "ins. AOPC", "AP"
    ]  # fmt: skip
    for s, model in enumerate(("EVA-L", "ViT-B/8", "MURA")):
        for m, row in enumerate(summary.results.methods):
            for k, column in enumerate(summary.results.metrics):
                cell = result.cell(row, f"{model} {column.call}")
                drawn = summary.cells[s][m][k]
                assert drawn.n == (cell.n if cell else 0)
                if cell:
                    assert drawn.mean == cell.measured
    assert not list(quick("skipplus-figure9", data, tmp_path).folder.glob("radar.*"))


def test_images_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    next(Path(data["imagenet"]).rglob("*.JPEG")).write_bytes(b"no picture")
    result = quick("tis-figure4", data, tmp_path, images=4)
    assert {cell.n for cell in result.cells} == {3}
    assert not result.failed
    assert any("1 images could not be read; the first: " in note for note in result.notes)


def test_models_are_seen_through_the_papers_preprocessing(data: dict[str, str], tmp_path: Path) -> None:
    seen = {}

    def load(spec):  # type: ignore[no-untyped-def]
        seen[spec.name] = view = stand_in(spec)
        return view

    quick("tis-table3", data, tmp_path, load=load)
    for view in seen.values():
        assert view.preprocessing.mean == (0.485, 0.456, 0.406)
        assert (view.preprocessing.fit, view.preprocessing.crop_pct) == ("squash", 0.875)
        assert view.preprocessing._scaled_size((100, 50)) == (36, 36)  # 32 / 0.875, whatever the shape
    written = (tmp_path / "tis-table3" / "vit-boxes-label" / "plan.toml").read_text(encoding="utf-8")
    assert 'fit = "squash"' in written


def test_class_agnostic_methods_have_equal_columns_for_both_classes(data: dict[str, str], tmp_path: Path) -> None:
    result = quick("vtranm-table1", data, tmp_path)
    for row in ("Raw Att.", "Rollout"):
        for test in ("CIFAR-10 Neg", "CIFAR-10 Pos", "CIFAR-100 Neg", "CIFAR-100 Pos"):
            cells = [result.cell(row, f"{test} ({kind})") for kind in ("Pred", "GT")]
            assert cells[0] is not None
            assert cells[1] is not None
            assert cells[0].measured == cells[1].measured


def test_a_complete_specification_replaces_data_and_a_name_replaces_models(tmp_path: Path) -> None:
    options = {"images": 3, "out": tmp_path, "quick": True}
    result = reproduce("skipplus-figure9", {"imagenet": "scenes:3"}, "scenes", only=["imagenet"], **options)  # type: ignore[arg-type]
    assert {cell.model for cell in result.cells} == {"scenes"}
    assert {cell.column for cell in result.cells} == {
        f"EVA-L {what}" for what in ("del. accuracy", "del. AOPC", "ins. accuracy", "ins. AOPC")
    }
    assert not result.failed
    assert "readout" not in "".join(cell.method for cell in result.cells), "the paper's parameter is for its own model"
    assert any("measured on scenes" in note for note in result.notes)
    headings = ["scenes del. accuracy", "scenes del. AOPC", "scenes ins. accuracy", "scenes ins. AOPC"]
    assert list(result.headings.values()) == headings, "the paper's model was not measured"
    with Console(width=200, record=True, file=io.StringIO()) as console:
        show_result(result, console)
    printed = console.export_text()
    assert headings[0] in printed
    assert "EVA-L del. accuracy" not in printed
    assert not any(verdict.decided for verdict in result.verdicts), "three images decide nothing"
    assert {line[0] for line in printed.splitlines() if "undecided" in line} == {"?"}
    assert "a cell has fewer than 6 images" in printed


def test_claims_are_decided_by_enough_images(tmp_path: Path) -> None:
    def load(spec):  # type: ignore[no-untyped-def]
        view = stand_in(replace(spec, name="vit_base_patch16_224", options={"num_classes": len(Scenes.labels)}))
        return replace(view, labels=tuple(Scenes.labels))

    options = {"images": 6, "out": tmp_path, "quick": True, "load": load}
    result = reproduce("tis-table4", {"imagenet": "scenes:6"}, "scenes", **options)  # type: ignore[arg-type]
    cells = [cell for cell in result.cells if cell.n]
    assert all(len(cell.draws) == 2000 and cell.low <= cell.measured <= cell.high for cell in cells)
    assert all(MISSING not in verdict.reasons.values() for verdict in result.verdicts if "DeiT-B" in verdict.tests)


def test_a_figure_names_the_model_that_was_measured() -> None:
    target = targets()["libragrad-table1"]
    paper = next(iter(target.models.values())).name
    for model, expected in (("scenes", "scenes"), (paper, "ViT-B")):
        cells = [
            PaperCell("GenAtt", column.label, model, "d", "label", "gen_att", "x", 0.5, 0.4, 0.6, 9, None)
            for column in target.columns
        ]
        assert _summary(target, {(cell.row, cell.column): cell for cell in cells}).results.settings[0].label == expected


def test_a_method_that_cannot_explain_another_model_leaves_a_reason(data: dict[str, str], tmp_path: Path) -> None:
    def load(spec):  # type: ignore[no-untyped-def]
        return stand_in(replace(spec, name="swin_base_patch4_window7_224"))

    result = quick("tis-table3", data, tmp_path, model="any_swin", load=load)
    refused = {cell.row for cell in result.cells if cell.error}
    assert refused == {"TIS", "TAM", "Chefer1", "Chefer2", "Att. Rollout", "BT-H", "BT-T"}
    assert all("no fixed tokens" in cell.error and not cell.n for cell in result.cells if cell.row in refused)
    assert all(np.isfinite(cell.measured) for cell in result.cells if cell.row not in refused)
    assert {cell.column for cell in result.cells} == {"DeiT-B"}, "one model stands for the first of the paper's alone"
