"""Every kind of picture becomes upright 8-bit RGB; everything else one clear error that names the file."""

import errno
import hashlib
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data import images, open_data
from vitrail.data.images import MAX_PIXELS, checked_file, image_hash, open_image, read_image
from vitrail.data.paths import read_values
from vitrail.errors import VitrailError

RANDOM = np.random.default_rng(0)
PHOTO = Image.fromarray(RANDOM.integers(0, 256, (5, 7, 3), dtype=np.uint8))


def pixel(image: Image.Image, at: tuple[int, int] = (0, 0)) -> object:
    assert image.mode == "RGB"
    return image.getpixel(at)


def png_without_pixels(path: Path, width: int, height: int) -> Path:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "YCbCr", "HSV", "CMYK", "LAB"])
def test_every_opaque_mode_becomes_rgb(mode: str) -> None:
    white = Image.new("RGB", (3, 2), "white")
    image = white.convert(mode) if mode != "LAB" else Image.new("LAB", (3, 2), (255, 128, 128))
    result = read_image(image)
    assert result.size == (3, 2)
    assert min(pixel(result)) >= 250  # type: ignore[call-overload]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGBa", "La", "PA"])
def test_transparent_pixels_are_put_on_white(mode: str) -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image = {
        "RGBA": clear,
        "LA": clear.convert("LA"),
        "RGBa": clear.convert("RGBa"),
        "La": clear.convert("LA").convert("La"),
        "PA": Image.new("PA", (2, 2), (0, 0)),
    }[mode]
    assert pixel(read_image(image)) == (255, 255, 255)


def test_half_transparent_black_is_mid_grey() -> None:
    grey = pixel(read_image(Image.new("RGBA", (1, 1), (0, 0, 0, 128))))
    assert grey == (127, 127, 127)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_colour_key_transparency(mode: str, tmp_path: Path) -> None:
    image = Image.new(mode, (2, 2), 0)
    path = tmp_path / "key.png"
    image.save(path, transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert pixel(read_image(path)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_by_their_range(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    for suffix in ("png", "tif"):
        path = tmp_path / f"deep.{suffix}"
        Image.fromarray(values).save(path)
        assert np.asarray(read_image(path))[0, :, 0].tolist() == [0, 1, 128, 255]
    big_endian = Image.frombytes("I;16B", (4, 1), values.astype(">u2").tobytes())
    assert np.asarray(read_image(big_endian))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 7, 255]], np.int32), [0, 7, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 7.0, 255.0]], np.float32), [0, 7, 255]),
        (np.array([[0.0, 257.0, 65535.0]], np.float32), [0, 1, 255]),
    ],
)
def test_thirty_two_bits_are_scaled_by_their_values(values: np.ndarray, expected: list[int]) -> None:
    assert np.asarray(read_image(Image.fromarray(values)))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("values", [[-1.0, 0.5], [0.0, 70000.0], [0.0, np.inf]])
def test_values_of_no_known_range_are_refused(values: list[float]) -> None:
    with pytest.raises(VitrailError, match="expected 0…1"):
        read_image(Image.fromarray(np.array([values], np.float32)))


def test_nan_is_refused() -> None:
    with pytest.raises(VitrailError, match="NaN"):
        read_image(Image.fromarray(np.array([[np.nan, 1.0]], np.float32)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, tmp_path: Path) -> None:
    upright = np.asarray(PHOTO)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    assert np.array_equal(np.asarray(read_image(path)), upright)
    with Image.open(path) as given:
        assert np.array_equal(np.asarray(read_image(given)), upright)
        assert given.getexif()[0x0112] == orientation


def test_the_result_is_a_copy() -> None:
    source = PHOTO.copy()
    read_image(source).putpixel((0, 0), (1, 2, 3))
    assert source.tobytes() == PHOTO.tobytes()


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_animations_give_their_first_frame(suffix: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = tmp_path / f"film.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    assert pixel(read_image(path)) == (255, 0, 0)


@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_arrays(channels: tuple[int, ...]) -> None:
    array = np.full((2, 3, *channels), 255, dtype=np.uint8)
    assert read_image(array).size == (3, 2)
    assert pixel(read_image(array)) == (255, 255, 255)
    assert read_image(array[::-1]).size == (3, 2)


def test_one_pixel(tmp_path: Path) -> None:
    path = tmp_path / "dot.png"
    Image.new("RGB", (1, 1), "red").save(path)
    assert pixel(read_image(str(path))) == (255, 0, 0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((0, 3, 3), np.uint8), "no pixels"),
        (np.zeros((2, 2, 3), np.float32), "float32, expected uint8.*normalised"),
        (np.full((2, 2, 3), np.nan), "float64, expected uint8"),
        (np.zeros((2, 2), np.uint16), "uint16, expected uint8"),
        (np.zeros((3, 8, 9), np.uint8), "3 × 8 × 9.*channels last"),
        (np.zeros((2, 2, 2), np.uint8), "expected .H, W."),
        (np.zeros((1, 2, 2, 3), np.uint8), "expected .H, W."),
        (np.zeros((), np.uint8), "expected .H, W."),
    ],
)
def test_wrong_arrays(array: np.ndarray, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        read_image(array)


@pytest.mark.parametrize("source", [None, 3, b"bytes", [1, 2]])
def test_wrong_types(source: object) -> None:
    with pytest.raises(VitrailError, match=type(source).__name__):
        read_image(source)  # type: ignore[arg-type]


def test_image_without_pixels() -> None:
    with pytest.raises(VitrailError, match="0 × 5"):
        read_image(Image.new("RGB", (0, 5)))


def test_files_that_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    cases = {"missing.png": "not found", "": "folder", "empty.png": "empty file", "text.png": "not an image"}
    for name, message in cases.items():
        path = tmp_path / name
        with pytest.raises(VitrailError, match=message) as caught:
            read_image(path)
        assert str(path) in str(caught.value)
    with pytest.raises(VitrailError, match="not found"):
        read_image(tmp_path / "text.png" / "below.png")
    with pytest.raises(VitrailError, match="cannot be read"):
        read_image(tmp_path / ("x" * 300))
    with pytest.raises(VitrailError, match="cannot be read"):
        read_image("nul\0byte.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(VitrailError, match="not a regular file"):
        read_image(tmp_path / "pipe.png")


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "tif", "bmp"])
def test_truncated_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    for share in (0.05, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(VitrailError, match=str(path)):
            read_image(path)


def test_corrupt_png(tmp_path: Path) -> None:
    path = tmp_path / "bad.png"
    PHOTO.save(path)
    broken = bytearray(path.read_bytes())
    broken[45:60] = b"\0" * 15
    path.write_bytes(broken)
    with pytest.raises(VitrailError, match=r"corrupt|not an image"):
        read_image(path)


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None])
def test_bombs_are_refused_before_decoding(limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    path = png_without_pixels(tmp_path / "bomb.png", 20_000, 20_000)
    size = "400,000,000 pixels" if limit else "20,000 × 20,000 pixels"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(VitrailError, match=f"bomb.png' has {size}.*shrink it first"):
            read_image(path)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_the_limit_is_64_million_pixels(tmp_path: Path) -> None:
    """Pillow warns from 89 million on and refuses from 179 million on."""
    assert MAX_PIXELS == 64_000_000
    allowed = png_without_pixels(tmp_path / "allowed.png", 8_000, 8_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_image(allowed) as image:
            assert image.size == (8_000, 8_000)
        for width, height in ((8_000, 8_001), (12_000, 12_000)):
            path = png_without_pixels(tmp_path / "large.png", width, height)
            with pytest.raises(VitrailError, match=f"{width:,} × {height:,} pixels, expected at most 64,000,000"):
                read_image(path)
            with pytest.raises(VitrailError, match="expected at most 64,000,000"):
                read_values(path, "Mask")
    with pytest.raises(VitrailError, match="expected at most 64,000,000"):
        read_image(Image.new("1", (12_000, 12_000)))


# Not by getrusage, whose peak a process inherits from the one that starts it.
MEASURED = """
import re, sys
from pathlib import Path
import numpy
from PIL import Image, ImageOps
from vitrail.data.images import image_hash, read_image

def kilobytes(name):
    return int(re.search(rf"{name}:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = kilobytes("VmRSS")
image = read_image(sys.argv[1])
image_hash(image)
print(image.width * image.height, kilobytes("VmHWM") - before)
"""


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "I;16"])
def test_a_large_image_takes_its_pixels_and_one_copy(mode: str, tmp_path: Path) -> None:
    """Pillow stores a pixel in four bytes, or in two; the result has four."""
    path = tmp_path / "large.png"
    Image.new(mode, (5_000, 4_000)).save(path, compress_level=1)
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True, check=True)
    pixels, kilobytes = map(int, done.stdout.split())
    assert kilobytes * 1024 < 2.4 * 4 * pixels


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "F"])
def test_strips_leave_no_seams(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = RANDOM.integers(0, 256, (50, 31, 4), dtype=np.uint8)
    image = Image.fromarray(values[..., 0].astype(np.uint16) * 200) if mode == "I;16" else Image.fromarray(values)
    image = image if mode == "I;16" else image.convert(mode)
    whole = read_image(image)
    monkeypatch.setattr(images, "_STRIP_PIXELS", 31 * 7)
    assert np.array_equal(np.asarray(read_image(image)), np.asarray(whole))
    assert image_hash(read_image(image)) == image_hash(whole)
    assert image_hash(whole) == hashlib.sha256(b"31x50:" + whole.tobytes()).hexdigest()


def test_folders_are_searched(tmp_path: Path) -> None:
    names = ["b.PNG", "a.jpg", "deep/c.webp", ".hidden.png", ".git/d.png", "notes.txt", "data.h5", "film.mpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert open_data(tmp_path).ids == ["a.jpg", "b.PNG", "deep/c.webp"]
    assert open_data(tmp_path / "notes.txt").ids == ["notes.txt"]


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(folder: str) -> object:
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(VitrailError, match=r"cannot read '.*closed': Permission denied\."):
        open_data(tmp_path / "closed")
    with pytest.raises(VitrailError, match=r"cannot read '.*aaa': File name too long\."):
        open_data("./" + "a" * 5_000)


def test_nothing_found(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=f"no image found in '{tmp_path}'"):
        open_data(tmp_path)
    with pytest.raises(VitrailError, match="not found"):
        checked_file(tmp_path / "missing.png")


def test_hash_depends_on_size_and_pixels_only() -> None:
    base = Image.new("RGB", (2, 3), "red")
    assert image_hash(base) == image_hash(base.copy())
    assert len(image_hash(base)) == 64
    assert image_hash(base) != image_hash(Image.new("RGB", (3, 2), "red"))
    assert image_hash(base) != image_hash(Image.new("RGB", (2, 3), (254, 0, 0)))
