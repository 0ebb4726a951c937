"""What every fuzzer shares: the promise that an input is tried against, and a bound on inputs or on seconds.

A fuzzer is a module of this folder with ``generate``, which draws an input, and ``target``, which uses it. An input
must end in success or in ``VitrailError``, in bounded time, and must change nothing outside the output folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from vitrail.errors import VitrailError

SECONDS = 120  # after which an input counts as one that hangs
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Event of the interpreter → the positions of the paths that it changes.
CHANGES = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "shutil.rmtree": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Input:
    """A file, under the name that it is tried with."""

    name: str
    content: bytes


Use = Callable[[Path, Path], object]  # of an input file and an output folder


class Fuzzer(Protocol):
    """A module that draws inputs and uses them."""

    def generate(self, draw: random.Random) -> Input: ...

    def target(self, place: Path) -> AbstractContextManager[Use]: ...


class HangError(BaseException):
    """An input that takes too long; not an ``Exception``, so that nothing on the way handles it."""


@dataclass
class Broken:
    """An input that breaks the promise, and how."""

    input: Input
    reason: str


@dataclass
class Trial:
    """What became of the inputs of a fuzzer."""

    inputs: int = 0
    refused: int = 0  # with a VitrailError
    slowest: tuple[float, str] = (0.0, "")  # seconds and the name of the input
    broken: list[Broken] = field(default_factory=list)


class _Watch:
    """Notes what is changed outside an output folder; one for the process, because such hooks stay for ever."""

    def __init__(self) -> None:
        self.out: str | None = None
        self.changed: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.out is None:
            return
        if event == "open" and arguments[2] & WRITES:
            self.note(event, arguments[0])
        elif event in CHANGES:
            for position in CHANGES[event]:
                self.note(event, arguments[position])

    def note(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor, which was noted when it was opened
        full = os.path.realpath(os.fsdecode(path))
        if full == os.devnull or "__pycache__" in full or full.startswith(("/proc/", "/dev/")):
            return
        if full != self.out and not full.startswith(f"{self.out}{os.sep}"):
            self.changed.append(f"{event} {full}")


_WATCH = _Watch()


@contextmanager
def nothing_outside(out: Path) -> Iterator[None]:
    """Fails if a file outside a folder is written, moved or removed."""
    _WATCH.out, _WATCH.changed = os.path.realpath(out), []
    try:
        yield
    finally:
        _WATCH.out = None
    assert not _WATCH.changed, f"changed outside the output folder: {_WATCH.changed[:3]}"


@contextmanager
def no_hang(seconds: int = SECONDS) -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-3:])
        raise HangError(f"still running after {seconds} seconds:\n{where}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(use: Use, item: Input, place: Path, trial: Trial) -> None:
    """Tries an input and counts what became of it."""
    path, out = place / "in" / item.name, place / "out"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(item.content)
    begin = time.perf_counter()
    trial.inputs += 1
    try:
        with no_hang(), nothing_outside(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(path, out)
    except VitrailError as error:
        trial.refused += 1
        if not str(error).strip():
            trial.broken.append(Broken(item, "an error without a message"))
    except (Exception, HangError):
        trial.broken.append(Broken(item, traceback.format_exc()))
    finally:
        trial.slowest = max(trial.slowest, (time.perf_counter() - begin, item.name))
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for inputs and outputs, in which the process works meanwhile."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        (place / "out").mkdir()
        os.chdir(place / "out")
        try:
            yield place
        finally:
            os.chdir(before)


@contextmanager
def offline() -> Iterator[None]:
    """Without the hub, as on a machine that has no network."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def fresh(use: Use) -> Use:
    """With an output folder that is empty each time."""

    def use_in_empty_folder(path: Path, out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            use(path, Path(folder))

    return use_in_empty_folder


def fuzz(fuzzer: Fuzzer, seed: int, *, inputs: int | None = None, seconds: float | None = None) -> Trial:
    """Tries inputs drawn from a seed: so many, or for so many seconds."""
    trial = Trial()
    with workplace() as place, fuzzer.target(place) as use:
        end = None if seconds is None else time.monotonic() + seconds
        while (inputs is None or trial.inputs < inputs) and (end is None or time.monotonic() < end):
            attempt(use, fuzzer.generate(random.Random(f"{seed}:{trial.inputs}")), place, trial)
    return trial


def replay(fuzzer: Fuzzer, files: list[Path]) -> Trial:
    """Tries the inputs of a corpus."""
    trial = Trial()
    with workplace() as place, fuzzer.target(place) as use:
        for file in files:
            attempt(use, Input(file.name, file.read_bytes()), place, trial)
    return trial


def keep(fuzzer: str, broken: Broken, folder: Path) -> Path:
    """Stores an input for the corpus: its name begins with a digest of its content."""
    path = folder / fuzzer / f"{hashlib.sha256(broken.input.content).hexdigest()[:8]}-{broken.input.name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(broken.input.content)
    return path
