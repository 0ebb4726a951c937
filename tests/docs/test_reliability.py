"""Every promise of docs/reliability.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
HEADERS = re.findall(r"^(\|.*\|)\n\|---", PAGE, re.MULTILINE)
LONG = re.findall(r"`(tests/soak/\w+\.py)`", PAGE)


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions(path)


def test_a_named_part_of_the_soak_exists() -> None:
    assert LONG
    assert [path for path in LONG if "soak" not in functions(path)] == []


def test_every_promise_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line not in HEADERS]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py", row)] == []
