"""FiftyOne with a database of its own, where it can have one."""

from __future__ import annotations

import importlib.metadata
import os
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
def fiftyone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library; the data sets of whoever runs the tests are not touched."""
    folder = tmp_path_factory.mktemp("fiftyone")
    own = {
        "FIFTYONE_DATABASE_DIR": str(folder),
        "FIFTYONE_DO_NOT_TRACK": "true",
        "FIFTYONE_SHOW_PROGRESS_BARS": "false",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(importlib.metadata, "metadata", headers)
            library = pytest.importorskip("fiftyone")
        try:
            assert library.list_datasets() == []
        except AssertionError:
            pytest.fail(f"FiftyOne does not use {folder}")
        except Exception as error:  # it finds no MongoDB, or none that starts
            pytest.skip(f"FiftyOne has no database: {error}")
        yield library
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def data_set(fiftyone: Any, tmp_path: Path) -> Iterator[Any]:
    """A data set of FiftyOne without samples, which is deleted afterwards."""
    made = fiftyone.Dataset(f"vitrail-{tmp_path.name}")
    yield made
    made.delete()
