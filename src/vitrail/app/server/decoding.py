"""Uploads become pixels in a process of their own, with a time limit and a memory limit and without torch."""

from __future__ import annotations

import asyncio
import io
import os
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vitrail.app.server.errors import Refused
from vitrail.app.server.processes import Child, Header, behave_as_child, leave, limit_memory, receive, send
from vitrail.app.server.settings import Settings
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from PIL import Image

# What browsers show too.
FORMATS = {
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "AVIF": "image/avif",
}
MOST_OBLONG = 100  # how many times longer than wide a picture may be

START_SECONDS = 60.0


@dataclass(frozen=True)
class Decoded:
    """An upright RGB picture."""

    size: tuple[int, int]
    kind: str  # the upload's media type
    pixels: bytes


class Decoder:
    """Decodes one upload after another; at most ``settings.queue`` wait."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._child: Child | None = None
        self._answer: asyncio.Future[tuple[Header, bytes]] | None = None
        self._ready = asyncio.Event()

    def start(self) -> None:
        self._ready = asyncio.Event()
        limits = (self.settings.max_pixels, self.settings.decode_bytes)
        self._child = Child(serve, limits, self._heard, self._lost)

    def stop(self) -> Child | None:
        """Ends the process at once; the one that ends is returned."""
        child, self._child = self._child, None
        if child is not None:
            child.end()
        return child

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def decode(self, data: bytes) -> Decoded:
        if self._waiting >= self.settings.queue:
            raise Refused(429, "too many pictures are being read: try again in a moment.", retry=2)
        self._waiting += 1
        try:
            async with self._turn:
                header, pixels = await self._ask(data)
        finally:
            self._waiting -= 1
        if "error" in header:
            raise Refused(header["status"], header["error"])
        width, height = header["size"]
        if len(pixels) != width * height * 3 or width * height > self.settings.max_pixels:
            raise Refused(422, "the picture could not be decoded: export it again as JPEG or PNG.")
        return Decoded((width, height), header["kind"], pixels)

    async def _ask(self, data: bytes) -> tuple[Header, bytes]:
        if self._child is None:
            self.start()
        assert self._child is not None
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._child.send({}, data)
            await asyncio.wait_for(self._ready.wait(), START_SECONDS)  # its start does not count
            return await asyncio.wait_for(self._answer, self.settings.decode_seconds)
        except TimeoutError:
            self._again()
            limit = f"{self.settings.decode_seconds:g} seconds"
            raise Refused(422, f"the picture takes longer than {limit} to decode: send a smaller one.") from None
        except BaseException:  # the request was given up: its answer must not become the next one's
            self._again()
            raise
        finally:
            self._answer = None

    def _again(self) -> None:
        self.stop()
        self.start()

    def _heard(self, header: Header, blob: bytes) -> None:
        if header.get("ready"):
            self._ready.set()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result((header, blob))

    def _lost(self) -> None:
        """The next picture starts a new process."""
        self._child = None
        self._ready.set()
        if self._answer is not None and not self._answer.done():
            sentence = "the picture needs more memory than is allowed, or is damaged: send a smaller one, or a copy."
            self._answer.set_result(({"status": 422, "error": sentence}, b""))


def serve(pipe: Connection, max_pixels: int, memory: int) -> None:
    """The child: a picture for every message."""
    behave_as_child()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each would reserve address space
    from PIL import Image

    import vitrail.data.images  # noqa: F401 — before the limit and before the first picture waits

    Image.init()
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.simplefilter("ignore")  # more pixels than that are refused below, not warned of
    limit_memory("address space", memory)
    send(pipe, {"ready": True})
    while True:
        try:
            answer_one(pipe, max_pixels)
        except (EOFError, OSError):
            leave()


def answer_one(pipe: Connection, max_pixels: int) -> None:
    """The next upload; nothing of it stays."""
    _, data = receive(pipe)
    try:
        image, kind = decode(data, max_pixels)
        size, pixels = image.size, image.tobytes()
    except Refused as error:
        send(pipe, {"status": error.status, "error": str(error)})
    except MemoryError:
        send(pipe, {"status": 413, "error": "the picture needs too much memory to decode: send a smaller one."})
    else:
        send(pipe, {"size": list(size), "kind": kind}, pixels)


def decode(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    """The upright RGB picture in an upload, and the upload's media type."""
    from vitrail.data.images import read_image

    image = _open(data)
    width, height = image.size
    if width * height > max_pixels:
        given = f"{width:,} × {height:,}"
        raise Refused(413, f"the picture has {given} pixels, expected at most {max_pixels:,}: shrink it first.")
    if max(width, height) > MOST_OBLONG * min(width, height):
        given = f"{width:,} × {height:,}"
        raise Refused(422, f"the picture is {given}, more than {MOST_OBLONG} times longer than wide: crop it.")
    kind = FORMATS.get(image.format or "", FORMATS["JPEG"])  # some phones make a JPEG with several pictures, MPO
    try:
        return read_image(image), kind
    except VitrailError as error:
        raise Refused(422, str(error).replace("the given image", "the upload")) from None


def _open(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise Refused(415, "the upload is empty (0 bytes): send a picture.")
    try:
        return Image.open(io.BytesIO(data), formats=list(FORMATS))
    except Image.DecompressionBombError:
        raise Refused(413, "the picture has far too many pixels: shrink it first.") from None
    except MemoryError:
        raise
    except UnidentifiedImageError:
        pass
    except Exception:  # Pillow's plugins raise almost anything on damaged headers
        raise Refused(422, "the header of the picture is damaged: export it again as JPEG or PNG.") from None
    raise Refused(415, f"the upload is no picture that can be read: expected one of {', '.join(FORMATS)}.")
