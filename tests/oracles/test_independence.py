"""Oracles share no code with the product, and each of them is compared with it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARED = [
    TESTS / "families.py",
    *sorted(Path(__file__).parent.glob("*.py")),
]  # what oracles are made of, and their tests
PRODUCT = [path for room in ("engine", "methods", "metrics") for path in (TESTS / room).glob("*.py")]


def imported(path: Path) -> set[str]:
    """Dotted names of the imported modules; of `from a import b` both a and a.b, as b may be a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not followed"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def oracles(paths: Iterable[Path]) -> set[str]:
    """The oracles that files import, and those that these import."""
    folder, reached = Path(__file__).parent, set[str]()
    waiting = list(paths)
    while waiting:
        for name in imported(waiting.pop()):
            path = folder / f"{name.removeprefix('tests.oracles.')}.py"
            if name.startswith("tests.oracles.") and path.exists() and path.stem not in reached:
                reached.add(path.stem)
                waiting.append(path)
    return reached


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_oracles_share_no_code_with_the_product(path: Path) -> None:
    names = imported(path)
    assert not {name for name in names if name.split(".")[0] == "vitrail"}
    here = {".".join(name.split(".")[:2]) for name in names if name.startswith("tests.")}
    assert here <= {"tests.families", "tests.oracles"}, "other helpers import the product"


def test_every_oracle_is_compared_with_the_product() -> None:
    assert oracles(PRODUCT) == {path.stem for path in SHARED[1:] if not path.stem.startswith("test_")}
