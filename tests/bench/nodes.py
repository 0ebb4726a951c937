"""Ray nodes as processes of their own, started as on a real machine, of which none outlives the tests."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = 240.0  # seconds, for anything: the machine may be busy
MEMORY = 80_000_000  # bytes of each object store
PR_SET_PDEATHSIG = 1


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that must come."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {LIMIT:.0f} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


class Nodes:
    """A head without CPUs, and nodes that are added and killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self.address, self.client = f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{free_port()}"
        self._start(
            "--head", "--port", self.address.split(":")[1], "--ray-client-server-port", self.client.split(":")[2],
            "--num-cpus", "0", "--include-dashboard", "false",
        )  # fmt: skip
        wait_until(lambda: _listens(self.client.removeprefix("ray://")), "the start of the server for clients")

    def add(self, cpus: int, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a node; of several on one machine, one after the other, because they choose their sockets."""
        return self._start("--address", self.address, "--num-cpus", str(cpus), *arguments)

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Kills every process of a node at once, as a power cut does."""
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        for node in self.processes:
            if node.poll() is None:
                self.kill(node)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--block",
            "--object-store-memory", str(MEMORY), "--disable-usage-stats", *arguments,
        ]  # fmt: skip
        log = self.folder / f"node-{len(self.processes)}.log"
        with log.open("wb") as file:
            node = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        self.processes.append(node)
        wait_until(lambda: node.poll() is not None or "block forever" in log.read_text(errors="replace"), "the start")
        assert node.poll() is None, log.read_text(errors="replace")
        return node


@contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        nodes.stop()
