"""From the queue to the computing process and back; a process that hangs or dies is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from vitrail.app.server import worker
from vitrail.app.server.bounded import Bounded
from vitrail.app.server.decoding import Decoded
from vitrail.app.server.errors import Refused
from vitrail.app.server.jobs import Answer, Job, Jobs, Lane, State, cancelled, overdue
from vitrail.app.server.processes import Child, Header
from vitrail.app.server.settings import Settings
from vitrail.errors import VitrailError

PIXEL_BYTES = 4  # of a picture that the worker holds
SLACK = 2  # times the time of a method, after which a comparison ends: its steps do not end by themselves
MOST_PAUSE = 30.0  # seconds between two tries to start the worker

Fetch = Callable[[str], Awaitable[Decoded]]


class Dispatcher:
    """Hands jobs to the worker, one long and one quick at a time; ``fetch`` finds the pixels of a picture."""

    def __init__(self, settings: Settings, models: list[str], jobs: Jobs, fetch: Fetch) -> None:
        self.settings, self.models, self.jobs, self.fetch = settings, models, jobs, fetch
        self.offer = b""
        self._child: Child | None = None
        self._ready, self._lost, self._settled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._broken: str | None = None
        self._pause = 1.0
        self._here: dict[str, Job] = {}  # with the worker
        self._begun: dict[Job, float] = {}  # those it has begun, and when; the last is what it does now
        self._shelf: Bounded[None] = Bounded(settings.cache_bytes // 2, self._forget)  # pictures that it holds
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Waits until the models are there; an error of theirs is raised here."""
        self._spawn()
        await self._settled.wait()
        if self._broken is not None:
            self.stop()
            raise VitrailError(self._broken)
        self._tasks = [asyncio.create_task(self._work_off(lane)) for lane in (self.jobs.quick, self.jobs.long)]

    def stop(self) -> Child | None:
        """Ends all work at once; the process that ends is returned."""
        for task in self._tasks:
            task.cancel()
        child, self._child = self._child, None
        if child is not None:
            child.end()
        return child

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def shelve(self, name: str, picture: Decoded) -> None:
        """Gives the worker a picture; where it is not there, a job that needs the picture fetches it again."""
        if self._child is None or not self._ready.is_set():
            return
        width, height = picture.size
        sent = self._child.send({"do": "picture", "id": name, "size": [width, height]}, picture.pixels)
        self._shelf.put(name, None, width * height * PIXEL_BYTES)
        await sent

    def cancel(self, job: Job) -> None:
        """Ends a job that waits; asks the worker to stop one that runs, and ends the worker if it does not."""
        if job.finished or job.unwanted or self.jobs.drop(job):
            return
        job.unwanted = True
        if self._child is not None:
            self._child.send({"do": "cancel", "id": job.id})
        asyncio.get_running_loop().call_later(self.settings.stop_seconds, self._insist, job)

    def let_go(self) -> None:
        """Ends every job, also those that run."""
        for lane in (self.jobs.quick, self.jobs.long):
            for job in lane.all():
                self.jobs.drop(job)
        for job in [*self._here.values()]:
            self._end(job, "cancelled")

    def _insist(self, job: Job) -> None:
        if job in self._begun and self._child is not None:
            self._child.end()
            self._lose(job)

    def _expire(self, job: Job) -> None:
        job.overdue = True
        self.cancel(job)

    def _forget(self, name: Hashable) -> None:
        if self._child is not None:
            self._child.send({"do": "forget", "id": name})

    async def _work_off(self, lane: Lane) -> None:
        while True:
            job = await lane.next()
            while not job.finished:
                await self._ready.wait()
                known = self.jobs.answers.get(job.task.key)
                if job.unwanted:
                    self._end(job, "cancelled")
                elif known is not None:
                    self._end(job, "done", known)
                elif job.task.picture not in self._shelf:
                    await self._fetch(job)
                else:
                    await self._hand_over(job)

    async def _fetch(self, job: Job) -> None:
        try:
            await self.shelve(job.task.picture, await self.fetch(job.task.picture))
        except Refused as error:
            self._end(job, "failed", error=error)

    async def _hand_over(self, job: Job) -> None:
        """Until the job is over or the worker is lost."""
        assert self._child is not None
        task = job.task
        self._shelf.get(task.picture)  # used just now
        header = {"do": "job", "id": job.id, "kind": task.kind, "quick": task.quick, "model": task.model}
        more = {"picture": task.picture, "fields": task.fields, "seconds": self.settings.job_seconds}
        self._child.send({**header, **more})
        self._here[job.id] = job
        waits = [asyncio.create_task(event.wait()) for event in (job.over, self._lost)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _heard(self, header: Header, blob: bytes) -> None:
        event = header["event"]
        if event == "ready":
            self.offer, self._pause = blob, 1.0
            self._ready.set()
            self._settled.set()
            return
        if event == "broken":
            self._broken = header["error"]
            return
        job = self._here.get(header["job"])
        if job is None:
            return
        if event == "started":
            self._begin(job)
        elif event in ("progress", "partial"):
            job.tell(event, blob)
            if event == "partial":
                self._give_time(job)
        elif event == "done":
            self._end(job, "done", Answer(header["type"], blob))
        elif event == "failed":
            self._end(job, "failed", error=Refused(422, header["error"]))
        else:
            self._end(job, "cancelled")

    def _begin(self, job: Job) -> None:
        job.state = "running"
        self._begun[job] = asyncio.get_running_loop().time()
        self._give_time(job)

    def _give_time(self, job: Job) -> None:
        """For the job, or for the next method of a comparison: the worker ends that one between two of its steps."""
        if job.timer is not None:
            job.timer.cancel()
        seconds = self.settings.job_seconds * (SLACK if job.task.kind == "compare" else 1)
        job.timer = asyncio.get_running_loop().call_later(seconds, self._expire, job)

    def _end(self, job: Job, state: State, answer: Answer | None = None, error: Refused | None = None) -> None:
        """The job's last event; what it took is no loss to the one it interrupted."""
        if state == "cancelled":
            error = overdue(self.settings.job_seconds) if job.overdue else cancelled()
            state = "failed" if job.overdue else "cancelled"
        self._here.pop(job.id, None)
        begun = self._begun.pop(job, None)
        spent = None if begun is None else asyncio.get_running_loop().time() - begun
        job.end(state, answer, error)
        self.jobs.settle(job, spent)
        for other in self._begun:
            self._extend(other, spent or 0.0)

    def _extend(self, job: Job, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if job.timer is not None and not job.timer.cancelled():
            until = job.timer.when() + seconds
            job.timer.cancel()
            job.timer = loop.call_at(until, self._expire, job)

    def _spawn(self) -> None:
        self._lost = asyncio.Event()
        kept = self.settings.cache_bytes // 8
        own = self.settings
        args = (self.models, own.load_options, own.threads, own.work_bytes, kept)
        self._child = Child(worker.serve, args, self._heard, self._gone)

    def _gone(self) -> None:
        """The worker has died by itself: what it did last is to blame."""
        self._lose(next(reversed(self._begun), None))

    def _lose(self, blame: Job | None) -> None:
        """One job ends with the worker; the others are handed over again once there is a new one."""
        was_ready, self._child = self._ready.is_set(), None
        self._ready.clear()
        self._shelf.clear()
        for job in [*self._begun]:
            if job.timer is not None:
                job.timer.cancel()
            if job is not blame:
                job.state = "queued"
        if blame is not None:
            self._blame(blame)
        self._here.clear()
        self._begun.clear()
        self._lost.set()
        if not self._settled.is_set():
            self._broken = self._broken or "the computing process ended before its models were loaded."
            self._settled.set()
        elif was_ready:
            self._spawn()
        else:
            asyncio.get_running_loop().call_later(self._pause, self._spawn)
            self._pause = min(2 * self._pause, MOST_PAUSE)

    def _blame(self, job: Job) -> None:
        if job.unwanted:
            self._end(job, "cancelled")
        else:
            sentence = f"the computing process ended during this {job.task.kind}: try fewer steps, masks or methods."
            self._end(job, "failed", error=Refused(422, sentence))
