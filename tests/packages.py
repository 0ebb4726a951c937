"""Packages for the tests of plugins: what pip would write, in a folder of this process's path."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from vitrail import plugins
from vitrail.data.names import DATA_SETS
from vitrail.methods.registry import METHODS
from vitrail.metrics.base import METRICS
from vitrail.models.registry import MODELS

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
Install = Callable[..., Path]


def write_package(
    folder: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]
) -> None:
    """A package with entry points (group → name → object) and modules (name → source)."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = (
        [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())] for group, entries in points.items()
    )
    (about / "entry_points.txt").write_text("\n".join(line for section in sections for line in section))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package for the time of a test: ``install(name, points, modules)``."""
    folder = tmp_path_factory.mktemp("packages")
    monkeypatch.syspath_prepend(str(folder))
    for registry in (METHODS, METRICS, DATA_SETS, MODELS):
        registry.entries()
        monkeypatch.setattr(registry, "_installed", {})
        monkeypatch.setattr(registry.points, "_failures", {})
    monkeypatch.setattr(plugins, "_versions", {})
    monkeypatch.setattr(plugins, "_said", set())
    before = set(sys.modules)

    def write(
        name: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str], version: str = "1.0"
    ) -> Path:
        write_package(folder, name, version, points, modules)
        plugins._points.cache_clear()
        importlib.invalidate_caches()
        return folder

    yield write
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(folder)):
            del sys.modules[module]
    plugins._points.cache_clear()


@pytest.fixture
def example(install: Install) -> str:
    """The package of examples/plugin, installed; its module."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = project["tool"]["setuptools"]["py-modules"]
    about = project["project"]
    source = (EXAMPLE / f"{module}.py").read_text(encoding="utf-8")
    install(about["name"], about["entry-points"], {module: source}, about["version"])
    return str(module)
