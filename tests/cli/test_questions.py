"""``vitrail explain --group`` and ``--similar-to``, and ``vitrail similar``: questions about more than one class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests import families
from tests.cli.common import Run, error_line, noise, results_in

import vitrail
from vitrail.samples import FOLDER
from vitrail.targets import Group, Similarity


def pictures_in(place: Path) -> list[str]:
    return sorted(name for name in results_in(place) if name.endswith(".png"))


def test_a_group_is_explained(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--group", "ant, b*", "--against-group", "dog,elk", "--no-trust"]
    assert vit("explain", photo, *tiny, *options).code == 0
    (picture,) = pictures_in(place)
    ex = vitrail.open(place / "vitrail-out" / picture)
    expected = vitrail.explain(ex.model_name, photo, target=Group("ant, b*"), against=Group("dog,elk"))
    assert (ex.title, ex.label) == (expected.title, "ant, b*")
    torch.testing.assert_close(ex.map, expected.map)


@pytest.mark.parametrize(
    ("options", "readable"),
    [
        ([["--group", "3,0"], ["--group", "3,1"]], "0-3-0"),
        ([["--group", "*e*, dog"], ["--group", "*e, dog"]], "0-e-dog"),
        ([["--target", "dog", "--against-group", "0,1"], ["--target", "dog", "--against-group", "0,2"]],
         "0-dog.not-1-0-1"),
        ([["--similar-to", "x/other.png"], ["--similar-to", "y/other.png"]], "0-similarity-to-other.p"),
    ],
)  # fmt: skip
def test_questions_that_look_alike_have_files_of_their_own(
    options: list[list[str]], readable: str, vit: Run, tiny: list[str], photo: Path, place: Path
) -> None:
    for number, folder in enumerate(("x", "y"), 1):
        (place / folder).mkdir()
        noise(number).save(place / folder / "other.png")
    for asked in options:
        for _ in range(2):  # the same question again writes the same files
            result = vit("explain", photo, *tiny, "--no-trust", *asked)
            assert result.code == 0, result.err
    names = pictures_in(place)
    assert len(names) == 2
    assert any(name.startswith(f"photo.decompx.skipplus.{readable}") for name in names)
    assert max(map(len, names)) < 90


def test_groups_of_a_file(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    explain = ["explain", photo, *tiny, "--no-trust", "--groups", "groups.txt"]
    (place / "groups.txt").write_text("insects: ant, bee\nlarge: dog, elk\n")
    assert vit(*explain, "--group", "insects", "--against-group", "dog").code == 0
    (place / "groups.txt").write_text("insects: ant\nlarge: dog, unicorn\n")
    assert vit(*explain, "--group", "insects", "--against-group", "dog").code == 0
    assert len(pictures_in(place)) == 2  # a group of this name was another one
    wrong = error_line(vit(*explain, "--group", "mammals"))
    assert "'mammals' is no group of --groups, which has insects, large: " in wrong
    assert "has no class 'mammals'" in wrong
    wrong = error_line(vit(*explain, "--target", "ant", "--against-group", "mammals"))
    assert "'mammals' is no group of --groups" in wrong
    wrong = error_line(vit(*explain, "--group", "large"))
    assert "is no group" not in wrong
    assert "has no class 'unicorn'" in wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", ""], "the name of a class is empty: give a name or a number."),
        (["--target", "ant", "--against-group", ""], "the name of a class is empty"),
        (["--group", "", "--similar-to", "photo.png"], "ask different questions: use only one of them"),
        (["--group", "ant", "--target", ""], "use only one for either side"),
        (["--group", "ant", "--groups", "none.txt"], "cannot read the groups of none.txt: No such file or directory."),
        (["--against-group", "ant", "--method", "raw_attention"], "--against-group has no effect"),
        (["--region", "photo.png"], "has no output per patch"),
    ],
)
def test_wrong_questions_get_one_line(
    options: list[str], message: str, vit: Run, tiny: list[str], photo: Path, place: Path
) -> None:
    assert message in error_line(vit("explain", photo, *tiny, *options))
    assert results_in(place) == set()


def test_two_images_are_compared(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    for number, folder in enumerate(("x", "y"), 1):
        (place / folder).mkdir()
        noise(number).save(place / folder / "other.png")
    scores = {}
    for other in ("x/other.png", "y/other.png"):
        for measure in ("cosine", "dot"):
            result = vit("similar", photo, other, *tiny, "--measure", measure, "--json")
            assert result.code == 0, result.err
            answer = json.loads(result.out)
            scores[answer["picture"]] = answer["score"]
            assert f"{measure} {answer['score']:.3f} →" in result.err
    assert len(scores) == len(pictures_in(place)) == 4
    expected = vitrail.explain(tiny[1], photo, target=Similarity("y/other.png", "dot")).probability
    assert [*scores.values()][-1] == pytest.approx(expected)


def test_people_read_a_minus_and_programs_a_number(vit: Run, place: Path) -> None:
    result = vit("similar", FOLDER / "cat.jpg", FOLDER / "coffee.jpg", "--json")
    score = json.loads(result.out)["score"]
    assert score < 0
    assert f"cosine −{-score:.3f} →" in result.err


def test_an_image_is_similar_to_itself(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    result = vit("similar", photo, photo, *tiny, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["score"] == pytest.approx(1)


def test_folders_are_not_compared(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    message = error_line(vit("similar", photo, place, *tiny))
    assert f"similar takes two images, but {place} is a folder: give a file inside it." in message


def test_images_are_not_compared_by_a_detector(vit: Run, photo: Path, place: Path) -> None:
    families.yolos(dtype=torch.float32).save_pretrained(place / "yolos")
    noise(1).save(place / "other.png")
    for command in (["similar", photo, "other.png"], ["explain", photo, "--similar-to", "other.png"]):
        assert "hf:./yolos is a detector, which has" in error_line(vit(*command, "--model", "hf:./yolos"))
    assert results_in(place) == set()
