"""Behind the routes: pictures come in, jobs go out."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass

from vitrail.app.server.bounded import Bounded
from vitrail.app.server.decoding import Decoded, Decoder
from vitrail.app.server.dispatch import Dispatcher
from vitrail.app.server.encoding import as_json
from vitrail.app.server.errors import Refused
from vitrail.app.server.jobs import Job, Jobs, Task
from vitrail.app.server.samples import read_samples
from vitrail.app.server.settings import Settings


@dataclass(frozen=True)
class Picture:
    """An upload, or a sample."""

    id: str
    data: bytes
    kind: str


class Service:
    """All that the routes need. ``start`` it in the event loop that serves them."""

    def __init__(self, settings: Settings, models: list[str]) -> None:
        self.settings, self.models = settings, list(dict.fromkeys(models))
        self.models_json = b"[]"
        self.methods_json: dict[str, bytes] = {}
        self.samples = read_samples(self.models)
        self._lasting = {one.id: Picture(one.id, one.data, one.kind) for one in self.samples.values()}
        self._running = False
        self.uploads: Bounded[Picture] = Bounded(settings.cache_bytes // 4)

    async def start(self) -> None:
        """Starts both processes and waits until the models are there."""
        if self._running:
            return
        self.jobs = Jobs(self.settings.queue, self.settings.cache_bytes // 8)
        self.decoder = Decoder(self.settings)
        self.dispatcher = Dispatcher(self.settings, self.models, self.jobs, self._pixels)
        self._running = True
        self.decoder.start()
        try:
            await self.dispatcher.start()
        except BaseException:
            await self.stop()
            raise
        offer = json.loads(self.dispatcher.offer)
        self.models_json = as_json(offer["models"])
        self.methods_json = {name: as_json(rows) for name, rows in offer["methods"].items()}

    async def stop(self) -> None:
        """Ends both processes and waits until they are gone."""
        if self._running:
            self._running = False
            for child in (self.decoder.stop(), self.dispatcher.stop()):
                if child is not None:
                    await asyncio.to_thread(child.wait)

    @property
    def pids(self) -> list[int]:
        """The processes besides this one."""
        return [pid for pid in (self.decoder.pid, self.dispatcher.pid) if pid is not None]

    async def admit(self, data: bytes) -> Picture:
        """An upload; it is decoded now, so that a bad one is refused at once."""
        name = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        known = self._known(name)
        if known is None:
            found = await self.decoder.decode(data)
            known = Picture(name, data, found.kind)
            self.uploads.put(name, known, len(data))
            await self.dispatcher.shelve(name, found)
        return known

    def sample(self, name: str) -> Picture:
        found = self.samples.get(name)
        if found is None:
            raise Refused(404, f"there is no sample {name!r}: expected one of {', '.join(self.samples) or 'none'}.")
        return self._lasting[found.id]

    def earlier(self, name: str) -> Picture:
        known = self._known(name)
        if known is None:
            raise Refused(410, "this picture is no longer in the server's memory: send it again.")
        return known

    def model(self, name: str | None) -> str:
        """The model of a request; the first where none is named."""
        chosen = self.models[0] if name is None else name
        if chosen not in self.models:
            raise Refused(404, f"this server has no model {name!r}: expected one of {', '.join(self.models)}.")
        return chosen

    def submit(self, task: Task, follow: bool) -> Job:
        return self.jobs.submit(task, follow)

    def cancel(self, job: Job) -> None:
        self.dispatcher.cancel(job)

    def let_go(self) -> None:
        """Every job ends, so that nobody waits any longer."""
        self.dispatcher.let_go()

    def _known(self, name: str) -> Picture | None:
        return self.uploads.get(name) or self._lasting.get(name)

    async def _pixels(self, name: str) -> Decoded:
        return await self.decoder.decode(self.earlier(name).data)
