"""Every promise of docs/reliability.md names a test that exists, and that was shown to be able to fail."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
TESTS = sorted({(path, name) for path, name in TEST.findall(PAGE) if name})
HEADERS = re.findall(r"^(\|.*\|)\n\| ?---", PAGE, re.MULTILINE)
LONG = sorted({path for path, name in TEST.findall(PAGE) if not name})


def _tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "tools" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = _tool()
CHANGES = mutations.read()


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def rows(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [line for line in lines if line not in HEADERS]


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions(path)


def test_a_named_part_of_the_soak_exists() -> None:
    assert LONG
    assert [path for path in LONG if "soak" not in functions(path)] == []


def test_every_promise_has_a_test() -> None:
    assert len(rows(PAGE)) > 20
    assert [row for row in rows(PAGE) if not TEST.search(row)] == []


def test_every_promise_was_shown_to_be_able_to_fail() -> None:
    shown = {change.named for change in CHANGES}
    promises = rows(PAGE.partition("## Shown by mutation")[0])
    tests = {row: {f"{path}::{name}" if name else path for path, name in TEST.findall(row)} for row in promises}
    assert [row for row in promises if not tests[row] & shown] == []


def test_changes_are_told_apart_and_fit_the_source() -> None:
    assert len({(change.change, change.test) for change in CHANGES}) == len(CHANGES)
    assert [change.change for change in CHANGES if change.is_stale(ROOT)] == []
    assert [change.change for change in CHANGES if change.new == change.old or not change.reason] == []


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("failed as it should", {}),
        ("NOT NOTICED: it passed", {"new": "ONE = 1  # still"}),
        ("NOT NOTICED: not for this reason", {"reason": "assert 3 == 1"}),
        ("NOT NOTICED: not for this reason", {"new": "ONE = = 1"}),
        ("STALE", {"old": "ONE = 3"}),
        ("STALE", {"old": "O"}),
    ],
)
def test_a_change_is_made_judged_and_undone(expected: str, changes: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("OTHER = 1\nONE = 1\n\n\ndef test_one() -> None:\n    assert ONE == OTHER\n")
    usual = {"change": "", "file": "test_one.py", "old": "ONE = 1", "new": "ONE = 2", "test": "test_one.py::test_one"}
    content = (tmp_path / "test_one.py").read_bytes()
    outcome = mutations.Mutation(**{**usual, "reason": "assert 2 == 1", **changes}).outcome(tmp_path)
    assert outcome.startswith(expected)
    assert (tmp_path / "test_one.py").read_bytes() == content
