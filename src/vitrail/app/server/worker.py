"""The worker process: it holds the models and runs one long job at a time, with quick jobs in between."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.app.server.cache import ByteCache
from vitrail.app.server.jobs import Cancelled
from vitrail.app.server.processes import exit_process, ignore_interrupt, limit_memory, receive, release_memory, send
from vitrail.app.server.responses import to_json
from vitrail.errors import VitrailError
from vitrail.plugins import load_plugins

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.app.server.tasks import Request
    from vitrail.models.view import View

REPORT_SECONDS = 0.1  # minimum interval between progress reports
RELEASE_SECONDS = 2.0  # minimum interval between releases of freed memory


@dataclass
class Assignment:
    """A job as the worker sees it."""

    id: str
    kind: str
    quick: bool
    request: Request
    cancelled: bool = False
    last_report: float = 0.0


def serve(
    pipe: Connection,
    models: list[str],
    options: Mapping[str, Any],
    threads: int,
    memory: int,
    cache_bytes: int,
    plugins: Sequence[Path] = (),
) -> None:
    """Main function of the process: loads the models, sends the catalogue, then works until the parent is gone."""
    ignore_interrupt()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    try:
        load_plugins(plugins)
        views = load_models(models, options)
        catalogue = describe(views)
    except VitrailError as error:
        send(pipe, {"event": "broken", "error": str(error)})
        return
    if hasattr(os, "nice"):
        os.nice(10)  # the web server and other programs go first
    limit_growth(memory)
    worker = Worker(pipe, views, cache_bytes)
    threading.Thread(target=worker.listen, daemon=True).start()
    send(pipe, {"event": "ready"}, catalogue)
    worker.work()


def load_models(models: list[str], options: Mapping[str, Any]) -> dict[str, View]:
    """The views by the names they were requested with, each used once so that the first request is fast."""
    from PIL import Image

    from vitrail.models.loading import load

    views = {name: load(name, **options) for name in models}
    from vitrail.app.server.tasks import Request, explain  # slow to import: a wrong model name is reported before

    for name, view in views.items():
        view.known_weights = view.weights_hash()  # the weights do not change here
        target = {"target": 0} if view.is_embedding else {}  # it predicts no class
        explain(view, Request(name, "", Image.new("RGB", (64, 64)), {"trust": False} | target), lambda *_: None)
    return views


def describe(views: dict[str, View]) -> bytes:
    from vitrail.app.server.catalogue import describe_methods_of, describe_model

    models = [describe_model(name, view) for name, view in views.items()]
    return to_json({"models": models, "methods": {name: describe_methods_of(view) for name, view in views.items()}})


def limit_growth(memory: int) -> None:
    """Limits what the process allocates beyond what the models take already; only on Linux."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData:"))
        limit_memory("data", int(line.split()[1]) * 1024 + memory)


class Worker:
    """A thread receives jobs; the main thread runs them."""

    def __init__(self, pipe: Connection, views: dict[str, View], cache_bytes: int) -> None:
        from vitrail.app.server.tasks import result_size

        self.pipe, self.views = pipe, views
        self.cache: ByteCache[Hashable, Any] = ByteCache(cache_bytes, result_size)
        self.pictures: dict[str, Image.Image] = {}
        self.assignments: dict[str, Assignment] = {}
        self.quick: deque[Assignment] = deque()
        self.long: deque[Assignment] = deque()
        self.available = threading.Semaphore(0)

    def listen(self) -> None:
        """Until the parent is gone; an exception here ends the process, and the parent starts another."""
        try:
            while True:
                self.handle(*receive(self.pipe))
        except (EOFError, OSError):
            pass
        finally:
            exit_process()

    def handle(self, header: dict[str, Any], blob: bytes) -> None:
        from PIL import Image

        if header["do"] == "picture":
            self.pictures[header["id"]] = Image.frombytes("RGB", tuple(header["size"]), blob)
        elif header["do"] == "forget":
            self.pictures.pop(header["id"], None)
        elif header["do"] == "job":
            self.accept(header)
        elif header["id"] in self.assignments:
            self.assignments[header["id"]].cancelled = True

    def accept(self, header: dict[str, Any]) -> None:
        from vitrail.app.server.tasks import OtherPicture, Request

        image = self.pictures[header["picture"]]  # looked up now: it may be forgotten before the job starts
        other = None if header["other"] is None else OtherPicture(header["other"], self.pictures[header["other"]])
        request = Request(
            header["model"], header["picture"], image, header["fields"], self.cache, header["seconds"], other
        )
        job = self.assignments[header["id"]] = Assignment(header["id"], header["kind"], header["quick"], request)
        (self.quick if job.quick else self.long).append(job)
        self.available.release()

    def work(self) -> None:
        """Runs one job after another; releases memory now and then, and once when there is nothing to do."""
        last_release, idle = time.monotonic(), False
        while True:
            acquired = self.available.acquire(timeout=None if idle else RELEASE_SECONDS)
            if self.quick:
                self.run(self.quick.popleft())
            elif self.long:
                self.run(self.long.popleft())
            idle = not acquired
            if idle or time.monotonic() - last_release > RELEASE_SECONDS:
                release_memory()
                last_release = time.monotonic()

    def run(self, job: Assignment) -> None:
        """Runs a job and sends its result or error."""
        from vitrail.app.server.tasks import run

        send(self.pipe, {"event": "started", "job": job.id})
        view, blob = self.views[job.request.model], b""
        try:
            self._check_cancelled(job)
            media_type, blob = run(job.kind, view, job.request, partial(self.report, job))
            header = {"event": "done", "type": media_type}
        except Cancelled:
            header = {"event": "cancelled"}
        except VitrailError as error:
            header = {"event": "failed", "error": str(error)}
        except Exception as error:  # no check anticipated these values: the client gets a sentence, the log a traceback
            traceback.print_exc()
            message = f"{job.kind} failed with these values ({type(error).__name__}): try others, or smaller ones."
            header = {"event": "failed", "error": message}
        del self.assignments[job.id]
        send(self.pipe, {**header, "job": job.id}, blob)

    def report(self, job: Assignment, event: str, data: dict[str, Any]) -> None:
        """Sends progress; runs a waiting quick job first; raises Cancelled if the job was cancelled."""
        if not job.quick and self.quick:
            self.run(self.quick.popleft())
        self._check_cancelled(job)
        now = time.monotonic()
        if event == "progress" and job.last_report and now - job.last_report < REPORT_SECONDS:
            return
        job.last_report = now
        send(self.pipe, {"event": event, "job": job.id}, to_json(data))

    @staticmethod
    def _check_cancelled(job: Assignment) -> None:
        if job.cancelled:
            raise Cancelled
