"""What is wrong is told in one line, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import families
from tests.app.hostile import png, zeros
from tests.command_line.given import Run, left, one_line

from vitrail.cli.program import main

# What is wrong is told in one line, and nothing is left behind


WRONG: dict[str, tuple[list[str], str]] = {
    "no image": (["nowhere.png"], "nowhere.png' was not found"),
    "empty folder": (["empty"], "no image found"),
    "not an image": (["notes.txt"], "is not an image"),
    "corrupt": (["corrupt.png"], "truncated or corrupt"),
    "too large": (["large.png"], "12,000 × 12,000 pixels, expected at most 64,000,000: shrink it first"),
    "name too long": (["a" * 5000], "File name too long"),
    "class": (["photo.png", "--target", "dgo"], "Did you mean 'dog'"),
    "class number": (["photo.png", "--target", "5"], "0…4"),
    "negative class": (["photo.png", "--target=-1"], "0…4"),
    "against": (["photo.png", "--against", "nobody"], "has no class 'nobody'"),
    "same classes": (["photo.png", "--target", "3", "--against", "dog"], "nothing is left to explain"),
    "against agnostic": (["photo.png", "--against", "1", "--method", "rollout"], "--against has no meaning"),
    "top agnostic": (["photo.png", "--top", "2", "--method", "rollout"], "--top has no meaning"),
    "top and target": (["photo.png", "--top", "2", "--target", "1"], "only one of the two"),
    "method": (["photo.png", "--method", "decompxx"], "Did you mean decompx"),
    "parameter": (["photo.png", "-p", "speed=3"], "no parameter speed"),
    "parameter form": (["photo.png", "-p", "speed"], "name=value"),
    "layer": (["photo.png", "-p", "start_layer=77"], "layer 77 does not fit"),
    "device": (["photo.png", "--device", "quantum"], "device 'quantum'"),
    "dtype": (["photo.png", "--dtype", "int4"], "unknown dtype"),
    "out is a file": (["photo.png", "--out", "notes.txt"], "not a folder"),
    "out below a file": (["photo.png", "--out", "notes.txt/out"], "not a folder"),
    "out is the folder": ([".", "--out", "."], "choose another"),
    "labels": (["photo.png", "--labels", "notes.txt"], "1 names, but the model has 5"),
    "hf checkpoint": (["photo.png", "--checkpoint", "notes.txt"], "own weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request(case: str, vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    arguments, message = WRONG[case]
    (place / "empty").mkdir()
    (place / "notes.txt").write_text("not a picture")
    (place / "corrupt.png").write_bytes(photo.read_bytes()[:1000])
    (place / "large.png").write_bytes(png(12_000, 12_000, rows=zeros(12_000, 12_000)))
    before = left(place)
    said = vit("explain", *arguments, *tiny)
    assert message in one_line(said)
    assert left(place) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit_base_patch16_244"], "Did you mean vit_base_patch16_224"),
        (["--model", "vit_small_patch14_dinov2"], "have no classes"),
        (["--model", "hf:./nothing"], "no config.json"),
        (["--model", "vit_tiny_patch16_224", "--checkpoint", "w.pth"], "no checkpoint file"),
        (["--model", "vit_tiny_patch16_224", "--num-classes", "0"], "at least 1"),
    ],
)
def test_a_wrong_model(arguments: list[str], message: str, vit: Run, photo: Path, place: Path) -> None:
    assert message in one_line(vit("explain", photo, *arguments))
    assert left(place) == {"photo.png"}


def test_broken_weights(vit: Run, photo: Path, place: Path) -> None:
    module = families.build("hf_vit")
    with torch.no_grad():
        module.classifier.bias[0] = torch.nan
    module.save_pretrained(place / "broken")
    before = left(place)
    for options in ([], ["--top", "2"]):
        assert "weights are broken (classifier.bias)" in one_line(
            vit("explain", photo, "--model", "hf:./broken", *options)
        )
    assert left(place) == before


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("room", range(3))
def test_a_full_disk(
    room: int, top: int, vit: Run, tiny: list[str], photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > min(room, 2 * top - 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in one_line(vit("explain", photo, *tiny, "--top", top))
    assert left(place) == {"photo.png"}


@pytest.mark.parametrize("arguments", [["--top", "0"], ["--top", "x"], ["--nonsense"], []])
def test_wrong_usage(arguments: list[str], vit: Run) -> None:
    said = vit("explain", *arguments)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_bug_is_told_without_a_traceback(
    vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr("vitrail.cli.explain.introduce", broken)
    assert "ZeroDivisionError: oh no" in one_line(vit("explain", photo, *tiny))
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["vitrail", "explain", str(photo), *tiny])
    with pytest.raises(ZeroDivisionError):
        main()
