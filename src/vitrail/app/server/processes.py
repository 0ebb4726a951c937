"""Child processes: spawned, connected by a pipe, killed when necessary.

A message is a JSON header and a blob. No pickle: whoever takes over the process that decodes uploads must not be able
to run code in this one.
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

MAX_MESSAGE = 2**30  # bytes


def send(pipe: Connection, header: Header, blob: bytes = b"") -> None:
    pipe.send_bytes(json.dumps(header).encode())
    pipe.send_bytes(blob)


def receive(pipe: Connection) -> tuple[Header, bytes]:
    header: Header = json.loads(pipe.recv_bytes(MAX_MESSAGE))
    return header, pipe.recv_bytes(MAX_MESSAGE)


def ignore_interrupt() -> None:
    """Ctrl-C reaches the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def limit_memory(kind: str, limit: int) -> None:
    """Caps the memory of this process, where the operating system supports it."""
    if sys.platform != "win32":
        import resource

        resource_id = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}[kind]
        resource.setrlimit(resource_id, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would contain pictures


def release_memory() -> None:
    """Returns freed memory to the operating system; glibc keeps it fragmented otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def exit_process() -> None:
    """Ends this process at once: its parent is gone."""
    os._exit(0)


class Child:
    """A running child. ``on_message`` and ``on_exit`` are called in the event loop that created it."""

    def __init__(
        self,
        main: Callable[..., None],
        args: tuple[Any, ...],
        on_message: Callable[[Header, bytes], None],
        on_exit: Callable[[], None],
    ) -> None:
        context = get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=main, args=(child_pipe, *args), daemon=True)
        self.process.start()
        child_pipe.close()
        self._loop, self._on_message, self._on_exit = asyncio.get_running_loop(), on_message, on_exit
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="vitrail-send")
        self._ended = False
        self._listener = threading.Thread(target=self._listen, name="vitrail-listen", daemon=True)
        self._listener.start()

    def send(self, header: Header, blob: bytes = b"") -> asyncio.Future[None]:
        """Messages arrive in the order of these calls; if the child has died, ``on_exit`` reports it, not this call."""
        try:
            return self._loop.run_in_executor(self._sender, self._send, header, blob)
        except RuntimeError:  # the executor is shut down: the child has died
            nothing: asyncio.Future[None] = self._loop.create_future()
            nothing.set_result(None)
            return nothing

    def kill(self) -> None:
        """Ends the child at once, without calling ``on_exit``."""
        self._ended = True
        self.process.kill()

    def join(self) -> None:
        """Waits until the child and the threads that serve it have ended."""
        self._listener.join()
        self._sender.shutdown()

    def _send(self, header: Header, blob: bytes) -> None:
        with contextlib.suppress(OSError):
            send(self._pipe, header, blob)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                self._call_in_loop(self._message_received, *receive(self._pipe))  # no variable: it would keep the blob
        self.process.kill()  # also a child that sent an invalid message
        self.process.join()
        self._sender.submit(self._pipe.close)  # in that thread, so that it is not closed while sending
        self._sender.shutdown(wait=False)
        self._call_in_loop(self._exited)

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(function, *args)

    def _message_received(self, header: Header, blob: bytes) -> None:
        if not self._ended:
            self._on_message(header, blob)

    def _exited(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_exit()
