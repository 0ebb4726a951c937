"""The command line in this process, in an empty folder with pictures and models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests import families
from tests.cli.common import LABELS, Result, Run, noise

from vitrail.cli.program import main
from vitrail.metrics import trust
from vitrail.show import figure


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrail …`` in this process: exit code, standard output and standard error."""

    def run(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert code is None or isinstance(code, int)
        return Result(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pictures, and trust of few subsets: neither is the point here."""
    monkeypatch.setattr(figure, "SHORT_SIDE", 96)
    monkeypatch.setattr(trust, "SUBSETS", 8)
    monkeypatch.setattr(trust, "RANDOM", 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("hf_vit", "hf_swin"):
        module = families.build(name)
        module.config.id2label = dict(enumerate(LABELS))
        module.save_pretrained(folder / name)
    return folder


@pytest.fixture
def tiny(models: Path) -> list[str]:
    return ["--model", f"hf:{models / 'hf_vit'}"]


@pytest.fixture
def photo(place: Path) -> Path:
    noise(0).save(place / "photo.png")
    return place / "photo.png"


@pytest.fixture
def album(place: Path) -> Path:
    """Two pictures of the same name, one with brackets, one corrupt, and something that is no picture."""
    folder = place / "album"
    (folder / "more").mkdir(parents=True)
    noise(1).save(folder / "a.png")
    noise(2).save(folder / "more" / "a.png")
    noise(3).save(folder / "b [red] [b].png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:1000])
    (folder / "notes.txt").write_text("no picture")
    return folder
