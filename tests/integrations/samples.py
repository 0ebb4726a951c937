"""FiftyOne with a database of its own, where it can have one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Headers(dict[str, str]):
    def __missing__(self, name: str) -> None:
        return None


def headers(package: str, read: Any = importlib.metadata.metadata) -> Headers:
    """The metadata of a package, None for what it lacks.

    FiftyOne relies on that, but once another library has imported importlib_metadata, a KeyError is raised instead.
    """
    return Headers({name.lower(): value for name, value in read(package).items()})


@pytest.fixture(scope="session")
def fiftyone_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """FiftyOne; the data sets of whoever runs the tests are not touched."""
    folder = tmp_path_factory.mktemp("fiftyone")
    settings = {"DATABASE_DIR": str(folder), "DO_NOT_TRACK": "true", "SHOW_PROGRESS_BARS": "false"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(f"FIFTYONE_{name}", value)
        with pytest.MonkeyPatch.context() as briefly:
            briefly.setattr(importlib.metadata, "metadata", headers)
            library = pytest.importorskip("fiftyone")
        yield library


@pytest.fixture(scope="session")
def fiftyone(fiftyone_library: Any) -> Any:
    """FiftyOne with a database."""
    try:
        names = fiftyone_library.list_datasets()
    except Exception as error:  # it finds no MongoDB, or none that starts
        pytest.skip(f"FiftyOne has no database: {error}")
    assert names == [], "a database of its own is empty"
    return fiftyone_library


@pytest.fixture
def data_set(fiftyone: Any, tmp_path: Path) -> Iterator[Any]:
    """A data set of FiftyOne without samples, which is deleted afterwards."""
    made = fiftyone.Dataset(f"vitrail-{tmp_path.name}")
    yield made
    made.delete()
