"""``vitrail compare``: one figure of many methods, nothing half-written."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests import families
from tests.cli.common import Result, Run, error_line

from vitrail.api import explain_each
from vitrail.cli.compare import build, choose, every_method
from vitrail.data import Scenes
from vitrail.data.images import read_image
from vitrail.evaluation import default_method
from vitrail.explanation import Explanation
from vitrail.methods.base import Method
from vitrail.models.loading import load
from vitrail.models.wrapping import wrap
from vitrail.show.figure import contact_sheet

Compare = Callable[..., Result]


@pytest.fixture
def compare(vit: Run, place: Path) -> Compare:
    """``vitrail compare scene.png …`` in an empty folder."""
    Image.fromarray(Scenes(1, seed=5, objects=2)[0].image).save(place / "scene.png")
    return lambda *arguments: vit("compare", "scene.png", "--model", "scenes", *arguments)


def test_chosen_methods_in_one_figure(compare: Compare, tmp_path: Path) -> None:
    result = compare("--methods", "decompx.skipplus,rollout", "--methods", "grad_cam*", "-p", "rule=frozen")
    assert result.code == 0, result.err
    assert "scene.compare.rule-frozen.png" in result.out
    saved = json.loads((tmp_path / "vitrail-out" / "scene.compare.rule-frozen.json").read_text())
    names = [entry["method"] for entry in saved]
    assert names[:2] == ["decompx.skipplus", "rollout"]
    assert {"grad_cam", "grad_cam.plus", "grad_cam_pp", "grad_cam_elementwise"} <= set(names)
    assert next(entry for entry in saved if entry["method"] == "grad_cam")["params"]["rule"] == "frozen"
    assert Image.open(tmp_path / "vitrail-out" / "scene.compare.rule-frozen.png").width > 600


def test_calls_as_tables_print_them_and_every_method_once(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions: list[str] = []
    monkeypatch.setattr(
        "vitrail.show.figure.contact_sheet",
        lambda cells, width: captions.extend(text for _, text in cells) or contact_sheet(cells, width),  # type: ignore[func-returns-value]
    )
    result = compare("--methods", "gen_att(rule=frozen),gen_att,chefer2,rise(masks=8, seed=1)")
    assert result.code == 0, result.err
    assert [caption.split("\n")[0] for caption in captions[1:]] == [
        "gen_att(rule=frozen)", "gen_att", "rise(masks=8, seed=1)"
    ]  # fmt: skip
    assert "3 methods → vitrail-out/scene.compare.gen_att.rule-frozen.rise.masks-8.seed-1.png" in result.out
    saved = json.loads(next((tmp_path / "vitrail-out").glob("*.json")).read_text())
    assert [entry["params"].get("masks") for entry in saved] == [None, None, 8]


def test_one_method_is_one_method_and_its_plain_name_stays(compare: Compare) -> None:
    result = compare("--methods", "gen_att,chefer2", "-p", "rule=plain")
    assert result.code == 0, result.err
    assert "1 method → vitrail-out/scene.compare.png" in result.out


@pytest.mark.parametrize(("sign", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_the_maps_that_are_done(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, expected: int
) -> None:
    asked: list[str] = []

    def stopped(method: Method, *arguments: Any) -> Iterator[Explanation]:
        asked.append(method.info.name)
        if len(asked) == 4:
            signal.raise_signal(sign)
        return explain_each(method, *arguments)

    def unhandled(*_: object) -> None:  # or SIGTERM would end all tests
        raise AssertionError("nobody handles SIGTERM")

    monkeypatch.setattr("vitrail.api.explain_each", stopped)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        result = compare("--methods", "decompx,gen_att,rollout", "--targets", "0,1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.code == expected
    assert "Stopped: 3 of 6 maps → " in result.out
    (picture,) = (tmp_path / "vitrail-out").glob("*.png")
    assert Image.open(picture).width > 600
    saved = json.loads(picture.with_suffix(".json").read_text())
    assert [entry["method"] for entry in saved] == ["decompx", "gen_att", "rollout"]


def test_the_picture_is_read_once(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, images = [], set()

    def read(source: Any) -> Image.Image:
        sources.append(source)
        return read_image(source)

    def shared(method: Method, *arguments: Any) -> Iterator[Explanation]:
        for ex in explain_each(method, *arguments):
            images.add(id(ex.image))
            yield ex

    monkeypatch.setattr("vitrail.api.read_image", read)
    monkeypatch.setattr("vitrail.api.explain_each", shared)
    result = compare("--methods", "decompx,gen_att,rollout", "--targets", "0,1")
    assert result.code == 0, result.err
    assert [str(source) for source in sources] == ["scene.png"]
    assert len(images) == 1


def test_ctrl_c_before_the_first_map_writes_nothing(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: Any) -> Iterator[Explanation]:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitrail.api.explain_each", stopped)
    assert compare("--methods", "decompx").code == 130
    assert not (tmp_path / "vitrail-out").exists()


def test_a_row_for_each_class(compare: Compare, tmp_path: Path) -> None:
    first, second = (Scenes.labels[o.label] for o in Scenes(1, seed=5, objects=2)[0].objects)
    result = compare("--methods", "decompx,gen_att", "--targets", f"{first},{second}")
    assert result.code == 0, result.err
    parts = ".".join(f"{Scenes.labels.index(name)}-{name}" for name in (first, second))
    saved = json.loads((tmp_path / "vitrail-out" / f"scene.compare.{parts}.json").read_text())
    assert [(entry["method"], entry["label"]) for entry in saved] == [
        ("decompx", first), ("gen_att", first), ("decompx", second), ("gen_att", second)
    ]  # fmt: skip


def test_a_folder_is_no_picture(compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scene.png").rename(tmp_path / "one.png")
    (tmp_path / "scene.png").mkdir()
    result = compare()
    assert "is a folder" in error_line(result)


def test_by_default_the_recommended_methods_with_the_default_first_and_the_control_last(
    compare: Compare, tmp_path: Path
) -> None:
    result = compare()
    assert result.code == 0, result.err
    saved = json.loads((tmp_path / "vitrail-out" / "scene.compare.json").read_text())
    names = [entry["method"] for entry in saved]
    assert names[0] == default_method(load("scenes"))
    assert names[-1] == "random"
    assert 6 <= len(names) <= 10


def test_the_recommended_methods_of_a_swin_are_those_that_work_there() -> None:
    swin = wrap(families.build("timm_swin"))
    names = choose(swin, [])
    assert (names[0], names[-1]) == (default_method(swin), "random")
    assert len(build(swin, names, {})) == len(names) >= 6


def test_all_are_the_bare_methods_of_few_passes(compare: Compare) -> None:
    names = every_method(load("scenes"))
    assert len(names) >= 35
    assert not [name for name in names if "." in name]
    assert "use only one of them" in error_line(compare("--all", "--methods", "rollout"))


def test_cells_say_time_any_class_and_trust(compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []

    def sheet(cells: Any, width: int) -> Image.Image:
        captions.extend(text for _, text in cells)
        return contact_sheet(cells, width)

    monkeypatch.setattr("vitrail.show.figure.contact_sheet", sheet)
    assert compare("--methods", "gen_att,rollout").code == 0
    assert re.fullmatch(r"gen_att\ntrust [01]\.\d\d · [\d.]+ m?s", captions[1])
    assert re.fullmatch(r"rollout\ntrust [01]\.\d\d · [\d.]+ m?s · any class", captions[2])
    captions.clear()
    assert compare("--methods", "gen_att", "--no-trust").code == 0
    assert re.fullmatch(r"gen_att\n[\d.]+ m?s", captions[1])


def test_against_a_class(compare: Compare, tmp_path: Path) -> None:
    first, second = (o.label for o in Scenes(1, seed=5, objects=2)[0].objects)
    arguments = ["--methods", "gen_att,decompx,rollout", "--targets", Scenes.labels[first]]
    result = compare(*arguments, "--against", Scenes.labels[second])
    assert result.code == 0, result.err
    part = f"{first}-{Scenes.labels[first]}.not-{second}-{Scenes.labels[second]}"
    saved = json.loads((tmp_path / "vitrail-out" / f"scene.compare.{part}.json").read_text())
    assert [entry["against"] for entry in saved] == [second, second, None], "rollout is the same for every class"
    assert "use two different classes" in error_line(compare(*arguments, "--against", Scenes.labels[first]))


def test_the_style_of_a_comparison(compare: Compare, tmp_path: Path) -> None:
    pictures = set()
    for look in ([], ["--style", "blocks"], ["--style", "outline"], ["--colormap", "PuOr"], ["--alpha", "0.5"]):
        assert compare("--methods", "decompx", *look).code == 0
        pictures.add((tmp_path / "vitrail-out" / "scene.compare.png").read_bytes())
    assert len(pictures) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nonsense"], "there is no method"),
        (["--methods", "nonsense*"], "matches no method that scenes supports"),
        (["--targets", "unicorn"], "no class"),
        (["--against", "unicorn"], "no class"),
        (["--style", "dots"], "no style 'dots'"),
        (["--colormap", "reds-and-blues"], "no colormap 'reds-and-blues'"),
        (["--alpha", "2"], "alpha must be between 0"),
        (["--methods", "decompx", "-p", "broken"], "parameter=value"),
        (["--methods", "decompx", "-p", "sart_layer=1"], "has a parameter sart_layer"),
    ],
)
def test_a_wrong_request_is_one_error_and_no_file(
    arguments: list[str], message: str, compare: Compare, tmp_path: Path
) -> None:
    result = compare(*arguments)
    assert message in error_line(result)
    assert not (tmp_path / "vitrail-out").exists()
