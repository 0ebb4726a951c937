"""Tasks return what the library returns."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
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
from vitrail.explanation import Explanation
from vitrail.methods.registry import RECOMMENDED, describe_methods, get_method, list_methods, recommended_methods
from vitrail.metrics import measure
from vitrail.models.embedded import FOLDER
from vitrail.models.view import View
from vitrail.progress import counted, shown, watched

IMAGE = Image.open(io.BytesIO(CAT)).convert("RGB")


@pytest.fixture(scope="module")
def view() -> View:
    return vitrail.load("scenes")


@pytest.fixture(scope="module")
def swin() -> View:
    return vitrail.wrap(families.build("timm_swin"), name="swin")


def silent(event: str, data: dict[str, Any]) -> None:
    """Ignores progress."""


def request(**fields: Any) -> tasks.Request:
    return tasks.Request("scenes", "0" * 64, IMAGE, fields)


def close(answer: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(np.array(answer), expected.numpy(), rtol=1e-5, atol=1e-12)


def test_predict_says_what_the_model_says(view: View) -> None:
    answer = tasks.predict(view, request(top=3), silent)
    probabilities = view.probabilities(view.logits(view.preprocess(IMAGE)[None]))[0]
    best = probabilities.argsort(descending=True)[:3]
    assert [row["index"] for row in answer["classes"]] == best.tolist()
    close([row["probability"] for row in answer["classes"]], probabilities[best].detach())
    assert [row["label"] for row in answer["classes"]] == [view.labels[i] for i in best]
    assert answer["size"] == list(IMAGE.size)
    assert answer["box"] == list(view.preprocessing.box(IMAGE.size))
    assert answer["grid"] == [8, 8]


@pytest.mark.parametrize("method", [None, "grad_cam", "epsilon_lrp", "rollout"])
def test_explain_says_what_the_library_says(view: View, method: str | None) -> None:
    answer = tasks.explain(view, request(method=method, target="star"), silent)
    expected = vitrail.explain(view, IMAGE, method, target="star")
    expected.trust()
    close(answer["values"], expected.map)
    close(answer["shares"], expected.shares)
    assert answer["shape"] == list(expected.map.shape)
    close(answer["tokens"], tasks.on_grid(view, expected.map))
    saved = expected.to_dict()
    assert saved.keys() - answer.keys() == {"map"}
    for name in saved.keys() - {"map", "seconds", "signed", "extras", "split", "trust"}:
        assert answer[name] == saved[name], name
    assert answer["split"] == (None if saved["split"] is None else pytest.approx(saved["split"], rel=1e-5))
    assert answer["trust"]["score"] == pytest.approx(expected.trust_score, rel=1e-5)
    for name in ("call", "title", "score_line", "storage_line", "trust_line"):
        assert answer[name] == getattr(expected, name), name
    assert answer["signed"] == (expected.signed if expected.signed is not None else bool((expected.map < 0).any()))
    json.loads(to_json(answer))


def test_explain_has_standard_errors_where_they_are_known(view: View) -> None:
    fields = {"method": "posterior", "target": "star", "params": {"masks": 16}, "trust": False}
    answer = tasks.explain(view, request(**fields), silent)
    close(answer["standard_error"], vitrail.explain(view, IMAGE, "posterior", target="star", masks=16).error)
    assert tasks.explain(view, request(target="star", trust=False), silent)["standard_error"] is None


def test_parameters_and_a_rival_reach_the_method(view: View) -> None:
    fields = {"method": "rise", "target": "star", "params": {"masks": 40, "seed": 3}}
    answer = tasks.explain(view, request(**fields), silent)
    close(answer["values"], vitrail.explain(view, IMAGE, "rise", target="star", masks=40, seed=3).map)
    answer = tasks.explain(view, request(target="star", against="ring"), silent)
    close(answer["values"], vitrail.explain(view, IMAGE, target="star", against="ring").map)
    assert answer["against_label"] == "ring"
    probabilities = view.probabilities(view.logits(view.preprocess(IMAGE)[None]))[0]
    assert answer["against_probability"] == pytest.approx(float(probabilities[view.class_index("ring")]), rel=1e-5)


def test_the_shares_add_up_to_the_score(view: View) -> None:
    answer = tasks.explain(view, request(target="star", trust=False), silent)
    assert np.sum(answer["shares"]) == pytest.approx(answer["split"]["score"], rel=1e-4)
    assert np.sum(answer["values"]) != pytest.approx(answer["split"]["score"], rel=1e-2)


def test_trust_follows_the_picture_and_can_be_switched_off(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(target="star", trust=False)
    with monkeypatch.context() as patch:
        patch.setattr(Explanation, "trust", lambda _: pytest.fail("switched off"))
        first = tasks.explain(view, asked, silent)
    assert (first["trust"], first["trust_line"]) == (None, None)
    answer = tasks.trust(view, replace(asked, fields={"target": "star"}), silent)
    expected = vitrail.explain(view, IMAGE, target="star")
    assert answer["trust"]["score"] == pytest.approx(expected.trust().score, rel=1e-4)
    assert answer["trust"].keys() == asdict(expected.trust()).keys()
    assert answer["trust_line"].startswith("trust: 0.")
    assert (answer["method"], answer["label"], answer["picture"]) == (expected.method, "star", "0" * 64)
    monkeypatch.setattr(Explanation, "trust", lambda _: pytest.fail("computed again"))
    again = tasks.explain(view, replace(asked, fields={"target": "star"}), silent)
    assert (again["trust"], again["trust_line"]) == (answer["trust"], answer["trust_line"])


def test_trust_ends_when_it_is_cancelled(view: View) -> None:
    def stop(event: str, data: dict[str, Any]) -> None:
        if data["what"] == "trust":
            raise Cancelled

    asked = request(target="star")
    with pytest.raises(Cancelled):
        tasks.trust(view, asked, stop)
    assert tasks.trust(view, asked, silent)["trust_line"]


def test_large_maps_are_reduced(view: View) -> None:
    values = torch.rand(500, 300)
    assert tasks.reduce_map(values, 224).shape == (224, 224)
    assert tasks.reduce_map(values, 400).shape == (400, 300)
    assert tasks.reduce_map(values, 500) is values
    answer = tasks.explain(view, request(method="epsilon_lrp"), silent)
    assert answer["shape"] == [64, 64]
    assert not answer["reduced"]


def test_scores_are_those_of_the_metrics(view: View) -> None:
    answer = tasks.score(view, request(target="star", steps=8), silent)
    explained = vitrail.explain(view, IMAGE, target="star")
    pixels = view.preprocess(IMAGE)[None]
    for name in ("insertion", "deletion"):
        (expected,) = measure(name, view, pixels, explained.map[None], explained.target, steps=8)
        assert answer[name] == pytest.approx(expected.value, rel=1e-6)
        assert answer["curves"][name] == pytest.approx(expected.curve, rel=1e-6)


def test_token_curves_are_those_of_true_masking(view: View) -> None:
    answer = tasks.score(view, request(target="star", steps=4, space="tokens"), silent)
    target, tokens = view.class_index("star"), view.embed(view.preprocess(IMAGE)[None])
    order, counts = answer["order"], answer["counts"]
    assert sorted(order) == list(range(64))
    assert counts == [0, 16, 32, 48, 64]
    flat = torch.tensor(tasks.explain(view, request(target="star"), silent)["tokens"]).flatten()
    assert (flat[order].diff() <= 0).all()
    for i, count in enumerate(counts):
        for name, kept in (("deletion", order[count:]), ("insertion", order[:count])):
            logits = view.encode(tokens, torch.tensor(sorted(kept), dtype=torch.long)[None])
            expected = float(view.probabilities(logits)[0, target])
            assert answer["curves"][name][i] == pytest.approx(expected, rel=1e-4, abs=1e-7), (name, i)
    ranks = torch.tensor(answer["ranks"]).flatten()
    assert ranks[order].tolist() == list(range(64))


@pytest.mark.parametrize("fields", [{"removed": [0, 9, 63]}, {"kept": [0, 9, 63]}, {"removed": []}, {"kept": []}])
def test_masks_are_those_of_encode(view: View, fields: dict[str, list[int]]) -> None:
    answer = tasks.mask(view, request(target="star", **fields), silent)
    listed = next(iter(fields.values()))
    keep = listed if "kept" in fields else [i for i in range(64) if i not in listed]
    tokens, target = view.embed(view.preprocess(IMAGE)[None]), view.class_index("star")
    logits = view.encode(tokens, torch.tensor(keep, dtype=torch.long)[None])
    assert answer["probability"] == pytest.approx(float(view.probabilities(logits)[0, target]), rel=1e-5)
    whole = float(view.probabilities(view.encode(tokens))[0, target])
    assert answer["full"] == pytest.approx(whole, rel=1e-5)
    assert answer["kept"] == len(keep)
    assert answer["space"] == "tokens"


def test_a_patch_that_is_not_there_is_an_error(view: View) -> None:
    with pytest.raises(vitrail.VitrailError, match="no patch 64"):
        tasks.mask(view, request(removed=[64]), silent)


def test_compare_reports_each_method_as_it_is_computed(view: View) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    names = ["tis", "rollout", "grad_cam"]
    fields = {"methods": names, "against": "ring", "target": "star", "steps": 4}
    answer = tasks.compare(view, request(**fields), lambda event, data: events.append((event, data)))
    parts = [data for event, data in events if event == "partial"]
    assert parts == answer["results"]
    assert [part["method"] for part in parts] == names
    assert "same map for every class" in parts[1]["error"]  # it cannot contrast; the others continue
    (expected,) = measure("insertion", view, view.preprocess(IMAGE)[None],
                          vitrail.explain(view, IMAGE, "grad_cam", "star", against="ring").map[None], "star",
                          steps=4)  # fmt: skip
    assert parts[2]["insertion"] == pytest.approx(expected.value)
    progress = [data for event, data in events if event == "progress"]
    assert progress[0]["methods"] == names
    assert any(data["what"].startswith("tis: ") for data in progress)
    done = [data["done"] for data in progress]
    assert done == sorted(done)
    assert all(0 <= value < 3 for value in done)
    within = [value for value in done if 0 < value < 1]  # the bar moves within a method
    assert len(set(within)) >= 5
    assert max(within) > 0.7


def test_a_method_that_takes_too_long_fails_alone(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    now, explain_each = [0.0], tasks.explain_each

    def slow(method: Any, *args: Any) -> Any:
        now[0] += 100 if method.info.name == "rise" else 1
        return explain_each(method, *args)

    monkeypatch.setattr(tasks, "explain_each", slow)
    monkeypatch.setattr(tasks, "monotonic", lambda: now[0])
    asked = replace(request(methods=["grad_cam", "rise", "rollout"], steps=4), seconds=20.5)
    first, rise, last = tasks.compare(view, asked, silent)["results"]
    assert "insertion" in first
    assert "insertion" in last
    assert rise["method"] == "rise"
    assert "longer than 20.5 seconds" in rise["error"]


def test_what_others_do_in_between_is_no_loss_to_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tasks, "monotonic", lambda: now[0])

    def interrupt(event: str, data: dict[str, Any]) -> None:
        now[0] += 100

    progress = tasks.MethodProgress(interrupt, {"done": 0, "total": 1, "what": "tis"}, seconds=5)
    for done in range(4):
        now[0] += 1
        progress.report("progress", {"what": "tis", "done": done, "total": 9})
    now[0] += 2
    with pytest.raises(tasks.MethodTimeout):
        progress.report("progress", {"what": "tis", "done": 4, "total": 9})


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
    assert answer["methods"] == recommended_methods(view) == list(RECOMMENDED)
    assert [row["call"] for row in answer["results"]] == list(RECOMMENDED)
    assert not any("error" in row or "insertion" in row for row in answer["results"])
    assert all(0 <= row["trust"]["score"] <= 1 for row in answer["results"])


def test_compare_takes_calls(view: View) -> None:
    calls = ["rise(masks=40, seed=3)", "rise(masks=-1)", "rollout"]
    first, wrong, last = tasks.compare(view, request(methods=calls, score=False, trust=False), silent)["results"]
    close(first["values"], vitrail.explain(view, IMAGE, "rise", masks=40, seed=3).map)
    assert (first["method"], first["call"], first["trust"]) == ("rise", calls[0], None)
    assert (wrong["method"], wrong["call"]) == ("rise", calls[1])
    assert "masks" in wrong["error"]
    assert last["call"] == "rollout"


def test_an_unknown_method_of_a_comparison_is_an_error_at_once(view: View) -> None:
    with pytest.raises(vitrail.VitrailError, match="no method"):
        tasks.compare(view, request(methods=["rollout", "nonsense"]), silent)


def test_the_picture_is_that_of_the_explanation(view: View) -> None:
    expected = vitrail.explain(view, IMAGE, target="star")
    for trust in (False, True):
        if trust:
            expected.trust()
        drawn = Image.open(io.BytesIO(tasks.picture(view, request(target="star", trust=trust), silent)))
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(expected.picture()))


def test_storage_is_told_and_can_be_hidden_in_the_picture(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(target="star", trust=False)
    explained = replace(tasks.find_explanation(view, asked, silent), storage=[9, 30])
    monkeypatch.setattr(tasks, "find_explanation", lambda *_: explained)
    answer = tasks.explain(view, asked, silent)
    assert (answer["storage"], answer["storage_line"]) == ([9, 30], explained.storage_line)
    for storage in ("mark", "hide"):
        hidden = replace(asked, fields={**asked.fields, "storage": storage})
        drawn = Image.open(io.BytesIO(tasks.picture(view, hidden, silent)))
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(explained.picture(storage=storage)))


def test_a_huge_picture_is_drawn_smaller(view: View) -> None:
    image = IMAGE.resize((3000, 1000))
    data = tasks.picture(view, tasks.Request("scenes", "1" * 64, image, {}), silent)
    drawn = Image.open(io.BytesIO(data))
    assert max(drawn.size) < 2300


def test_what_was_computed_is_not_computed_again(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(method="rise", params={"masks": 40})
    first = tasks.explain(view, asked, silent)
    monkeypatch.setattr(tasks, "explain_each", lambda *_: pytest.fail("computed again"))
    assert tasks.explain(view, asked, silent) == first
    tasks.score(
        view, tasks.Request(asked.model, asked.picture, IMAGE, {**asked.fields, "steps": 4}, asked.cache), silent
    )


def test_work_ends_where_telling_raises(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    encode = type(view).present
    monkeypatch.setattr(type(view), "present", lambda self, t, keep: scored.append(len(keep)) or encode(self, t, keep))

    def stop(event: str, data: dict[str, Any]) -> None:
        if data["total"] == 512 and data["done"] >= 128:
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
    answer = tasks.mask(swin, asked, silent)
    pixels = swin.preprocess(IMAGE)[None]
    half = pixels.shape[2] * (cells // 2 // tasks.grid_of(swin)[1]) // tasks.grid_of(swin)[0]
    painted = pixels.mean((2, 3), keepdim=True).expand_as(pixels).clone()
    painted[:, :, :half] = pixels[:, :, :half]
    with torch.no_grad():
        expected = swin.probabilities(swin.logits(painted))[0, answer["target"]]
    assert answer["probability"] == pytest.approx(float(expected), rel=1e-5)
    assert answer["space"] == "pixels"
    assert describe_model("swin", swin)["view"] == "features"
    with pytest.raises(vitrail.VitrailError, match="space=pixels"):
        tasks.score(swin, tasks.Request("swin", "0" * 64, IMAGE, {"method": "grad_cam", "space": "tokens"}), silent)
    assert tasks.score(swin, tasks.Request("swin", "0" * 64, IMAGE, {"method": "grad_cam", "steps": 2}), silent)[
        "ranks"
    ]
    assert tasks.trust(swin, tasks.Request("swin", "0" * 64, IMAGE, {"method": "grad_cam"}), silent)["trust"]


def test_rows_of_methods_are_those_of_the_command_line(view: View) -> None:
    rows = describe_methods_of(view)
    expected = describe_methods("*", vitrail.load("scenes"))
    assert [{k: v for k, v in row.items() if k != "form"} for row in rows] == expected


def test_every_parameter_but_tensors_and_files_has_an_entry_in_the_form() -> None:
    for name, info in list_methods().items():
        entries = parameter_form(get_method(name))
        expected = [param for param in info.params if param not in ("references", "explainer")]
        assert [entry["name"] for entry in entries] == expected
        for entry in entries:
            assert entry["kind"] in ("integer", "number", "boolean", "choice", "text", "numbers")
            assert entry["optional"] or entry["default"] is not None
            if entry["kind"] == "choice" and entry["default"] is not None:
                assert entry["default"] in entry["choices"]


def test_visitors_name_no_files(view: View) -> None:
    fields = {"method": "vit_shapley", "trust": False}
    assert tasks.explain(view, tasks.Request("scenes", "0" * 64, IMAGE, fields), silent)["call"] == "vit_shapley"
    path = str(FOLDER / "scenes.explainer.safetensors")
    for value in (path, "", "/nowhere", 3):
        request = tasks.Request("scenes", "0" * 64, IMAGE, {**fields, "params": {"explainer": value}})
        with pytest.raises(
            vitrail.VitrailError, match="'explainer' is not available here: it names a file of the server"
        ):
            tasks.explain(view, request, silent)
    (result,) = tasks.compare(
        view, tasks.Request("scenes", "0" * 64, IMAGE, {"methods": [f"vit_shapley(explainer='{path}')"]}), silent
    )["results"]
    assert "names a file of the server" in result["error"]
    assert get_method("decompx.skipplus").file_parameters == ()


def test_forms_know_their_kinds() -> None:
    tis = {entry["name"]: entry for entry in parameter_form(get_method("tis"))}
    assert tis["masks"]["kind"] == "integer"
    assert "authors" in tis["protocol"]["choices"]
    kinds = {entry["kind"] for name in list_methods() for entry in parameter_form(get_method(name))}
    assert {"integer", "number", "boolean", "choice", "numbers"} <= kinds


def test_watching_tells_every_step() -> None:
    heard: list[tuple[str, int, int]] = []
    with watched(lambda *step: heard.append(step)):
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
    with watched(lambda *step: heard.append(step)):
        vitrail.explain(view, [IMAGE] * 3, batch_size=2)
    assert [step for step in heard if step[0] == "decompx.skipplus"] == [
        ("decompx.skipplus", 0, 3), ("decompx.skipplus", 2, 3), ("decompx.skipplus", 3, 3)
    ]  # fmt: skip


def test_json_holds_no_nan_and_no_broken_letters() -> None:
    assert json.loads(to_json({"a": [float("nan"), 1.5], "b": "\ud800", "c": (1, float("inf"))})) == {
        "a": [None, 1.5], "b": "\ud800", "c": [1, None]
    }  # fmt: skip
