"""``vitrail serve``: the web page and its HTTP API."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from vitrail.app.server.settings import MIB, Settings, is_loopback, is_wildcard, network_address, spare_cores
from vitrail.cli import options
from vitrail.cli.outputs import print_json
from vitrail.errors import VitrailError

MODELS = ("photo", "scenes")
BACKLOG = 512


@options.grouped(load_options=options.load_options)
def serve(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODELS",
            help="Models to serve, comma-separated or repeated; default: photo and scenes.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; non-loopback addresses require a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free port.")] = 8000,
    token: Annotated[
        str | None, typer.Option(help="Token that clients must send; generated where one is required.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Number of compute threads; default: all cores but one.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting jobs of each kind.")] = 16,
    job_seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of a job, or of a method in a comparison.")
    ] = 120,
    cache_mb: Annotated[int, typer.Option(min=1, help="Size of the cache of images and responses, in MiB.")] = 256,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Serve the web page and its HTTP API."""
    settings = Settings(
        host=host,
        port=port,
        token=token,
        queue=queue,
        job_seconds=job_seconds,
        threads=threads or spare_cores(),
        cache_bytes=cache_mb * MIB,
        load_options=load_options,
        plugins=tuple(plugin or ()),
    )
    run(settings, options.comma_separated(model), as_json)


def run(settings: Settings, models: list[str], as_json: bool = False) -> None:
    """Serves until Ctrl-C."""
    import asyncio  # slow to import, and every command of the program imports this file

    check_extra()
    check_options(settings, models)
    settings = with_token(settings)
    with bind(settings) as listener, suppress(KeyboardInterrupt):
        asyncio.run(_serve(settings, models or list(MODELS), listener, as_json))


def check_extra() -> None:
    try:
        import cachetools  # noqa: F401
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise VitrailError(f"vitrail serve needs {error.name}: pip install 'vitrail[app]'.") from None


def check_options(settings: Settings, models: list[str]) -> None:
    """Refuses weights and preprocessing for no model or for several."""
    named = [options.flag(name) for name in settings.load_options]
    if named and len(models) != 1:
        count = f"{len(models)} models" if models else "none"
        raise VitrailError(f"{' and '.join(named)} must go with exactly one --model, but got {count}.")


def with_token(settings: Settings) -> Settings:
    """The settings with a token where the address is not a loopback address."""
    token = settings.token
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise VitrailError("--token must be printable ASCII without spaces: it is sent in an HTTP header.")
    return settings if token or is_loopback(settings.host) else replace(settings, token=secrets.token_urlsafe(24))


def bind(settings: Settings) -> socket.socket:
    """The listening socket; bound here, so that a wrong address is a one-line error."""
    try:
        candidates = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = candidates[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; without it each response waits 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise VitrailError(
            f"cannot listen on {settings.host}:{settings.port} ({reason}): choose another --host or --port."
        ) from None
    return listener


def address(settings: Settings, listener: socket.socket) -> str:
    """The URL to open in a browser; the token is in the fragment, which is never sent."""
    bound_host, port = listener.getsockname()[:2]
    host = network_address(listener.family) if is_wildcard(bound_host) else settings.host
    host = f"[{host}]" if ":" in host else host
    fragment = "" if settings.token is None else f"#token={settings.token}"
    return f"http://{host}:{port}/{fragment}"


async def _serve(settings: Settings, models: list[str], listener: socket.socket, as_json: bool) -> None:
    from vitrail.app.server.application import Server

    console = Console(stderr=as_json, highlight=False)
    console.print(f"Loading {', '.join(models)} …", markup=False)
    server = Server(settings, models)
    await server.service.start()
    console.print(f"vitrail is at {address(settings, listener)}", markup=False, soft_wrap=True)
    console.print("Press Ctrl-C to stop.")
    if as_json:
        url = address(settings, listener).partition("#")[0]
        print_json({"url": url, "token": settings.token, "models": models})
    await server.serve(sockets=[listener])
