"""A server for all tests that only send requests, and one with small limits; imported only where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.quick_trust import FEW

QUICK_TRUST = Path(__file__).with_name("quick_trust.py")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Started by the command line, without a folder for temporary files."""
    from tests.app.serving import subprocess_server

    folder = tmp_path_factory.mktemp("serve")
    options = ["--plugin", str(QUICK_TRUST)]
    missing = {"TMPDIR": str(folder / "missing"), "TEMP": str(folder / "missing")}
    with subprocess_server(folder / "log", *options, **missing) as server:
        yield server


@pytest.fixture
def as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust in this process as the server has it."""
    for name, value in FEW.items():
        monkeypatch.setattr(f"vitrail.metrics.trust.{name}", value)


@pytest.fixture
def client(served: Any) -> Iterator[Any]:
    with served.client() as http_client:
        yield http_client


@pytest.fixture(scope="session")
def small() -> Iterator[Any]:
    """A short queue and little memory; it is patient with a cancelled job, so that a slow machine loses no worker."""
    from tests.app.serving import PATIENCE, inner_server

    from vitrail.app.server.settings import Settings

    settings = Settings(
        port=0, queue=2, threads=1, stop_seconds=PATIENCE, cache_bytes=8 * 2**20, plugins=(QUICK_TRUST,)
    )
    with inner_server(settings, "scenes") as server:
        yield server


@pytest.fixture(scope="session")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """With a tiny model of images and texts."""
    from tests import families
    from tests.app.serving import inner_server

    from vitrail.app.server.settings import Settings

    folder = tmp_path_factory.mktemp("models") / "clip"
    families.build("hf_clip_text").save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    options = {"prompts": ["a photo of a cat", "a photo of a dog"]}
    settings = Settings(port=0, threads=1, plugins=(QUICK_TRUST,), load_options=options)
    with inner_server(settings, f"hf:{folder}") as server:
        yield server


@pytest.fixture
def small_client(small: Any) -> Iterator[Any]:
    with small.client() as http_client:
        yield http_client


@pytest.fixture(scope="session")
def placing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """With a tiny detector, a tiny segmenter and a tiny backbone without a head."""
    import torch
    from tests import families
    from tests.app.serving import inner_server

    from vitrail.app.server.settings import Settings

    folder = tmp_path_factory.mktemp("places")
    families.yolos(dtype=torch.float32).save_pretrained(folder / "yolos")
    families.eomt(dtype=torch.float32).save_pretrained(folder / "eomt")
    families.build("hf_dinov2").base_model.save_pretrained(folder / "dinov2")
    settings = Settings(port=0, threads=1, plugins=(QUICK_TRUST,))
    with inner_server(settings, *(f"hf:{folder / name}" for name in ("yolos", "eomt", "dinov2"))) as server:
        yield server
