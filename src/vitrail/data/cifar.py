"""CIFAR-10 and CIFAR-100, from the binary version or the Python version; neither can run code."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.base import Example, Listed
from vitrail.data.paths import broken, missing, read_bytes, read_text
from vitrail.errors import VitrailError

_PIXELS = 3 * 32 * 32
_broken = partial(broken, "CIFAR file")
_UNPACK = "unpack the archive again"
_BATCH_FILES = {
    (10, "test"): ["test_batch"],
    (10, "train"): [f"data_batch_{number}" for number in range(1, 6)],
    (100, "test"): ["test"],
    (100, "train"): ["train"],
}
_BINARY_FOLDER = {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}
_PYTHON_FOLDER = {10: "cifar-10-batches-py", 100: "cifar-100-python"}
_BINARY_NAMES = {10: "batches.meta.txt", 100: "fine_label_names.txt"}
_PYTHON_NAMES = {10: ("batches.meta", b"label_names"), 100: ("meta", b"fine_label_names")}


class Cifar(Listed):
    """Images of 32 × 32 pixels in 10 or 100 classes (the fine labels of CIFAR-100).

    The binary version (`cifar-10-batches-bin`, `cifar-100-binary`) is read if present, otherwise the Python version,
    whose pickles are read without importing anything.
    """

    def __init__(self, root: str | Path, classes: int = 10, split: str = "test") -> None:
        """Reads the labels and pixels.

        Args:
            root: the unpacked folder, or the one that holds it.
            classes: 10 or 100.
            split: "test" or "train".
        """
        if (classes, split) not in _BATCH_FILES:
            raise VitrailError(f"CIFAR has 10 or 100 classes, test and train; got classes={classes}, split={split!r}.")
        self.name = f"cifar{classes}"
        root, files = Path(root), _BATCH_FILES[classes, split]
        binary = _folder_with(root, _BINARY_FOLDER[classes], f"{files[0]}.bin")
        python = _folder_with(root, _PYTHON_FOLDER[classes], files[0])
        if binary is not None:
            batches = [_read_binary(binary / f"{file}.bin", classes) for file in files]
            self.labels = _binary_names(binary / _BINARY_NAMES[classes])
        elif python is not None:
            batches = [_read_python(python / file, classes) for file in files]
            self.labels = _python_names(python, classes)
        else:
            expected = f"'{files[0]}.bin' or '{files[0]}' of CIFAR-{classes}"
            raise missing(expected, root, "download it from cs.toronto.edu/~kriz/cifar.html and unpack it there")
        self._labels = np.concatenate([labels for labels, _ in batches])
        self._pixels = np.concatenate([pixels for _, pixels in batches])
        if self.labels is not None and len(self.labels) != classes:
            raise VitrailError(f"'{root}' names {len(self.labels)} classes, expected {classes}.")
        self._ids = [f"{split}/{position:05}" for position in range(len(self._labels))]

    def load(self, position: int) -> Example:
        colours = self._pixels[position].reshape(3, 32, 32).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(colours))
        return Example(self._ids[position], image, int(self._labels[position]))


def _folder_with(root: Path, folder: str, file: str) -> Path | None:
    return next((place for place in (root, root / folder) if (place / file).is_file()), None)


def _read_binary(path: Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(labels, pixels). A record is the label (coarse, then fine, for 100 classes) and the pixels."""
    before = 1 if classes == 10 else 2
    data = np.frombuffer(read_bytes(path, "CIFAR file", _UNPACK), dtype=np.uint8)
    if not len(data) or len(data) % (before + _PIXELS):
        raise _broken(path, f"{len(data)} bytes, expected a multiple of {before + _PIXELS}")
    records = data.reshape(-1, before + _PIXELS)
    return _checked(records[:, before - 1], classes, path), records[:, before:]


def _read_python(path: Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    content = read_plain_pickle(path)
    labels, pixels = content.get(b"labels" if classes == 10 else b"fine_labels"), content.get(b"data")
    if not isinstance(pixels, _Recorded) or not isinstance(labels, list) or not all(type(x) is int for x in labels):
        raise _broken(path, "expected a list of labels and an array of pixels")
    array = pixels.numpy(path)
    if array.shape != (len(labels), _PIXELS) or not labels:
        raise _broken(path, f"{len(labels)} labels and pixels {array.shape}, expected n and (n, {_PIXELS})")
    return _checked(np.asarray(labels), classes, path), array


def _checked(labels: NDArray[Any], classes: int, path: Path) -> NDArray[np.uint8]:
    if labels.min() < 0 or labels.max() >= classes:
        raise _broken(path, f"it has label {labels.max()}, expected 0…{classes - 1}: is it the other CIFAR?")
    return labels.astype(np.uint8)


def _binary_names(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    return [line.strip() for line in read_text(path, "the list of classes").splitlines() if line.strip()]


def _python_names(folder: Path, classes: int) -> list[str] | None:
    file, key = _PYTHON_NAMES[classes]
    if not (folder / file).is_file():
        return None
    names = read_plain_pickle(folder / file).get(key)
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise _broken(folder / file, f"expected a list of names under {key!r}")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]


class _Recorded:
    """Stands for numpy's array and dtype while unpickling: it keeps what the pickle says; numpy is not called.

    The stand-ins are classes with a `__setstate__` of their own, so that no pickle can set attributes on them.
    """

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def numpy(self, path: Path) -> NDArray[np.uint8]:
        try:
            _version, shape, kind, column_major, data = self.state
            if kind.arguments[0] not in (b"u1", "u1") or type(data) is not bytes:
                raise ValueError("expected bytes")
            return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if column_major else "C")
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise _broken(path, f"its pixels are not an array of bytes ({error})") from None


class _Encoded:
    """Stands for _codecs.encode, by which Python 3 writes bytes in the old protocols."""

    def __new__(cls, text: Any, encoding: Any) -> Any:
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("bytes in an unknown encoding")
        return str.encode(text, "latin1")

    def __setstate__(self, state: Any) -> None: ...


_STANDS_FOR: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Recorded,
    ("numpy._core.multiarray", "_reconstruct"): _Recorded,
    ("numpy", "ndarray"): _Recorded,
    ("numpy", "dtype"): _Recorded,
    ("_codecs", "encode"): _Encoded,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STANDS_FOR:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR files never need")
        return _STANDS_FOR[module, name]


def read_plain_pickle(path: Path) -> dict[Any, Any]:
    """Reads a pickled dictionary of strings, numbers, lists and byte arrays; anything else is refused."""
    data = read_bytes(path, "CIFAR file", _UNPACK)
    try:
        # The files come from Python 2, whose texts are bytes.
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise _broken(path, f"refused as a pickle ({str(error) or type(error).__name__})") from None
    if not isinstance(content, dict):
        raise _broken(path, f"it holds {type(content).__name__}, expected a dictionary")
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}
