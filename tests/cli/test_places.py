"""``vitrail explain --region`` and ``--box``: a class at a place of the image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests import families
from tests.cli.common import Run, error_line, noise
from tests.families import CLASSES, WIDTH

import vitrail


@pytest.fixture
def segmenter(tmp_path: Path) -> list[str]:
    """The options of a model with an output per patch."""
    families.build("hf_patches").save_pretrained(tmp_path / "model")
    save_file({"weight": torch.randn(CLASSES, WIDTH)}, tmp_path / "head.safetensors")
    return ["--model", "hf:./model", "--head", "head.safetensors", "--pool", "patches"]


def test_a_region_is_explained(vit: Run, segmenter: list[str], tmp_path: Path) -> None:
    noise(0).save("noise.png")
    mask = np.zeros((40, 60), bool)
    mask[10:20, 10:50] = True
    Image.fromarray(mask).save("sky.png")
    assert vit("explain", "noise.png", *segmenter, "--no-trust", "--region", "sky.png", "--target", "3").code == 0
    (saved,) = (tmp_path / "vitrail-out").glob("*.json")
    assert "region-sky" in saved.name
    made = vitrail.open(saved)
    assert made.target == 3
    expected = vitrail.explain(
        vitrail.load("hf:./model", head="head.safetensors", pool="patches"),
        "noise.png",
        target=vitrail.targets.Region(mask, 3),
    )
    assert torch.allclose(made.map, expected.map)
    assert made.probability == expected.probability


def test_masks_of_one_name_have_files_of_their_own(vit: Run, segmenter: list[str], tmp_path: Path) -> None:
    noise(0).save("noise.png")
    for folder, rows in (("x", 10), ("y", 20)):
        mask = np.zeros((40, 60), bool)
        mask[:rows, 10:50] = True
        (tmp_path / folder).mkdir()
        Image.fromarray(mask).save(f"{folder}/sky.png")
        options = ["--no-trust", "--region", f"{folder}/sky.png", "--target", "3"]
        assert vit("explain", "noise.png", *segmenter, *options).code == 0
    assert len(list((tmp_path / "vitrail-out").glob("noise.*.region-sky-*.3*.json"))) == 2


def test_wrong_regions_get_one_line(vit: Run, segmenter: list[str]) -> None:
    noise(0).save("noise.png")
    noise(1).save("second.png")
    Image.new("L", (7, 9)).save("other.png")
    wrong = error_line(vit("explain", "noise.png", *segmenter, "--region", "other.png"))
    assert "the mask has 7 × 9 pixels, but the image has 60 × 40" in wrong
    assert "cannot read the mask" in error_line(vit("explain", "noise.png", *segmenter, "--region", "nothing.png"))
    several = error_line(vit("explain", "noise.png", "second.png", *segmenter, "--region", "other.png"))
    assert "the mask of a single image" in several
    assert "has no output per patch" in error_line(vit("explain", "noise.png", "--region", "noise.png"))


@pytest.fixture
def detector(tmp_path: Path) -> list[str]:
    """The options of a detector."""
    families.yolos(dtype=torch.float32).save_pretrained(tmp_path / "yolos")
    return ["--model", "hf:./yolos", "--no-trust"]


def test_a_box_is_explained(vit: Run, detector: list[str], tmp_path: Path) -> None:
    noise(0).save("noise.png")
    result = vit("explain", "noise.png", *detector, "--box", "4", "--target", "dog", "--against", "cat")
    assert result.code == 0, result.err
    (saved,) = (tmp_path / "vitrail-out").glob("*.json")
    assert "box-4" in saved.name
    made = vitrail.open(saved)
    assert made.model.question == {"kind": "box", "query": 4}
    assert (made.label, made.against_label) == ("dog", "cat")
    best = made.model.boxes(made.image)[0]
    assert f"{best.query}" in result.out
    assert f"{best.probability:.1%}" in result.out


def test_without_a_number_the_surest_box_of_each_image_is_explained(
    vit: Run, detector: list[str], tmp_path: Path
) -> None:
    view = vitrail.load("hf:./yolos")
    for seed in range(3):
        noise(seed).save(f"{seed}.png")
    assert vit("explain", "0.png", "1.png", "2.png", *detector).code == 0
    for seed in range(3):
        (saved,) = (tmp_path / "vitrail-out").glob(f"{seed}*.json")
        made = vitrail.open(saved)
        assert made.model.question["query"] == view.boxes(noise(seed))[0].query
    assert vit("explain", "0.png", *detector, "--target", "cow", "--out", "cows").code == 0
    (saved,) = Path("cows").glob("*.json")
    expected = vitrail.explain(view, "0.png", target="cow")
    assert vitrail.open(saved).model.question == expected.model.question
    assert vit("explain", "0.png", *detector, "--top", "2", "--out", "top").code == 0
    assert len(list(Path("top").glob("*.json"))) == 2


def test_wrong_boxes_get_one_line(vit: Run, detector: list[str]) -> None:
    noise(0).save("noise.png")
    assert "there is no box 99" in error_line(vit("explain", "noise.png", *detector, "--box", "99"))
    assert "detects no boxes" in error_line(vit("explain", "noise.png", "--box", "1"))
    both = error_line(vit("explain", "noise.png", *detector, "--box", "1", "--region", "noise.png"))
    assert "use only one of them" in both
