"""Models whose classes are texts: ``--prompt``, and new texts as classes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from tests import families
from tests.cli.common import Run, error_line, results_in

import vitrail
from vitrail.app.server.settings import Settings
from vitrail.bench.store import Store
from vitrail.cli.serve import check_options
from vitrail.data import CaptionedScenes
from vitrail.errors import VitrailError

PROMPTS = ["--prompt", "a photo of a cat", "--prompt", "a photo of a dog"]


@pytest.fixture(scope="module", params=["hf_clip_text", "hf_siglip_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / request.param
    families.build(request.param).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return f"hf:{folder}"


def test_a_new_text_is_explained(vit: Run, model: str, photo: Path, place: Path) -> None:
    texts = ["--target", "a red star", "--against", "a photo of a cat"]
    result = vit("explain", photo, "--model", model, *PROMPTS, *texts, "--no-trust")
    assert (result.code, result.err) == (0, "")
    assert "3 classes" in result.out
    (picture,) = place.glob("vitrail-out/*.png")
    assert picture.name == "photo.decompx.skipplus.2-a-red-star.not-0-a-photo-of-a-cat.png"
    ex = vitrail.open(picture)
    assert (ex.label, ex.against_label) == ("a red star", "a photo of a cat")
    assert ex.model is not None
    assert ex.model.labels == ("a photo of a cat", "a photo of a dog", "a red star")


def test_a_text_against_a_text(vit: Run, place: Path) -> None:
    Image.fromarray(CaptionedScenes(1, 5)[0].image).save(place / "scene.png")
    texts = ["--text", "a red star", "--against-text", "a large blue object"]
    result = vit("explain", "scene.png", "--model", "scenes-text", *texts, "--no-trust")
    assert (result.code, result.err) == (0, "")
    (picture,) = place.glob("vitrail-out/*.png")
    assert picture.name == "scene.decompx.skipplus.5-a-red-star.not-60-a-large-blue-object.png"
    ex = vitrail.open(picture)
    assert (ex.label, ex.against_label) == ("a red star", "a large blue object")


def test_texts_that_begin_alike_have_files_of_their_own(vit: Run, place: Path) -> None:
    Image.fromarray(CaptionedScenes(1, 5)[0].image).save(place / "scene.png")
    explain = ["explain", "scene.png", "--model", "scenes-text", "--no-trust"]
    for side in ("left", "right"):
        assert vit(*explain, "--text", f"a large red star on the {side}").code == 0
    pictures = sorted(path.name for path in place.glob("vitrail-out/*.png"))
    assert len(pictures) == 2
    for name in pictures:
        assert re.fullmatch(r"scene\.decompx\.skipplus\.60-a-large-red-star-on-the-[0-9a-f]{8}\.png", name)


def test_wrong_texts(vit: Run, photo: Path, place: Path) -> None:
    explain = ["explain", photo, "--model", "scenes-text"]
    boat = error_line(vit(*explain, "--text", "a red boat"))
    assert "the model does not know 'boat' in 'a red boat': its words are small, large, red" in boat
    assert "not empty" in error_line(vit(*explain, "--text", ""))
    assert "--text takes a text such as 'a red star', but got '3'" in error_line(vit(*explain, "--text", "3"))
    assert "--against-text takes a text" in error_line(vit(*explain, "--against-text", "@label"))
    both = ["--target", "a red star", "--text", "a blue star"]
    assert "--target and --text both say what to explain" in error_line(vit(*explain, *both))
    both = ["--against", "1", "--against-text", "a blue star"]
    assert "--against and --against-text both" in error_line(vit(*explain, *both))
    for option in ("--text", "--against-text"):
        message = error_line(vit("explain", photo, option, "a red star"))
        assert "photo reads no texts: use --target CLASS" in message
    same = ["--text", "a red star", "--against-text"]
    for text in ("a red star", "red star"):
        both = error_line(vit(*explain, *same, text))
        assert "--text and --against-text are both a red star: use two different classes." in both
    mixed = error_line(vit(*explain, "--target", "red star", "--against-text", "a red star"))
    assert "--target and --against-text are both a red star" in mixed
    agnostic = error_line(vit(*explain, *same, "a blue star", "--method", "raw_attention"))
    assert "--against-text has no effect" in agnostic
    assert results_in(place) == set()


def test_texts_are_compared(vit: Run, model: str, photo: Path, place: Path) -> None:
    texts = ["--targets", "a red star,0,the cat", "--against", "a ring"]
    result = vit("compare", photo, "--model", model, *PROMPTS, *texts, "--methods", "decompx,random", "--no-trust")
    assert (result.code, result.err) == (0, "")
    (table,) = place.glob("vitrail-out/*.json")
    rows = json.loads(table.read_text())
    assert {row["label"] for row in rows} == {"a red star", "a photo of a cat", "the cat"}


def test_methods_of_such_a_model(vit: Run, model: str) -> None:
    assert vit("methods", "decompx", "--model", model, *PROMPTS).code == 0
    assert "(--prompt)" in error_line(vit("methods", "--model", model))


def test_wrong_questions(vit: Run, model: str, photo: Path, place: Path) -> None:
    explain = ["explain", photo, "--model", model]
    assert "has no classes of its own: give prompts=" in error_line(vit(*explain))
    assert "(--prompt)" in error_line(vit(*explain))
    assert "give at least two" in error_line(vit(*explain, *PROMPTS[:2]))
    assert "twice" in error_line(vit(*explain, *PROMPTS[:2], *PROMPTS[:2]))
    assert "not empty" in error_line(vit(*explain, *PROMPTS, "--prompt", ""))
    assert "there is no class 7" in error_line(vit(*explain, *PROMPTS, "--target", "7"))
    assert "there is no class '@cat'" in error_line(vit(*explain, *PROMPTS, "--target", "@cat"))
    for count in (2, 4):  # one prompt, and two
        refused = error_line(vit("explain", photo, *PROMPTS[:count]))
        assert "photo takes no prompts, which are for scenes-text" in refused
    assert results_in(place) == set()


def test_a_benchmark(vit: Run, model: str, photo: Path, place: Path) -> None:
    (place / "photos").mkdir()
    photo.rename(place / "photos" / photo.name)
    settings = ["--data", "photos", "--methods", "random", "--metrics", "sparseness", "--out", place / "run"]
    result = vit("bench", "--model", model, *PROMPTS, *settings)
    assert result.code == 0, result.err
    assert len(Store(place / "run").rows()) == 1
    (spec,) = Store(place / "run").plan().models
    assert spec.options == {"prompts": ["a photo of a cat", "a photo of a dog"]}


def test_the_server_takes_prompts_of_one_model() -> None:
    settings = Settings(load_options={"prompts": ["a cat", "a dog"]})
    check_options(settings, ["hf:clip"])
    with pytest.raises(VitrailError, match=r"^--prompt must go with exactly one --model, but got 2 models"):
        check_options(settings, ["hf:clip", "photo"])
