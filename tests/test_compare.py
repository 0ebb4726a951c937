"""``vitrail compare``: one figure of many methods, nothing half-written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.commands.compare import choose
from vitrail.data import Scenes
from vitrail.models.loading import load

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrail compare scene.png …`` in an empty folder: exit code and everything said."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(Scenes(1, seed=5, objects=2)[0].image).save("scene.png")

    def run(*arguments: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vitrail", "compare", "scene.png", "--model", "scenes", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out + said.err

    return run


def test_chosen_methods_in_one_figure(compare: Run, tmp_path: Path) -> None:
    code, said = compare("--methods", "decompx.skipplus,rollout", "--methods", "grad_cam*", "-p", "rule=frozen")
    assert code == 0, said
    assert "scene.compare.png" in said
    saved = json.loads((tmp_path / "vitrail-out" / "scene.compare.json").read_text())
    names = [one["method"] for one in saved]
    assert names[:2] == ["decompx.skipplus", "rollout"]
    assert {"grad_cam", "grad_cam.plus", "grad_cam_pp", "grad_cam_elementwise"} <= set(names)
    assert next(one for one in saved if one["method"] == "grad_cam")["params"]["rule"] == "frozen"
    assert Image.open(tmp_path / "vitrail-out" / "scene.compare.png").width > 600


def test_a_row_for_each_class(compare: Run, tmp_path: Path) -> None:
    first, second = (Scenes.labels[o.label] for o in Scenes(1, seed=5, objects=2)[0].objects)
    code, said = compare("--methods", "decompx,gen_att", "--targets", f"{first},{second}")
    assert code == 0, said
    saved = json.loads((tmp_path / "vitrail-out" / "scene.compare.json").read_text())
    assert [(one["method"], one["label"]) for one in saved] == [
        ("decompx", first), ("gen_att", first), ("decompx", second), ("gen_att", second)
    ]  # fmt: skip


def test_a_folder_is_no_picture(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scene.png").rename(tmp_path / "one.png")
    (tmp_path / "scene.png").mkdir()
    code, said = compare()
    assert code == 1
    assert "is a folder" in said


def test_every_bare_method_of_few_passes_by_default() -> None:
    names = choose(load("scenes"), [])
    assert len(names) >= 35
    assert not [name for name in names if "." in name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nonsense"], "there is no method"),
        (["--methods", "nonsense*"], "no method that scenes supports"),
        (["--targets", "unicorn"], "no class"),
        (["--methods", "decompx", "-p", "broken"], "name=value"),
        (["--methods", "decompx", "-p", "sart_layer=1"], "has a parameter sart_layer"),
    ],
)
def test_a_wrong_request_is_one_error_and_no_file(
    arguments: list[str], message: str, compare: Run, tmp_path: Path
) -> None:
    code, said = compare(*arguments)
    assert code == 1
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "vitrail-out").exists()
