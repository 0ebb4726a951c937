"""``vitrail audit`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tests.cli.common import LABELS, Run, error_line, noise


@pytest.fixture
def folder(place: Path) -> Path:
    for i in range(6):
        (place / "data" / LABELS[i % 2]).mkdir(parents=True, exist_ok=True)
        noise(i).save(place / "data" / LABELS[i % 2] / f"{i}.png")
    return place / "data"


def test_an_audit_and_its_files(vit: Run, tiny: list[str], folder: Path, place: Path) -> None:
    result = vit("audit", folder, *tiny, "--out", "report", "--region", "0,0,0.4,0.4")
    assert result.code == 0, result.err
    assert "Accuracy" in result.out
    assert "No class is suspicious" in result.out
    assert "6 images explained, 0 known before" in result.out
    table = pd.read_csv(place / "report" / "images.csv")
    assert len(table) == 6
    assert set(table["true"]) == set(LABELS[:2])
    assert "evidence in 0,0,0.4,0.4" in table.columns
    assert (place / "report" / "report.html").is_file()
    again = vit("audit", folder, *tiny, "--out", "report", "--region", "0,0,0.4,0.4")
    assert "0 images explained, 6 known before" in again.out


def test_a_broken_image_is_counted_and_the_others_are_audited(vit: Run, tiny: list[str], place: Path) -> None:
    (place / "data").mkdir()
    for i in range(3):
        noise(i).save(place / "data" / f"{i}.png")
    (place / "data" / "broken.png").write_bytes((place / "data" / "0.png").read_bytes()[:1000])
    result = vit("audit", "data", *tiny, "--no-trust", "--out", "report")
    assert result.code == 1
    assert "1 image could not be explained" in result.out
    table = pd.read_csv(place / "report" / "images.csv")
    assert list(table["image"]) == ["0.png", "1.png", "2.png"]
    assert table["true"].isna().all(), "no folder is a class"


def test_a_region_of_a_single_image(vit: Run, tiny: list[str], folder: Path, photo: Path) -> None:
    result = vit("audit", folder, *tiny, "--no-trust", "--images", 2, "--region", f"{photo}=0,0,0.5,0.5")
    assert result.code == 0, result.err
    assert "photo.png: without the region" in result.out


def test_boxes_tell_object_from_background(vit: Run, tiny: list[str], folder: Path, place: Path) -> None:
    lines = [f'{LABELS[i % 2]}/{i}.png,"0,0,30,40"' for i in range(6)]
    (place / "boxes.csv").write_text("\n".join(["file,boxes", *lines]))
    assert vit("audit", folder, *tiny, "--no-trust", "--boxes", "boxes.csv", "--out", "report").code == 0
    table = pd.read_csv(place / "report" / "images.csv")
    assert table["object"].between(0, 1).all()
    assert (table["object"] + table["background"]).sub(1).abs().max() < 1e-9


def test_wrong_options_are_one_line(vit: Run, tiny: list[str], folder: Path) -> None:
    assert "no region" in error_line(vit("audit", folder, *tiny, "--region", "left"))
    assert "is the folder of the images" in error_line(vit("audit", folder, *tiny, "--out", folder))
    assert "which is no file" in error_line(vit("audit", folder, *tiny, "--region", "x.png=0,0,0.5,0.5"))
