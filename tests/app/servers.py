"""A server for all tests that only send requests, and one with small limits."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.app.serving import Served, inner_server, subprocess_server

from vitrail.app.server.settings import Settings


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Started by the command line, without a folder for temporary files."""
    folder = tmp_path_factory.mktemp("serve")
    with subprocess_server(folder / "log", TMPDIR=str(folder / "missing"), TEMP=str(folder / "missing")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as http_client:
        yield http_client


@pytest.fixture(scope="session")
def small() -> Iterator[Served]:
    """A short queue and little memory."""
    settings = Settings(port=0, queue=2, threads=1, stop_seconds=1, cache_bytes=8 * 2**20)
    with inner_server(settings, "scenes") as server:
        yield server


@pytest.fixture
def small_client(small: Served) -> Iterator[httpx.Client]:
    with small.client() as http_client:
        yield http_client
