"""Jobs: waiting, running, finished."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.app.server.cache import ByteCache
from vitrail.app.server.responses import RequestError, to_json

State = Literal["queued", "running", "done", "failed", "cancelled"]

QUICK = frozenset({"predict", "mask"})
FINISHED_BYTES = 16 * 2**20  # of finished jobs that can still be looked up
OVERHEAD = 2048  # bytes of a job or answer besides its contents
PING_SECONDS = 15.0  # a comment now and then keeps proxies from closing an event stream


class Cancelled(BaseException):  # like KeyboardInterrupt: no handler in between may catch it
    """The job was cancelled."""


@dataclass(frozen=True)
class Task:
    """The work to do: its kind, the model, the ids of the picture and of what it is compared with, the other fields."""

    kind: str
    model: str
    picture: str
    fields: dict[str, Any]
    other: str | None = None

    @property
    def pictures(self) -> list[str]:
        return [self.picture] if self.other is None else [self.picture, self.other]

    @property
    def quick(self) -> bool:
        return self.kind in QUICK

    @property
    def key(self) -> Hashable:
        return self.kind, self.model, *self.pictures, json.dumps(self.fields, sort_keys=True)


@dataclass(frozen=True)
class Answer:
    """Media type and body of a response."""

    type: str
    body: bytes

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.body)


@dataclass(eq=False)
class Job:
    """A task in progress. ``events`` is its history; ``changed`` wakes those who stream it."""

    task: Task
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: State = "queued"
    events: dict[int, tuple[str, bytes]] = field(default_factory=dict)  # by their number; of progress only the latest
    progress: int = -1  # number of the latest progress report
    numbers: Iterator[int] = field(default_factory=itertools.count)
    answer: Answer | None = None
    error: RequestError | None = None
    timed_out: bool = False
    cancel_requested: bool = False
    timer: asyncio.TimerHandle | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return self.ended.is_set()

    @property
    def fraction(self) -> float:
        """Fraction of the work done, 0…1."""
        if self.state == "done":
            return 1.0
        report = json.loads(self.events[self.progress][1]) if self.progress in self.events else {}
        return min(1.0, report["done"] / report["total"]) if report.get("total") else 0.0

    @property
    def size(self) -> int:
        """Memory in bytes."""
        events = sum(len(data) for _, data in self.events.values())
        return OVERHEAD + events + (len(self.answer.body) if self.answer else 0)

    def emit(self, name: str, data: bytes) -> None:
        """Adds an event; of progress only the latest is kept."""
        number = next(self.numbers)
        self.events[number] = name, data
        if name == "progress":
            self.events.pop(self.progress, None)
            self.progress = number
        previous, self.changed = self.changed, asyncio.Event()
        previous.set()

    def finish(self, state: State, answer: Answer | None = None, error: RequestError | None = None) -> None:
        self.state, self.answer, self.error = state, answer, error
        if self.timer is not None:
            self.timer.cancel()
        if answer is not None and answer.type == "application/json":
            data = answer.body
        else:
            data = to_json({} if error is None else {"error": str(error), "status": error.status})
        self.ended.set()
        self.emit(state, data)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: all so far, then each as it happens, to the last; of progress only the latest."""
        sent = -1
        while True:
            changed = self.changed
            while (number := next((number for number in self.events if number > sent), None)) is not None:
                sent, (name, data) = number, self.events[number]
                if name != "progress" or not self.finished:
                    yield b"event: %s\ndata: %s\n\n" % (name.encode(), data)
            if self.finished:
                return
            try:
                await asyncio.wait_for(changed.wait(), PING_SECONDS)
            except TimeoutError:
                yield b": ping\n\n"


class JobQueue:
    """First in, first out; quick and long jobs have one each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.jobs: deque[Job] = deque()  # that wait
        self._taken: Job | None = None  # the last job that left the queue
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self.jobs)

    def position(self, job: Job) -> int | None:
        """Number of jobs ahead, including the running one; None if the job is not waiting."""
        running = self._taken is not None and not self._taken.finished
        return running + self.jobs.index(job) if job in self.jobs else None

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self._emit_positions()
        self._added.set()

    def remove(self, job: Job) -> bool:
        if job not in self.jobs:
            return False
        self.jobs.remove(job)
        self._emit_positions()
        return True

    async def next(self) -> Job:
        while not self.jobs:
            self._added.clear()
            await self._added.wait()
        self._taken = self.jobs.popleft()
        self._emit_positions()
        return self._taken

    def _emit_positions(self) -> None:
        """Of the jobs whose position has changed: the first keeps its own when the job ahead starts to run."""
        for job in self.jobs:
            data = to_json({"position": self.position(job)})
            if ("queued", data) not in job.events.values():
                job.emit("queued", data)


class Jobs:
    """The two queues, the jobs that can be looked up by id, and the cache of answers."""

    def __init__(self, capacity: int, cache_bytes: int) -> None:
        self.quick, self.long = JobQueue(capacity), JobQueue(capacity)
        self.answers: ByteCache[Hashable, Answer] = ByteCache(cache_bytes, lambda answer: answer.size)
        self._active: dict[str, Job] = {}
        self._finished: ByteCache[str, Job] = ByteCache(FINISHED_BYTES, lambda job: job.size)
        self._seconds = 1.0  # running mean of the duration of a long job

    def queue(self, task: Task) -> JobQueue:
        return self.quick if task.quick else self.long

    def submit(self, task: Task, keep: bool) -> Job:
        """A waiting job, or a finished one if the answer is cached; ``keep`` makes it available by its id."""
        job, answer, queue = Job(task), self.answers.get(task.key), self.queue(task)
        if answer is not None:
            job.finish("done", answer)
        elif len(queue) >= queue.capacity:
            message = f"the queue is full ({queue.capacity} jobs are waiting): try again later."
            raise RequestError(429, message, retry_after=self._expected_wait(queue))
        else:
            queue.add(job)
        if keep:
            (self._finished if job.finished else self._active)[job.id] = job
        return job

    def find(self, job_id: str) -> Job:
        job = self._active.get(job_id) or self._finished.get(job_id)
        if job is None:
            raise RequestError(404, "there is no job with this id: it never existed, or its result is no longer kept.")
        return job

    def drop(self, job: Job) -> bool:
        """Cancels the job if it is waiting; returns whether it was."""
        if not self.queue(job.task).remove(job):
            return False
        job.finish("cancelled", error=cancelled_error())
        self.settle(job)
        return True

    def settle(self, job: Job, seconds: float | None = None) -> None:
        """Keeps a finished job and its answer; ``seconds`` is how long it ran."""
        if self._active.pop(job.id, None) is not None:
            self._finished[job.id] = job
        if seconds is not None and not job.task.quick:
            self._seconds += 0.2 * (seconds - self._seconds)
        # the worker caches the parts of a comparison
        if job.state == "done" and job.answer is not None and job.task.kind != "compare":
            self.answers[job.task.key] = job.answer

    def _expected_wait(self, queue: JobQueue) -> int:
        per_job = 0.1 if queue is self.quick else self._seconds
        return max(1, min(60, round(per_job * len(queue) / 2)))


def cancelled_error() -> RequestError:
    return RequestError(409, "the job was cancelled.")
