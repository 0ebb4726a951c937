"""Child processes: spawned, spoken to through a pipe, ended at will.

A message is a header in JSON and some bytes. Not pickle: whoever took over the process that decodes uploads must not
be able to run code here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Header = dict[str, Any]

MOST = 2**30  # bytes of one message


def send(pipe: Connection, header: Header, blob: bytes = b"") -> None:
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(blob)


def receive(pipe: Connection) -> tuple[Header, bytes]:
    header: Header = json.loads(pipe.recv_bytes(MOST))
    return header, pipe.recv_bytes(MOST)


def behave_as_child() -> None:
    """Ctrl-C is the parent's business: it ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def limit_memory(kind: str, most: int) -> None:
    """An upper limit to what this process may hold, where the system can set one."""
    if sys.platform != "win32":
        import resource

        what = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}[kind]
        resource.setrlimit(what, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold pictures


def give_back_memory() -> None:
    """What was freed goes back to the system; without this glibc keeps it in pieces that fit nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class Child:
    """A running child. ``heard`` gets its messages and ``lost`` its end, both in the event loop that made it."""

    def __init__(
        self,
        main: Callable[..., None],
        args: tuple[Any, ...],
        heard: Callable[[Header, bytes], None],
        lost: Callable[[], None],
    ) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self._loop, self._heard, self._lost = asyncio.get_running_loop(), heard, lost
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="vitrail-send")
        self._ended = False
        self._listener = threading.Thread(target=self._listen, name="vitrail-listen", daemon=True)
        self._listener.start()

    def send(self, header: Header, blob: bytes = b"") -> asyncio.Future[None]:
        """Messages arrive in the order of these calls; a child that is gone is told by ``lost``, not here."""
        try:
            return self._loop.run_in_executor(self._sender, self._send, header, blob)
        except RuntimeError:  # it has gone, which ``lost`` will say in a moment
            nothing: asyncio.Future[None] = self._loop.create_future()
            nothing.set_result(None)
            return nothing

    def end(self) -> None:
        """At once; ``lost`` is not called."""
        self._ended = True
        self.process.kill()

    def wait(self) -> None:
        """Until it has ended and nothing of it is left here."""
        self._listener.join()
        self._sender.shutdown()

    def _send(self, header: Header, blob: bytes) -> None:
        with contextlib.suppress(OSError):
            send(self._pipe, header, blob)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                self._in_loop(self._tell, *receive(self._pipe))  # no name for a picture: it would be kept till the next
        self.process.kill()  # also one that sent nonsense
        self.process.join()
        self._sender.submit(self._pipe.close)  # there, so that it is not closed while something is being sent
        self._sender.shutdown(wait=False)
        self._in_loop(self._tell_lost)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the child
            self._loop.call_soon_threadsafe(call, *args)

    def _tell(self, header: Header, blob: bytes) -> None:
        if not self._ended:
            self._heard(header, blob)

    def _tell_lost(self) -> None:
        if not self._ended:
            self._ended = True
            self._lost()


def leave() -> None:
    """The parent has gone."""
    os._exit(0)
