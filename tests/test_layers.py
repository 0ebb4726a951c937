"""Packages look only down: each imports only what stands before it in the list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vitrail"

# What everything may use; then each room may use those before it.
BASE = ("errors", "progress", "pipeline", "registry", "calls", "files", "geometry", "plugins", "samples", "version")
ROOMS = ("core", "models", "targets", "engine", "methods", "metrics", "data", "show", "stored", "explanation", "sheets",
         "evaluation", "api", "similarity", "integrations", "training", "bench", "report", "papers", "audit", "app",
         "cli")  # fmt: skip

FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or not path.name.startswith("__")]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The rooms that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "vitrail":
            names = [f"vitrail.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("vitrail."):
                yield name.split(".")[1]


def test_every_file_is_in_a_room() -> None:
    assert {room_of(path) for path in FILES} == {*BASE, *ROOMS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_from_rooms_before_its_own(path: Path) -> None:
    room = room_of(path)
    allowed = set(BASE) if room in BASE else {*BASE, *ROOMS[: ROOMS.index(room) + 1]}
    assert set(imports(path)) <= allowed


def test_nothing_but_progress_is_ambient() -> None:
    """No context variable carries traces, precision or chunk sizes around."""
    users = [path.name for path in FILES if "ContextVar" in path.read_text(encoding="utf-8")]
    assert users == ["progress.py"]


def test_no_class_is_made_at_run_time() -> None:
    assert [path for path in FILES if "make_dataclass" in path.read_text(encoding="utf-8")] == []
