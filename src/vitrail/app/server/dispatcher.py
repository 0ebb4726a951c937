"""From the queues to the worker and back; a worker that hangs or dies is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from vitrail.app.server import worker
from vitrail.app.server.cache import ByteCache
from vitrail.app.server.decoding import Decoded
from vitrail.app.server.jobs import Answer, Job, JobQueue, Jobs, State, cancelled_error
from vitrail.app.server.processes import Child, Header
from vitrail.app.server.responses import RequestError
from vitrail.app.server.settings import Settings
from vitrail.errors import VitrailError

BYTES_PER_PIXEL = 4  # of a picture in the worker
COMPARE_FACTOR = 2  # a comparison times out after this many times the limit of one method
MAX_RESTART_DELAY = 30.0  # seconds

Decode = Callable[[str], Awaitable[Decoded]]


class Dispatcher:
    """Assigns jobs to the worker, one long and one quick at a time; ``decode`` returns the pixels of a picture."""

    def __init__(self, settings: Settings, models: list[str], jobs: Jobs, decode: Decode) -> None:
        self.settings, self.models, self.jobs, self.decode = settings, models, jobs, decode
        self.catalogue = b""  # JSON: models and methods
        self._child: Child | None = None
        self._ready, self._lost, self._loaded = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._load_error: str | None = None
        self._restart_delay = 1.0
        self._assigned: dict[str, Job] = {}  # jobs that the worker has
        self._started: dict[Job, float] = {}  # those it has started, and when; the last is the one that runs now
        # pictures in the worker, and their size
        self._pictures: ByteCache[str, int] = ByteCache(settings.cache_bytes // 2, int, self._forget_picture)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Waits until the models are loaded, and raises the error if they cannot be."""
        self._spawn()
        await self._loaded.wait()
        if self._load_error is not None:
            self.stop()
            raise VitrailError(self._load_error)
        self._tasks = [asyncio.create_task(self._process(queue)) for queue in (self.jobs.quick, self.jobs.long)]

    def stop(self) -> Child | None:
        """Kills the worker and returns it."""
        for task in self._tasks:
            task.cancel()
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        return child

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def send_picture(self, picture: str, decoded: Decoded) -> None:
        """Sends a picture ahead of its jobs; without a worker this does nothing, and the job decodes it again."""
        if self._child is None or not self._ready.is_set():
            return
        width, height = decoded.size
        sent = self._child.send({"do": "picture", "id": picture, "size": [width, height]}, decoded.pixels)
        most = int(self._pictures.maxsize) // 2  # so that the two pictures of a job always fit
        self._pictures[picture] = min(width * height * BYTES_PER_PIXEL, most)
        await sent

    def cancel(self, job: Job) -> None:
        """Removes a waiting job; asks the worker to stop a running one, and kills the worker if it does not."""
        if job.finished or job.cancel_requested or self.jobs.drop(job):
            return
        job.cancel_requested = True
        if self._child is not None:
            self._child.send({"do": "cancel", "id": job.id})
        asyncio.get_running_loop().call_later(self.settings.stop_seconds, self._kill_if_running, job)

    def cancel_all(self) -> None:
        """Ends every job, waiting or running, at once."""
        for job in [*self.jobs.quick.jobs, *self.jobs.long.jobs]:
            self.jobs.drop(job)
        for job in [*self._assigned.values()]:
            self._finish(job, "cancelled")

    def _kill_if_running(self, job: Job) -> None:
        if job in self._started and self._child is not None:
            self._child.kill()
            self._replace_worker(job)

    def _time_out(self, job: Job) -> None:
        job.timed_out = True
        self.cancel(job)

    def _forget_picture(self, picture: str) -> None:
        if self._child is not None:
            self._child.send({"do": "forget", "id": picture})

    async def _process(self, queue: JobQueue) -> None:
        while True:
            job = await queue.next()
            while not job.finished:
                await self._ready.wait()
                answer = self.jobs.answers.get(job.task.key)
                if job.cancel_requested:
                    self._finish(job, "cancelled")
                elif answer is not None:
                    self._finish(job, "done", answer)
                elif missing := [id_ for id_ in job.task.pictures if self._pictures.get(id_) is None]:
                    await self._decode_picture(job, missing[0])
                else:
                    await self._assign(job)

    async def _decode_picture(self, job: Job, picture: str) -> None:
        try:
            await self.send_picture(picture, await self.decode(picture))
        except RequestError as error:
            self._finish(job, "failed", error=error)

    async def _assign(self, job: Job) -> None:
        """Until the job has ended or the worker is lost."""
        assert self._child is not None
        limits = {"quick": job.task.quick, "seconds": self.settings.job_seconds}
        self._child.send({"do": "job", "id": job.id, **asdict(job.task), **limits})
        self._assigned[job.id] = job
        waits = [asyncio.create_task(event.wait()) for event in (job.ended, self._lost)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_message(self, header: Header, blob: bytes) -> None:
        event = header["event"]
        if event == "ready":
            self.catalogue, self._restart_delay = blob, 1.0
            self._ready.set()
            self._loaded.set()
            return
        if event == "broken":
            self._load_error = header["error"]
            return
        job = self._assigned.get(header["job"])
        if job is None:
            return
        if event == "started":
            job.state = "running"
            self._started[job] = asyncio.get_running_loop().time()
            self._start_timer(job)
        elif event in ("progress", "partial"):
            job.emit(event, blob)
            if event == "partial":
                self._start_timer(job)
        elif event == "done":
            self._finish(job, "done", Answer(header["type"], blob))
        elif event == "failed":
            self._finish(job, "failed", error=RequestError(422, header["error"]))
        else:
            self._finish(job, "cancelled")

    def _start_timer(self, job: Job) -> None:
        """For the job, or for the next method of a comparison, which the worker itself stops between two steps."""
        seconds = self.settings.job_seconds * (COMPARE_FACTOR if job.task.kind == "compare" else 1)
        self._set_timer(job, asyncio.get_running_loop().time() + seconds)

    def _set_timer(self, job: Job, deadline: float) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.timer = asyncio.get_running_loop().call_at(deadline, self._time_out, job)

    def _finish(self, job: Job, state: State, answer: Answer | None = None, error: RequestError | None = None) -> None:
        """Ends the job; the time it took is added to the limit of the job it interrupted."""
        if state == "cancelled" and job.timed_out:
            limit = f"{self.settings.job_seconds:g} seconds"
            advice = "try fewer steps, masks or methods, or start vitrail serve with more --job-seconds"
            message = f"the job took longer than {limit}: {advice}."
            state, error = "failed", RequestError(408, message)
        elif state == "cancelled":
            error = cancelled_error()
        self._assigned.pop(job.id, None)
        start = self._started.pop(job, None)
        seconds = None if start is None else asyncio.get_running_loop().time() - start
        job.finish(state, answer, error)
        self.jobs.settle(job, seconds)
        for other in self._started:
            if other.timer is not None and not other.timer.cancelled():
                self._set_timer(other, other.timer.when() + (seconds or 0.0))

    def _spawn(self) -> None:
        self._lost = asyncio.Event()
        settings = self.settings
        limits = (settings.threads, settings.work_bytes, settings.cache_bytes // 8)
        args = (self.models, settings.load_options, *limits, settings.plugins)
        self._child = Child(worker.serve, args, self._on_message, self._on_exit)

    def _on_exit(self) -> None:
        """The worker has died: the job that ran last is the cause."""
        self._replace_worker(next(reversed(self._started), None))

    def _replace_worker(self, culprit: Job | None) -> None:
        """One job ends with the worker; the others are assigned again to its successor."""
        was_ready, self._child = self._ready.is_set(), None
        self._ready.clear()
        self._pictures.clear()
        for job in [*self._started]:
            if job.timer is not None:
                job.timer.cancel()
            if job is not culprit:
                job.state = "queued"
        if culprit is not None:
            state: State = "cancelled" if culprit.cancel_requested else "failed"
            message = f"the worker process ended during this {culprit.task.kind}: try fewer steps, masks or methods."
            self._finish(culprit, state, error=RequestError(422, message))
        self._assigned.clear()
        self._started.clear()
        self._lost.set()
        if not self._loaded.is_set():
            self._load_error = self._load_error or "the worker process ended before its models were loaded."
            self._loaded.set()
        elif was_ready:
            self._spawn()
        else:
            asyncio.get_running_loop().call_later(self._restart_delay, self._spawn)
            self._restart_delay = min(2 * self._restart_delay, MAX_RESTART_DELAY)
