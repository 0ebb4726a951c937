"""The published tables as data: complete, consistent with themselves, and read correctly."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.methods.registry import get_method
from vitrail.metrics.base import get_metric
from vitrail.papers.catalogue import FOLDER, LAYER, Claim, PaperTarget, find_target, requirements, targets
from vitrail.papers.cells import READINGS
from vitrail.papers.claims import TableValues, judge
from vitrail.papers.metrics import paper_metrics

TARGETS = [
    *(f"tis-{n}" for n in "table1 table2 table3 table4 sparseness masks ratio figure3 figure4".split()),
    *(f"vit_cx-{n}" for n in "table1 table2 figure1 redundancy overdetermination sensitivity sanity".split()),
    *(f"vtranm-table{n}" for n in range(1, 5)),
    *(f"skipplus-figure{n}" for n in (2, 3, 4, 6, 7, 8, 9, 10, 11, 12)),
    "libragrad-table1",
]

# Number and sum of the published cells, from a second reading of the papers.
CHECKSUMS = {
    "tis-table1": (132, 39.56),
    "tis-table2": (132, 44.52),
    "tis-table3": (22, 14.483),
    "tis-table4": (22, 6.257),
    "tis-masks": (8, 2.98),
    "tis-ratio": (8, 2.98),
    "tis-figure3": (2, 0.9984),
    "vit_cx-table1": (99, 2115.752),
    "vit_cx-table2": (42, 6663.66),
    "vit_cx-figure1": (40, 20.07),
    "vit_cx-redundancy": (1, 0.92),
    "vit_cx-overdetermination": (2, 20.986),
    "vit_cx-sensitivity": (4, 150.201),
    "vtranm-table1": (72, 3201.43),
    "vtranm-table2": (63, 2991.96),
    "vtranm-table3": (54, -104.218),
    "vtranm-table4": (20, 1112.42),
    "libragrad-table1": (115, 5266.8),
}
BASELINES = ("Mean", "Blur", "Black", "Rand")


@pytest.fixture(autouse=True)
def own_metrics() -> Iterator[None]:
    with paper_metrics():
        yield


def test_every_table_and_figure_of_the_papers_is_a_target() -> None:
    assert [*targets()] == TARGETS
    assert find_target(" TIS-Table1 ").name == "tis-table1"
    with pytest.raises(VitrailError, match=r"no target 'tis-tabel1'\. Did you mean tis-table"):
        find_target("tis-tabel1")


@pytest.mark.parametrize("target", targets().values(), ids=lambda one: one.name)
def test_a_target_names_only_what_exists(target: PaperTarget) -> None:
    labels = [one.label for one in target.columns]
    assert target.title
    assert len(set(labels)) == len(labels)
    assert set(target.published) <= set(target.methods)
    for row, call in target.methods.items():
        assert (LAYER in row) == (LAYER in call)
        for model in target.models.values():
            name, params = split_call(target.call(row, model, 0))
            assert params.keys() <= get_method(name).parameters().keys()
    for column in target.columns:
        name, params = split_call(column.metric)
        assert params.keys() <= get_metric(name).parameters().keys()
        assert column.direction() in (-1, 0, 1)
        assert {*(column.rows or ()), *column.without} <= set(target.methods)
        assert column.reading.partition(":")[0] in {"mean", "deviation", "seconds_deviation", *READINGS}
    for doubt in target.doubts:
        assert doubt.row in target.published
        assert any(doubt.covers(doubt.row, label) for label in labels)
    for claim in target.claims:
        assert all(any(judge(Claim("", "1 == 1", [one]), as_published(target)).tests) for one in claim.columns)


@pytest.mark.parametrize("target", targets().values(), ids=lambda one: one.name)
def test_published_numbers_have_the_digits_they_are_printed_with(target: PaperTarget) -> None:
    for row in target.published:
        assert len(target.published[row]) <= len(target.columns)
        for column in target.columns:
            value = target.value(row, column.label)
            if value is not None:
                assert round(value, column.digits) == value
                assert column.applies(row), "a number is published for a cell that is not measured"


def test_published_numbers_add_up_as_in_a_second_reading() -> None:
    found = {name: [v for own in one.published.values() for v in own] for name, one in targets().items()}
    sums = {name: (len(own), round(sum(map(float, own)), 4)) for name, own in found.items() if own}  # type: ignore[arg-type]
    assert sums == CHECKSUMS


def test_requirements_say_what_they_are_and_where_to_get_them() -> None:
    used = {one.name for target in targets().values() for one in target.needs()}
    assert used == requirements().keys()
    assert all(one.what and one.get for one in requirements().values())


def test_the_files_name_no_place_of_a_machine() -> None:
    for path in FOLDER.glob("*.toml"):
        assert not re.search(r"(^|[\s\"'=])/\w|[A-Z]:\\|~/", path.read_text(encoding="utf-8")), path


def test_models_are_timms_and_their_preprocessing_is_valid() -> None:
    import timm

    from vitrail.models.preprocessing import Preprocess

    for target in targets().values():
        for model in target.models.values():
            assert timm.is_model(model.name)
            assert model.weights or timm.is_model_pretrained(model.name)
            seen = Preprocess.from_dict({"size": (224, 224), **model.spec({}).preprocessing})
            if target.name.startswith("tis"):
                assert seen._scaled_size((500, 300)) == (256, 256), "squashed to 256, then cropped to 224"
            elif target.name.startswith(("vit_cx", "vtranm")):
                assert seen._scaled_size((500, 300)) == (224, 224)


# --- arithmetic that the papers' tables must obey -------------------------------------------------------------------


def value(name: str, row: str, column: str) -> float:
    found = targets()[name].value(row, column)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["tis-table1", "tis-table2"])
def test_difference_is_insertion_minus_deletion_but_for_the_marked_row(name: str) -> None:
    target = targets()[name]
    for row in target.published:
        gaps = [value(name, row, f"I-{b}") - value(name, row, f"D-{b}") - value(name, row, f"Δ-{b}") for b in BASELINES]
        marked = target.doubt(row, "Δ-Mean") is not None
        assert (max(map(abs, gaps)) > 0.0151) == marked, (row, gaps)  # three numbers rounded to 0.01


def test_class_agnostic_rows_are_the_same_for_both_classes() -> None:
    for name, tests in (("vtranm-table1", ("CIFAR-10 ", "CIFAR-100 ")), ("vtranm-table2", ("",))):
        for row in targets()[name].published:
            pairs = [(f"{test}{way} (Pred)", f"{test}{way} (GT)") for test in tests for way in ("Neg", "Pos")]
            same = [value(name, row, a) == value(name, row, b) for a, b in pairs]
            agnostic = not get_method(split_call(targets()[name].methods[row])[0]).info.class_specific
            assert all(same) == agnostic, row


def test_what_two_tables_print_is_the_same() -> None:
    for metric in ("Del", "Ins", "PG"):
        first = value("vit_cx-table1", "ViT-CX", f"DeiT-B {metric}")
        assert value("vit_cx-table2", "ViT-CX", metric) == first
        assert value("vit_cx-sensitivity", "δ = σ = 0.1", metric) == value("vit_cx-table1", "ViT-CX", f"ViT-B {metric}")
    assert value("vit_cx-table2", "ViT-CX", "Masks") == value("vit_cx-table1", "ViT-CX", "DeiT-B masks")
    for sweep, row in (("tis-masks", "TIS, 1024 masks"), ("tis-ratio", "TIS, ratio 0.5")):
        for baseline in BASELINES:
            assert value(sweep, row, f"ViT-B Δ-{baseline}") == value("tis-table1", "TIS", f"Δ-{baseline}")
            assert value(sweep, row, f"DeiT-B Δ-{baseline}") == value("tis-table2", "TIS", f"Δ-{baseline}")


def test_with_one_output_probability_and_logit_rank_alike() -> None:
    """DecompX is frozen Input×Gradient of the logit: on MURA, and only there, the two rows must agree."""
    columns = [one.label for one in targets()["libragrad-table1"].columns]
    same = [c for c in columns if value("libragrad-table1", "DecompX", c) == value("libragrad-table1", "L IxG", c)]
    assert same == ["ViT-B MURA"]


# --- the papers' statements about their own numbers -----------------------------------------------------------------


def as_published(target: PaperTarget) -> TableValues:
    cells: dict[str, dict[str, float]] = {}
    for column in target.columns:
        for row in target.published:
            found = target.value(row, column.label)
            if found is not None:
                cells.setdefault(column.label, {})[row] = found
    return TableValues(cells, {one.label: one.direction() for one in target.columns})


NUMBERED = [one for one in targets().values() if one.published and one.claims]


@pytest.mark.parametrize("target", NUMBERED, ids=lambda one: one.name)
def test_statements_hold_for_the_published_numbers(target: PaperTarget) -> None:
    values = as_published(target)
    for claim in target.claims:
        assert judge(claim, values).holds in (True, None), claim.text


def test_statements_are_told_by_the_published_numbers_where_there_are_any() -> None:
    for name in ("tis-table1", "tis-table2", "vit_cx-table1", "vtranm-table3", "libragrad-table1"):
        assert all(judge(claim, as_published(targets()[name])).decided for claim in targets()[name].claims)


def test_claims_are_read_and_nothing_else() -> None:
    values = TableValues(
        {"a": {"x": 1.0, "y": 3.0, "z": 2.0}, "b": {"x": 9.0, "y": 5.0, "z": 7.0}}, {"a": 1, "b": -1, "c": 1}
    )

    def test(text: str, *columns: str) -> dict[str, bool | None]:
        return judge(Claim("", text, columns), values).tests

    assert test("rank('y', column) == 1", "a", "b") == {"a": True, "b": True}
    assert test("rank('x', column) == count(column)", "?") == {"a": True, "b": True, "c": None}
    assert test("gap('x', 'a') == 2 and gap('x', 'b') == 4 and gap('y', 'a') == 0") == {"": True}
    assert test("better('y', 'x', column)", "a", "b") == {"a": True, "b": True}
    assert test("correlation('a', 'b') > 0.99") == {"": True}, "both taken so that higher is better"
    assert test("cell('x', 'a') - -1 * 2 >= max(1, min(2, 3), abs(-3)) or cell('x', 'a') > 9") == {"": True}
    assert test("cell('nobody', 'a') > 0") == test("cell('x', 'c') > 0") == {"": None}
    assert test("better('x', 'x', 'a')") == {"": False}
    for wrong in ("__import__('os')", "cell.__class__ == 1", "[1] == [1]", "open('x')", "1 < 2 < 3", "row == 1"):
        with pytest.raises(VitrailError, match="cannot be parsed"):
            test(wrong)


@pytest.mark.parametrize(("agreeing", "decided"), [(1.0, True), (0.98, True), (0.97, False), (0.5, False)])
def test_a_claim_is_undecided_where_its_interval_includes_the_opposite(agreeing: float, decided: bool) -> None:
    better = np.where(np.arange(1000) < 1000 * agreeing, 2.0, 0.0)
    values = TableValues({"a": {"x": np.array([2.0, *better]), "y": np.ones(1001), "z": np.zeros(1001)}}, {"a": 1})
    for text, expected in (
        ("rank('x', column) == 1", True),
        ("better('y', 'x', column)", False),
        ("gap('x', column) < 0.5 and cell('x', column) > 1.5", True),
        ("max(cell('x', column), cell('z', column)) <= 1", False),
    ):
        verdict = judge(Claim("", text, ["a"]), values)
        assert verdict.tests == {"a": expected if decided else None}
        assert verdict.holds == (expected if decided else None)
        assert bool(verdict.reasons) != decided


def test_a_claim_holds_only_where_all_its_columns_do() -> None:
    values = TableValues({"a": {"x": 1.0, "y": 0.0}, "b": {"x": 0.0, "y": 1.0}}, {"a": 1, "b": 1, "c": 1})
    for columns, expected in ((["a"], True), (["a", "c"], None), (["a", "b", "c"], False), (["c"], None)):
        assert judge(Claim("", "better('x', 'y', column)", columns), values).holds is expected


def test_rows_that_differ_by_rounding_share_a_rank() -> None:
    values = TableValues({"a": {"x": 0.075, "y": 0.07500000000000001, "z": 0.07}}, {"a": 1})
    assert [int(values.rank(row, "a")[0]) for row in "xyz"] == [1, 1, 3]
    assert not values.better("y", "x", "a")[0]


def test_verdicts_show_the_numbers_of_their_test() -> None:
    drawn = np.linspace(0, 1, 1001)
    cells = {"x": np.array([2.0, *(2 + drawn)]), "y": np.array([1.0, *(1 - drawn)]), "z": np.zeros(1002)}
    values = TableValues({"a": cells}, {"a": 1})

    def shown(test: str) -> list[tuple[str, float, float, float]]:
        quantities = judge(Claim("", test, ["a"]), values).quantities["a"]
        return [(q.text, q.value, round(q.low, 3), round(q.high, 3)) for q in quantities]

    assert shown("cell('x', column) > 0.5") == [("x", 2.0, 2.025, 2.975)]
    assert shown("better('x', 'y', column)") == [("x − y", 1.0, 1.05, 2.95)], "paired by resample"
    assert shown("cell('x', column) >= cell('y', column) - 5") == shown("better('x', 'y', column)")
    assert shown("rank('y', column) == 2") == [("y, rank of 3", 2, 2, 2), ("y − x", -1.0, -2.95, -1.05)]
    assert shown("gap('y', column) < 1") == [("y, behind the best", 1.0, 1.05, 2.95)]
    assert not judge(Claim("", "cell('w', column) > 0", ["a"]), values).quantities
