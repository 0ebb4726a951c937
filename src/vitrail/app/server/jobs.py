"""Jobs: what waits, what runs, what became of it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.app.server.bounded import Bounded
from vitrail.app.server.encoding import as_json
from vitrail.app.server.errors import Refused

State = Literal["queued", "running", "done", "failed", "cancelled"]

QUICK = frozenset({"predict", "mask"})
KEPT_BYTES = 16 * 2**20  # of finished jobs that may still be asked for
PER_JOB = 2048  # bytes that a job takes besides its answer


class Cancelled(BaseException):  # like KeyboardInterrupt: nothing on the way may catch it
    """The work is no longer wanted."""


@dataclass(frozen=True)
class Task:
    """What is to be done: the kind of work, the model, the picture and the other fields."""

    kind: str
    model: str
    picture: str
    fields: dict[str, Any]

    @property
    def quick(self) -> bool:
        return self.kind in QUICK

    @property
    def key(self) -> Hashable:
        return self.kind, self.model, self.picture, json.dumps(self.fields, sort_keys=True)


@dataclass(frozen=True)
class Answer:
    """The body of a response."""

    type: str
    body: bytes


@dataclass(eq=False)
class Job:
    """A task on its way. ``events`` are for whoever follows it; ``changed`` wakes them."""

    task: Task
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: State = "queued"
    events: list[tuple[str, bytes]] = field(default_factory=list)
    progress: bytes | None = None
    steps: int = 0  # how often progress was told
    place: int = 0  # how many events came before the last progress
    answer: Answer | None = None
    error: Refused | None = None
    overdue: bool = False
    unwanted: bool = False
    timer: asyncio.TimerHandle | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return self.over.is_set()

    @property
    def share(self) -> float:
        """How much is done, 0…1."""
        if self.state == "done":
            return 1.0
        said = {} if self.progress is None else json.loads(self.progress)
        return min(1.0, said["done"] / said["total"]) if said.get("total") else 0.0

    @property
    def weight(self) -> int:
        """In bytes."""
        held = sum(len(data) for _, data in self.events)
        return PER_JOB + held + (0 if self.answer is None else len(self.answer.body))

    def tell(self, name: str, data: bytes) -> None:
        """Every event is kept but progress, of which the last counts."""
        if name == "progress":
            self.progress, self.steps, self.place = data, self.steps + 1, len(self.events)
        else:
            self.events.append((name, data))
        self._wake()

    def end(self, state: State, answer: Answer | None = None, error: Refused | None = None) -> None:
        self.state, self.answer, self.error = state, answer, error
        if self.timer is not None:
            self.timer.cancel()
        if answer is not None and answer.type == "application/json":
            data = answer.body
        else:
            data = as_json({} if error is None else {"error": str(error), "status": error.status})
        self.events.append((state, data))
        self.over.set()
        self._wake()

    def _wake(self) -> None:
        before, self.changed = self.changed, asyncio.Event()
        before.set()


class Lane:
    """Jobs of one kind that wait for their turn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: deque[Job] = deque()
        self._taken: Job | None = None  # whose turn it was last
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def all(self) -> list[Job]:
        return list(self._jobs)

    def position(self, job: Job) -> int | None:
        """How many go before it, also the one that runs; None if it does not wait here."""
        return self._running + self._jobs.index(job) if job in self._jobs else None

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        self._tell_place(job)
        self._news.set()

    def remove(self, job: Job) -> bool:
        if job not in self._jobs:
            return False
        behind = list(self._jobs)[self._jobs.index(job) + 1 :]
        self._jobs.remove(job)
        for other in behind:
            self._tell_place(other)
        return True

    async def next(self) -> Job:
        while not self._jobs:
            self._news.clear()
            await self._news.wait()
        self._taken = self._jobs.popleft()
        for other in self._jobs:
            self._tell_place(other)
        return self._taken

    @property
    def _running(self) -> int:
        return int(self._taken is not None and not self._taken.finished)

    def _tell_place(self, job: Job) -> None:
        """Only what is new: the first of those that wait keeps its place when the one before it begins."""
        data = as_json({"position": self.position(job)})
        if ("queued", data) not in job.events:
            job.tell("queued", data)


class Jobs:
    """Two lanes of waiting jobs, those that may be asked for by their id, and answers kept for the next time."""

    def __init__(self, most_waiting: int, cache_bytes: int) -> None:
        self.quick, self.long = Lane(most_waiting), Lane(most_waiting)
        self.answers: Bounded[Answer] = Bounded(cache_bytes)
        self._followed: dict[str, Job] = {}
        self._finished: Bounded[Job] = Bounded(KEPT_BYTES)
        self._seconds = 1.0  # what a long job took of late

    def lane(self, task: Task) -> Lane:
        return self.quick if task.quick else self.long

    def submit(self, task: Task, follow: bool) -> Job:
        """A job that waits, or one that is done already; ``follow`` keeps it where its id finds it."""
        job, known, lane = Job(task), self.answers.get(task.key), self.lane(task)
        if known is not None:
            job.end("done", known)
        elif len(lane) >= lane.most:
            sentence = f"the queue is full ({lane.most} jobs wait): try again in a moment."
            raise Refused(429, sentence, retry=self._wait(lane))
        else:
            lane.add(job)
        if follow:
            self._follow(job)
        return job

    def find(self, job_id: str) -> Job:
        job = self._followed.get(job_id) or self._finished.get(job_id)
        if job is None:
            raise Refused(404, "there is no job with this id: it was never made, or its result is no longer kept.")
        return job

    def drop(self, job: Job) -> bool:
        """Whether the job was waiting; then it is cancelled."""
        if not self.lane(job.task).remove(job):
            return False
        job.end("cancelled", error=cancelled())
        self.settle(job)
        return True

    def settle(self, job: Job, seconds: float | None = None) -> None:
        """A job has come to its end."""
        if self._followed.pop(job.id, None) is not None:
            self._finished.put(job.id, job, job.weight)
        if seconds is not None and not job.task.quick:
            self._seconds += 0.2 * (seconds - self._seconds)
        keep = job.state == "done" and job.task.kind != "compare"  # whose parts are kept by the worker
        if keep and job.answer is not None:
            self.answers.put(job.task.key, job.answer, len(job.answer.body) + PER_JOB)

    def _follow(self, job: Job) -> None:
        if job.finished:
            self._finished.put(job.id, job, job.weight)
        else:
            self._followed[job.id] = job

    def _wait(self, lane: Lane) -> int:
        each = 0.1 if lane is self.quick else self._seconds
        return max(1, min(60, round(each * len(lane) / 2)))


def cancelled() -> Refused:
    return Refused(409, "the job was cancelled.")


def overdue(seconds: float) -> Refused:
    return Refused(408, f"the job took longer than {seconds:g} seconds: try fewer steps, masks or methods.")
