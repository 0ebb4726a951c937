"""``vitrail explain``: pictures, tables, JSON."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests import families
from tests.app.server.hostile import png, zeros
from tests.cli.common import OVERVIEW, Run, error_line, files_in, noise, results_in

import vitrail
from vitrail import pipeline
from vitrail.bench.run import load_model
from vitrail.bench.store import Store
from vitrail.cli import explain
from vitrail.cli.outputs import MAX_LENGTH, join_parts, params_part
from vitrail.explanation import Explanation
from vitrail.show.figure import contact_sheet


def test_one_picture(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    result = vit("explain", photo, *tiny)
    assert (result.code, result.err) == (0, "")
    explanations = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.png")
    assert results_in(place) == {"photo.decompx.skipplus.png", "photo.decompx.skipplus.json"}
    assert "5 classes, 32×32 pixels" in result.out
    for _, label, probability in explanations.top:  # the five likeliest classes
        assert f"{label}" in result.out
        assert f"{probability:.1%}" in result.out
    assert f"{explanations.title} → vitrail-out/photo.decompx.skipplus.png" in result.out
    assert "completeness gap" not in result.out
    assert f"  {explanations.score_line}\n" in result.out
    assert f"  {explanations.trust_line}\n" in result.out
    assert explanations.trust_line.startswith("trust: ")


def test_without_trust(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert "trust:" not in vit("explain", photo, *tiny, "--no-trust").out
    assert vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.png").trusted is None


def test_scores_stand_beside_those_of_a_random_map(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    result = vit("explain", photo, *tiny, "--score", "--steps", "4")
    ex = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.png")
    assert [*ex.scores] == ["insertion(steps=4)", "deletion(steps=4)"]
    assert len(ex.curves["insertion(steps=4)"]) == 5
    random = ex.random_scores([*ex.scores])
    for name in ("insertion", "deletion"):
        call = f"{name}(steps=4)"
        assert f"{name} {ex.scores[call]:.3f} (random {random[call]:.3f})" in result.out
        assert ex.scores[call] != random[call]


def test_scaled_scores_are_printed_with_their_scale(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    noise(4).save(place / "other.png")
    score = ["--score", "--steps", "2", "--no-trust"]
    result = vit("explain", photo, "other.png", *tiny, *score, "--similar-to", "other.png")
    assert result.out.count(" (scaled: empty image 0, full image 1); higher is better for insertion") == 2
    with (place / "vitrail-out" / "explanations.csv").open(encoding="utf-8") as file:
        (first, second) = csv.DictReader(file)
    assert json.loads(first["scale"]).keys() == {"insertion(steps=2)", "deletion(steps=2)"}
    assert json.loads(second["scale"])["insertion(steps=2)"][1] == pytest.approx(1, abs=1e-5)
    assert "scaled" not in vit("explain", photo, *tiny, *score).out


def test_target_against_method_and_parameters(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--target", "dog", "--against", "0", "--method", "input_x_gradient", "-p", "start_layer=1"]
    result = vit("explain", photo, *tiny, *options, "--param", "rule=frozen", "--out", place / "deep" / "out")
    assert result.code == 0
    ex = vitrail.open(place / "deep" / "out" / "photo.input_x_gradient.rule-frozen.start_layer-1.3-dog.not-0-ant.json")
    assert (ex.label, ex.against_label, ex.method) == ("dog", "ant", "input_x_gradient")
    assert (ex.params["start_layer"], ex.params["rule"]) == (1, "frozen")
    assert re.search(r"dog [\d.]+% rather than ant [\d.]+% →", result.out)


def test_every_question_has_its_own_files_and_caption(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    asked: dict[str, list[str]] = {
        "photo.att_ixg.plus": [],
        "photo.att_ixg.plus.rule-frozen": ["-p", "rule=frozen"],
        "photo.att_ixg.plus.2-cat": ["--target", "2"],
        "photo.att_ixg.plus.3-dog.not-2-cat": ["--target", "dog", "--against", "2"],
    }
    for options in asked.values():
        assert vit("explain", photo, *tiny, "--method", "att_cat", *options).code == 0
    assert results_in(place) == {f"{stem}.{suffix}" for stem in asked for suffix in ("png", "json")}
    model = vitrail.open(place / "vitrail-out" / "photo.att_ixg.plus.json").model_name
    texts = [vitrail.open(place / "vitrail-out" / f"{stem}.json", check=False).detail for stem in asked]
    assert texts[:2] == [f"att_ixg.plus on {model}", f"att_ixg.plus(rule=frozen) on {model}"]


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
    first, second = (join_parts([params_part({"layers": [*range(number)]})]) for number in (90, 91))
    assert first != second
    assert len(first) == len(second) == MAX_LENGTH + 1
    assert join_parts(["", ""]) == ""


def test_a_call_as_tables_print_it(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "--method", "rise(masks=8)", "-p", "seed=3").code == 0
    ex = vitrail.open(place / "vitrail-out" / "photo.rise.masks-8.seed-3.json")
    assert (ex.params["masks"], ex.params["seed"], ex.call) == (8, 3, "rise(masks=8, seed=3)")
    assert "set it once" in error_line(vit("explain", photo, *tiny, "--method", "rise(masks=8)", "-p", "masks=9"))


def test_what_is_the_same_for_every_class_says_so(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    result = vit("explain", photo, *tiny, "--method", "rollout", "--target", "dog")
    assert "rollout is the same for every class" in result.out
    ex = vitrail.open(place / "vitrail-out" / "photo.rollout.3-dog.json")
    assert " · the same for every class" in ex.detail
    result = vit("explain", photo, *tiny)
    assert "same for every class" not in result.out
    assert "same for every class" not in vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.json").detail


def test_the_likeliest_classes_side_by_side(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "--top", 3).code == 0
    stem = "photo.decompx.skipplus"
    assert results_in(place) == {f"{stem}.top3.png"} | {f"{stem}.{k}.{s}" for k in (1, 2, 3) for s in ("png", "json")}
    explanations = [vitrail.open(place / "vitrail-out" / f"{stem}.{k}.json") for k in (1, 2, 3)]
    assert [e.target for e in explanations] == [index for index, _, _ in explanations[0].top[:3]]
    sheet, single = (Image.open(place / "vitrail-out" / f"{stem}.{name}.png") for name in ("top3", "1"))
    assert sheet.width > 3 * single.width


def test_top_leaves_out_the_class_that_it_is_against(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    first = json.loads(vit("explain", photo, *tiny, "--json").out)[0]["top"][0]
    result = vit("explain", photo, *tiny, "--top", 9, "--against", first["class"], "--json")
    explanations = json.loads(result.out)
    assert len(explanations) == 4
    assert first["class"] not in [e["target"] for e in explanations]
    assert {e["against"] for e in explanations} == {first["class"]}


def test_exports_of_a_folder(vit: Run, tiny: list[str], place: Path) -> None:
    (place / "two").mkdir()
    for seed in (0, 1):
        noise(seed).save(place / "two" / f"{seed}.png")
    options = ["--no-trust", "--method", "input_x_gradient", "--export", "coco,npz", "--export", "label_studio,tiff"]
    result = vit("explain", "two", *tiny, *options)
    assert result.code == 0
    exported = {"coco.json", "label_studio.json", "maps.npz"}
    maps = {f"{seed}.input_x_gradient.{kind}" for seed in (0, 1) for kind in ("png", "json", "tif")}
    assert results_in(place) == OVERVIEW | exported | maps
    assert "Exported: vitrail-out/coco.json and vitrail-out/maps.npz and vitrail-out/label_studio.json" in result.out
    saved = [vitrail.open(place / "vitrail-out" / f"{seed}.input_x_gradient.json") for seed in (0, 1)]
    read = np.load(place / "vitrail-out" / "maps.npz")
    assert np.array_equal(read["maps"], torch.stack([ex.map for ex in saved]).numpy())
    assert read["image"].tolist() == ["0.png", "1.png"]
    areas = json.loads((place / "vitrail-out" / "coco.json").read_text(encoding="utf-8"))
    assert [annotation["area"] for annotation in areas["annotations"]] == [ex.area().sum() for ex in saved]
    assert "besides earlier results" in error_line(vit("explain", "vitrail-out", *tiny, "--out", "again"))


def test_exports_of_several_classes(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--no-trust", "--method", "input_x_gradient", "--top", "2", "--export", "coco,tiff"]
    assert vit("explain", photo, *tiny, *options).code == 0
    assert {name for name in results_in(place) if name.endswith(".tif")} == {
        "photo.input_x_gradient.1.tif", "photo.input_x_gradient.2.tif",
    }  # fmt: skip
    areas = json.loads((place / "vitrail-out" / "coco.json").read_text(encoding="utf-8"))
    assert [len(areas[key]) for key in ("images", "annotations", "categories")] == [1, 2, 2]
    message = error_line(vit("explain", photo, *tiny, "--export", "voc"))
    assert "--export must be coco, label_studio, npz, tiff or fiftyone:NAME, but got 'voc'." in message


def test_a_folder_gives_an_overview_and_goes_on_after_a_bad_picture(
    vit: Run, tiny: list[str], album: Path, place: Path
) -> None:
    result = vit("explain", album, *tiny)
    assert result.code == 1
    assert "broken.png: " in result.out
    assert "1 image could not be explained" in result.out
    assert "Traceback" not in result.err
    stems = ("a", "a-2", "b [red] [b]")
    pictures = {f"{stem}.decompx.skipplus.{suffix}" for stem in stems for suffix in ("png", "json")}
    assert results_in(place) == pictures | OVERVIEW
    assert all(str(place / "vitrail-out" / f"{stem}.decompx").removeprefix(f"{place}/") in result.out for stem in stems)
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ["a.png", "b [red] [b].png", "broken.png", "a.png", "notes.txt"]
    assert [Path(row["image"]).name for row in rows] == names
    assert [bool(row["error"]) for row in rows] == [False, False, True, False, False]
    assert [bool(row["skipped"]) for row in rows] == [False, False, False, False, True]
    for row in rows:
        if row["picture"]:
            ex = vitrail.open(row["picture"])
            assert ex.image_path == row["image"] or Path(ex.image_path or "") == Path(row["image"]).resolve()
            assert (str(ex.target), ex.label) == (row["class"], row["label"])
            assert (json.loads(row["params"]), row["against"]) == (ex.params, "")
            assert float(row["probability"]) == pytest.approx(ex.probability, abs=1e-6)
    assert Image.open(place / "vitrail-out" / "contact-sheet.png").width > 600


@pytest.fixture
def captions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The captions of the contact sheets that are drawn."""
    texts: list[str] = []

    def sheet(cells: list[tuple[Image.Image, str]], columns: int | None = None) -> Image.Image:
        texts.extend(caption for _, caption in cells)
        return contact_sheet(cells, columns)

    monkeypatch.setattr("vitrail.show.figure.contact_sheet", sheet)
    return texts


@pytest.fixture
def shelf(place: Path) -> Path:
    """Three images, of which the names and the probabilities are in different orders."""
    (place / "shelf").mkdir()
    for seed, name in enumerate("bca"):
        noise(seed).save(place / "shelf" / f"{name}.png")
    return place / "shelf"


def test_the_order_of_the_contact_sheet(vit: Run, tiny: list[str], shelf: Path, captions: list[str]) -> None:
    images = [shelf / f"{name}.png" for name in "bca"]
    for order in ([], ["--sort", "name"], ["--sort", "probability"]):
        result = vit("explain", *images, *tiny, *order, "--json")
        assert result.code == 0, result.err
    names = [caption[0] for caption in captions]
    assert names[:6] == [*"bca", *"abc"]
    probabilities = {Path(e["image"]["path"]).stem: e["probability"] for e in json.loads(result.out)}
    assert names[6:] == sorted(probabilities, key=lambda name: -probabilities[name])
    assert "--sort must be name, probability or trust, but got 'size'" in error_line(
        vit("explain", *images, *tiny, "--sort", "size")
    )


def test_the_order_of_trust(vit: Run, tiny: list[str], shelf: Path, captions: list[str]) -> None:
    result = vit("explain", shelf, *tiny, "--sort", "trust", "--no-trust")
    assert "--sort trust and --no-trust contradict each other" in error_line(result)
    result = vit("explain", shelf, *tiny, "--sort", "trust", "--json")
    scores = {Path(e["image"]["path"]).stem: e["trust"]["score"] for e in json.loads(result.out)}
    assert [caption[0] for caption in captions] == sorted(scores, key=lambda name: -scores[name])
    assert all(caption.endswith(f"\ntrust {scores[caption[0]]:.2f}") for caption in captions)


def test_the_contact_sheet_says_the_true_class_and_where_the_model_is_wrong(
    vit: Run, tiny: list[str], shelf: Path, captions: list[str]
) -> None:
    predicted = [json.loads(vit("explain", shelf / name, *tiny, "--json").out)[0] for name in ("a.png", "b.png")]
    wrong = "ant" if predicted[1]["label"] != "ant" else "dog"
    rows = ["file\tindex", f"a.png\t{predicted[0]['target']}", f"b.png\t{['ant', '', '', 'dog'].index(wrong)}"]
    (shelf / "labels.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (shelf / "c.png").unlink()
    assert vit("explain", shelf, *tiny, "--no-trust").code == 0
    assert captions[0].endswith(f"\n✓ true class: {predicted[0]['label']}")
    assert captions[1].endswith(f"\n✗ true class: {wrong}")
    assert vitrail.open(shelf.parent / "vitrail-out" / "b.decompx.skipplus.json").true_label == wrong


@pytest.mark.filterwarnings("ignore:.*keeps its shape")
def test_the_contact_sheet_has_a_legend_and_no_stripes(vit: Run, tiny: list[str], shelf: Path, place: Path) -> None:
    noise(5).resize((3000, 100)).save(shelf / "a.png")
    assert vit("explain", shelf, *tiny, "--target", "dog").code == 0
    sheet = np.asarray(Image.open(place / "vitrail-out" / "contact-sheet.png"), dtype=int)
    first = (sheet[16:, 16 : 16 + 320] < 250).all(2).all(1)
    assert first[:100].all(), "a panorama is cropped, not reduced to a stripe"
    legend = sheet[-60:, 16:300]
    assert legend[..., 2].max() > 100
    assert (legend[..., 2] - legend[..., 0]).max() > 60, "blue: against"
    assert (legend[..., 0] - legend[..., 2])[:, :].max() < 100, "red is at the other end"


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (["--style", "dots"], "no style 'dots': expected smooth, blocks or outline"),
        (["--colormap", "x"], "no colormap 'x'"),
        (["--alpha", "-1"], "alpha must be between 0"),
    ],
)
def test_a_wrong_look_is_refused_before_any_work(
    vit: Run, tiny: list[str], photo: Path, place: Path, look: list[str], message: str
) -> None:
    assert message in error_line(vit("explain", photo, *tiny, *look))
    assert not (place / "vitrail-out").exists()


def test_looks(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    pictures = set()
    for look in ([], ["--style", "blocks"], ["--style", "outline"], ["--colormap", "PuOr"], ["--alpha", "0.5"]):
        assert vit("explain", photo, *tiny, *look).code == 0
        pictures.add((place / "vitrail-out" / "photo.decompx.skipplus.png").read_bytes())
    assert len(pictures) == 5


def test_a_second_run_does_not_explain_its_own_results(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    for _ in range(2):
        result = vit("explain", ".", *tiny, "--json")
        assert result.code == 0
        assert [Path(e["image"]["path"]) for e in json.loads(result.out)] == [photo]
    photo.unlink()
    assert "besides earlier results" in error_line(vit("explain", ".", *tiny))


def test_results_of_another_folder_are_not_explained(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    noise(1).save(place / "second.png")
    (place / "second.json").write_text('{"label": "of somebody else"}')
    first = vit("explain", ".", *tiny, "--top", 2, "--curves", "--out", "one")
    assert first.code == 0, first.err
    assert vit("compare", photo, *tiny, "--methods", "rollout", "--out", "beside").code == 0
    result = vit("explain", ".", *tiny, "--json", "--out", "two")
    assert [Path(e["image"]["path"]).name for e in json.loads(result.out)] == ["photo.png", "second.png"]
    assert "besides earlier results" in error_line(vit("explain", "one", *tiny, "--out", "three"))
    assert vit("explain", "beside/photo.compare.png", *tiny).code == 0  # asked for by its name


def test_names_never_collide(vit: Run, tiny: list[str], place: Path) -> None:
    for name in ("x/cat.png", "y/cat.png", "z/cat-2.png"):
        (place / "in" / name).parent.mkdir(parents=True)
        noise(len(name)).save(place / "in" / name)
    explanations = json.loads(vit("explain", "in", *tiny, "--json").out)
    assert len({e["picture"] for e in explanations}) == 3
    for e in explanations:
        assert vitrail.open(e["picture"]).image_path == e["image"]["path"]


def test_json_is_all_that_is_printed(vit: Run, tiny: list[str], album: Path) -> None:
    result = vit("explain", album, *tiny, "--json")
    explanations = json.loads(result.out)
    assert result.code == 1
    assert [("error" in e) for e in explanations] == [False, False, True, False]
    assert {"picture", "label", "probability", "map", "seconds"} <= explanations[0].keys()
    assert "Overview" in result.err


def test_a_checkpoint_with_labels(vit: Run, photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    module = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    families.randomize(module, 0)
    save_file(module.state_dict(), place / "w.safetensors")
    (place / "l.txt").write_text("yes\nno\nperhaps\n")
    options = ["--model", "vit_tiny_patch16_224", "--checkpoint", "w.safetensors", "--labels", "l.txt"]
    result = vit("explain", photo, *options, "--img-size", 32, "--target", "perh", "--dtype", "bfloat16", "--json")
    assert result.code == 0
    (ex,) = json.loads(result.out)
    assert ex["label"] == "perhaps"
    monkeypatch.chdir("/")  # what was relative is found again from anywhere
    again = vitrail.open(place / ex["picture"])
    assert again.model is not None
    assert (again.model.dtype, again.model.size) == (torch.bfloat16, (32, 32))


def test_a_long_run_says_how_long(vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about" not in vit("explain", photo, *tiny).out
    monkeypatch.setattr("vitrail.cli.explain.LONG", 0.0)
    assert "1 × decompx.skipplus: about 0 s" in vit("explain", photo, *tiny).out


@pytest.mark.parametrize("value", ["False", "false", "0 == 1"])
def test_parameters_are_parsed_like_those_of_calls(
    value: str, vit: Run, tiny: list[str], photo: Path, place: Path
) -> None:
    result = vit("explain", photo, *tiny, "--method", "vit_cx", "-p", f"cluster={value}", "-p", "delta=None")
    if value == "0 == 1":
        assert "cluster must be true or false, but got '0 == 1'" in error_line(result)
        return
    assert (result.code, result.err) == (0, "")
    ex = vitrail.open(place / "vitrail-out" / "photo.vit_cx.cluster-False.json")
    assert (ex.params["cluster"], ex.params["delta"]) == (False, None)


def test_parameters_in_json_are_read_too(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "-p", "start_layer=null").code == 0
    ex = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.json")
    assert ex.params == {"start_layer": None, "precision": "auto"}


# Errors are one line and leave no files behind


WRONG: dict[str, tuple[list[str], str]] = {
    "no image": (["nowhere.png"], "nowhere.png' was not found"),
    "empty folder": (["empty"], "o image found"),
    "not an image": (["notes.txt"], "is not an image"),
    "corrupt": (["corrupt.png"], "truncated or corrupt"),
    "too large": (["large.png"], "12,000 × 12,000 pixels, expected at most 64,000,000: shrink it first"),
    "name too long": (["a" * 5000], "File name too long"),
    "class": (["photo.png", "--target", "dgo"], "Did you mean 'dog'"),
    "class number": (["photo.png", "--target", "5"], "0…4"),
    "negative class": (["photo.png", "--target=-1"], "0…4"),
    "against": (["photo.png", "--against", "nobody"], "has no class 'nobody'"),
    "same classes": (["photo.png", "--target", "3", "--against", "dog"], "two different classes"),
    "against agnostic": (["photo.png", "--against", "1", "--method", "rollout"], "--against has no effect"),
    "top agnostic": (["photo.png", "--top", "2", "--method", "rollout"], "--top has no effect"),
    "top and target": (["photo.png", "--top", "2", "--target", "1"], "use only one of them"),
    "method": (["photo.png", "--method", "decompxx"], "Did you mean decompx"),
    "parameter": (["photo.png", "-p", "speed=3"], "no parameter speed"),
    "parameter form": (["photo.png", "-p", "speed"], "parameter=value"),
    "layer": (["photo.png", "-p", "start_layer=77"], "layer 77 "),
    "device": (["photo.png", "--device", "quantum"], "device 'quantum'"),
    "dtype": (["photo.png", "--dtype", "int4"], "unknown dtype"),
    "out is a file": (["photo.png", "--out", "notes.txt"], "not a writable folder"),
    "out below a file": (["photo.png", "--out", "notes.txt/out"], "not a writable folder"),
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
    before = files_in(place)
    result = vit("explain", *arguments, *tiny)
    assert message in error_line(result)
    assert files_in(place) == before


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
    assert message in error_line(vit("explain", photo, *arguments))
    assert files_in(place) == {"photo.png"}


def test_broken_weights(vit: Run, photo: Path, place: Path) -> None:
    module = families.build("hf_vit")
    with torch.no_grad():
        module.classifier.bias[0] = torch.nan
    module.save_pretrained(place / "broken")
    before = files_in(place)
    for options in ([], ["--top", "2"]):
        assert "weights are broken (classifier.bias)" in error_line(
            vit("explain", photo, "--model", "hf:./broken", *options)
        )
    assert files_in(place) == before


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
    assert "No space left on device" in error_line(vit("explain", photo, *tiny, "--top", top))
    assert files_in(place) == {"photo.png"}


@pytest.fixture
def labelled(place: Path, vit: Run, tiny: list[str]) -> Path:
    """A photograph that the model gets right, one that it gets wrong, a mask, and files that are no images."""
    folder = place / "labelled"
    noise(0).save(place / "photo.png")
    vit("explain", place / "photo.png", *tiny, "--out", place / "first")
    predicted = vitrail.open(place / "first" / "photo.decompx.skipplus.json", check=False).target
    names = [f"{index}" for index in range(5)]
    for name, index in (("right.jpg", predicted), ("wrong.jpg", (predicted + 1) % 5)):
        (folder / names[index]).mkdir(parents=True)
        noise(0).save(folder / names[index] / name, quality=100, subsampling=0)
    Image.new("1", (60, 40)).save(folder / names[predicted] / "right.png")
    (folder / "IMG_1.HEIC").write_text("x")
    return folder


def test_a_labelled_folder_is_read_as_the_benchmark_reads_it(
    vit: Run, tiny: list[str], labelled: Path, place: Path
) -> None:
    result = vit("explain", labelled, *tiny)
    assert result.code == 0, result.err
    assert "IMG_1.HEIC (HEIC needs an extra package: pip install pillow-heif)" in result.out
    with open(place / "vitrail-out" / "explanations.csv", newline="") as file:
        rows = {Path(row["image"]).name: row for row in csv.DictReader(file)}
    assert rows.keys() == {"right.jpg", "wrong.jpg", "IMG_1.HEIC"}
    assert rows["right.jpg"]["true"] == rows["right.jpg"]["label"]
    assert rows["wrong.jpg"]["true"] not in ("", rows["wrong.jpg"]["label"])
    assert f"the true class is {rows['wrong.jpg']['true']}" in result.out
    explained = vitrail.open(place / "vitrail-out" / "wrong.decompx.skipplus.json", check=False)
    assert explained.true_label == rows["wrong.jpg"]["true"]
    assert vit("bench", "--data", labelled, *tiny, "--methods", "random", "--metrics", "sparseness").code == 0


def test_why_is_it_wrong(vit: Run, tiny: list[str], labelled: Path, place: Path) -> None:
    result = vit("explain", labelled, *tiny, "--target", "@label", "--against", "@predicted")
    assert result.code == 0, result.err
    assert "right.jpg: the model is right here" in result.out
    explained = vitrail.open(place / "vitrail-out" / "wrong.decompx.skipplus.label.not-predicted.json", check=False)
    assert (explained.label, explained.against) == (explained.true_label, explained.top[0][0])
    with open(place / "vitrail-out" / "explanations.csv", newline="") as file:
        rows = {Path(row["image"]).name: row for row in csv.DictReader(file)}
    assert (rows["right.jpg"]["error"], rows["wrong.jpg"]["skipped"]) == ("", "")
    assert "the model is right" in rows["right.jpg"]["skipped"]
    (wrong,) = labelled.rglob("wrong.jpg")
    (right,) = labelled.rglob("right.jpg")
    options = [*tiny, "--methods", "rollout,grad_cam", "--target", "@label", "--against", "@predicted"]
    (wrong.parent / "labels.csv").write_text(f"wrong.jpg,{wrong.parent.name}\n")
    assert vit("compare", wrong, *options).code == 0
    compared = json.loads((place / "vitrail-out" / "wrong.compare.label.not-predicted.json").read_text())
    assert [item["against"] for item in compared] == [None, explained.against]  # rollout is the same for every class
    (right.parent / "labels.csv").write_text(f"right.jpg,{right.parent.name}\n")
    assert "the model is right here" in error_line(vit("compare", right, *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "@label"], "@label is the true class, which is not known of this image: put it into a folder"),
        (["--target", "@truth"], "there is no class '@truth': expected @label, @predicted, a name or a number"),
        (["--against", "@predicted"], "the target and --against are both @predicted: use two different classes"),
        (["--target", "dog", "--against", "3"], r"--target and --against are both dog: use two different classes\.$"),
        (["--target", "@label", "--against", "@label"], "--target and --against are both @label"),
        (["--target", ""], "the name of a class is empty: give a name or a number"),
        (["--against", " "], "the name of a class is empty"),
        (["--against", "LIKELIEST"], "the predicted class and --against are both .* --target, e.g. --target @label"),
    ],
)
def test_questions_without_an_answer(
    options: list[str], message: str, vit: Run, tiny: list[str], photo: Path, place: Path
) -> None:
    if "LIKELIEST" in options:
        vit("explain", photo, *tiny)
        saved = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.json", check=False)
        options = ["--against", str(saved.target)]
    assert re.search(message, error_line(vit("explain", photo, *tiny, *options)))


def test_preprocessing_is_the_users(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--fit", "pad", "--mean", "0.1,0.2,0.3", "--std", "0.5", "--interpolation", "nearest"]
    result = vit("explain", photo, *tiny, *options)
    assert result.code == 0, result.err
    assert "longer edge scaled to 32 pixels, the rest padded (nearest); mean 0.1, 0.2, 0.3; std 0.5" in result.out
    saved = json.loads((place / "vitrail-out" / "photo.decompx.skipplus.json").read_text())["model"]["preprocessing"]
    assert (saved["fit"], saved["mean"], saved["interpolation"]) == ("border", [0.1, 0.2, 0.3], "nearest")
    reopened = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.json")  # loads with the same options
    assert reopened.model is not None
    assert reopened.model.preprocessing.to_dict() == saved
    plan = ["--data", place, "--methods", "random", "--metrics", "sparseness", "--out", place / "run"]
    result = vit("bench", *plan, *tiny, *options, "--crop-pct", 0.9)
    assert result.code == 0, result.err
    described = load_model(Store(place / "run").plan().models[0]).preprocessing
    assert f": {described.describe()}." in result.out.replace("\n", " ")
    assert described.to_dict() in Store(place / "run").environment()["preprocessing"].values()
    assert (described.mean, described.interpolation) == ((0.1, 0.2, 0.3), "nearest")
    assert "fit" in (place / "run" / "plan.toml").read_text()
    for wrong, message in (
        (["--fit", "stretch"], "expected squash, crop or pad"),
        (["--mean", "a,b,c"], "--mean is 'a,b,c', expected one number or three"),
        (["--std", "0.5,0.5"], "expected three numbers, one per colour"),
    ):
        assert message in error_line(vit("explain", photo, *tiny, *wrong))


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        ((1, 1), [], "only 1 × 1 pixels"),
        ((900, 30), ["--fit", "crop"], "sees 3% of the image"),
        ((900, 30), ["--fit", "squash"], "30 times more in one direction"),
        ((900, 30), ["--fit", "pad"], None),
        ((60, 40), [], None),
    ],
)
def test_images_that_the_model_hardly_sees_are_warned_about(
    size: tuple[int, int], options: list[str], message: str | None, vit: Run, tiny: list[str], place: Path
) -> None:
    Image.new("RGB", size).save(place / "odd.png")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = vit("explain", place / "odd.png", *tiny, *options)
    assert result.code == 0, result.err
    assert (message in result.err) if message else (result.err == "")


def test_every_skipped_file_is_in_the_table(vit: Run, tiny: list[str], shelf: Path) -> None:
    for number in range(30):
        (shelf / f"note-{number}.heic").write_bytes(b"x")
    assert vit("explain", shelf, *tiny, "--no-trust").code == 0
    with open(shelf.parent / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    skipped = {Path(row["image"]).name: row["skipped"] for row in rows if row["skipped"]}
    assert set(skipped) == {f"note-{number}.heic" for number in range(30)}
    assert all("pillow-heif" in reason for reason in skipped.values())
    assert len(rows) == 33


def test_results_are_written_and_reported_in_order(
    vit: Run, tiny: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are drawn in threads: the second is ready before the first."""
    monkeypatch.setattr("vitrail.pipeline.threads", lambda: 2)
    second, draw = threading.Event(), explain.Run._drawn

    def drawn(self: explain.Run, name: str, *arguments: Any) -> explain.Drawn:
        if name == "0.png":
            assert second.wait(60)
        try:
            return draw(self, name, *arguments)
        finally:
            if name == "1.png":
                second.set()

    monkeypatch.setattr(explain.Run, "_drawn", drawn)
    (place / "many").mkdir()
    for number in range(6):
        noise(number).save(place / "many" / f"{number}.png")
    (place / "many" / "2.png").write_bytes(b"broken")
    assert vit("explain", "many", *tiny, "--no-trust").code == 1
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows] == [f"{number}.png" for number in range(6)]
    assert [bool(row["error"]) for row in rows] == [number == 2 for number in range(6)]
    assert all(Path(row["picture"]).is_file() for row in rows if not row["error"])


@pytest.mark.parametrize("place_of_the_stop", ["trust", "write", "read", "draw"])
def test_ctrl_c_keeps_what_is_explained_and_no_picture_is_missing_from_the_table(
    place_of_the_stop: str, vit: Run, tiny: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it arrives, while up to four images are explained and not written yet."""
    monkeypatch.setattr("vitrail.pipeline.threads", lambda: 2)
    (place / "many").mkdir()
    for number in range(6):
        noise(number).save(place / "many" / f"{number}.png")
    calls, explained, explain_one = 0, list[str](), explain.Run._explained

    def noted(run: explain.Run, path: Path, *arguments: Any) -> Any:
        task = explain_one(run, path, *arguments)
        explained.append(f"{path.stem}.decompx.skipplus.png")
        return task

    def stop_at_the_fourth(function: Any, counts: Callable[..., bool] = lambda *_: True) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += counts(*arguments)
            if calls == 4:
                calls += 1
                raise KeyboardInterrupt
            return function(*arguments)

        return counted

    def waits_for_a_picture(waiting: Sequence[Future[Any]]) -> bool:
        return isinstance(waiting[0].result(), explain.Drawn) == (place_of_the_stop == "draw")

    monkeypatch.setattr(explain.Run, "_explained", noted)
    if place_of_the_stop == "trust":  # while the fourth is explained
        monkeypatch.setattr(Explanation, "trust", stop_at_the_fourth(Explanation.trust))
    elif place_of_the_stop == "write":  # while others are explained and drawn
        monkeypatch.setattr(explain, "write_together", stop_at_the_fourth(explain.write_together))
    else:
        monkeypatch.setattr(pipeline, "_awaited", stop_at_the_fourth(pipeline._awaited, waits_for_a_picture))
    result = vit("explain", "many", *tiny)
    assert result.code == 130, result.err
    out = place / "vitrail-out"
    with open(out / "explanations.csv", newline="", encoding="utf-8") as file:
        listed = [Path(row["picture"]).name for row in csv.DictReader(file)]
    assert listed == explained
    assert len(listed) >= 3
    assert {path.name for path in out.glob("*.png")} == {*listed, "contact-sheet.png"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vitrail-ahead")]
