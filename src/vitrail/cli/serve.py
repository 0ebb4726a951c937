"""``vitrail serve``: the web page and its HTTP interface."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import suppress
from dataclasses import replace

from rich.console import Console

from vitrail.app.server.settings import Settings, is_loopback, is_wildcard, network_address
from vitrail.errors import VitrailError

MODELS = ("photo", "scenes")
BACKLOG = 512


def run(settings: Settings, models: list[str]) -> None:
    """Serves until Ctrl-C."""
    check_extra()
    check_options(settings, models)
    settings = with_token(settings)
    bound = bind(settings)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, list(models) or list(MODELS), bound))


def check_extra() -> None:
    try:
        import cachetools  # noqa: F401
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise VitrailError(f"vitrail serve needs {error.name}: pip install 'vitrail[app]'.") from None


def check_options(settings: Settings, models: list[str]) -> None:
    """What is said about a model's weights is about one model."""
    given = [f"--{name.replace('_', '-')}" for name in settings.load_options]
    if given and len(models) != 1:
        told = f"{len(models)} models" if models else "none"
        raise VitrailError(f"{' and '.join(given)} must go with exactly one --model, but got {told}.")


def with_token(settings: Settings) -> Settings:
    """Who listens to more than this machine has a token."""
    if settings.token is not None and (not settings.token.isascii() or not settings.token.isprintable()
                                       or " " in settings.token or not settings.token):  # fmt: skip
        raise VitrailError("--token must be letters, digits and signs without spaces: it is sent in a header.")
    if settings.token is None and not is_loopback(settings.host):
        return replace(settings, token=secrets.token_urlsafe(24))
    return settings


def bind(settings: Settings) -> socket.socket:
    """The listening socket; bound here, so that what is wrong with the address is one sentence."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        # with TCP named, asyncio sends small packets at once: otherwise each answer waits 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"{settings.host}:{settings.port}"
        raise VitrailError(f"cannot listen on {where} ({reason}): choose another with --host or --port.") from None
    return listener


def address(settings: Settings, bound: socket.socket) -> str:
    """What to open in a browser; the token is in the fragment, which is never sent."""
    host = network_address(bound.family) if is_wildcard(bound.getsockname()[0]) else settings.host
    host = f"[{host}]" if ":" in host else host
    fragment = "" if settings.token is None else f"#token={settings.token}"
    return f"http://{host}:{bound.getsockname()[1]}/{fragment}"


async def serve(settings: Settings, models: list[str], bound: socket.socket) -> None:
    from vitrail.app.server.application import Server

    told = Console(highlight=False)
    told.print(f"Loading {', '.join(models)} …", markup=False)
    server = Server(settings, models)
    await server.service.start()
    told.print(f"vitrail is at {address(settings, bound)}", markup=False, soft_wrap=True)
    told.print("Ctrl-C ends it.")
    await server.serve(sockets=[bound])
