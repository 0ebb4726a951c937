"""Servers for the tests: one as people start it, one in this process with small limits."""

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

from vitrail.app.server.service import Service
from vitrail.app.server.settings import Settings
from vitrail.app.server.uvicorn_server import Server
from vitrail.cli.serve import bind

SAMPLES = Path(__file__).parents[2] / "src" / "vitrail" / "app" / "samples"
PATIENCE = 120.0  # seconds after which a test gives up
CAT = (SAMPLES / "cat.jpg").read_bytes()


@dataclass
class Served:
    """A server: where it is and what it consists of."""

    url: str
    pid: int
    service: Service | None = None
    log: Path | None = None
    process: subprocess.Popen[str] | None = None

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def processes(self) -> list[int]:
        """This one and all its children."""
        return [self.pid, *(int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def rss(self) -> int:
        """Bytes in memory, of all processes."""
        return sum(resident(pid) for pid in self.processes())


def until(true: Callable[[], Any]) -> Any:
    """What comes true, once it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come true")


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # it has just ended
        return 0


@contextmanager
def subprocess_server(log: Path, *options: str, **environment: str) -> Iterator[Served]:
    """``vitrail serve`` as people start it, on a free port."""
    command = [sys.executable, "-m", "vitrail.cli.program", "serve", "--port", "0", "--threads", "1", *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment) as it,
    ):
        try:
            assert it.stdout is not None
            line = next((line for line in it.stdout if "http://" in line), "")
            assert line, log.read_text()
            yield Served(line[line.index("http://") :].split("/#")[0].strip().rstrip("/"), it.pid, log=log, process=it)
        finally:
            it.terminate()


@contextmanager
def inner_server(settings: Settings, *models: str) -> Iterator[Served]:
    """A real server on a free port in a thread of this process, so that a test can look inside."""
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
    """What the thread has to say once it is there."""

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
    """Server-sent events as they come."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def upload(data: bytes = CAT, name: str = "cat.jpg", kind: str = "image/jpeg") -> dict[str, Any]:
    return {"image": (name, data, kind)}


def form(**fields: Any) -> dict[str, Any]:
    """Fields as parts of a form, also where there is no file."""
    return {name: (None, value if isinstance(value, str) else json.dumps(value)) for name, value in fields.items()}
