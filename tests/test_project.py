"""Promises about the project itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORACLES = sorted((ROOT / "tests" / "oracles").glob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", ORACLES, ids=lambda p: p.stem)
def test_oracles_share_no_code_with_the_product(path: Path) -> None:
    assert not {name for name in imported(path) if name.split(".")[0] == "vitrail"}


def test_there_are_oracles() -> None:
    assert len(ORACLES) >= 4


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: p.stem)
def test_files_hold_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("code", ["import vitrail", "import vitrail.cli.program"])
def test_importing_is_quick(code: str) -> None:
    heavy = "torch timm transformers matplotlib pandas captum".split()
    check = f"{code}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import vitrail

    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError):
        _ = vitrail.nonsense
