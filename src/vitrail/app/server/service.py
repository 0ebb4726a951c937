"""Behind the routes: pictures, jobs and the two child processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePath

from vitrail.app.server.cache import ByteCache
from vitrail.app.server.decoding import Decoded, Decoder
from vitrail.app.server.dispatcher import Dispatcher
from vitrail.app.server.jobs import Jobs
from vitrail.app.server.responses import RequestError, to_json
from vitrail.app.server.settings import Settings
from vitrail.samples import FOLDER

# File, title, and the model trained on what it shows.
SAMPLES = (
    ("cat.jpg", "A cat", "photo"),
    ("coffee.jpg", "A cup of coffee", "photo"),
    ("rocket.jpg", "A rocket", "photo"),
    ("star-and-heart.png", "Star and heart", "scenes"),
    ("ring-and-hourglass.png", "Ring and hourglass", "scenes"),
)
SAMPLE_TYPES = {".jpg": "image/jpeg", ".png": "image/png"}


@dataclass(frozen=True)
class Picture:
    """An upload or a sample; ``id`` is the SHA-256 of the file."""

    id: str
    data: bytes
    type: str


def read_sample(file: str) -> Picture:
    data = (FOLDER / file).read_bytes()
    return Picture(hashlib.sha256(data).hexdigest(), data, SAMPLE_TYPES[PurePath(file).suffix])


def sample_row(file: str, title: str, model: str | None) -> dict[str, str | None]:
    """An entry of ``/api/samples``; ``model`` is None if the model it suits is not served."""
    url = f"/samples/{file}"
    return {"name": PurePath(file).stem, "title": title, "model": model, "url": url, "thumbnail": url}


class Service:
    """Everything the routes need. Call ``start`` in the event loop that serves them."""

    def __init__(self, settings: Settings, models: list[str]) -> None:
        self.settings, self.models = settings, list(dict.fromkeys(models))
        self.models_json = b"[]"
        self.methods_json: dict[str, bytes] = {}
        rows = [sample_row(file, title, model if model in models else None) for file, title, model in SAMPLES]
        self.samples_json = to_json(rows)
        self.samples = {file: read_sample(file) for file, _, _ in SAMPLES}
        self._running = False
        self.uploads: ByteCache[str, Picture] = ByteCache(settings.cache_bytes // 4, lambda picture: len(picture.data))

    async def start(self) -> None:
        """Starts both processes and waits until the models are loaded."""
        if self._running:
            return
        self.jobs = Jobs(self.settings.queue, self.settings.cache_bytes // 8)
        self.decoder = Decoder(self.settings)
        self.dispatcher = Dispatcher(self.settings, self.models, self.jobs, self._decode)
        self._running = True
        self.decoder.start()
        try:
            await self.dispatcher.start()
        except BaseException:
            await self.stop()
            raise
        catalogue = json.loads(self.dispatcher.catalogue)
        self.models_json = to_json(catalogue["models"])
        self.methods_json = {name: to_json(rows) for name, rows in catalogue["methods"].items()}

    async def stop(self) -> None:
        """Ends both processes and waits until they are gone."""
        if self._running:
            self._running = False
            for child in (self.decoder.stop(), self.dispatcher.stop()):
                if child is not None:
                    await asyncio.to_thread(child.join)

    async def add_upload(self, data: bytes) -> Picture:
        """Stores an upload; it is decoded now, so that an invalid one is refused at once."""
        picture_id = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        picture = self._find_picture(picture_id)
        if picture is None:
            decoded = await self.decoder.decode(data)
            picture = self.uploads[picture_id] = Picture(picture_id, data, decoded.type)
            await self.dispatcher.send_picture(picture_id, decoded)
        return picture

    def sample(self, name: str) -> Picture:
        pictures = {PurePath(file).stem: picture for file, picture in self.samples.items()}
        if name not in pictures:
            raise RequestError(404, f"there is no sample {name!r}: expected one of {', '.join(pictures)}.")
        return pictures[name]

    def picture(self, picture_id: str) -> Picture:
        """An earlier upload, or a sample."""
        picture = self._find_picture(picture_id)
        if picture is None:
            raise RequestError(410, "this picture is no longer in the server's memory: send it again.")
        return picture

    def model(self, name: str | None) -> str:
        """The model of a request; by default the first."""
        if name is not None and name not in self.models:
            raise RequestError(404, f"this server has no model {name!r}: expected one of {', '.join(self.models)}.")
        return self.models[0] if name is None else name

    def _find_picture(self, picture_id: str) -> Picture | None:
        samples = {sample.id: sample for sample in self.samples.values()}
        return self.uploads.get(picture_id) or samples.get(picture_id)

    async def _decode(self, picture_id: str) -> Decoded:
        return await self.decoder.decode(self.picture(picture_id).data)
