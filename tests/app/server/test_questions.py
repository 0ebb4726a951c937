"""Questions beyond classes: groups of classes, texts, the similarity to another picture and its pairs of patches."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.app.serving import SAMPLES, Served, events, form, upload
from tests.cli.common import noise
from torch import nn

import vitrail
from vitrail.app.server import schemas, tasks
from vitrail.app.server.catalogue import describe_model
from vitrail.app.server.jobs import Cancelled, Task
from vitrail.models.view import View
from vitrail.targets import Box as BoxTarget
from vitrail.targets import Group, Region, Similarity

STAR, RING = ((SAMPLES / f"{name}.png").read_bytes() for name in ("star-and-heart", "ring-and-hourglass"))
RING_ID = hashlib.sha256(RING).hexdigest()
IMAGE, OTHER = (Image.open(io.BytesIO(data)).convert("RGB") for data in (STAR, RING))
KINDS = ("predict", "explain", "trust", "score", "mask", "compare")
FEW = {"score": {"steps": 2}, "compare": {"steps": 2, "methods": ["rollout"]}, "explain": {"trust": False}}


@pytest.fixture(scope="module")
def view() -> View:
    return vitrail.load("scenes")


@pytest.fixture(scope="module")
def reader() -> View:
    """A model of images and texts."""
    module = families.build("hf_clip_text")
    return vitrail.wrap(module, prompts=["a photo of a cat", "a photo of a dog"], tokenizer=families.tokenizer())


def silent(event: str, data: dict[str, Any]) -> None:
    """Ignores progress."""


def similar(**fields: Any) -> tasks.Request:
    return tasks.Request("scenes", "0" * 64, IMAGE, fields, other=tasks.OtherPicture("1" * 64, OTHER))


def asked(**fields: Any) -> tasks.Request:
    return tasks.Request("scenes", "0" * 64, IMAGE, fields)


def run(kind: str, view: View, request: tasks.Request, report: Any = silent) -> dict[str, Any]:
    media_type, body = tasks.run(kind, view, request, report)
    assert media_type == "application/json"
    return json.loads(body)


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["base64"]), dtype="<f4").reshape(packed["shape"])


def post(client: httpx.Client, what: str, status: int = 200, files: Any = None, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/api/{what}", files={**form(**fields), **(files or {})})
    assert answer.status_code == status, answer.text
    return answer.json()


# What tasks answer


def test_a_group_is_explained_as_the_library_does(view: View) -> None:
    answer = run("explain", view, asked(group="star,ri*", against_group="heart", trust=False))
    expected = vitrail.explain(view, IMAGE, target=Group("star,ri*"), against=Group("heart"))
    np.testing.assert_allclose(answer["values"], expected.map, rtol=1e-5, atol=1e-9)
    assert (answer["title"], answer["measure"]) == (expected.title, "probability")
    members = [view.class_index("star"), view.class_index("ring")]
    assert answer["model"]["question"]["groups"]["star,ri*"] == sorted(members)
    (whole,) = run("predict", view, asked(group="star,ri*"))["asked"]
    classes = run("predict", view, asked(top=100))["classes"]
    none = np.prod([1 - row["probability"] for row in classes if row["index"] in members])  # a head of sigmoids
    assert whole["probability"] == pytest.approx(1 - none, abs=1e-6)
    assert run("mask", view, asked(group="star,ri*", removed=[]))["full"] == pytest.approx(whole["probability"])


def test_a_similarity_is_explained_as_the_library_does(view: View) -> None:
    for measure in ("cosine", "dot"):
        answer = run("explain", view, similar(measure=measure))
        expected = vitrail.explain(view, IMAGE, target=Similarity(OTHER, measure))
        np.testing.assert_allclose(answer["values"], expected.map, rtol=1e-5, atol=1e-7)
        assert answer["measure"] == measure
        assert answer["probability"] == pytest.approx(expected.probability, rel=1e-5)
        assert answer["title"] == expected.title
        assert "%" not in answer["title"]
        assert (answer["other"], answer["pairs"]) == ("1" * 64, None)
        assert "similarity to the other image from" in answer["trust_line"]


def test_every_kind_of_work_takes_a_similarity(view: View) -> None:
    score = vitrail.explain(view, IMAGE, target=Similarity(OTHER)).probability
    answers = {kind: run(kind, view, similar(**FEW.get(kind, {}))) for kind in KINDS}
    assert answers["predict"]["asked"] == answers["predict"]["classes"]
    assert answers["predict"]["classes"][0]["probability"] == pytest.approx(score, abs=1e-6)
    assert answers["mask"]["full"] == pytest.approx(score, abs=1e-6)
    assert {answers[kind]["measure"] for kind in ("predict", "mask", "explain")} == {"cosine"}
    (row,) = answers["compare"]["results"]
    assert row["measure"] == "cosine"
    assert row["insertion"] == run("score", view, similar(steps=2, method="rollout"))["insertion"]
    media_type, body = tasks.run("picture", view, similar(trust=False), silent)
    assert media_type == "image/png"
    assert Image.open(io.BytesIO(body)).format == "PNG"


def test_curves_of_a_score_go_from_nothing_to_everything(view: View) -> None:
    answer = run("score", view, similar(steps=4, space="tokens"))
    empty, full = answer["scale"]
    assert full == pytest.approx(vitrail.explain(view, IMAGE, target=Similarity(OTHER)).probability, abs=1e-5)
    assert (answer["curves"]["insertion"][0], answer["curves"]["insertion"][-1]) == pytest.approx((0, 1), abs=1e-5)
    assert (answer["curves"]["deletion"][0], answer["curves"]["deletion"][-1]) == pytest.approx((1, 0), abs=1e-5)
    kept = run("mask", view, similar(kept=answer["order"][: answer["counts"][1]]))["probability"]
    assert empty + answer["curves"]["insertion"][1] * (full - empty) == pytest.approx(kept, rel=1e-3, abs=1e-5)
    assert run("score", view, asked(steps=2, space="tokens"))["scale"] is None


def test_pairs_are_those_of_the_library_and_add_up(model: View) -> None:
    heard: list[dict[str, Any]] = []
    answer = run("explain", model, similar(pairs=True, trust=False), lambda _, data: heard.append(data))
    assert answer["method"] == "decompx"
    expected = vitrail.explain(model, IMAGE, "decompx", target=Similarity(OTHER))
    assert expected.pairs is not None
    np.testing.assert_allclose(unpacked(answer["pairs"]), expected.pairs, rtol=1e-4, atol=1e-7)
    total = answer["extras"]["score_pairs"] + answer["extras"]["score_pairs_rest"]
    assert total == pytest.approx(answer["probability"], abs=1e-5)
    channels = [data["done"] for data in heard if data["what"] == "pairs"]
    assert channels == sorted(channels)
    assert len(channels) > 4


def test_pairs_can_be_cancelled(model: View) -> None:
    def stop(event: str, data: dict[str, Any]) -> None:
        if data["what"] == "pairs" and data["done"]:
            raise Cancelled

    request = similar(pairs=True, trust=False)
    with pytest.raises(Cancelled):
        tasks.run("explain", model, request, stop)
    assert run("explain", model, replace(request, fields={"trust": False}))["pairs"] is None


def test_pairs_are_of_a_similarity_by_decompx(view: View) -> None:
    for request in (asked(pairs=True), similar(pairs=True, method="rollout")):
        with pytest.raises(vitrail.VitrailError, match=r"^pairs are the exact shares of a similarity by decompx.*\.$"):
            tasks.run("explain", view, request, silent)


def test_any_text_is_explained_by_a_model_that_reads_texts(reader: View) -> None:
    request = tasks.Request("clip", "0" * 64, noise(0), {"target": "a red star", "against": "the cat", "trust": False})
    answer = run("explain", reader, request)
    expected = vitrail.explain(reader, noise(0), target="a red star", against="the cat")
    np.testing.assert_allclose(answer["values"], expected.map, rtol=1e-4, atol=1e-6)
    assert (answer["label"], answer["target"], answer["against_label"]) == ("a red star", 2, "the cat")
    assert answer["model"]["fingerprint"] == expected.to_dict()["model"]["fingerprint"]
    masked = run("mask", reader, replace(request, fields={"target": "a red star", "removed": []}))
    assert (masked["label"], len(masked["classes"])) == ("a red star", 3)
    with pytest.raises(vitrail.VitrailError, match="not empty"):
        tasks.run("explain", reader, replace(request, fields={"target": " "}), silent)


def test_the_fingerprint_is_that_of_the_question_though_weights_are_hashed_once(view: View) -> None:
    hashed = replace(view, known_weights=view.weights_hash())
    question = Group("star,ring")
    one, two = (vitrail.explain(model, IMAGE, target=question).to_dict()["model"] for model in (view, hashed))
    assert one["fingerprint"] == two["fingerprint"] != view.fingerprint()


def test_questions_have_answers_of_their_own(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all: neither a map nor a prediction is that of another question."""
    cache = asked().cache
    requests = [
        asked(trust=False),
        asked(group="star,ring", trust=False),
        asked(group="arrow,cross", trust=False),
        similar(trust=False),
        similar(measure="dot", trust=False),
        replace(similar(trust=False), other=tasks.OtherPicture("2" * 64, noise(3))),
    ]
    answers = [run("explain", view, replace(request, cache=cache)) for request in requests]
    titles = [answer["title"] for answer in answers]
    assert len(set(titles)) == len(titles)
    for request, answer in zip(requests, answers, strict=True):
        masked = run("mask", view, replace(request, cache=cache, fields={**request.fields, "removed": [1]}))
        assert masked["full"] == pytest.approx(answer["probability"], abs=1e-4)
    monkeypatch.setattr(tasks, "pose", lambda *_: pytest.fail("asked again"))
    monkeypatch.setattr(tasks, "explain_each", lambda *_: pytest.fail("computed again"))
    for request, answer in zip(requests[1:], answers[1:], strict=True):
        assert run("explain", view, replace(request, cache=cache))["values"] == answer["values"]


def test_the_key_of_a_cached_answer_has_both_pictures() -> None:
    tasks_ = [Task("explain", "m", "a", {}, other) for other in (None, "b", "c")]
    assert len({task.key for task in tasks_}) == 3
    assert tasks_[1].pictures == ["a", "b"]


def test_a_model_says_what_can_be_asked(view: View, reader: View) -> None:
    assert describe_model("scenes", view)["asks"] == ["class", "group", "similarity"]
    assert describe_model("clip", reader)["asks"] == ["class", "group", "text", "similarity"]
    for name in ("timm_swin", "timm_deit_distilled"):
        assert describe_model("m", vitrail.wrap(families.build(name)))["asks"] == ["class", "group"]


# What the HTTP server answers


def test_both_pictures_are_sent_or_named(client: httpx.Client) -> None:
    both = {**upload(STAR, "star.png"), "other": ("ring.png", RING, "image/png")}
    sent = post(client, "explain", files=both, model="scenes", trust=False)
    schemas.Explained.model_validate(sent)
    assert (sent["other"], sent["measure"]) == (RING_ID, "cosine")
    named = {"sample": "star-and-heart", "model": "scenes", "trust": False}
    assert post(client, "explain", **named, other_picture=RING_ID) == sent
    assert post(client, "explain", **named, other_sample="ring-and-hourglass") == sent
    for kind, schema in (("predict", schemas.Prediction), ("mask", schemas.Masked), ("score", schemas.Scores)):
        fields = {"steps": 2, "space": "tokens"} if kind == "score" else {}
        answer = post(client, kind, sample="star-and-heart", model="scenes", other_picture=RING_ID, **fields)
        schema.model_validate(answer)
        assert answer["other"] == RING_ID


def test_pairs_are_a_job(reading: Served) -> None:
    with reading.client() as client:
        fields = {"sample": "cat", "other_sample": "coffee", "pairs": True, "trust": False}
        accepted = post(client, "explain", 202, **fields, wait=False)
        with client.stream("GET", accepted["events"]) as stream:
            heard = list(events(stream))
    name, answer = heard[-1]
    assert name == "done"
    schemas.Explained.model_validate(answer)
    assert answer["pairs"]["shape"] == [16, 16]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "*unicorn*"}, "no class of scenes matches '*unicorn*'."),
        ({"group": "*"}, "the group holds all 10 classes of scenes: nothing is left to ask."),
        ({"group": "star", "against_group": "star,ring"}, "'star' is both in the target and in what it is opposed to."),
        ({"group": "x" * 4001}, "group: expected at most 4000 characters."),
        ({"group": "star,"}, "the name of a class is empty: give a name or a number."),
        ({"target": "a red car"}, "scenes has no class 'a red car'. It has 10 classes."),
        ({"target": "star", "group": "ring"}, "target and group ask different questions: send only one of them."),
        ({"against": "star", "against_group": "ring"},
         "against and against_group ask different questions: send only one of them."),
        ({"group": "star", "other_sample": "cat"},
         "group and other_sample ask different questions: send only one of them."),
        ({"against": "star", "other_sample": "cat"},
         "against and other_sample ask different questions: send only one of them."),
        ({"other_sample": "cat", "other_picture": RING_ID},
         "other_picture and other_sample ask different questions: send only one of them."),
        ({"measure": "cosine"}, "measure is that of a similarity: send other, other_picture or other_sample, too."),
        ({"measure": "angle", "other_sample": "cat"}, "measure: expected 'cosine' or 'dot'."),
        ({"other": "text"}, "other: expected a file, but got text."),
        ({"other_picture": "/etc/passwd"},
         "other_picture: expected the id of an earlier upload, as returned by /api/predict."),
    ],
)  # fmt: skip
def test_wrong_questions_are_told_in_a_sentence(client: httpx.Client, fields: dict[str, str], message: str) -> None:
    assert post(client, "explain", 422, sample="star-and-heart", model="scenes", **fields) == {"error": message}


@pytest.mark.parametrize("field", ["target", "against", "group", "against_group", "other", "text", "method", "box"])
def test_an_empty_field_is_not_one_that_was_left_out(client: httpx.Client, field: str) -> None:
    message = {"error": f"{field}: the field is empty, expected a value: fill it or leave it out."}
    named = {"sample": "star-and-heart", "model": "scenes", "trust": False}
    assert post(client, "explain", 422, **named, **{field: ""}) == message
    if field in ("target", "group"):
        blank = post(client, "explain", 422, **named, **{field: "  "})
        assert blank == {"error": "the name of a class is empty: give a name or a number."}


@pytest.mark.parametrize("field", ["image", "other"])
def test_a_file_field_without_a_file_is_empty(client: httpx.Client, field: str) -> None:
    """As browsers send it."""
    named = {"sample": "star-and-heart", "model": "scenes"}
    answer = post(client, "explain", 422, files={field: ("", b"", "application/octet-stream")}, **named)
    assert answer["error"].startswith(f"{field}: the field is empty, expected a value")
    nothing = post(client, "explain", 415, files={"other": ("other.png", b"", "image/png")}, **named)
    assert "the upload is empty" in nothing["error"]


def test_the_other_picture_is_checked_like_the_first(client: httpx.Client) -> None:
    named = {"sample": "star-and-heart", "model": "scenes"}
    text = {"other": ("other.png", b"no picture", "image/png")}
    assert "not an image" in post(client, "explain", 415, files=text, **named)["error"]
    assert "there is no sample" in post(client, "explain", 404, **named, other_sample="../cat")["error"]
    assert "no longer" in post(client, "explain", 410, **named, other_picture="0" * 64)["error"]
    answer = client.post("/api/explain", files=[("image", STAR), ("other", RING), ("other", RING)])
    assert answer.status_code in (400, 422)


def test_two_pictures_that_fill_the_memory_are_compared(small: Served, small_client: httpx.Client) -> None:
    """Each alone is larger than what the server keeps."""
    sides = []
    for seed in (1, 2):
        Image.new("RGB", (1300, 1000), (seed, seed, seed)).save(data := io.BytesIO(), "PNG")
        sides.append(("side.png", data.getvalue(), "image/png"))
    answer = post(small_client, "explain", files={"image": sides[0], "other": sides[1]}, trust=False)
    assert answer["probability"] > 0.9


def test_a_text_model_is_served(reading: Served) -> None:
    with reading.client() as client:
        assert client.get("/api/models").json()[0]["asks"] == ["class", "group", "text", "similarity"]
        answer = post(client, "explain", sample="cat", target="a red star", trust=False)
        schemas.Explained.model_validate(answer)
        assert (answer["label"], answer["target"], answer["measure"]) == ("a red star", 2, "probability")
        (row,) = post(client, "predict", sample="cat", target="a red star")["asked"]
        assert row["probability"] == pytest.approx(answer["probability"], rel=1e-4)


# Boxes and regions


@pytest.fixture(scope="module")
def detector() -> View:
    return vitrail.wrap(families.yolos(dtype=torch.float32))


@pytest.fixture(scope="module")
def segmenter() -> View:
    return vitrail.wrap(families.eomt(dtype=torch.float32))


def test_the_boxes_of_a_detector_are_listed_and_asked_about(detector: View) -> None:
    predicted = run("predict", detector, asked())
    expected = detector.boxes(IMAGE, 0.05)
    assert [row["query"] for row in predicted["boxes"]] == [detection.query for detection in expected]
    np.testing.assert_allclose([row["box"] for row in predicted["boxes"]], [d.box for d in expected], rtol=1e-5)
    query = expected[1].query
    answer = run("explain", detector, asked(box=query, against="no object", trust=False))
    made = vitrail.explain(detector, IMAGE, target=BoxTarget(query), against="no object")
    np.testing.assert_allclose(answer["values"], made.map, rtol=1e-3, atol=1e-5)
    assert (answer["label"], answer["against_label"]) == (made.label, "no object")
    assert answer["model"]["question"] == {"kind": "box", "query": query}
    assert describe_model("yolos", detector)["asks"] == ["class", "group", "box"]
    with pytest.raises(vitrail.VitrailError, match="is a detector, which has an embedding for each box and none"):
        tasks.run("explain", detector, similar(), silent)
    with pytest.raises(vitrail.VitrailError, match="there is no box 6"):
        tasks.run("explain", detector, asked(box=6), silent)


def test_the_segments_of_a_picture_are_listed_and_asked_about(segmenter: View) -> None:
    predicted = run("predict", segmenter, asked())
    assert predicted["cells"] == [16, 16]
    segments = predicted["segments"]
    assert sorted(cell for row in segments for cell in row["cells"]) == list(range(256))
    assert [len(row["cells"]) for row in segments] == sorted((len(row["cells"]) for row in segments), reverse=True)
    segment = segments[-1]
    answer = run("explain", segmenter, asked(region=segment["cells"], trust=False))
    mask = np.zeros(256, bool)
    mask[segment["cells"]] = True
    mask = mask.reshape(16, 16).repeat(2, 0).repeat(2, 1)
    seen = segmenter.preprocess(IMAGE)
    made = vitrail.explain(segmenter, seen, target=Region(mask))
    np.testing.assert_allclose(answer["values"], made.map, rtol=1e-3, atol=1e-5)
    assert answer["label"] == made.label
    masked = run("mask", segmenter, asked(region=segment["cells"], removed=[]))
    assert masked["probability"] == pytest.approx(answer["probability"], abs=1e-5)
    assert "region" in describe_model("eomt", segmenter)["asks"]
    with pytest.raises(vitrail.VitrailError, match="there is no cell 256: expected indices from 0 to 255"):
        tasks.run("explain", segmenter, asked(region=[256]), silent)
    with pytest.raises(vitrail.VitrailError, match="the mask is empty"):
        tasks.run("explain", segmenter, asked(region=[]), silent)


def test_a_head_on_patches_has_segments_of_patches() -> None:
    head = nn.Linear(32, 3)
    families.randomize(head, seed=1)
    module = families.build("timm_headless_token")
    view = vitrail.wrap(module, head=head.eval(), pool="patches")
    pixels = view.preprocess(IMAGE)
    with torch.no_grad():
        expected = head(module.forward_features(pixels[None])[0, 1:]).argmax(1).tolist()
    predicted = run("predict", view, asked())
    assert predicted["cells"] == list(view.grid)
    classes = {cell: row["target"] for row in predicted["segments"] for cell in row["cells"]}
    assert [classes[cell] for cell in range(len(expected))] == expected


def test_a_classifier_has_no_places_and_an_embedding_no_classes(view: View) -> None:
    predicted = run("predict", view, asked())
    assert {"boxes", "cells", "segments"} & predicted.keys() == set()
    for fields, message in (({"box": 0}, "detects no boxes"), ({"region": [0]}, "has no output per patch")):
        with pytest.raises(vitrail.VitrailError, match=message):
            tasks.run("explain", view, asked(**fields), silent)
    backbone = vitrail.wrap(families.build("timm_headless_token"))
    assert run("predict", backbone, asked())["classes"] == []
    assert describe_model("dinov2", backbone)["asks"] == ["similarity"]
    with pytest.raises(vitrail.VitrailError, match="has no classes, but an embedding"):
        tasks.run("explain", backbone, asked(), silent)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"box": 1, "region": [0]}, "box and region"),
        ({"box": 1, "group": "star"}, "box and group"),
        ({"region": [1], "other_sample": "ring-and-hourglass"}, "region and other_sample"),
    ],
)
def test_places_exclude_other_questions(client: httpx.Client, fields: dict[str, Any], names: str) -> None:
    answer = client.post("/api/explain", files=form(sample="star-and-heart", **fields))
    assert answer.status_code == 422
    assert answer.json()["error"] == f"{names} ask different questions: send only one of them."
