"""Plugins: Python files of users whose methods, metrics and data sets are registered when they are imported."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from vitrail.errors import VitrailError


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Imports Python files, each once in a process."""
    for path in paths:
        _load(Path(path).expanduser().resolve())


def _load(path: Path) -> None:
    if path.suffix != ".py" or not path.is_file():
        raise VitrailError(f"plugin '{path}' is not a Python file: expected the path of an existing .py file.")
    name = f"{path.stem}_{hashlib.sha256(str(path).encode(errors='surrogateescape')).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else next(reversed(lines), None)
        where = f", line {line}" if line else ""
        reason = str(error).rstrip(".") if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
        raise VitrailError(f"plugin '{path}'{where}: {reason}.") from error
