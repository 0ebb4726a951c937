"""Guarantees about the project itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORACLES = sorted((ROOT / "tests" / "oracles").glob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, and the names it imports from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", ORACLES, ids=lambda p: p.stem)
def test_oracles_share_no_code_with_the_product(path: Path) -> None:
    assert not {name for name in imported(path) if name.split(".")[0] == "vitrail"}


def test_every_oracle_is_compared_with() -> None:
    oracles = {f"tests.oracles.{path.stem}" for path in ORACLES if not path.stem.startswith("test_")}
    used = set().union(*(imported(path) for path in (ROOT / "tests").rglob("*.py")))
    assert oracles
    assert oracles - used == set()


@pytest.mark.parametrize("code", ["import vitrail", "import vitrail.cli.program"])
def test_importing_is_quick(code: str) -> None:
    heavy = "torch timm transformers matplotlib pandas captum".split()
    check = f"{code}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import vitrail

    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError):
        _ = vitrail.nonsense
