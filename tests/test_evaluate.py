"""``evaluate``: rows, classes, protocols, what is left out, and the command line around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import state_of
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.cli.program import app
from vitrail.data import Example, InMemory, Object, Scenes
from vitrail.data.annotations import annotated, class_map, own_class
from vitrail.geometry import fill_boxes
from vitrail.metrics import build_metric, measure, summarise
from vitrail.models.view import View
from vitrail.targets import Box, Callable, Class, Contrast, Group, Text

QUICK = ["insertion(steps=4)", "deletion(steps=4)", "pointing_game", "discriminativity", "token_deletion_accuracy"]


@pytest.fixture(scope="module")
def view() -> vitrail.models.view.View:
    return vitrail.load("scenes")


def test_one_row_per_image_method_and_metric(view) -> None:
    before = state_of(view.module)
    rows = vitrail.evaluate(view, "scenes:3", "gen_att,random(seed=3)", QUICK, target="label", curves=True)
    examples = vitrail.data.open_data("scenes:3").ids
    assert list(rows.columns) == [
        "image",
        "method",
        "params",
        "metric",
        "value",
        "target",
        "explained",
        "seconds",
        "ties",
        "curve",
    ]
    ordered = rows["metric"] != "discriminativity"
    assert rows[ordered]["ties"].between(0, 1).all()
    assert rows[~ordered]["ties"].isna().all(), "shares of mass need no order"
    assert len(rows) == len(examples) * 2 * len(QUICK)
    assert set(rows["image"]) == set(examples)
    assert set(rows["metric"]) == set(QUICK)
    assert set(rows["params"]) == {"{}", '{"seed": 3}'}
    assert set(rows["explained"]) == {"label"}
    assert rows[rows["metric"] == QUICK[0]]["curve"].map(len).eq(5).all()
    after = state_of(view.module)
    assert all(torch.equal(a, after["tensors"][n]) for n, a in before["tensors"].items())


def test_values_are_those_of_measure(view) -> None:
    rows = vitrail.evaluate(view, "scenes:2", ["gen_att"], ["insertion(steps=5)", "mean_iou"], batch_size=3)
    data = vitrail.data.open_data("scenes:2")
    for i, example in enumerate(data):
        pixels = view.preprocess(example.image)[None]
        target = int(view.class_scores(view.logits(pixels)).argmax())
        result = vitrail.explain(view, example.image, "gen_att")
        assert result.target == target
        own = next((o for o in example.objects if o.label == target), None)
        (scored,) = measure("insertion", view, pixels, result.map[None], target, steps=5)
        value = rows[(rows["image"] == data.ids[i]) & rows["metric"].str.startswith("insertion")]["value"].item()
        assert value == pytest.approx(scored.value, rel=1e-5)
        if own is not None:
            (scored,) = measure(
                "mean_iou", view, pixels, result.map[None], target, masks=torch.from_numpy(own.mask)[None]
            )
            value = rows[(rows["image"] == data.ids[i]) & (rows["metric"] == "mean_iou")]["value"].item()
            assert value == pytest.approx(scored.value, rel=1e-5)


@pytest.mark.parametrize("metric", ["max_sensitivity(samples=3)", "model_randomization"])
def test_methods_share_the_traces_that_a_metric_of_methods_asks_for(metric: str, forwards: list[int]) -> None:
    methods = ["gen_att", "raw_attention", "attn_cam"]
    alone, passes = [], []
    for method in methods:
        forwards.clear()
        alone.append(vitrail.evaluate("scenes", "scenes:2@1", method, metric, target="label"))
        passes.append(sum(forwards))
    forwards.clear()
    together = vitrail.evaluate("scenes", "scenes:2@1", methods, metric, target="label")
    assert sum(forwards) == max(passes), "one forward pass of each noisy image, or randomised model, serves all methods"
    values = together.sort_values("image", kind="stable").groupby("method", sort=False)["value"].apply(list)
    for method, rows in zip(methods, alone, strict=True):
        assert values[method] == pytest.approx(rows.sort_values("image")["value"].tolist(), abs=1e-5)


def test_papers_say_which_class_is_explained(view) -> None:
    asked = {"tis": "sparseness", "skipplus": "token_insertion_aopc", "vtranm": "aopc(steps=2)"}
    for protocol, expected in (("tis", {"label"}), ("skipplus", {"label"}), ("vtranm", {"predicted", "label"})):
        rows = vitrail.evaluate(view, "scenes:2", "raw_attention", asked[protocol], protocol=protocol)
        assert set(rows["explained"]) == expected
        assert rows["metric"].str.contains(f"protocol={protocol}").all()
    assert set(vitrail.evaluate(view, "scenes:1", "raw_attention", "sparseness")["explained"]) == {"predicted"}
    rows = vitrail.evaluate(view, "scenes:1", "raw_attention", "mean_iou", protocol="tis")
    assert set(rows["explained"]) == {"label"}, (
        "the paper says which class, also where a metric has no conventions of it"
    )
    with pytest.raises(VitrailError, match="no protocol 'tiss': expected default, tis"):
        vitrail.evaluate(view, "scenes:1", "raw_attention", "sparseness", protocol="tiss")


def test_maps_that_ignore_the_class_have_equal_columns_and_others_do_not(view) -> None:
    """The accuracy while pixels vanish asks for the true class: only the map can make a difference."""
    rows = vitrail.evaluate(view, "scenes:12@3", "raw_attention, gen_att", "positive_auc(steps=5)", protocol="vtranm")
    wide = rows.pivot_table(index=["method", "image"], columns="explained", values="value")
    same, other = wide.loc["raw_attention"], wide.loc["gen_att"]
    assert np.array_equal(same["predicted"], same["label"])
    assert not np.allclose(other["predicted"], other["label"])


def test_broken_images_are_counted_or_fatal(view, tmp_path: Path) -> None:
    for i, scene in enumerate(Scenes(3, seed=1)):
        Image.fromarray(scene.image).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match="1 of 3 images were left out"):
        rows = vitrail.evaluate(view, tmp_path, "random", "sparseness")
    assert len(rows) == 2
    assert list(rows.attrs["skipped"]) == ["1.png"]
    with pytest.raises(VitrailError, match=r"1\.png"):
        vitrail.evaluate(view, tmp_path, "random", "sparseness", strict=True)
    for name in ("0.png", "2.png"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(VitrailError, match="3 were left out"):
        vitrail.evaluate(view, tmp_path, "random", "sparseness")


def test_what_cannot_be_measured_is_told_before_much_is_done(view, tmp_path: Path) -> None:
    picture = Image.fromarray(Scenes(1, seed=1)[0].image)
    for data, metrics, target, text in (
        ([picture], "mean_iou", None, "mean_iou needs masks"),
        ([picture], "pointing_game", None, "needs boxes or masks"),
        ([picture], "sparseness", "label", "true class"),
        ([(picture, 99)], "sparseness", None, "label 99 is outside the 10 classes"),
        ([], "sparseness", None, "empty|no image"),
        ("scenes:2", "sparsness", None, "Did you mean sparseness"),
        ("scenes:2", "insertion(stpes=3)", None, "no parameter stpes"),
    ):
        with pytest.raises(VitrailError, match=text):
            vitrail.evaluate(view, data, "random", metrics, target=target)
    with pytest.raises(VitrailError, match="target must be"):
        vitrail.evaluate(view, "scenes:2", "random", "sparseness", target="both")
    method = vitrail.methods.registry.build_method("random", vitrail.load("photo"))
    with pytest.raises(VitrailError, match="built for another model"):
        vitrail.evaluate(view, "scenes:2", [method], "sparseness")


@pytest.mark.parametrize(
    ("model", "target", "label"),
    [
        ("scenes", 3, None),
        ("scenes", torch.tensor(3), None),
        ("scenes", "star", None),
        ("scenes", Class("star"), None),
        ("scenes", Group(["star", "disc"]), "disc or star"),
        ("scenes", Callable(lambda tokens, pooled, logits: logits[:, 0] - logits[:, 1], "difference"), "difference"),
        ("scenes-text", "a large red star", "a large red star"),
        ("scenes-text", Text("a large red star"), "a large red star"),
    ],
    ids=lambda value: None if callable(getattr(value, "function", None)) else str(value),
)
def test_one_question_about_all_images(model: str, target: Any, label: str | None) -> None:
    rows = vitrail.evaluate(model, "scenes:2@1" if model == "scenes" else "scenes_text:1", "gradient", "sparseness",
                            target=target)  # fmt: skip
    data = vitrail.data.open_data("scenes:2@1" if model == "scenes" else "scenes_text:1")
    assert set(rows["explained"]) == {"target"}
    expected = vitrail.explain(model, [example.image for example in data], "gradient", target)
    assert rows["target"].tolist() == [ex.target for ex in expected]
    assert label in (None, expected[0].label)
    values = [ex.score("sparseness")["sparseness"] for ex in expected]
    assert rows["value"].tolist() == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "both",
            'target must be "predicted", "label", "region", "box", a class or another target: .* no class \'both\'',
        ),
        (99, "there is no class 99"),
        (3.5, "a class is an integer or a name, but got 3.5"),
        (["star", "disc"], 'asks the same of all images, but got several targets: .* ask for target="label"'),
        (torch.tensor([3, 4]), "asks the same of all images, but got several targets"),
        (Contrast("star", "disc"), "metrics measure the score of a single target: evaluate that of the Contrast alone"),
        (Text("a star"), "reads no texts"),
        (Box(), "detects no boxes"),
    ],
    ids=str,
)
def test_questions_that_evaluate_does_not_take(view, target: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.evaluate(view, "scenes:1", "random", "sparseness", target=target)


def test_objects_are_seen_through_the_crop(view) -> None:
    size = (120, 80)
    mask = np.zeros((80, 120), bool)
    mask[30:50, 50:70] = True
    example = Example("one", Image.new("RGB", size), 2, (Object(2, None, mask), Object(4, (0.0, 0.0, 60.0, 80.0))))
    annotations = annotated(view, example, 2, 2, lambda label: label)
    box = view.preprocessing.boxes([(50.0, 30.0, 70.0, 50.0)], size)
    assert annotations["boxes"] == box
    assert torch.equal(annotations["region"], view.preprocessing.mask(mask))
    assert annotations["from_masks"]
    assert torch.equal(
        annotations["others"], fill_boxes(view.preprocessing.boxes([(0.0, 0.0, 60.0, 80.0)], size), view.size)
    )
    wrong = annotated(view, example, 7, 2, lambda label: label)
    assert torch.equal(wrong["region"], annotations["region"]), "a wrong prediction is explained by what is there"
    assert annotated(view, Example("none", Image.new("RGB", size)), 2, None, int)["region"] is None


def test_the_largest_class_is_that_of_what_the_model_sees(view) -> None:
    """In a wide picture the largest thing stands outside of the square that the model sees."""
    left, middle = np.zeros((50, 200), bool), np.zeros((50, 200), bool)
    left[:, :60], middle[10:40, 90:110] = True, True
    objects = (Object(4, None, left), Object(7, None, middle), Object(7, (80.0, 0.0, 90.0, 10.0)))
    example = Example("wide", Image.new("RGB", (200, 50)), 4, objects, by_area=True)
    assert view.preprocessing.box((200, 50))[0] > 60
    assert own_class(view, example, lambda label: label + 1) == 8
    assert own_class(view, replace(example, by_area=False), int) == 4
    assert own_class(view, replace(example, objects=objects[:1]), int) == 4, "nothing else is known"
    assert own_class(view, Example("none", example.image, by_area=True), int) is None
    rows = vitrail.evaluate(view, [example], "random", "pointing_game", target="label")
    assert rows["target"].tolist() == [7]


def test_classes_are_matched_by_name(view) -> None:
    names = list(view.labels)
    picture = Image.new("RGB", (64, 64))
    few = InMemory([(picture, 0)], labels=[names[3], names[1]])
    assert [class_map(view, few)(i) for i in (0, 1)] == [3, 1]
    assert class_map(view, InMemory([(picture, 0)], labels=names[::-1]))(0) == len(names) - 1
    assert class_map(view, InMemory([(picture, 0)], labels=[f"n{i}" for i in range(len(names))]))(4) == 4
    for label in (-1, 2, 99):
        with pytest.raises(VitrailError, match=f"a label {label}, but only the classes 0…1"):
            class_map(view, few)(label)
    with pytest.raises(VitrailError, match="names do not match"):
        class_map(view, InMemory([(picture, 0)], labels=["zebra", "elephant"]))


@pytest.mark.parametrize(
    ("labels", "numbered", "label", "index"),
    [
        (["", "", "", "{3}"], True, 3, 3),  # a table with the numbers and names of some of the classes
        (["", "", "", "{3}"], True, 2, 2),
        (["", "ours"], True, 1, 1),  # names of the user's own are no error
        (["{5}", "{2}"], True, 0, 5),  # numbers of the user's own
        (["{3}".upper(), " {1}_"], False, 0, 3),
    ],
)
def test_numbers_are_kept_and_names_checked(view, labels, numbered, label, index) -> None:
    data = InMemory([], labels=[name.lower().format(*view.labels).upper() for name in labels])
    data.numbered = numbered
    assert class_map(view, data)(label) == index


def test_a_folder_of_some_classes_written_otherwise(view, tmp_path) -> None:
    for name in (view.labels[3].upper(), f"{view.labels[1]}_"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (64, 64)).save(tmp_path / name / "a.png")
    (tmp_path / "IMG_1.heic").write_text("x")
    rows = vitrail.evaluate(view, tmp_path, "random", "sparseness", target="label")
    assert sorted(rows["target"]) == [1, 3]
    assert list(rows.attrs["skipped"]) == ["IMG_1.heic"]


def test_numbers_that_contradict_their_names_are_refused(view) -> None:
    data = InMemory([], labels=["ours", view.labels[5]])
    data.numbered = True
    with pytest.raises(VitrailError, match=rf"the number 1 for '{view.labels[5]}', which is class 5 of"):
        class_map(view, data)


def test_a_subset_of_classes_needs_the_names_of_the_model(view) -> None:
    nameless = replace(view, labels=None)
    with pytest.raises(VitrailError, match=r"\(2\) .* names do not match"):
        class_map(nameless, InMemory([], labels=["cat", "dog"]))
    assert class_map(nameless, InMemory([], labels=["4", "2"]))(0) == 4


def test_summary_has_means_intervals_and_counts(view) -> None:
    rows = vitrail.evaluate(view, "scenes:6", "gen_att,random", "sparseness,mean_iou,pointing_game", target="label")
    table = summarise(rows)
    assert list(table.columns) == ["method", "params", "metric", "explained", "mean", "low", "high", "n"]
    assert len(table) == 6
    assert (table["low"] <= table["mean"]).all()
    assert (table["mean"] <= table["high"]).all()
    own = rows[(rows["method"] == "gen_att") & (rows["metric"] == "mean_iou")]
    parts = torch.tensor(own["parts"].tolist()).double()
    line = table[(table["method"] == "gen_att") & (table["metric"] == "mean_iou")].iloc[0]
    assert line["mean"] == pytest.approx(float(build_metric("mean_iou").combine(parts)))
    assert line["mean"] != pytest.approx(own["value"].mean(), rel=1e-6)


def test_reduced_precision_hardly_moves_areas(view, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does by default, forced on the CPU."""
    arguments = (view, "scenes:2", "gen_att", "insertion(steps=8),token_deletion_aopc")
    exact = vitrail.evaluate(*arguments)["value"]
    monkeypatch.setattr(View, "gains_from_half", True)
    rounded = vitrail.evaluate(*arguments)["value"]
    assert 0 < (rounded - exact).abs().max() < 0.01
    full = vitrail.evaluate(view, "scenes:2", "gen_att(precision=full)", "insertion(steps=8, precision=full)")["value"]
    assert np.allclose(full, exact[: 2 * len(full) : 2], atol=1e-6)


def test_command_line_scores_what_it_draws(tmp_path: Path) -> None:
    Image.fromarray(Scenes(1, seed=3)[0].image).save(tmp_path / "scene.png")
    runner = CliRunner()
    outcome = runner.invoke(
        app,
        [
            "explain",
            str(tmp_path / "scene.png"),
            "-m",
            "scenes",
            "--curves",
            "--out",
            str(tmp_path / "out"),
            "--json",
            "--no-trust",
        ],
    )
    assert outcome.exit_code == 0, outcome.output
    (result,) = json.loads(outcome.stdout)
    insertion, deletion = "insertion(steps=32)", "deletion(steps=32)"
    assert set(result["scores"]) == {insertion, deletion}
    assert result["scores"][insertion] > result["scores"][deletion]
    assert len(result["curves"][insertion]) == 33
    with Image.open(tmp_path / "out" / "scene.decompx.skipplus.curves.png") as picture:
        assert picture.width > 400
    again = vitrail.open(tmp_path / "out" / "scene.decompx.skipplus.json")
    assert again.scores == result["scores"]
    assert again.score([insertion, deletion]) == pytest.approx(result["scores"])


def test_command_line_prints_the_scores(tmp_path: Path) -> None:
    Image.fromarray(Scenes(1, seed=3)[0].image).save(tmp_path / "scene.png")
    outcome = CliRunner().invoke(
        app,
        [
            "explain",
            str(tmp_path / "scene.png"),
            "-m",
            "scenes",
            "--score",
            "--no-trust",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert outcome.exit_code == 0, outcome.output
    scores = vitrail.open(tmp_path / "out" / "scene.decompx.skipplus.json").scores
    for name in ("insertion", "deletion"):
        assert f"{name} {scores[f'{name}(steps=32)']:.3f} (random " in " ".join(outcome.output.split())
    assert not list((tmp_path / "out").glob("*.curves.png"))


def test_explanations_of_tensors_are_scored_too(view) -> None:
    pixels = view.preprocess(Image.fromarray(Scenes(1, seed=3)[0].image))
    result = vitrail.explain(view, pixels, "gen_att")
    scores = result.score(["insertion(steps=8)"])
    (expected,) = measure("insertion", view, pixels[None], result.map[None], result.target, steps=8)
    assert scores["insertion(steps=8)"] == pytest.approx(expected.value, rel=1e-5)
    result.model = None
    with pytest.raises(VitrailError, match="without its model"):
        result.score()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": []}, "no method was given"),
        ({"methods": " , "}, "no method was given"),
        ({"metrics": []}, "no metric was given"),
        ({"metrics": ""}, "no metric was given"),
        ({"images": 0}, "images must be at least 1, but got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"batch_size": "a"}, "batch_size must be an integer of at least 1"),
    ],
)
def test_what_is_empty_is_named(options: dict[str, Any], message: str, view) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.evaluate(view, "scenes:2", **options)


def test_metrics_are_listed() -> None:
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["metrics", "--json"]).stdout)
    assert {row["name"] for row in rows} == set(vitrail.list_metrics())
    assert "token_insertion_aopc" in runner.invoke(app, ["metrics", "token*"]).output
    assert isinstance(runner.invoke(app, ["metrics", "nothing*"]).exception, VitrailError)
