"""HTTP requests, sent as bytes: damaged forms, pictures, headers and lines."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.app.serving import inner_server
from tests.fuzz import images
from tests.fuzz.harness import Input, Use
from tests.fuzz.mutation import TEXTS, VALUES, damaged

from vitrail.app.server.settings import Settings

PATHS = (
    "/", "/api/health", "/api/models", "/api/methods", "/api/samples", "/api/samples/cat", "/api/jobs/x",
    "/api/jobs/x/events", "/api/pictures/x", "/api/openapi.json", "/api/docs", "/api/predict", "/api/explain",
    "/api/explain", "/api/score", "/api/mask", "/api/compare", "/api/picture", "/api/pairs", "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd", "/api/pictures/..%2f..%2fetc", "/style.css", "//evil.example/", "/api/explain?x=%ff",
)  # fmt: skip
FIELDS = ("sample", "picture", "model", "method", "target", "against", "params", "removed", "kept", "methods", "steps",
          "group", "text", "measure", "trust", "background", "wait", "style", "alpha", "other", "")  # fmt: skip
KNOWN = ("cat", "scenes", "rollout", "raw_attention", "0", "1", "-1", "true", "{}", '{"masks": 2}', "[0, 1]", "[]", "3")
ALLOWED = range(200, 500)
WAIT = 10.0  # seconds for a response
BUSY = 503  # the queue is full: come again


@contextmanager
def target(place: Path) -> Iterator[Use]:
    with inner_server(Settings(port=0, threads=1, job_seconds=20.0, body_seconds=1.0), "scenes") as server:
        yield sending(server.url)


def sending(url: str) -> Use:
    host, port = url.removeprefix("http://").split(":")

    def use(path: Path, out: Path) -> None:
        status = answer((host, int(port)), path.read_bytes())
        assert status is None or status in ALLOWED or status == BUSY, f"status {status}"
        healthy = answer((host, int(port)), b"GET /api/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert healthy == 200, f"the server is no longer healthy: {healthy}"

    return use


def answer(address: tuple[str, int], request: bytes) -> int | None:
    """The status of the first response; None where there is none: the server hung up, or waits for more."""
    with socket.create_connection(address, timeout=WAIT) as line:
        try:
            line.sendall(request)
            start = line.recv(16)
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            return None
    return int(start.split()[1]) if start.startswith(b"HTTP/1.1 ") else None


def generate(draw: random.Random) -> Input:
    path = draw.choice(PATHS)
    verb = draw.choice(("GET", "POST", "POST", "POST", "POST", "HEAD", "DELETE", "PUT", "OPTIONS", "\0"))
    kind, body = draw.choice((form, form, form, encoded, plain))(draw)
    headers = {"Host": "127.0.0.1", "Connection": "close", "Content-Type": kind, "Content-Length": str(len(body))}
    if draw.random() < 0.2:
        odd = draw.choice([text for text in TEXTS if text.isprintable()])
        headers[draw.choice((*headers, "Origin", "Range", "Cookie", "Accept", "Transfer-Encoding", "Expect"))] = odd
    lines = [f"{verb} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    request = "\r\n".join(lines).encode("utf-8", "surrogatepass") + body
    return Input("request.http", damaged(request, draw) if draw.random() < 0.2 else request)


def value(draw: random.Random) -> str:
    odd = draw.choice((*TEXTS, *(json.dumps(value) for value in VALUES if not isinstance(value, str))))
    return draw.choice((draw.choice(KNOWN), odd))


def form(draw: random.Random) -> tuple[str, bytes]:
    """Multipart, with a picture that may be damaged."""
    border = draw.choice((b"x", b"x", b"--", b"x" * 300))
    fields = {draw.choice(FIELDS): value(draw) for _ in range(draw.randint(0, 4))}
    if draw.random() < 0.5:
        fields |= {"sample": "cat", "method": "rollout"}
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode("utf-8", "surrogatepass")
        for name, text in fields.items()
    ]
    if draw.random() < 0.5:
        item = images.generate(draw)
        name = draw.choice((item.name, "../../evil.png", '"', "é"))
        parts.append(f'Content-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode() + item.content)
    body = b"".join(b"--" + border + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + border + b"--\r\n"
    return f"multipart/form-data; boundary={border.decode()}", damaged(body, draw) if draw.random() < 0.3 else body


def encoded(draw: random.Random) -> tuple[str, bytes]:
    text = "&".join(f"{draw.choice(FIELDS)}={value(draw)}" for _ in range(draw.randint(0, 4)))
    return "application/x-www-form-urlencoded", text.encode("utf-8", "surrogatepass")


def plain(draw: random.Random) -> tuple[str, bytes]:
    kind = draw.choice(("application/json", "text/plain", "image/png", "multipart/form-data", ""))
    return kind, draw.choice((b"", b"{}", b"[" * 10_000, draw.randbytes(64), bytes(100_000)))
