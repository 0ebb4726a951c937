"""Reading images: whatever the user gives becomes an upright 8-bit RGB image, or an error."""

import hashlib
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitrail.errors import VitrailError

ImageSource: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray[Any, Any]

MAX_PIXELS = 64_000_000
"""Larger images are refused before they are decoded: a few kilobytes can become gigabytes."""

# Formats that photographs have and Pillow alone cannot read: what to install, or to do.
_INSTALL_HEIF = "HEIC needs an extra package: pip install pillow-heif"
_EXPORT = "a format that Pillow cannot read: export it as JPEG"
UNREADABLE = {
    **dict.fromkeys((".heic", ".heif", ".hif"), _INSTALL_HEIF),
    **dict.fromkeys((".arw", ".cr2", ".cr3", ".dng", ".jxl", ".nef", ".orf", ".pdf", ".raf", ".rw2", ".svg"), _EXPORT),
}

_STRIP_PIXELS = 1_000_000
_WHITE = (255, 255, 255, 255)

# Pillow registers these, but they are documents, data or films: a folder scan must not pick them up.
_NOT_PICTURES = frozenset(
    ".bufr .dcx .emf .eps .fit .fits .flc .fli .gbr .grib .h5 .hdf .icns .iim .im .mpeg .mpg .ps .wmf".split()
)

# Two threads must not decode the same image object at once; an object always has the same of these locks.
_LOCKS = tuple(threading.Lock() for _ in range(1021))


def read_image(source: ImageSource) -> Image.Image:
    """Reads an image as an upright 8-bit RGB copy.

    Args:
        source: a path, a PIL image of any mode, or a uint8 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

    Transparent parts are put on white, 16- and 32-bit greys scaled to 8 bits; an animation gives its first frame.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source, "the given image")
    if isinstance(source, np.ndarray):
        return _to_rgb(_from_array(source), "the given array")
    if not isinstance(source, str | os.PathLike):
        raise VitrailError(f"an image must be a path, a PIL image or a uint8 array, but got {type(source).__name__}.")
    path = checked_file(source)
    with open_image(path) as image:
        return _to_rgb(image, f"'{path}'")


def no_images(folder: Path, files: Iterable[str]) -> VitrailError:
    """The error for a folder without images that can be read; ``files`` is what it holds."""
    hints = dict.fromkeys(hint for file in files if (hint := UNREADABLE.get(Path(file).suffix.lower())))
    reason = "; ".join(hints) or "give image files, or folders that hold some (.jpg, .png, …)"
    return VitrailError(f"no image found in '{folder}': {reason}.")


def decode(image: Image.Image) -> None:
    """Reads the pixels of an image that was only opened: from here on, several threads may use it at once."""
    try:
        with _LOCKS[id(image) % len(_LOCKS)]:
            image.load()
    except Exception as error:
        raise _undecodable("the given image", error) from error


def image_hash(image: Image.Image) -> str:
    """The sha256 of the size and the RGB bytes of an image."""
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    for _, strip in _strips(image):
        digest.update(strip.convert("RGB").tobytes())
    return digest.hexdigest()


def checked_file(source: str | os.PathLike[str]) -> Path:
    """The path if it is a non-empty regular file."""
    path = Path(source)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise VitrailError(f"image '{source}' was not found: check the path.") from None
    except (OSError, ValueError) as error:
        raise VitrailError(f"image '{source}' cannot be read: {_reason(error)}.") from error
    if stat.S_ISDIR(status.st_mode):
        raise VitrailError(f"'{source}' is a folder, expected an image file: give a file inside it.")
    if not stat.S_ISREG(status.st_mode):
        raise VitrailError(f"'{source}' is not a regular file, expected an image file.")
    if status.st_size == 0:
        raise VitrailError(f"image '{source}' is an empty file (0 bytes): download or export it again.")
    return path


def open_image(path: Path) -> Image.Image:
    """Reads the header of an image file, which must not be too large; its pixels are decoded later."""
    try:
        with _without_warnings():
            _register_heif()
            if threading.current_thread() is not threading.main_thread():
                Image.init()  # Pillow does so itself for rare formats, where two threads can get in each other's way
            image = Image.open(path)
    except UnidentifiedImageError:
        hint = UNREADABLE.get(path.suffix.lower(), "convert it to PNG or JPEG")
        raise VitrailError(f"'{path}' is not an image that Pillow can read: {hint}.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        pixels = re.search(r"\((\d+) pixels\)", str(error))
        size = f"{int(pixels[1]):,} pixels" if pixels else "too many pixels"
        raise _too_large(f"'{path}'", size) from None
    # Pillow's plugins raise almost anything on damaged headers.
    except Exception as error:
        raise VitrailError(f"image '{path}' cannot be read: {_reason(error)}.") from error
    try:
        _check_size(image, f"'{path}'")
    except VitrailError:
        image.close()
        raise
    return image


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside, Pillow does not warn about images that are refused anyway.

    Only the main thread can have it so: what swaps the filters of the process must not interleave with its likes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width == 0 or height == 0:
        raise VitrailError(f"image size {width} × {height} of {name} has no pixels: give at least 1 × 1.")
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width:,} × {height:,} pixels")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An upright RGB copy, on white where transparent."""
    _check_size(image, name)
    try:
        with _LOCKS[id(image) % len(_LOCKS)]:
            image.load()
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        upright = ImageOps.exif_transpose(image) if turned else image
        is_transparent = upright.has_transparency_data  # refuses a palette image without a palette
    except Exception as error:
        raise _undecodable(name, error) from error
    if upright.mode in ("I", "F") or upright.mode.startswith("I;16"):
        return _deep_grey_to_rgb(upright, name)
    if is_transparent:
        return _convert_strips(upright, _put_on_white)
    return upright if turned and upright.mode == "RGB" else upright.convert("RGB")


def _undecodable(name: str, error: Exception) -> VitrailError:
    return VitrailError(
        f"the pixels of {name} cannot be decoded, the file is truncated or corrupt ({_reason(error)}): "
        "download or export it again."
    )


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Cuts an image into (top, strip), so that conversions take little memory."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _convert_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """An RGB image, converted strip by strip."""
    result = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        result.paste(convert(strip), (0, top))
    return result


def _put_on_white(image: Image.Image) -> Image.Image:
    colours = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, _WHITE), colours).convert("RGB")


def _deep_grey_to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Scales a 16- or 32-bit grey image to 8 bits by the range its values are in."""
    ranges = [(values.min(), values.max()) for values in (np.asarray(strip) for _, strip in _strips(image))]
    if np.isnan(ranges).any():
        raise VitrailError(f"pixels of {name} are NaN (not a number): replace them first.")
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if image.mode.startswith("I;16"):
        scale = 1 / 257
    elif image.mode == "F" and low >= 0 and high <= 1:
        scale = 255.0
    elif low >= 0 and high <= 255:
        scale = 1.0
    elif low >= 0 and high <= 65535:
        scale = 1 / 257
    else:
        raise VitrailError(
            f"pixels of {name} (mode {image.mode}) range from {low:g} to {high:g}, expected 0…1 (floats), 0…255 or "
            "0…65535: scale them first."
        )

    def convert(strip: Image.Image) -> Image.Image:
        values = np.asarray(strip, dtype=np.float64)
        return Image.fromarray(np.rint(values * scale).astype(np.uint8)).convert("RGB")

    return _convert_strips(image, convert)


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    """Turns a uint8 array into a PIL image."""
    shape = " × ".join(map(str, array.shape)) or "scalar"
    if array.size == 0:
        raise VitrailError(f"the given array ({shape}) has no pixels: give at least 1 × 1.")
    if array.dtype != np.uint8:
        raise VitrailError(
            f"the given array holds {array.dtype}, expected uint8 (0…255): convert it to uint8, or give a normalised "
            "torch tensor (3, H, W)."
        )
    grey = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if grey.ndim != 2 and not (grey.ndim == 3 and grey.shape[2] in (3, 4)):
        hint = "move the channels last" if array.ndim == 3 and array.shape[0] in (1, 3, 4) else "reshape it"
        raise VitrailError(f"the given array is {shape}, expected (H, W), (H, W, 3) or (H, W, 4): {hint}.")
    return Image.fromarray(np.ascontiguousarray(grey))


def files_under(folder: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise error

    visible = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(visible)


def picture_suffixes() -> frozenset[str]:
    """The file suffixes of images that this Pillow can open."""
    _register_heif()
    registered = Image.registered_extensions()
    return frozenset(suffix for suffix, kind in registered.items() if kind in Image.OPEN) - _NOT_PICTURES


@lru_cache(maxsize=1)
def _register_heif() -> None:
    """Lets Pillow read HEIC, where the package for it is installed."""
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()


def _too_large(name: str, size: str) -> VitrailError:
    return VitrailError(f"image {name} has {size}, expected at most {MAX_PIXELS:,}: shrink it first.")


def _reason(error: Exception) -> str:
    """Says in a few words why something failed."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.rstrip(".") or type(error).__name__
