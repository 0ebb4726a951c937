"""Servers for the tests: one started by the command line, one in this process with small limits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vitrail.app.server.application import Server
from vitrail.app.server.service import Service
from vitrail.app.server.settings import Settings
from vitrail.cli.serve import bind

SAMPLES = Path(__file__).parents[2] / "src" / "vitrail" / "data" / "samples"
PATIENCE = 240.0  # seconds after which a test gives up
CAT = (SAMPLES / "cat.jpg").read_bytes()


@dataclass
class Served:
    """A running server."""

    url: str
    pid: int
    service: Service | None = None
    log: Path | None = None
    process: subprocess.Popen[str] | None = None

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def processes(self) -> list[int]:
        """The server and all its children."""
        return [self.pid, *(int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def rss(self) -> int:
        """Resident memory of all processes, in bytes."""
        return sum(resident(pid) for pid in self.processes())


def until(condition: Callable[[], Any]) -> Any:
    """Waits for a true value and returns it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # the process has just ended
        return 0


@contextmanager
def subprocess_server(log: Path, *options: str, **environment: str) -> Iterator[Served]:
    """``vitrail serve`` on a free port."""
    command = [sys.executable, "-m", "vitrail.cli.program", "serve", "--port", "0", "--threads", "1", *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            assert line, log.read_text()
            yield Served(
                line[line.index("http://") :].split("/#")[0].strip().rstrip("/"), process.pid, log=log, process=process
            )
        finally:
            process.terminate()


@contextmanager
def inner_server(settings: Settings, *models: str) -> Iterator[Served]:
    """A server on a free port in a thread of this process, whose internals a test can access."""
    bound = bind(settings)
    server = Server(settings, list(models))
    thread = threading.Thread(target=asyncio.run, args=(_run(server, bound, ready := Ready()),))
    thread.start()
    ready.event.wait()
    try:
        if ready.error is not None:
            raise ready.error
        yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", os.getpid(), server.service)
    finally:
        server.should_exit = True
        thread.join()


class Ready:
    """Set by the thread once the server is ready or has failed."""

    def __init__(self) -> None:
        self.event, self.error = threading.Event(), None  # type: tuple[threading.Event, BaseException | None]


async def _run(server: Server, bound: socket.socket, ready: Ready) -> None:
    try:
        await server.service.start()
    except BaseException as error:
        ready.error = error
        ready.event.set()
        return
    ready.event.set()
    await server.serve(sockets=[bound])


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Parses server-sent events as they arrive."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def upload(data: bytes = CAT, name: str = "cat.jpg", kind: str = "image/jpeg") -> dict[str, Any]:
    return {"image": (name, data, kind)}


def form(**fields: Any) -> dict[str, Any]:
    """Fields as parts of a multipart form."""
    return {name: (None, value if isinstance(value, str) else json.dumps(value)) for name, value in fields.items()}
