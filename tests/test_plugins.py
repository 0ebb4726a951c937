"""Plugins: files of users, imported by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import vitrail
from vitrail.errors import VitrailError
from vitrail.plugins import load_plugins

METHOD = """
import vitrail

@vitrail.method("brightest", needs="logits", cost=(0, 0))
def brightest(model, images, target):
    return images.mean(1)
"""


def test_a_plugin_registers_its_methods_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(METHOD + "\nimport sys\nsys.path.append('imported')\n")
    load_plugins([path, str(path)])
    assert "brightest" in vitrail.list_methods()
    assert sys.path.count("imported") == 1
    sys.path.remove("imported")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import vitrail\nx = 1 / 0\n", r"mine\.py', line 2: ZeroDivisionError: division by zero\.$"),
        ("x = (\n", r"mine\.py', line 1: SyntaxError"),
        ('import vitrail\n\nvitrail.method("Not A Name")(print)\n', r"mine\.py', line 3: .*"),
    ],
)
def test_a_plugin_that_fails_says_where(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    for _ in range(2):  # it is not taken for imported
        with pytest.raises(VitrailError, match=message):
            load_plugins([path])


@pytest.mark.parametrize("name", ["missing.py", "folder.py", "notes.txt"])
def test_what_is_no_python_file_is_no_plugin(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(VitrailError, match="is not a Python file: expected"):
        load_plugins([tmp_path / name])
