"""Image files: damaged ones of every common format, bombs and odd modes; each is explained by a tiny model."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests import families
from tests.fuzz.harness import Input, Use
from tests.fuzz.mutation import damaged

import vitrail

# Format → (suffix, modes that it can hold).
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PNG": (".png", ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    "JPEG": (".jpg", ("L", "RGB", "CMYK")),
    "WEBP": (".webp", ("RGB", "RGBA")),
    "GIF": (".gif", ("L", "P")),
    "TIFF": (".tiff", ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "I;16", "F")),
    "BMP": (".bmp", ("1", "L", "P", "RGB", "RGBA")),
    "PPM": (".ppm", ("1", "L", "RGB")),
    "TGA": (".tga", ("L", "LA", "P", "RGB", "RGBA")),
    "ICO": (".ico", ("RGB", "RGBA")),
    "AVIF": (".avif", ("RGB", "RGBA")),
    "JPEG2000": (".jp2", ("L", "RGB")),
    "DDS": (".dds", ("RGB", "RGBA")),
    "SGI": (".sgi", ("L", "RGB")),
    "PCX": (".pcx", ("1", "L", "P", "RGB")),
}
SIZES = ((16, 16), (48, 32), (1, 1), (1, 300), (200, 2), (7, 5))


@contextmanager
def target(place: Path) -> Iterator[Use]:
    view = vitrail.wrap(families.build("timm_vit"))

    def use(path: Path, out: Path) -> None:
        explanation = vitrail.explain(view, path, "raw_attention")
        assert explanation.image.mode == "RGB"
        assert explanation.map.isfinite().all()

    yield use


def generate(draw: random.Random) -> Input:
    kind = draw.choice(list(FORMATS))
    suffix, modes = FORMATS[kind]
    choice = draw.random()
    if choice < 0.05:
        return Input(f"bomb{draw.choice(('.png', '.tiff'))}", bomb(draw))
    data = valid(kind, draw.choice(modes), draw.choice(SIZES), draw.randrange(3))
    if choice < 0.1:
        return Input(f"plain{suffix}", data)
    if choice < 0.15:
        return Input(f"noise{suffix}", data[: draw.randrange(32)] + draw.randbytes(draw.randrange(400)))
    data = damaged(data, draw)
    data = mended(data) if kind == "PNG" and choice < 0.6 else data
    return Input(f"damaged{draw.choice((suffix, suffix, '.png', ''))}", data)


@cache
def valid(kind: str, mode: str, size: tuple[int, int], extra: int) -> bytes:
    """An image of noise; with EXIF data and an ICC profile, or as an animation."""
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    colours = Image.fromarray(values)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    elif mode == "LAB":
        image = Image.frombytes("LAB", size, colours.tobytes())
    else:
        image = colours.convert(mode)
    options: dict[str, Any] = {}
    if extra == 1 and kind in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF"):
        exif = Image.Exif()
        exif[0x0112] = 6  # the orientation
        exif[0x010E] = "a description"
        options = {"exif": exif} | ({} if kind == "TIFF" else {"icc_profile": b"\0" * 128})
    if extra == 2 and kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"save_all": True, "append_images": [image, image]}
    if kind == "ICO":
        options = {"sizes": [(min(size), min(size))]}
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def mended(data: bytes) -> bytes:
    """A PNG whose chunks have correct checksums again, so that damage goes deeper."""
    place, result = 8, bytearray(data)
    while place + 12 <= len(result):
        (length,) = struct.unpack_from(">I", result, place)
        if place + 12 + length > len(result):
            break
        struct.pack_into(">I", result, place + 8 + length, zlib.crc32(result[place + 4 : place + 8 + length]))
        place += 12 + length
    return bytes(result)


def bomb(draw: random.Random) -> bytes:
    """A small PNG that promises to be large, and at times is."""
    width, height = draw.choice(
        ((2**31 - 1, 2**31 - 1), (60_000, 60_000), (100_000, 1), (1, 100_000), (0, 5), (7000, 1))
    )
    depth, colour = draw.choice(((1, 0), (8, 0), (16, 2), (8, 3), (16, 6), (8, 9)))
    rows = zlib.compress(bytes(min(height, 50) * (1 + min(width, 9000) * 8)), 9) if draw.random() < 0.5 else b""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, draw.choice((0, 0, 1)))
    text = zlib.compress(bytes(5_000_000), 9) if draw.random() < 0.3 else b""
    chunks = [(b"IHDR", header), (b"zTXt", b"a\0\0" + text), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
