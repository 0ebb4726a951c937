"""Tasks return what the library returns."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.app.serving import CAT

import vitrail
from vitrail.app.server import tasks
from vitrail.app.server.catalogue import describe_methods_of, describe_model, parameter_form
from vitrail.app.server.jobs import Cancelled
from vitrail.app.server.responses import to_json
from vitrail.methods.registry import describe_methods, get_method, list_methods, supported_methods
from vitrail.metrics import measure
from vitrail.models.view import View
from vitrail.progress import counted, shown, watched

IMAGE = Image.open(io.BytesIO(CAT)).convert("RGB")


@pytest.fixture(scope="module")
def view() -> View:
    return vitrail.load("scenes")


@pytest.fixture(scope="module")
def swin() -> View:
    return vitrail.wrap(families.build("timm_swin"), name="swin")


def silent(what: str, said: dict[str, Any]) -> None:
    """Nobody listens."""


def request(**fields: Any) -> tasks.Request:
    return tasks.Request("scenes", "0" * 64, IMAGE, fields)


def close(found: Any, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(np.array(found), wanted.numpy(), rtol=1e-5, atol=1e-12)


def test_predict_says_what_the_model_says(view: View) -> None:
    found = tasks.predict(view, request(top=3), silent)
    probabilities = view.probabilities(view.logits(view.preprocess(IMAGE)[None]))[0]
    best = probabilities.argsort(descending=True)[:3]
    assert [one["index"] for one in found["classes"]] == best.tolist()
    close([one["probability"] for one in found["classes"]], probabilities[best].detach())
    assert [one["label"] for one in found["classes"]] == [view.labels[i] for i in best]
    assert found["size"] == list(IMAGE.size)
    assert found["box"] == list(view.preprocessing.box(IMAGE.size))
    assert found["grid"] == [8, 8]


@pytest.mark.parametrize("method", [None, "grad_cam", "epsilon_lrp", "rollout"])
def test_explain_says_what_the_library_says(view: View, method: str | None) -> None:
    found = tasks.explain(view, request(method=method, target="star"), silent)
    wanted = vitrail.explain(view, IMAGE, method, target="star")
    close(found["values"], wanted.map)
    assert found["shape"] == list(wanted.map.shape)
    close(found["tokens"], tasks.on_grid(view, wanted.map))
    own = wanted.to_dict()
    assert own.keys() - found.keys() == {"map"}
    for name in own.keys() - {"map", "seconds", "signed", "extras"}:
        assert found[name] == own[name], name
    assert found["signed"] == (wanted.signed if wanted.signed is not None else bool((wanted.map < 0).any()))
    json.loads(to_json(found))


def test_parameters_and_a_rival_reach_the_method(view: View) -> None:
    fields = {"method": "rise", "target": "star", "params": {"masks": 40, "seed": 3}}
    found = tasks.explain(view, request(**fields), silent)
    close(found["values"], vitrail.explain(view, IMAGE, "rise", target="star", masks=40, seed=3).map)
    found = tasks.explain(view, request(target="star", against="ring"), silent)
    close(found["values"], vitrail.explain(view, IMAGE, target="star", against="ring").map)
    assert found["against_label"] == "ring"


def test_large_maps_are_reduced(view: View) -> None:
    values = torch.rand(500, 300)
    assert tasks.reduce_map(values, 224).shape == (224, 224)
    assert tasks.reduce_map(values, 400).shape == (400, 300)
    assert tasks.reduce_map(values, 500) is values
    found = tasks.explain(view, request(method="epsilon_lrp"), silent)
    assert found["shape"] == [64, 64]
    assert not found["reduced"]


def test_scores_are_those_of_the_metrics(view: View) -> None:
    found = tasks.score(view, request(target="star", steps=8), silent)
    explained = vitrail.explain(view, IMAGE, target="star")
    pixels = view.preprocess(IMAGE)[None]
    for name in ("insertion", "deletion"):
        (wanted,) = measure(name, view, pixels, explained.map[None], explained.target, steps=8)
        assert found[name] == pytest.approx(wanted.value, rel=1e-6)
        assert found["curves"][name] == pytest.approx(wanted.curve, rel=1e-6)


def test_token_curves_are_those_of_true_masking(view: View) -> None:
    found = tasks.score(view, request(target="star", steps=4, space="tokens"), silent)
    target, tokens = view.class_index("star"), view.embed(view.preprocess(IMAGE)[None])
    order, counts = found["order"], found["counts"]
    assert sorted(order) == list(range(64))
    assert counts == [0, 16, 32, 48, 64]
    flat = torch.tensor(tasks.explain(view, request(target="star"), silent)["tokens"]).flatten()
    assert (flat[order].diff() <= 0).all()
    for i, count in enumerate(counts):
        for name, kept in (("deletion", order[count:]), ("insertion", order[:count])):
            logits = view.encode(tokens, torch.tensor(sorted(kept), dtype=torch.long)[None])
            wanted = float(view.probabilities(logits)[0, target])
            assert found["curves"][name][i] == pytest.approx(wanted, rel=1e-4, abs=1e-7), (name, i)
    ranks = torch.tensor(found["ranks"]).flatten()
    assert ranks[order].tolist() == list(range(64))


@pytest.mark.parametrize("fields", [{"removed": [0, 9, 63]}, {"kept": [0, 9, 63]}, {"removed": []}, {"kept": []}])
def test_masks_are_those_of_encode(view: View, fields: dict[str, list[int]]) -> None:
    found = tasks.mask(view, request(target="star", **fields), silent)
    given = next(iter(fields.values()))
    keep = given if "kept" in fields else [i for i in range(64) if i not in given]
    tokens, target = view.embed(view.preprocess(IMAGE)[None]), view.class_index("star")
    logits = view.encode(tokens, torch.tensor(keep, dtype=torch.long)[None])
    assert found["probability"] == pytest.approx(float(view.probabilities(logits)[0, target]), rel=1e-5)
    whole = float(view.probabilities(view.encode(tokens))[0, target])
    assert found["full"] == pytest.approx(whole, rel=1e-5)
    assert found["kept"] == len(keep)
    assert found["space"] == "tokens"


def test_a_patch_that_is_not_there_is_an_error(view: View) -> None:
    with pytest.raises(vitrail.VitrailError, match="no patch 64"):
        tasks.mask(view, request(removed=[64]), silent)


def test_compare_tells_each_method_as_it_comes(view: View) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    names = ["rollout", "tis", "grad_cam"]
    fields = {"methods": names, "against": "ring", "target": "star", "steps": 4}
    answer = tasks.compare(view, request(**fields), lambda what, said: heard.append((what, said)))
    parts = [said for what, said in heard if what == "partial"]
    assert parts == answer["results"]
    assert [part["method"] for part in parts] == names
    assert "same map for every class" in parts[0]["error"]  # against means nothing to it; the others go on
    (wanted,) = measure("insertion", view, view.preprocess(IMAGE)[None],
                        vitrail.explain(view, IMAGE, "grad_cam", "star", against="ring").map[None], "star",
                        steps=4)  # fmt: skip
    assert parts[2]["insertion"] == pytest.approx(wanted.value)
    said = [said for what, said in heard if what == "progress"]
    assert said[0]["methods"] == names
    done = [one["done"] for one in said]
    assert done == sorted(done)
    assert any(one["what"].startswith("tis: ") for one in said)


def test_the_bar_of_a_comparison_moves_within_a_method(view: View) -> None:
    done: list[float] = []
    tasks.compare(view, request(methods=["tis", "random"], steps=8, space="pixels"),
                 lambda what, said: done.append(said["done"]) if what == "progress" else None)  # fmt: skip
    within = [value for value in done if 0 < value < 1]
    assert len(set(within)) >= 5
    assert max(within) > 0.7
    assert done == sorted(done)
    assert all(0 <= value < 2 for value in done)


def test_a_method_that_takes_too_long_says_so_and_the_others_stay(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    now, logits = [0.0], type(view).logits

    def slow(self: View, pixels: torch.Tensor) -> torch.Tensor:
        now[0] += 1  # each pass takes a second
        return logits(self, pixels)

    monkeypatch.setattr(type(view), "logits", slow)
    monkeypatch.setattr(tasks, "monotonic", lambda: now[0])
    own = replace(request(methods=["grad_cam", "rise", "rollout"], steps=4), seconds=20.5)
    first, rise, last = tasks.compare(view, own, silent)["results"]
    assert "insertion" in first
    assert "insertion" in last
    assert rise["method"] == "rise"
    assert "longer than 20.5 seconds" in rise["error"]


def test_what_others_do_in_between_is_no_loss_to_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tasks, "monotonic", lambda: now[0])

    def interrupt(what: str, said: dict[str, Any]) -> None:
        now[0] += 100

    own = tasks.MethodProgress(interrupt, {"done": 0, "total": 1, "what": "tis"}, seconds=5)
    for done in range(4):
        now[0] += 1
        own.report("progress", {"what": "tis", "done": done, "total": 9})
    now[0] += 2
    with pytest.raises(tasks.MethodTimeout):
        own.report("progress", {"what": "tis", "done": 4, "total": 9})


def test_a_rival_means_nothing_to_a_method_without_classes(view: View) -> None:
    with pytest.raises(vitrail.VitrailError, match="rollout gives the same map for every class"):
        tasks.explain(view, request(method="rollout", against="ring"), silent)


def test_compare_scores_as_score_does(view: View) -> None:
    fields = {"steps": 4, "space": "tokens"}
    (row,) = tasks.compare(view, request(methods=["rollout"], **fields), silent)["results"]
    alone = tasks.score(view, request(method="rollout", **fields), silent)
    assert (row["insertion"], row["deletion"], row["space"]) == (alone["insertion"], alone["deletion"], "tokens")


def test_compare_without_scores_and_with_the_usual_methods(view: View) -> None:
    answer = tasks.compare(view, request(score=False), silent)
    assert answer["methods"] == [name for name in tasks.COMPARED if name in supported_methods(view)]
    assert len(answer["results"]) == 12
    assert not any("error" in one or "insertion" in one for one in answer["results"])


def test_an_unknown_method_of_a_comparison_is_an_error_at_once(view: View) -> None:
    with pytest.raises(vitrail.VitrailError, match="no method"):
        tasks.compare(view, request(methods=["rollout", "nonsense"]), silent)


def test_the_picture_is_that_of_the_explanation(view: View) -> None:
    drawn = Image.open(io.BytesIO(tasks.picture(view, request(target="star"), silent)))
    wanted = vitrail.explain(view, IMAGE, target="star").picture()
    np.testing.assert_array_equal(np.asarray(drawn), np.asarray(wanted))


def test_a_huge_picture_is_drawn_smaller(view: View) -> None:
    image = IMAGE.resize((3000, 1000))
    data = tasks.picture(view, tasks.Request("scenes", "1" * 64, image, {}), silent)
    drawn = Image.open(io.BytesIO(data))
    assert max(drawn.size) < 2300


def test_what_was_computed_is_not_computed_again(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(method="rise", params={"masks": 40})
    first = tasks.explain(view, one, silent)
    monkeypatch.setattr(tasks, "explain_each", lambda *_: pytest.fail("computed again"))
    assert tasks.explain(view, one, silent) == first
    tasks.score(view, tasks.Request(one.model, one.picture, IMAGE, {**one.fields, "steps": 4}, one.cache), silent)


def test_work_ends_where_telling_raises(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    encode = type(view).present
    monkeypatch.setattr(type(view), "present", lambda self, t, keep: scored.append(len(keep)) or encode(self, t, keep))

    def stop(what: str, said: dict[str, Any]) -> None:
        if said["total"] == 512 and said["done"] >= 128:
            raise Cancelled

    with pytest.raises(Cancelled):
        tasks.explain(view, request(method="tis", params={"masks": 512}), stop)
    assert 128 <= sum(scored) < 512
    monkeypatch.undo()
    tasks.explain(view, request(), silent)  # and nothing is left of it


def test_hierarchical_models_are_masked_with_their_mean_colour(swin: View) -> None:
    assert tasks.grid_of(swin) == (swin.size[0] // 16, swin.size[1] // 16)
    cells = tasks.grid_of(swin)[0] * tasks.grid_of(swin)[1]
    asked = tasks.Request("swin", "0" * 64, IMAGE, {"kept": list(range(cells // 2))})
    found = tasks.mask(swin, asked, silent)
    pixels = swin.preprocess(IMAGE)[None]
    half = pixels.shape[2] * (cells // 2 // tasks.grid_of(swin)[1]) // tasks.grid_of(swin)[0]
    painted = pixels.mean((2, 3), keepdim=True).expand_as(pixels).clone()
    painted[:, :, :half] = pixels[:, :, :half]
    with torch.no_grad():
        wanted = swin.probabilities(swin.logits(painted))[0, found["target"]]
    assert found["probability"] == pytest.approx(float(wanted), rel=1e-5)
    assert found["space"] == "pixels"
    assert describe_model("swin", swin)["view"] == "features"
    with pytest.raises(vitrail.VitrailError, match="space=pixels"):
        tasks.score(swin, tasks.Request("swin", "0" * 64, IMAGE, {"method": "grad_cam", "space": "tokens"}), silent)
    assert tasks.score(swin, tasks.Request("swin", "0" * 64, IMAGE, {"method": "grad_cam", "steps": 2}), silent)[
        "ranks"
    ]
    assert len(tasks.default_methods(swin)) >= 3


def test_rows_of_methods_are_those_of_the_command_line(view: View) -> None:
    rows = describe_methods_of(view)
    wanted = describe_methods("*", vitrail.load("scenes"))
    assert [{k: v for k, v in row.items() if k != "form"} for row in rows] == wanted


def test_every_parameter_has_an_entry_in_the_form() -> None:
    for name, info in list_methods().items():
        entries = parameter_form(get_method(name))
        assert [entry["name"] for entry in entries] == list(info.params)
        for entry in entries:
            assert entry["kind"] in ("integer", "number", "boolean", "choice", "text", "numbers")
            assert entry["optional"] or entry["default"] is not None
            if entry["kind"] == "choice" and entry["default"] is not None:
                assert entry["default"] in entry["choices"]


def test_forms_know_their_kinds() -> None:
    tis = {entry["name"]: entry for entry in parameter_form(get_method("tis"))}
    assert tis["masks"]["kind"] == "integer"
    assert "authors" in tis["protocol"]["choices"]
    kinds = {entry["kind"] for name in list_methods() for entry in parameter_form(get_method(name))}
    assert {"integer", "number", "boolean", "choice", "numbers"} <= kinds


def test_watching_tells_every_step() -> None:
    heard: list[tuple[str, int, int]] = []
    with watched(lambda *said: heard.append(said)):
        assert list(shown(range(2), "a")) == [0, 1]
        with counted(5, "b") as bar:
            bar.update(2)
            bar.update(3)
    assert heard == [("a", 0, 2), ("a", 1, 2), ("b", 0, 5), ("b", 2, 5), ("b", 5, 5)]
    assert list(shown(range(2), "a")) == [0, 1]
    assert len(heard) == 5


def test_what_a_watcher_raises_passes_through() -> None:
    def stop(*_: object) -> None:
        raise Cancelled

    with pytest.raises(Cancelled), watched(stop):
        list(shown(range(2), "a"))


def test_explaining_reports_each_batch(view: View) -> None:
    heard: list[tuple[str, int, int]] = []
    with watched(lambda *said: heard.append(said)):
        vitrail.explain(view, [IMAGE] * 3, batch_size=2)
    assert [said for said in heard if said[0] == "decompx.skipplus"] == [
        ("decompx.skipplus", 0, 3), ("decompx.skipplus", 2, 3), ("decompx.skipplus", 3, 3)
    ]  # fmt: skip


def test_json_holds_no_nan_and_no_broken_letters() -> None:
    assert json.loads(to_json({"a": [float("nan"), 1.5], "b": "\ud800", "c": (1, float("inf"))})) == {
        "a": [None, 1.5], "b": "\ud800", "c": [1, None]
    }  # fmt: skip
