"""Ray nodes as processes of their own, started as on a real machine, of which none outlives the tests; and a method
that lets tests kill a process in the middle of its work.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


GATED = """
import sys
import time
from pathlib import Path
import vitrail

folder = Path({folder!r})


@vitrail.method("tests_gated")
def gated(model, images, target):
    ray = sys.modules.get("ray")
    task = ray.get_runtime_context().get_task_name() if ray is not None and ray.is_initialized() else ""
    with (folder / "tasks").open("a", encoding="utf-8") as file:
        file.write(task + "\\n")
    until = time.monotonic() + {limit}
    while (folder / "shut").exists() and len((folder / "tasks").read_text(encoding="utf-8").splitlines()) > {free}:
        if time.monotonic() > until:
            raise TimeoutError("the gate stays shut")
        time.sleep(0.05)
    return images.mean(1)[:, ::8, ::8]
"""


def gated_method(folder: Path, free: int = 0) -> tuple[Path, Path]:
    """A plugin with the method tests_gated, and a file that shuts its gate.

    The method notes the name of its Ray task; while the file exists, it waits after so many explanations.
    """
    plugin = folder / "gated.py"
    plugin.write_text(GATED.format(folder=str(folder), limit=LIMIT, free=free), encoding="utf-8")
    return plugin, folder / "shut"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


def processes_of(node: int) -> set[int]:
    """All processes of a node: its session, for Ray gives its workers process groups of their own."""
    processes = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            state = (path / "stat").read_text().rpartition(") ")[2][0]
            if os.getsid(int(path.name)) == node and state != "Z":
                processes.add(int(path.name))
    return processes


def kill_all(node: int) -> None:
    """Kills every process of a node at once, as a power cut does: all are stopped first, so that none starts others."""
    stopped: set[int] = set()
    while starting := processes_of(node) - stopped:
        for pid in starting:
            _send(pid, signal.SIGSTOP)
        stopped |= starting
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def with_token() -> dict[str, str]:
    """The environment with a token of its own for Ray, whether or not this account has one already."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    return {**others, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class Nodes:
    """A head without CPUs, and nodes that are added and killed; drivers need their ``environment``."""

    def __init__(self, folder: Path) -> None:
        self.environment = with_token()
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
        kill_all(node.pid)
        node.wait()

    def stop(self) -> None:
        for node in self.processes:
            if node.poll() is None:
                self.kill(node)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block",
            "--object-store-memory", str(MEMORY), "--disable-usage-stats", *arguments,
        ]  # fmt: skip
        log = self.folder / f"node-{len(self.processes)}.log"
        with log.open("wb") as file:
            node = subprocess.Popen(
                command,
                env=self.environment,
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
