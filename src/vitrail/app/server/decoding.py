"""Uploads are decoded in a separate process, without torch, within limits of time and memory."""

from __future__ import annotations

import asyncio
import io
import os
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vitrail.app.server.processes import Child, Header, exit_process, ignore_interrupt, limit_memory, receive, send
from vitrail.app.server.responses import RequestError
from vitrail.app.server.settings import Settings
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from PIL import Image

# What browsers can display.
FORMATS = {
    "JPEG": "image/jpeg",
    "PNG": "image/png",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "AVIF": "image/avif",
}
MAX_ASPECT_RATIO = 100
START_SECONDS = 60.0


@dataclass(frozen=True)
class Decoded:
    """An upright RGB picture."""

    size: tuple[int, int]
    type: str  # media type of the upload
    pixels: bytes


class Decoder:
    """Decodes one upload at a time; at most ``settings.queue`` wait."""

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
        self._child = Child(serve, limits, self._on_message, self._on_exit)

    def stop(self) -> Child | None:
        """Kills the process and returns it."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        return child

    async def decode(self, data: bytes) -> Decoded:
        if self._waiting >= self.settings.queue:
            raise RequestError(429, "too many uploads are being decoded: try again later.", retry_after=2)
        self._waiting += 1
        try:
            async with self._turn:
                header, pixels = await self._request(data)
        finally:
            self._waiting -= 1
        if "error" in header:
            raise RequestError(header["status"], header["error"])
        width, height = header["size"]
        if len(pixels) != width * height * 3 or width * height > self.settings.max_pixels:
            raise RequestError(422, "the upload cannot be decoded: export it again as JPEG or PNG.")
        return Decoded((width, height), header["type"], pixels)

    async def _request(self, data: bytes) -> tuple[Header, bytes]:
        if self._child is None:
            self.start()
        assert self._child is not None
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._child.send({}, data)
            await asyncio.wait_for(self._ready.wait(), START_SECONDS)  # starting does not count as decoding
            return await asyncio.wait_for(self._answer, self.settings.decode_seconds)
        except TimeoutError:
            self._restart()
            limit = f"{self.settings.decode_seconds:g} seconds"
            raise RequestError(422, f"decoding the upload takes longer than {limit}: send a smaller image.") from None
        except BaseException:  # the request was abandoned: its answer must not become that of the next
            self._restart()
            raise
        finally:
            self._answer = None

    def _restart(self) -> None:
        self.stop()
        self.start()

    def _on_message(self, header: Header, blob: bytes) -> None:
        if header.get("ready"):
            self._ready.set()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result((header, blob))

    def _on_exit(self) -> None:
        """The next upload starts a new process."""
        self._child = None
        self._ready.set()
        if self._answer is not None and not self._answer.done():
            message = "the upload is corrupt or needs too much memory to decode: send a smaller image, or a copy."
            self._answer.set_result(({"status": 422, "error": message}, b""))


def serve(pipe: Connection, max_pixels: int, memory: int) -> None:
    """Main function of the process: decodes an upload per message."""
    ignore_interrupt()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread would reserve address space
    from PIL import Image

    import vitrail.data.images  # noqa: F401 — imported before memory is limited

    Image.init()
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.simplefilter("ignore")  # larger images are refused below, without a warning
    limit_memory("address space", memory)
    send(pipe, {"ready": True})
    while True:
        try:
            decode_next(pipe, max_pixels)
        except (EOFError, OSError):
            exit_process()


def decode_next(pipe: Connection, max_pixels: int) -> None:
    """In a function, so that no reference to an upload survives it."""
    _, data = receive(pipe)
    try:
        image, media_type = decode(data, max_pixels)
        size, pixels = image.size, image.tobytes()
    except RequestError as error:
        send(pipe, {"status": error.status, "error": str(error)})
    except MemoryError:
        send(pipe, {"status": 413, "error": "the upload needs too much memory to decode: send a smaller image."})
    else:
        send(pipe, {"size": list(size), "type": media_type}, pixels)


def decode(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    """The upright RGB image, and the media type of the upload."""
    from vitrail.data.images import read_image

    image = _open(data)
    width, height = image.size
    shape = f"{width:,} × {height:,}"
    if width * height > max_pixels:
        raise RequestError(413, f"the upload has {shape} pixels, expected at most {max_pixels:,}: downscale it first.")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RequestError(422, f"the upload has {shape} pixels, an aspect ratio above {MAX_ASPECT_RATIO}: crop it.")
    media_type = FORMATS.get(image.format or "", FORMATS["JPEG"])  # MPO: a JPEG with several images, of some phones
    try:
        return read_image(image), media_type
    except VitrailError as error:
        raise RequestError(422, str(error).replace("the given image", "the upload")) from None


def _open(data: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise RequestError(415, "the upload is empty (0 bytes): send an image.")
    try:
        return Image.open(io.BytesIO(data), formats=list(FORMATS))
    except Image.DecompressionBombError:
        raise RequestError(413, "the upload has far too many pixels: downscale it first.") from None
    except MemoryError:
        raise
    except UnidentifiedImageError:
        pass
    except Exception:  # Pillow's plugins raise almost anything on corrupt headers
        raise RequestError(422, "the header of the upload is corrupt: export it again as JPEG or PNG.") from None
    raise RequestError(415, f"the upload is not an image that can be read: expected one of {', '.join(FORMATS)}.")
