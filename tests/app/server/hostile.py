"""Malicious and malformed uploads, generated from a seed, with the statuses that are allowed."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

FINE, BAD, EITHER = {200}, frozenset({400, 413, 415, 422}), frozenset({200, 400, 413, 415, 422})


@dataclass(frozen=True)
class Hostile:
    """One upload; ``allowed`` are the acceptable statuses."""

    name: str
    data: bytes
    allowed: frozenset[int] | set[int]
    filename: str = "picture"
    kind: str = "application/octet-stream"


@cache
def all_uploads() -> list[Hostile]:
    makers = (nothing, other_formats, truncated, flipped, bombs, polyglots, oblong, odd_but_fine, names, liars, chunks)
    uploads = [upload for maker in makers for upload in maker()]
    assert len({upload.name for upload in uploads}) == len(uploads)
    return uploads


def photo(size: tuple[int, int] = (48, 40), mode: str = "RGB") -> Image.Image:
    draw = np.random.default_rng(3)
    return Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def formats() -> dict[str, bytes]:
    return {kind: saved(photo(), kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF")}


def nothing() -> Iterator[Hostile]:
    draw = random.Random(1)
    yield Hostile("empty", b"", BAD)
    for count in (1, 2, 3, 8, 64, 1000, 65536, 1_000_000):
        yield Hostile(f"zeros-{count}", bytes(count), BAD)
        yield Hostile(f"noise-{count}", draw.randbytes(count), BAD)
    for text in ("hello", "<!doctype html><script>alert(1)</script>", "{}", "#!/bin/sh\nexit 1\n", "GIF89a", "RIFF",
                 "BM", "\xff\xd8\xff", "%PDF-1.7\n", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):  # fmt: skip
        yield Hostile(f"text-{text[:6]!r}", text.encode("latin-1"), BAD)


def other_formats() -> Iterator[Hostile]:
    yield Hostile("svg", b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><rect/></svg>', BAD, "a.svg")
    entity = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
    yield Hostile("svg-entity", entity, BAD, "a.svg", "image/svg+xml")
    for kind in ("TIFF", "ICO", "PPM", "PCX", "TGA", "EPS", "PDF", "DDS", "SGI", "JPEG2000", "MSP", "XBM"):
        mode = "1" if kind in ("MSP", "XBM") else "RGB"
        yield Hostile(f"format-{kind}", saved(photo(mode=mode), kind), BAD, f"a.{kind.lower()}", "image/png")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("../../evil", b"0" * 100_000)
    yield Hostile("zip", archive.getvalue(), BAD, "a.zip")


def truncated() -> Iterator[Hostile]:
    for kind, data in formats().items():
        for part in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9):
            yield Hostile(f"cut-{kind}-{part}", data[: int(len(data) * part)], BAD)
        yield Hostile(f"cut-{kind}-last", data[:-1], EITHER)


def flipped() -> Iterator[Hostile]:
    for kind, data in formats().items():
        draw = random.Random(kind)
        for number in range(10):
            broken = bytearray(data)
            for _ in range(1 + number * 3):
                broken[draw.randrange(len(broken) if number % 2 else min(64, len(broken)))] ^= 1 << draw.randrange(8)
            yield Hostile(f"flip-{kind}-{number}", bytes(broken), EITHER)


def png(width: int, height: int, depth: int = 1, colour: int = 0, *, rows: bytes | None = None,
        extra: bytes = b"") -> bytes:  # fmt: skip
    """A PNG with a header of our choosing; without rows it promises more than it holds."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", rows or b"") + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def zeros(width: int, height: int, bits: int = 1) -> bytes:
    """The rows of a black picture, compressed: a thousand times smaller than what they become."""
    row, packer = bytes(1 + (width * bits + 7) // 8), zlib.compressobj(9)
    return b"".join([packer.compress(row * height), packer.flush()])


def bombs() -> Iterator[Hostile]:
    for width, height in ((50_000, 50_000), (2**31 - 1, 2**31 - 1), (65_536, 65_536), (2**31 - 1, 1), (0, 0), (0, 9)):
        yield Hostile(f"png-promise-{width}x{height}", png(width, height), BAD)
    yield Hostile("png-bomb-400M", png(20_000, 20_000, rows=zeros(20_000, 20_000)), BAD)
    yield Hostile("png-bomb-41M", png(6_500, 6_400, rows=zeros(6_500, 6_400)), BAD)
    yield Hostile("png-large-but-allowed", png(6_000, 6_000, rows=zeros(6_000, 6_000)), FINE)
    yield Hostile("png-too-few-rows", png(5_000, 5_000, rows=zeros(5_000, 10)), EITHER)
    packed = zlib.compress(bytes(90_000_000), 9)
    text = chunk(b"zTXt", b"a\0\0" + packed)
    yield Hostile("png-text-bomb", png(9, 9, rows=zeros(9, 9), extra=text), EITHER)
    profile = chunk(b"iCCP", b"a\0\0" + packed)
    yield Hostile("png-profile-bomb", png(9, 9, rows=zeros(9, 9), extra=profile), EITHER)
    yield Hostile("png-many-texts", png(9, 9, rows=zeros(9, 9), extra=chunk(b"tEXt", b"a\0b") * 20_000), EITHER)
    yield Hostile("gif-promise", b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + formats()["GIF"][10:], BAD)
    bitmap = bytearray(formats()["BMP"])
    bitmap[18:26] = struct.pack("<ii", 60_000, 60_000)
    yield Hostile("bmp-promise", bytes(bitmap), BAD)
    webp = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_382).to_bytes(3, "little") * 2
    yield Hostile("webp-promise", b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp, BAD)
    jpeg = bytearray(formats()["JPEG"])
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 65_000, 65_000)
    yield Hostile("jpeg-promise", bytes(jpeg), BAD)
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 6_000, 6_000)
    yield Hostile("jpeg-promise-small", bytes(jpeg), EITHER)
    frames = [Image.new("P", (8, 8), i % 250) for i in range(3000)]
    film = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=20)
    yield Hostile("gif-3000-frames", film, FINE)
    yield Hostile("png-moving", saved(photo(), "PNG", save_all=True, append_images=[photo()] * 40), FINE)
    yield Hostile("webp-moving", saved(photo(), "WEBP", save_all=True, append_images=[photo()] * 40), FINE)


def polyglots() -> Iterator[Hostile]:
    page, data = b"<html><script>alert(1)</script></html>", formats()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("a.txt", "hello")
    for kind in data:
        yield Hostile(f"{kind}-then-html", data[kind] + page, EITHER, "a.html", "text/html")
        yield Hostile(f"{kind}-then-zip", data[kind] + archive.getvalue(), EITHER, "a.jar")
        yield Hostile(f"html-then-{kind}", page + data[kind], BAD, "a.html", "text/html")
    yield Hostile("jpeg-comment-html", saved(photo(), "JPEG", comment=page), FINE, "a.html", "text/html")
    yield Hostile("gif-script", b"GIF89a/*" + data["GIF"][8:] + b"*/=1;alert(1)", EITHER, "a.js", "text/javascript")
    yield Hostile("pdf-then-jpeg", b"%PDF-1.4\n" + data["JPEG"], BAD, "a.pdf", "application/pdf")


def oblong() -> Iterator[Hostile]:
    for width, height in ((100_000, 1), (1, 100_000), (65_000, 2), (3, 60_000)):
        yield Hostile(f"png-{width}x{height}", png(width, height, 8, rows=zeros(width, height, 8)), BAD)
    yield Hostile("jpeg-65500x1", saved(Image.new("L", (65_500, 1)), "JPEG"), BAD)
    yield Hostile("png-1x1", saved(Image.new("RGB", (1, 1)), "PNG"), FINE)


def odd_but_fine() -> Iterator[Hostile]:
    for mode in ("1", "L", "LA", "P", "RGBA"):
        yield Hostile(f"png-{mode}", saved(photo(mode=mode), "PNG"), FINE)
    deep = Image.fromarray(np.arange(0, 65536, 37, dtype=np.uint16)[:1764].reshape(42, 42))
    yield Hostile("png-16-bit-grey", saved(deep, "PNG"), FINE)
    yield Hostile("jpeg-cmyk", saved(photo(mode="CMYK"), "JPEG"), FINE)
    yield Hostile("jpeg-progressive", saved(photo(), "JPEG", progressive=True), FINE)
    yield Hostile("png-16-bit-colour", png(4, 4, 16, 2, rows=zeros(4, 4, 48)), FINE)
    yield Hostile("png-palette-clear", saved(photo(mode="P"), "PNG", transparency=0), FINE)
    exif = Image.Exif()
    for turn in (0, 3, 6, 9, 255):
        exif[0x0112] = turn
        yield Hostile(f"jpeg-turned-{turn}", saved(photo(), "JPEG", exif=exif), FINE)
    yield Hostile("jpeg-broken-exif", saved(photo(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\xff" + b"\xff" * 500), EITHER)


def names() -> Iterator[Hostile]:
    data = formats()["PNG"]
    for name in ("../../../etc/passwd", "..\\..\\boot.ini", "/etc/shadow", "a\0.png", "con", "." * 300, " ", ".", "..",
                 "x" * 5000 + ".png", "a\r\nX-Evil: 1", '"; filename="b.php', "%2e%2e%2fa", "\u202egnp.exe",
                 "$(reboot).png", "`id`.png", "<script>.png", "ünïcödé.png"):  # fmt: skip
        yield Hostile(f"name-{name[:12]!r}", data, EITHER, name, "image/png")


def liars() -> Iterator[Hostile]:
    for kind in ("text/html", "image/svg+xml", "application/x-php", "multipart/form-data", "image/*", "", "x" * 300):
        yield Hostile(f"type-{kind[:20]!r}", formats()["PNG"], FINE, "a.png", kind)


def chunks() -> Iterator[Hostile]:
    """PNGs with invalid chunks."""
    good = zeros(9, 9)
    yield Hostile("png-crc", png(9, 9, rows=good)[:-20] + b"\0" * 8 + png(9, 9, rows=good)[-12:], BAD)
    yield Hostile("png-not-zlib", png(9, 9, rows=b"\xff" * 50), BAD)
    yield Hostile("png-depth-3", png(9, 9, 3, rows=good), BAD)
    yield Hostile("png-colour-7", png(9, 9, 8, 7, rows=good), BAD)
    yield Hostile("png-palette-missing", png(9, 9, 8, 3, rows=zeros(9, 9, 8)), EITHER)
    yield Hostile("png-length-lies", png(9, 9, rows=good, extra=b"\x7f\xff\xff\xfftEXt"), BAD)
    yield Hostile("png-two-headers", png(9, 9, rows=good, extra=chunk(b"IHDR", bytes(13))), EITHER)
