"""`vitrail train-explainer`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.common import Run, error_line, files_in, noise

QUICK = ["--steps", 2, "--batch-size", 2, "--subsets", 16, "--hidden", 16, "--blocks", 1, "--workers", 0]


@pytest.fixture
def folder(place: Path) -> Path:
    (place / "pictures").mkdir()
    for seed in range(5):
        noise(seed).save(place / "pictures" / f"{seed}.png")
    return place / "pictures"


def test_an_explainer_is_trained_and_used(vit: Run, tiny: list[str], folder: Path, photo: Path, place: Path) -> None:
    result = vit("train-explainer", *tiny, "--data", folder, "--out", "mine.safetensors", *QUICK)
    assert result.code == 0, result.err
    lines = " ".join(result.out.split())
    assert "2 steps of 2 of the 5 images of" in lines
    assert re.search(r"step 2 of 2: R² −?-?\d\.\d+", lines)
    assert "→ mine.safetensors; use it with explain --method vit_shapley -p explainer=mine.safetensors" in lines
    assert not [name for name in files_in(place) if name.endswith(".state")]
    explained = vit(
        "explain", photo, *tiny, "--method", "vit_shapley", "-p", "explainer=mine.safetensors", "--no-trust"
    )
    assert explained.code == 0, explained.err


def test_errors_are_one_line(vit: Run, tiny: list[str], models: Path, folder: Path, place: Path) -> None:
    command = ["train-explainer", "--data", folder, "--out", "mine.safetensors", *QUICK]
    swin = ["--model", f"hf:{models / 'hf_swin'}"]
    assert "no fixed tokens" in error_line(vit(*command, *swin))
    assert "subsets must be a multiple of 16, but got 20" in error_line(vit(*command, *tiny, "--subsets", 20))
    assert "rate must be a positive number" in error_line(vit(*command, *tiny, "--rate", 0))
    assert "expected a file name in a writable folder" in error_line(vit(*command, *tiny, "--out", folder))
    assert "nowhere" in error_line(vit(*command, *tiny, "--data", "nowhere"))
    assert "has 5 examples" in error_line(vit(*command, *tiny, "--images", 6))
    (place / "mine.safetensors.state").write_text("damaged")
    assert "mine.safetensors.state is damaged: delete it" in error_line(vit(*command, *tiny))
    assert "mine.safetensors" not in files_in(place)


def test_the_method_names_what_it_needs(vit: Run, tiny: list[str], photo: Path) -> None:
    message = error_line(vit("explain", photo, *tiny, "--method", "vit_shapley"))
    assert "it needs an explainer of this model, which `vitrail train-explainer` makes" in message
    message = error_line(vit("explain", photo, *tiny, "--method", "vit_shapley", "-p", "explainer=nowhere.safetensors"))
    assert "there is no explainer nowhere.safetensors" in message
