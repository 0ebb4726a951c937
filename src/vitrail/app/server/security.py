"""Which requests are accepted, how large they may be, and the security headers of answers."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.app.server.responses import RequestError, to_json
from vitrail.app.server.settings import Settings, is_loopback

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "X-Frame-Options": "DENY",
}
# These describe the API and not what this server holds; a browser cannot send a token with a link.
PUBLIC = frozenset({"/api/docs", "/api/docs.css", "/api/openapi.json"})
DRAIN_FACTOR = 4  # a refused body is discarded up to this many times the limit, so that the client reads the answer
IDLE_SECONDS = 0.5  # without data, after which a refused client has stopped sending


class Guard:
    """Middleware that checks every request before the routes see it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.receiving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        api = scope["path"].startswith("/api")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store" if api else "no-cache")
            await send(message)

        if scope["method"] == "HEAD" and not scope["path"].endswith("/events"):  # whose end would cancel the job
            scope = {**scope, "method": "GET"}  # the web server drops the body
        body = Body(receive, self)
        try:
            check(scope, Headers(scope=scope), self.settings)
            body.announce(Headers(scope=scope).get("content-length", ""))
        except RequestError as error:
            await body.drain()
            await error_response(error)(scope, receive, guarded)
            return
        try:
            await self.app(scope, body.receive, guarded)
        finally:
            self.receiving -= body.held


class Body:
    """The body of a request, counted while it arrives."""

    def __init__(self, receive: Receive, guard: Guard) -> None:
        self._receive, self._guard = receive, guard
        self._until = asyncio.get_running_loop().time() + guard.settings.body_seconds
        self.held, self._complete = 0, False

    def announce(self, length: str) -> None:
        if length.isdecimal() and int(length[:20]) > self._guard.settings.body_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(408, "the request took too long to arrive: send it again, or a smaller image.") from None
        size = len(message.get("body", b""))
        self.held += size
        self._guard.receiving += size
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self.held > self._guard.settings.body_bytes:
            await self.drain()
            raise self._too_large()
        if self._guard.receiving > self._guard.settings.receiving_bytes:
            await self.drain()
            raise RequestError(429, "too many uploads are in transit: try again later.", retry_after=2)
        return message

    async def drain(self) -> None:
        """Discards the rest for a while: a client that is still sending would not read the answer."""
        remaining = DRAIN_FACTOR * self._guard.settings.body_bytes
        with suppress(TimeoutError):
            while not self._complete and remaining > 0:
                async with asyncio.timeout(IDLE_SECONDS):
                    message = await self._receive()
                remaining -= len(message.get("body", b""))
                self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        self._complete = True

    def _too_large(self) -> RequestError:
        limit = self._guard.settings.upload_bytes // 2**20
        return RequestError(413, f"the upload is too large, expected at most {limit} MiB: send a smaller image.")


def check(scope: Scope, headers: Headers, settings: Settings) -> None:
    """Raises if the host, the origin or the token is wrong."""
    host = headers.get("host", "")
    if settings.token is None and not is_loopback(host_name(host)):  # DNS rebinding
        raise RequestError(403, f"the host {host[:80]!r} is not this machine: use localhost, or start with --token.")
    path, origin = scope["path"], headers.get("origin")
    if origin is not None and origin_host(origin) != host:
        raise RequestError(403, "requests from other sites are refused: use this server's page, or no Origin header.")
    if not path.startswith("/api") or path in PUBLIC:
        return
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise RequestError(403, "requests from other sites are refused: use this server's page.")
    token = headers.get("authorization", "").partition(" ")[2]
    if settings.token is not None and not secrets.compare_digest(token.encode(), settings.token.encode()):
        problem = "the token is wrong, expected the one that vitrail serve printed" if token else "a token is required"
        raise RequestError(401, f"{problem}: send the header Authorization: Bearer TOKEN.")


def origin_host(origin: str) -> str | None:
    """Host and port; None if the origin is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def host_name(host: str) -> str:
    """The host without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def error_response(error: RequestError) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(to_json({"error": str(error)}), error.status, headers, "application/json")
