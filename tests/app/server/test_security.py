"""Hosts, origins and tokens, security headers, and limits of request sizes."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from tests.app.serving import CAT, Served, form, upload
from typer.testing import CliRunner

from vitrail.app.server.routes import catalogue_routes, page_routes, task_routes
from vitrail.app.server.security import HEADERS, POLICY, Guard, check, host_name
from vitrail.app.server.settings import Settings
from vitrail.cli.program import app as command
from vitrail.cli.serve import address, bind, is_loopback, with_token
from vitrail.errors import VitrailError


def test_every_answer_has_the_headers(client: httpx.Client) -> None:
    for path in ("/", "/api/models", "/api/nonsense", "/static/index.html", "/static/nonsense", "/samples/cat.jpg"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (path, name)
        assert answer.headers["cache-control"] == ("no-store" if path.startswith("/api") else "no-cache")
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in POLICY


def test_uploads_are_given_back_as_pictures_only(client: httpx.Client) -> None:
    page = CAT + b"<script>alert(1)</script>"
    picture = client.post("/api/predict", files=upload(page, "a.html", "text/html")).json()["picture"]
    answer = client.get(f"/api/pictures/{picture}")
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost.", "0"])
def test_foreign_hosts_are_refused(client: httpx.Client, host: str) -> None:
    for path in ("/", "/api/models", "/static/index.html"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code in ((400, 403) if not host else (403,))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:5", "127.0.0.2:8000", "[::1]:80", "[::1]"])
def test_own_hosts_are_served(client: httpx.Client, host: str) -> None:
    assert client.get("/api/health", headers={"Host": host}).status_code == 200


def test_other_sites_are_refused(served: Served, client: httpx.Client) -> None:
    page_origin = served.url
    for origin in (
        "http://evil.example",
        "null",
        "http://localhost:1",
        "http://[",
        "",
        page_origin.replace("http", "https") + "0",
        "file://",
    ):
        answer = client.post("/api/predict", files=upload(), headers={"Origin": origin})
        assert answer.status_code == 403, origin
    assert client.post("/api/predict", files=upload(), headers={"Origin": page_origin}).status_code == 200
    for site in ("cross-site", "same-site"):
        assert client.get("/api/models", headers={"Sec-Fetch-Site": site}).status_code == 403
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link to the page
    assert client.options("/api/predict", headers={"Origin": page_origin}).status_code == 405


def test_head_is_get_without_a_body(client: httpx.Client) -> None:
    for path in ("/", "/api/health", "/api/docs", "/static/index.html", "/samples/cat.jpg", "/nonsense"):
        got, head = client.get(path), client.head(path)
        assert head.status_code == got.status_code, path
        assert head.headers["content-length"] == got.headers["content-length"]
        assert head.content == b""
    assert client.head("/api/predict").status_code == 405
    assert client.head("/api/jobs/x/events").status_code == 405


def connection(served: Served) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)


def chunked(total: int) -> Iterator[bytes]:
    yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    for _ in range(total // 2**20):
        yield bytes(2**20)
    yield b"\r\n--x--\r\n"


HEADER = {"Content-Type": "multipart/form-data; boundary=x"}


def test_a_body_that_is_announced_too_large_is_refused(served: Served) -> None:
    line = connection(served)
    line.putrequest("POST", "/api/predict")
    for name, value in {**HEADER, "Content-Length": str(2**40)}.items():
        line.putheader(name, value)
    line.endheaders()
    line.send(bytes(1000))
    answer = line.getresponse()
    assert answer.status == 413
    assert "20 MiB" in json.loads(answer.read())["error"]


def test_a_body_that_grows_too_large_is_refused_while_it_arrives(served: Served, client: httpx.Client) -> None:
    before = served.rss()
    answer = client.post("/api/predict", content=chunked(60 * 2**20), headers=HEADER)
    assert answer.status_code == 413
    assert served.rss() - before < 40 * 2**20
    answer = client.post("/api/predict", content=chunked(10 * 2**20), headers=HEADER)
    assert answer.status_code in (415, 422)  # not too large, but zeros are not an image


def test_a_form_may_have_few_parts(client: httpx.Client) -> None:
    many = [("removed", (None, "[]"))] * 100
    assert client.post("/api/mask", files=many).status_code == 400
    two = [("image", ("a.jpg", CAT)), ("image", ("b.jpg", CAT))]
    assert client.post("/api/predict", files=two).status_code == 422
    assert client.post("/api/predict", files=[*two, ("other", ("c.jpg", CAT))]).status_code == 400
    assert client.post("/api/predict", files=form(sample="x" * 2_000_000)).status_code == 400
    assert client.post("/api/predict", files=form(image="text")).status_code == 422
    assert client.post("/api/predict", files=form(nonsense="1", sample="cat")).status_code == 422


@pytest.mark.parametrize("name", ["method", "sample"])
def test_a_field_that_comes_twice_is_refused(client: httpx.Client, name: str) -> None:
    twice = [("sample", (None, "cat")), ("method", (None, "rollout")), (name, (None, "random"))]
    answer = client.post("/api/explain", files=twice)
    assert answer.status_code == 422
    assert answer.json()["error"] == f"the form has '{name}' more than once: give each field once."


def test_huge_headers_and_lines_are_refused(served: Served, client: httpx.Client) -> None:
    for headers in ({"X-Long": "a" * 200_000}, {f"X-{i}": "a" * 1000 for i in range(200)}):
        try:
            status = client.get("/api/health", headers=headers).status_code
        except httpx.TransportError:  # it hangs up on them
            status = 400
        assert 400 <= status < 500
    with socket.create_connection(("127.0.0.1", urlsplit(served.url).port), timeout=10) as line:
        line.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in line.recv(1000)
    assert client.get("/api/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "/api/models", 401),
        ({"authorization": "Bearer wrong"}, "/api/models", 401),
        ({"authorization": "Bearer "}, "/api/models", 401),
        ({"authorization": "secret"}, "/api/models", 401),
        ({"authorization": "Bearer sécret"}, "/api/models", 401),
        ({"authorization": "Bearer secret"}, "/api/models", None),
        ({"authorization": "Bearer secret", "host": "far.example"}, "/api/jobs/1", None),
        ({}, "/api/jobs/1/events", 401),
        ({}, "/api/pictures/1", 401),
        ({}, "/", None),
        ({}, "/static/x.js", None),
        ({}, "/api/docs", None),
    ],
)
def test_with_a_token_every_request_needs_it(headers: dict[str, str], path: str, status: int | None) -> None:
    result = None
    try:
        check({"path": path}, Headers({"host": "127.0.0.1", **headers}), Settings(token="secret"))
    except VitrailError as error:
        result = error.status  # type: ignore[attr-defined]
    assert result == status


def test_a_wrong_token_is_told_apart_from_none() -> None:
    for headers, message in (({}, "a token is required"), ({"authorization": "Bearer x"}, "the token is wrong")):
        with pytest.raises(VitrailError, match=message):
            check({"path": "/api/models"}, Headers({"host": "h", **headers}), Settings(token="secret"))


def test_a_server_with_a_token_asks_for_it(guarded: Served) -> None:
    with guarded.client() as client:
        answer = client.get("/api/models")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get("/").status_code == 200
        assert client.get("/api/models", headers={"Authorization": "Bearer open-sesame"}).status_code == 200
        assert client.post("/api/predict", files=upload()).status_code == 401


@pytest.fixture(scope="module")
def guarded(small: Served) -> Iterator[Served]:
    """The small server behind a second door that wants a token."""
    assert small.service is not None
    settings = Settings(port=0, token="open-sesame")
    bound = bind(settings)
    app = FastAPI(openapi_url=None)
    app.include_router(catalogue_routes(small.service))
    app.include_router(task_routes(small.service))
    app.include_router(page_routes(small.service))
    app.add_middleware(Guard, settings=settings)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[bound]),))
    thread.start()
    yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", small.pid)
    server.should_exit = True
    thread.join()


def test_other_addresses_than_loopback_get_a_token() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1"):
        assert is_loopback(host)
        assert with_token(Settings(host=host)).token is None
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        assert not is_loopback(host)
        first, second = (with_token(Settings(host=host)).token for _ in range(2))
        assert first is not None
        assert first != second
        assert len(first) >= 32
    assert with_token(Settings(host="0.0.0.0", token="mine")).token == "mine"
    for token in ("", "two words", "ünï", "a\nb"):
        with pytest.raises(VitrailError, match="--token"):
            with_token(Settings(token=token))


def test_the_address_has_the_token_where_no_server_sees_it() -> None:
    settings = Settings(port=0, token="abc")
    with bind(settings) as bound:
        port = bound.getsockname()[1]
        assert address(settings, bound) == f"http://127.0.0.1:{port}/#token=abc"
        with pytest.raises(VitrailError, match="--port"):
            bind(Settings(port=port))
    with pytest.raises(VitrailError, match="cannot listen"):
        bind(Settings(host="203.0.113.7", port=0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_cannot_be_opened_is_not_printed(host: str) -> None:
    settings = Settings(host=host, port=0, token="abc")
    try:
        bound = bind(settings)
    except VitrailError:
        if host != "::":
            raise
        pytest.skip("this machine has no IPv6")
    with bound:
        url = urlsplit(address(settings, bound))
    assert url.hostname not in (None, "", "0.0.0.0", "::")
    assert url.fragment == "token=abc"


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["serve", "--port", "0", "--model", "no_such_model_at_all"])
    assert isinstance(result.exception, VitrailError)
    assert "no_such_model_at_all" in str(result.exception)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(command, ["serve"])
    assert "pip install 'vitrail[app]'" in str(result.exception)


def test_names_of_hosts() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("LocalHost:80") == "localhost"
