"""The HTTP API of a server started by the command line."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.app.serving import CAT, SAMPLES, Served, events, form, upload

import vitrail
from vitrail.app.server import schemas
from vitrail.app.server.service import SAMPLES as CATALOGUE
from vitrail.models.view import View

CAT_ID = hashlib.sha256(CAT).hexdigest()
IMAGE = Image.open(io.BytesIO(CAT))


@pytest.fixture(scope="module")
def photo() -> View:
    return vitrail.load("photo")


def post(client: httpx.Client, what: str, status: int = 200, **fields: object) -> dict[str, object]:
    answer = client.post(f"/api/{what}", files=form(**fields))
    assert answer.status_code == status, answer.text
    return answer.json()


def test_models_are_those_the_server_was_started_with(client: httpx.Client, photo: View) -> None:
    first, second = client.get("/api/models").json()
    assert first["id"] == "photo"
    assert first["labels"] == list(photo.labels)
    assert first["classes"] == 200
    assert first["input"] == [64, 64]
    assert first["grid"] == [16, 16]
    assert first["view"] == "tokens"
    assert first["default_method"] == "decompx.skipplus"
    assert second["id"] == "scenes"
    schemas.Model.model_validate(first)


def test_methods_have_a_form_and_say_what_is_supported(client: httpx.Client) -> None:
    rows = client.get("/api/methods", params={"model": "scenes"}).json()
    assert {"decompx.skipplus", "tis", "rollout"} <= {row["name"] for row in rows}
    assert all(row["supported"] == "yes" or len(row["supported"]) > 8 for row in rows)
    for row in rows:
        schemas.Method.model_validate(row)
    assert client.get("/api/methods").json() == client.get("/api/methods", params={"model": "photo"}).json()
    assert client.get("/api/methods", params={"model": "../photo"}).status_code == 404


def test_samples_are_there_and_the_models_get_them_right(client: httpx.Client) -> None:
    rows = client.get("/api/samples").json()
    assert len(rows) == len(CATALOGUE)
    right = {"cat": {"tabby"}, "coffee": {"espresso"}, "rocket": {"projectile"}, "star-and-heart": {"star", "heart"},
             "ring-and-hourglass": {"ring", "hourglass"}}  # fmt: skip
    for row in rows:
        answer = client.get(row["url"])
        assert answer.content == (SAMPLES / row["url"].rpartition("/")[2]).read_bytes()
        assert answer.headers["content-type"].startswith("image/")
        result = post(client, "predict", sample=row["name"], model=row["model"])
        count = len(right[row["name"]])
        assert {row["label"] for row in result["classes"][:count]} == right[row["name"]]


def test_samples_are_small_and_have_a_licence() -> None:
    for file, _, _ in CATALOGUE:
        assert (SAMPLES / file).stat().st_size <= 40_000
        assert Image.open(SAMPLES / file).width <= 448
    licence = (SAMPLES / "LICENSE.md").read_text()
    assert all(file in licence for file, _, _ in CATALOGUE)


def test_an_upload_is_predicted_and_can_be_named_later(client: httpx.Client, photo: View) -> None:
    answer = client.post("/api/predict", files=upload(), data={"top": "3"})
    result = answer.json()
    schemas.Prediction.model_validate(result)
    assert result["picture"] == CAT_ID
    assert len(result["classes"]) == 3
    expected = vitrail.explain(photo, IMAGE, "random").top[0]
    assert result["classes"][0]["label"] == expected[1]
    assert result["classes"][0]["probability"] == pytest.approx(expected[2], rel=1e-4)
    again = post(client, "predict", picture=CAT_ID, top=3)
    assert again["classes"] == result["classes"]
    picture = client.get(f"/api/pictures/{CAT_ID}")
    assert picture.content == CAT
    assert picture.headers["content-type"] == "image/jpeg"


def test_explain_equals_the_library_and_the_command_line(client: httpx.Client, photo: View) -> None:
    result = client.post("/api/explain", files=upload(), data={"target": "Egyptian cat"}).json()
    schemas.Explained.model_validate(result)
    expected = vitrail.explain(photo, IMAGE, target="Egyptian cat")
    np.testing.assert_allclose(np.array(result["values"]), expected.map.numpy(), rtol=1e-4, atol=1e-6)
    assert result["image"]["sha256"] == expected.to_dict()["image"]["sha256"]
    assert result["model"]["fingerprint"] == photo.fingerprint()
    assert result["target"] == expected.target
    assert result["model_id"] == "photo"
    assert (result["title"], result["score_line"]) == (expected.title, expected.score_line)


def test_trust_is_a_part_of_an_explanation_or_follows_it(client: httpx.Client) -> None:
    alone = post(client, "explain", sample="rocket", trust=False)
    schemas.Explained.model_validate(alone)
    assert (alone["trust"], alone["trust_line"]) == (None, None)
    trust = post(client, "trust", sample="rocket")
    schemas.Trusted.model_validate(trust)
    whole = post(client, "explain", sample="rocket")
    schemas.Explained.model_validate(whole)
    assert (whole["trust"], whole["trust_line"]) == (trust["trust"], trust["trust_line"])
    assert whole["shares"] == alone["shares"]


def test_score_and_mask_answer_by_their_schemas(client: httpx.Client) -> None:
    result = post(client, "score", sample="cat", steps=4)
    schemas.Scores.model_validate(result)
    assert 0 < result["deletion"] < result["insertion"] < 1
    tokens = post(client, "score", sample="cat", steps=4, space="tokens")
    schemas.Scores.model_validate(tokens)
    assert tokens["counts"] == [0, 64, 128, 192, 256]
    best = tokens["order"][:64]
    masked = post(client, "mask", sample="cat", removed=best, target=str(tokens["target"]))
    schemas.Masked.model_validate(masked)
    assert masked["probability"] == pytest.approx(tokens["curves"]["deletion"][1], rel=1e-4)
    assert masked["full"] == pytest.approx(tokens["curves"]["deletion"][0], rel=1e-4)
    kept = post(client, "mask", sample="cat", kept=best, target=str(tokens["target"]))
    assert kept["probability"] == pytest.approx(tokens["curves"]["insertion"][1], rel=1e-4)
    assert post(client, "mask", sample="cat", kept=[])["kept"] == 0


def test_a_comparison_streams_its_methods(client: httpx.Client) -> None:
    fields = form(sample="cat", methods="rollout, grad_cam,rollout,random", steps=2, wait=False)
    accepted = client.post("/api/compare", files=fields)
    assert accepted.status_code == 202
    job = accepted.json()["job"]
    with client.stream("GET", accepted.json()["events"]) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        heard = list(events(stream))
    names = [name for name, _ in heard]
    assert names[0] == "queued"
    assert names[-1] == "done"
    parts = [data for name, data in heard if name == "partial"]
    assert [part["method"] for part in parts] == ["rollout", "grad_cam", "random"]
    assert heard[-1][1]["results"] == parts
    for part in parts:
        schemas.Explained.model_validate(part)
        assert 0 <= part["insertion"] <= 1
    with client.stream("GET", accepted.json()["events"]) as stream:  # once more, from the beginning
        again = list(events(stream))
    assert [event for event in again if event[0] != "progress"] == [event for event in heard if event[0] != "progress"]
    state = client.get(f"/api/jobs/{job}").json()
    schemas.JobState.model_validate(state)
    assert state["state"] == "done"
    assert state["progress"] == 1
    assert state["result"] == heard[-1][1]


def test_every_kind_of_work_can_be_a_job(client: httpx.Client) -> None:
    for kind, more in (
        ("predict", {}),
        ("explain", {}),
        ("trust", {}),
        ("score", {"steps": 2}),
        ("mask", {"removed": [1]}),
    ):
        waited = post(client, kind, sample="coffee", **more)
        accepted = post(client, kind, 202, sample="coffee", wait=False, **more)
        with client.stream("GET", accepted["events"]) as stream:
            assert list(events(stream))[-1] == ("done", waited)


def test_the_picture_can_be_downloaded(client: httpx.Client) -> None:
    answer = client.post("/api/picture", files=form(sample="cat", method="grad_cam"))
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).format == "PNG"


@pytest.mark.parametrize(
    ("what", "fields", "status"),
    [
        ("predict", {}, 415),
        ("predict", {"sample": "cat", "picture": CAT_ID}, 422),
        ("predict", {"sample": "nobody"}, 404),
        ("predict", {"sample": "../cat"}, 404),
        ("predict", {"picture": "0" * 64}, 410),
        ("predict", {"picture": "../../etc/passwd"}, 422),
        ("predict", {"sample": "cat", "model": "vit_base_patch16_224"}, 404),
        ("predict", {"sample": "cat", "model": "hf:./weights"}, 404),
        ("predict", {"sample": "cat", "top": "many"}, 422),
        ("predict", {"sample": "cat", "top": 0}, 422),
        ("predict", {"sample": "cat", "wait": "perhaps"}, 422),
        ("predict", {"sample": "cat", "checkpoint": "/etc/passwd"}, 422),
        ("explain", {"sample": "cat", "method": "nonsense"}, 422),
        ("explain", {"sample": "cat", "method": "os.system"}, 422),
        ("explain", {"sample": "cat", "target": "unicorn"}, 422),
        ("explain", {"sample": "cat", "target": 200}, 422),
        ("explain", {"sample": "cat", "target": -1}, 422),
        ("explain", {"sample": "cat", "target": "tabby", "against": "tabby"}, 422),
        ("explain", {"sample": "cat", "params": "[1]"}, 422),
        ("explain", {"sample": "cat", "params": "{"}, 422),
        ("explain", {"sample": "cat", "params": '{"start_layer": NaN}'}, 422),
        ("explain", {"sample": "cat", "params": "[" * 3000}, 422),
        ("explain", {"sample": "cat", "params": '{"shape": "input"}'}, 422),
        ("explain", {"sample": "cat", "params": '{"model": 1}'}, 422),
        ("explain", {"sample": "cat", "params": '{"start_layer": "\\ud800"}'}, 422),
        ("explain", {"sample": "cat", "params": '{"start_layer": ' + "9" * 3000 + "}"}, 422),
        ("explain", {"sample": "cat", "method": "rise", "params": {"masks": 10**15}}, 422),
        ("explain", {"sample": "cat", "method": "rise", "params": {"masks": -1}}, 422),
        ("explain", {"sample": "cat", "method": "smooth_grad", "params": {"sigma": 1e308, "samples": 2}}, 422),
        ("explain", {"sample": "cat", "method": "expected_gradients", "params": {"references": "/etc"}}, 422),
        ("explain", {"sample": "cat", "method": "vit_shapley", "params": {"explainer": "/etc/passwd"}}, 422),
        ("score", {"sample": "cat", "steps": 0}, 422),
        ("score", {"sample": "cat", "steps": 10**9}, 422),
        ("score", {"sample": "cat", "space": "outer"}, 422),
        ("mask", {"sample": "cat", "removed": [256]}, 422),
        ("mask", {"sample": "cat", "removed": [-1]}, 422),
        ("mask", {"sample": "cat", "removed": [1.5]}, 422),
        ("mask", {"sample": "cat", "removed": [True]}, 422),
        ("mask", {"sample": "cat", "removed": {"a": 1}}, 422),
        ("mask", {"sample": "cat", "removed": [1], "kept": [2]}, 422),
        ("compare", {"sample": "cat", "methods": "rollout,nonsense"}, 422),
        ("compare", {"sample": "cat", "methods": ",,,"}, 422),
        ("compare", {"sample": "cat", "methods": "rise(masks=2"}, 422),
        ("compare", {"sample": "cat", "methods": "rise(2)"}, 422),
        ("explain", {"sample": "cat", "trust": "perhaps"}, 422),
        ("picture", {"sample": "cat", "storage": "show"}, 422),
        ("score", {"sample": "cat", "trust": False}, 422),
        ("compare", {"sample": "cat", "methods": ",".join(f"m{i}" for i in range(200))}, 422),
    ],
)  # fmt: skip
def test_wrong_values_are_told_in_a_sentence(
    client: httpx.Client, what: str, fields: dict[str, object], status: int
) -> None:
    result = post(client, what, status, **fields)
    assert result.keys() == {"error"}
    assert 10 < len(result["error"]) <= 2000


@pytest.mark.parametrize(
    ("what", "fields", "message"),
    [
        ("predict", {"image": "text"}, "image: expected a file, but got text."),
        ("explain", {"sample": "cat", "target": "x" * 201}, "target: expected at most 200 characters."),
        ("explain", {"sample": "cat", "method": "x" * 201}, "method: expected at most 200 characters."),
        ("explain", {"sample": "cat", "against": "1", "method": "rollout"},
         "rollout gives the same map for every class: it cannot contrast two of them."),
        ("predict", {"sample": "cat", "top": "many"}, "top: expected an integer."),
        ("predict", {"sample": "cat", "top": 0}, "top: expected 1 or more."),
        ("predict", {"sample": "cat", "top": 1000}, "top: expected 100 or less."),
        ("predict", {"sample": "cat", "wait": "perhaps"}, "wait: expected true or false."),
        ("predict", {"picture": "cat"}, "picture: expected the id of an earlier upload, as returned by /api/predict."),
        ("predict", {"sample": "cat", "size": 1}, "size: there is no such field, see /api/docs."),
        ("score", {"sample": "cat", "space": "outer"}, "space: expected 'pixels' or 'tokens'."),
        ("mask", {"sample": "cat", "removed": "x"}, "removed: expected JSON."),
    ],
)  # fmt: skip
def test_wrong_values_are_told_in_plain_words(
    client: httpx.Client, what: str, fields: dict[str, object], message: str
) -> None:
    assert post(client, what, 422, **fields) == {"error": message}


def test_unknown_jobs_pictures_and_places_are_404(client: httpx.Client) -> None:
    for path in ("/api/jobs/x", "/api/jobs/x/events", "/api/nonsense", "/samples/../cli.py", "/nonsense"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]
    assert client.delete("/api/jobs/x").status_code == 404
    assert client.get(f"/api/pictures/{'0' * 64}").status_code == 410
    assert client.get("/api/predict").status_code == 405
    assert client.get("/static/../../../etc/passwd").status_code == 404
    assert client.get("/static/%2e%2e/server.py").status_code == 404


def test_the_reference_works_offline_and_lists_every_operation(client: httpx.Client) -> None:
    page, schema = client.get("/api/docs"), client.get("/api/openapi.json").json()
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script" not in page.text
    for path, verbs in schema["paths"].items():
        for verb in verbs:
            assert f"{verb.upper()} {path}" in page.text
    assert client.get("/api/docs.css").headers["content-type"].startswith("text/css")


def test_the_page_is_there(client: httpx.Client) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")
    assert client.get("/static/index.html").status_code == 200


def test_health_says_version_and_queue(client: httpx.Client) -> None:
    result = client.get("/api/health").json()
    assert result == {"status": "ok", "version": vitrail.__version__, "queue": 0}


def test_the_web_process_does_without_torch(served: Served) -> None:
    maps = Path(f"/proc/{served.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in served.processes()[1:])


def test_the_worker_is_nice(served: Served) -> None:
    nice = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16]) for pid in served.processes()]
    assert nice[0] + 10 in nice[1:]


def test_a_big_upload_is_not_written_to_disk(client: httpx.Client) -> None:
    """The server has no folder for temporary files: to write one would be an error."""
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    assert len(buffer.getvalue()) > 2 * 2**20
    answer = client.post("/api/predict", files=upload(buffer.getvalue(), "noise.png"))
    assert answer.status_code == 200, answer.text


def test_the_log_holds_no_picture_and_no_address(served: Served, client: httpx.Client) -> None:
    client.post("/api/predict", files=upload(name="secret-name.jpg"))
    client.get("/api/methods", params={"model": "secret-model"})
    assert served.log is not None
    log = served.log.read_text()
    assert "secret" not in log
    assert CAT_ID not in log


def test_the_schema_is_valid_json_with_every_error(client: httpx.Client) -> None:
    schema = client.get("/api/openapi.json").json()
    assert "/api/mask" in schema["paths"]
    assert "429" in schema["paths"]["/api/explain"]["post"]["responses"]
    json.dumps(schema)
