"""``vitrail explain``: pictures, tables, JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests import families
from tests.command_line.given import OVERVIEW, Run, noise, one_line, written

import vitrail
from vitrail.cli.outputs import LONGEST, join_parts, params_part

# explain


def test_one_picture(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    said = vit("explain", photo, *tiny)
    assert (said.code, said.err) == (0, "")
    found = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.png")
    assert written(place) == {"photo.decompx.skipplus.png", "photo.decompx.skipplus.json"}
    assert "5 classes, 32×32 pixels" in said.out
    for _, label, probability in found.top:  # the five likeliest classes
        assert f"{label}" in said.out
        assert f"{probability:.1%}" in said.out
    assert f"{found.title} → vitrail-out/photo.decompx.skipplus.png" in said.out
    assert "completeness gap" in said.out


def test_target_against_method_and_parameters(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--target", "dog", "--against", "0", "--method", "input_x_gradient", "-p", "start_layer=1"]
    said = vit("explain", photo, *tiny, *options, "--param", "rule=frozen", "--out", place / "deep" / "out")
    assert said.code == 0
    found = vitrail.open(
        place / "deep" / "out" / "photo.input_x_gradient.rule-frozen.start_layer-1.3-dog.not-0-ant.json"
    )
    assert (found.label, found.against_label, found.method) == ("dog", "ant", "input_x_gradient")
    assert (found.params["start_layer"], found.params["rule"]) == (1, "frozen")
    assert "dog, not ant (" in said.out


def test_every_question_has_its_own_files_and_caption(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    asked: dict[str, list[str]] = {
        "photo.att_ixg.plus": [],
        "photo.att_ixg.plus.rule-frozen": ["-p", "rule=frozen"],
        "photo.att_ixg.plus.2-cat": ["--target", "2"],
        "photo.att_ixg.plus.3-dog.not-2-cat": ["--target", "dog", "--against", "2"],
    }
    for options in asked.values():
        assert vit("explain", photo, *tiny, "--method", "att_cat", *options).code == 0
    assert written(place) == {f"{stem}.{suffix}" for stem in asked for suffix in ("png", "json")}
    model = vitrail.open(place / "vitrail-out" / "photo.att_ixg.plus.json").model_name
    told = [vitrail.open(place / "vitrail-out" / f"{stem}.json", check=False).detail for stem in asked]
    assert told[:2] == [f"att_ixg.plus on {model}", f"att_ixg.plus(rule=frozen) on {model}"]


def test_a_picture_of_the_same_name_from_another_folder_keeps_the_earlier_results(
    vit: Run, tiny: list[str], place: Path
) -> None:
    for name in ("x/cat.png", "y/cat.png"):
        (place / name).parent.mkdir()
        noise(len(name)).save(place / name)
    pictures = [
        json.loads(vit("explain", name, *tiny, *top, "--json").out)[0]["picture"]
        for top in ([], ["--top", "2"])
        for name in ("x/cat.png", "y/cat.png", "x/cat.png")
    ]
    stems = ["cat", "cat-2", "cat"]
    assert pictures[:3] == [f"vitrail-out/{stem}.decompx.skipplus.png" for stem in stems]
    assert pictures[3:] == [f"vitrail-out/{stem}.decompx.skipplus.top2.png" for stem in stems]


def test_long_parameters_make_no_long_names() -> None:
    one, other = (join_parts([params_part({"layers": [*range(number)]})]) for number in (90, 91))
    assert one != other
    assert len(one) == len(other) == LONGEST + 1
    assert join_parts(["", ""]) == ""


def test_a_call_as_tables_print_it(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "--method", "rise(masks=8)", "-p", "seed=3").code == 0
    found = vitrail.open(place / "vitrail-out" / "photo.rise.masks-8.seed-3.json")
    assert (found.params["masks"], found.params["seed"], found.call) == (8, 3, "rise(masks=8, seed=3)")
    assert "give it once" in one_line(vit("explain", photo, *tiny, "--method", "rise(masks=8)", "-p", "masks=9"))


def test_what_is_the_same_for_every_class_says_so(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    said = vit("explain", photo, *tiny, "--method", "rollout", "--target", "dog")
    assert "rollout is the same for every class" in said.out
    found = vitrail.open(place / "vitrail-out" / "photo.rollout.3-dog.json")
    assert found.detail.endswith(" · the same for every class")
    said = vit("explain", photo, *tiny)
    assert "same for every class" not in said.out
    assert "same for every class" not in vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.json").detail


def test_the_likeliest_classes_side_by_side(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "--top", 3).code == 0
    stem = "photo.decompx.skipplus"
    assert written(place) == {f"{stem}.top3.png"} | {f"{stem}.{k}.{s}" for k in (1, 2, 3) for s in ("png", "json")}
    found = [vitrail.open(place / "vitrail-out" / f"{stem}.{k}.json") for k in (1, 2, 3)]
    assert [e.target for e in found] == [index for index, _, _ in found[0].top[:3]]
    sheet, single = (Image.open(place / "vitrail-out" / f"{stem}.{name}.png") for name in ("top3", "1"))
    assert sheet.width > 3 * single.width


def test_top_leaves_out_the_class_that_it_is_against(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    first = json.loads(vit("explain", photo, *tiny, "--json").out)[0]["top"][0]
    said = vit("explain", photo, *tiny, "--top", 9, "--against", first["class"], "--json")
    found = json.loads(said.out)
    assert len(found) == 4
    assert first["class"] not in [e["target"] for e in found]
    assert {e["against"] for e in found} == {first["class"]}


def test_a_folder_gives_an_overview_and_goes_on_after_a_bad_picture(
    vit: Run, tiny: list[str], album: Path, place: Path
) -> None:
    said = vit("explain", album, *tiny)
    assert said.code == 1
    assert "broken.png: " in said.out
    assert "1 picture could not be explained" in said.out
    assert "Traceback" not in said.err
    stems = ("a", "a-2", "b [red] [b]")
    pictures = {f"{stem}.decompx.skipplus.{suffix}" for stem in stems for suffix in ("png", "json")}
    assert written(place) == pictures | OVERVIEW
    assert all(str(place / "vitrail-out" / f"{stem}.decompx").removeprefix(f"{place}/") in said.out for stem in stems)
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b [red] [b].png", "broken.png", "a.png"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, False]
    for row in rows:
        if not row["error"]:
            found = vitrail.open(row["picture"])
            assert found.image_path == row["image"] or Path(found.image_path or "") == Path(row["image"]).resolve()
            assert (str(found.target), found.label) == (row["class"], row["label"])
            assert (json.loads(row["params"]), row["against"]) == (found.params, "")
            assert float(row["probability"]) == pytest.approx(found.probability, abs=1e-6)
    assert Image.open(place / "vitrail-out" / "contact-sheet.png").width > 600


def test_a_second_run_does_not_explain_its_own_results(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    for _ in range(2):
        said = vit("explain", ".", *tiny, "--json")
        assert said.code == 0
        assert [Path(e["image"]["path"]) for e in json.loads(said.out)] == [photo]
    photo.unlink()
    assert "besides earlier results" in one_line(vit("explain", ".", *tiny))


def test_results_of_another_folder_are_not_explained(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    noise(1).save(place / "second.png")
    (place / "second.json").write_text('{"label": "of somebody else"}')
    first = vit("explain", ".", *tiny, "--top", 2, "--curves", "--out", "one")
    assert first.code == 0, first.err
    assert vit("compare", photo, *tiny, "--methods", "rollout", "--out", "beside").code == 0
    said = vit("explain", ".", *tiny, "--json", "--out", "two")
    assert [Path(e["image"]["path"]).name for e in json.loads(said.out)] == ["photo.png", "second.png"]
    assert "besides earlier results" in one_line(vit("explain", "one", *tiny, "--out", "three"))
    assert vit("explain", "beside/photo.compare.png", *tiny).code == 0  # asked for by its name


def test_names_never_collide(vit: Run, tiny: list[str], place: Path) -> None:
    for name in ("x/cat.png", "y/cat.png", "z/cat-2.png"):
        (place / "in" / name).parent.mkdir(parents=True)
        noise(len(name)).save(place / "in" / name)
    found = json.loads(vit("explain", "in", *tiny, "--json").out)
    assert len({e["picture"] for e in found}) == 3
    for e in found:
        assert vitrail.open(e["picture"]).image_path == e["image"]["path"]


def test_json_is_all_that_is_printed(vit: Run, tiny: list[str], album: Path) -> None:
    said = vit("explain", album, *tiny, "--json")
    found = json.loads(said.out)
    assert said.code == 1
    assert [("error" in e) for e in found] == [False, False, True, False]
    assert {"picture", "label", "probability", "map", "seconds"} <= found[0].keys()
    assert "Overview" in said.err


def test_a_checkpoint_with_labels(vit: Run, photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    families.randomize(made, 0)
    save_file(made.state_dict(), place / "w.safetensors")
    (place / "l.txt").write_text("yes\nno\nperhaps\n")
    options = ["--model", "vit_tiny_patch16_224", "--checkpoint", "w.safetensors", "--labels", "l.txt"]
    said = vit("explain", photo, *options, "--img-size", 32, "--target", "perh", "--dtype", "bfloat16", "--json")
    assert said.code == 0
    (found,) = json.loads(said.out)
    assert found["label"] == "perhaps"
    monkeypatch.chdir("/")  # what was relative is found again from anywhere
    again = vitrail.open(place / found["picture"])
    assert again.model is not None
    assert (again.model.dtype, again.model.size) == (torch.bfloat16, (32, 32))


def test_a_long_run_says_how_long(vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about" not in vit("explain", photo, *tiny).out
    monkeypatch.setattr("vitrail.cli.explain.LONG", 0.0)
    assert "1 × decompx.skipplus: about 0 s" in vit("explain", photo, *tiny).out
