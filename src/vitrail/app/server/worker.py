"""The computing process: it holds the models, does one long job at a time, and quick ones in between."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.app.server.bounded import Bounded
from vitrail.app.server.encoding import as_json
from vitrail.app.server.jobs import Cancelled
from vitrail.app.server.processes import (
    behave_as_child,
    give_back_memory,
    leave,
    limit_memory,
    receive,
    send,
)
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.models.view import View

TELL_SECONDS = 0.1  # progress is sent at most so often
TIDY_SECONDS = 2.0  # freed memory is given back at most so often


@dataclass
class Assignment:
    """A job as the worker sees it."""

    id: str
    kind: str
    quick: bool
    model: str
    picture: str
    image: Image.Image
    fields: dict[str, Any]
    seconds: float
    cancelled: bool = False
    told: float = 0.0


def serve(
    pipe: Connection, models: list[str], options: Mapping[str, Any], threads: int, memory: int, kept: int
) -> None:
    """The child: loads the models, says what it has, then works until the parent is gone."""
    behave_as_child()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    try:
        views = load_all(models, options)
        offer = describe_all(views)
    except VitrailError as error:
        send(pipe, {"event": "broken", "error": str(error)})
        return
    if hasattr(os, "nice"):
        os.nice(10)  # the web server, and whatever else people do here, goes first
    _limit(memory)
    worker = Worker(pipe, views, Bounded(kept))
    threading.Thread(target=worker.listen, daemon=True).start()
    send(pipe, {"event": "ready"}, offer)
    worker.work()


def load_all(models: list[str], options: Mapping[str, Any]) -> dict[str, View]:
    """The views by the names they were asked for, each used once so that the first request is quick."""
    from PIL import Image

    from vitrail.models.loading import load

    views = {name: load(name, **options) for name in models}
    from vitrail.app.server.tasks import Request, explain  # slow to import: a wrong name is told before

    for name, view in views.items():
        view.known_fingerprint = view.fingerprint()  # nobody changes the weights here
        explain(view, Request(name, "", Image.new("RGB", (64, 64))), lambda *_: None)
    return views


def describe_all(views: dict[str, View]) -> bytes:
    from vitrail.app.server.catalogue import describe_model, methods_of

    models = [describe_model(name, view) for name, view in views.items()]
    return as_json({"models": models, "methods": {name: methods_of(view) for name, view in views.items()}})


class Worker:
    """Jobs come in by a thread that listens; the main thread works."""

    def __init__(self, pipe: Connection, views: dict[str, View], memory: Bounded[Any]) -> None:
        self.pipe, self.views, self.memory = pipe, views, memory
        self.pictures: dict[str, Image.Image] = {}
        self.known: dict[str, Assignment] = {}
        self.quick: deque[Assignment] = deque()
        self.long: deque[Assignment] = deque()
        self.news = threading.Semaphore(0)

    def listen(self) -> None:
        """Until the parent is gone; an error here ends the process, which the parent starts again."""
        try:
            while True:
                self.hear(*receive(self.pipe))
        except (EOFError, OSError):
            pass
        finally:
            leave()

    def hear(self, header: dict[str, Any], blob: bytes) -> None:
        from PIL import Image

        if header["do"] == "picture":
            self.pictures[header["id"]] = Image.frombytes("RGB", tuple(header["size"]), blob)
        elif header["do"] == "forget":
            self.pictures.pop(header["id"], None)
        elif header["do"] == "job":
            self.accept(header)
        elif header["id"] in self.known:
            self.known[header["id"]].cancelled = True

    def accept(self, header: dict[str, Any]) -> None:
        # the picture is taken now: it may be forgotten before the job begins
        wanted = {name: header[name] for name in ("id", "kind", "quick", "model", "picture", "fields", "seconds")}
        job = Assignment(**wanted, image=self.pictures[header["picture"]])
        self.known[job.id] = job
        (self.quick if job.quick else self.long).append(job)
        self.news.release()

    def work(self) -> None:
        """One job after another; now and then, and once when there is nothing to do, memory is given back."""
        tidied, idle = time.monotonic(), False
        while True:
            came = self.news.acquire(timeout=None if idle else TIDY_SECONDS)
            if self.quick:
                self.do(self.quick.popleft())
            elif self.long:
                self.do(self.long.popleft())
            idle = not came
            if idle or time.monotonic() - tidied > TIDY_SECONDS:
                give_back_memory()
                tidied = time.monotonic()

    def do(self, job: Assignment) -> None:
        """One job, whatever comes of it."""
        from vitrail.app.server.tasks import KINDS, Request

        send(self.pipe, {"event": "started", "job": job.id})
        request = Request(job.model, job.picture, job.image, job.fields, self.memory, job.seconds)
        try:
            self._go_on(job)
            answer = KINDS[job.kind](self.views[job.model], request, lambda what, said: self.tell(job, what, said))
            png = isinstance(answer, bytes)
            blob = answer if isinstance(answer, bytes) else as_json(answer)
            end = {"event": "done", "type": "image/png" if png else "application/json"}
        except Cancelled:
            end, blob = {"event": "cancelled"}, b""
        except VitrailError as error:
            end, blob = {"event": "failed", "error": str(error)}, b""
        except Exception as error:  # values that no check foresaw: the client learns it, the log has the place
            traceback.print_exc()
            sentence = f"{job.kind} failed with these values ({type(error).__name__}): try others, or smaller ones."
            end, blob = {"event": "failed", "error": sentence}, b""
        del self.known[job.id]
        send(self.pipe, {**end, "job": job.id}, blob)

    def tell(self, job: Assignment, what: str, said: dict[str, Any]) -> None:
        """Sends on what the work says; a quick job may go first; raises Cancelled where the work is not wanted."""
        if not job.quick and self.quick:
            self.do(self.quick.popleft())
        self._go_on(job)
        now = time.monotonic()
        if what == "progress" and job.told and now - job.told < TELL_SECONDS:
            return
        job.told = now
        send(self.pipe, {"event": what, "job": job.id}, as_json(said))

    @staticmethod
    def _go_on(job: Assignment) -> None:
        if job.cancelled:
            raise Cancelled


def _limit(memory: int) -> None:
    """Beyond what the models hold already; only Linux tells and enforces that."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData:"))
        limit_memory("data", int(line.split()[1]) * 1024 + memory)
