"""Plugins: files and installed packages of users; what they bring is registered when they are imported."""

from __future__ import annotations

import hashlib
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from vitrail.errors import VitrailError


class _Importing(threading.local):
    """The package whose entry point this thread is importing."""

    package: str | None = None


_importing = _Importing()
_lock = threading.RLock()  # an entry point is imported by one thread, and others wait for it
_versions: dict[str, str] = {}
_said: set[str] = set()


def plugin_versions() -> dict[str, str]:
    """The plugins that this process has imported: packages with their versions, files with a digest."""
    return dict(_versions)


def importing_package() -> str | None:
    """Name and version of the package whose entry point is being imported."""
    return _importing.package


def warn_once(message: str) -> None:
    """A warning about an installed package: as it concerns every command, it is not repeated."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)


class EntryPoints:
    """A group of entry points, by which installed packages name what they bring; each is imported once.

    Args:
        group: of the entry points: "vitrail.methods".
        kind: what they bring, for messages: "method".
    """

    def __init__(self, group: str, kind: str) -> None:
        self.group, self.kind = group, kind
        self._failures: dict[metadata.EntryPoint, str | None] = {}  # None: it was imported

    def package_with(self, name: str) -> str | None:
        """Name and version of the package that has an entry point of a name."""
        return next((_package(point) for point in _points(self.group) if point.name == name), None)

    def load(self, name: str) -> None:
        """Imports the entry points of a name; raises if that fails."""
        for point in _points(self.group):
            if point.name == name and (failure := self._import(point)):
                raise VitrailError(
                    f"the {self.kind} {name!r} of the package {_package(point)} cannot be used: importing "
                    f"{point.value} failed with {failure}."
                )

    def load_all(self) -> None:
        """Imports every entry point; those that fail are left out with a warning."""
        for point in _points(self.group):
            if failure := self._import(point):
                warn_once(
                    f"the package {_package(point)} is left out: importing its plugin {point.value} failed with "
                    f"{failure}."
                )

    def _import(self, point: metadata.EntryPoint) -> str | None:
        """Why an entry point cannot be imported; None if it can."""
        with _lock:
            if point in self._failures:
                return self._failures[point]
            self._failures[point] = None  # an import that looks up names comes here again
            before, _importing.package = _importing.package, _package(point)
            try:
                point.load()
            except (Exception, SystemExit) as error:  # whatever it is, it is no matter of other commands
                self._failures[point] = _reason(error)
            else:
                _versions[_distribution(point).name] = _distribution(point).version
            finally:
                _importing.package = before
            return self._failures[point]


@cache
def _points(group: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))


def _distribution(point: metadata.EntryPoint) -> metadata.Distribution:
    assert point.dist is not None  # it was found in one
    return point.dist


def _package(point: metadata.EntryPoint) -> str:
    """Name and version of the package of an entry point."""
    return f"{_distribution(point).name} {_distribution(point).version}"


def _reason(error: BaseException) -> str:
    return str(error).rstrip(".") if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}".rstrip(".")


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
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else next(reversed(lines), None)
        where = f", line {line}" if line else ""
        raise VitrailError(f"plugin '{path}'{where}: {_reason(error)}.") from error
    _versions[str(path)] = f"sha256:{digest[:16]}"
