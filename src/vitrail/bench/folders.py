"""Where a run is kept: a folder of a file system, or a prefix of an object store such as ``s3://bucket/run``."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from vitrail.errors import VitrailError
from vitrail.files import remove_unfinished, save_atomically

LOCK = ".lock"
LOCKS = "locks"  # of an object store
BEAT = 5.0  # seconds between the renewals of a lock of an object store
LEASE = 20.0  # seconds without a renewal, after which the lock's owner is taken for dead

Place = str | Path


def is_remote(place: Place) -> bool:
    """Whether a place is an address, as ``s3://bucket/run``, rather than a path."""
    return isinstance(place, str) and "://" in place


def open_folder(place: Place) -> Folder:
    """The folder at a path or an address.

    Credentials, region and endpoint of an object store come from its usual environment variables, as
    ``AWS_ENDPOINT_URL``, or from the query of the address.
    """
    if not is_remote(place):
        if isinstance(place, Path) and re.fullmatch(r"[a-z]\w+:", next(iter(place.parts), "")):
            raise VitrailError(f"'{place}' is a path, in which an address loses a slash: give an address as text.")
        return LocalFolder(Path(place))
    from pyarrow.fs import FileSystem, LocalFileSystem

    try:
        system, path = FileSystem.from_uri(place)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise VitrailError(
            f"cannot open '{place}': {reason}; expected a path or an address as s3://BUCKET/RUN."
        ) from None
    return LocalFolder(Path(path)) if isinstance(system, LocalFileSystem) else ObjectFolder(str(place), system, path)


class Folder(Protocol):
    """What a run needs of the place where it is kept; names are relative and have at most one slash."""

    def read(self, name: str) -> bytes:
        """The content of a file; raises FileNotFoundError if there is none, or VitrailError."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, all of it or nothing."""

    def names(self, subfolder: str = "") -> list[str]:
        """The sorted names of the files of a subfolder; empty if there is none."""

    def rename(self, name: str, new: str) -> None:
        """Renames a file; one that is gone already is no error."""

    def tidy(self, subfolder: str) -> None:
        """Removes what killed processes left half-written, while nobody else writes."""

    def locked(self, shard: str | None = None) -> Any:
        """A context that excludes equal shards and whole runs; None = the whole run."""


class LocalFolder:
    """A folder of a file system, local or shared; its locks are the system's, released however a process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise VitrailError(f"cannot read {self.path / name}: {error.strerror or error}.") from None

    def write(self, name: str, content: bytes) -> None:
        save_atomically(self.path / name, lambda file: file.write(content))

    def names(self, subfolder: str = "") -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(entry.name for entry in (self.path / subfolder).iterdir())
        return []

    def rename(self, name: str, new: str) -> None:
        try:
            (self.path / name).rename(self.path / new)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise VitrailError(f"cannot rename {self.path / name}: {error.strerror or error}.") from error

    def tidy(self, subfolder: str) -> None:
        remove_unfinished(self.path / subfolder)

    @contextmanager
    def locked(self, shard: str | None = None) -> Iterator[None]:
        is_new = not self.path.exists()
        with ExitStack() as locks:
            locks.enter_context(self._lock(LOCK, shared=shard is not None))
            if shard is not None:
                locks.enter_context(self._lock(f"{LOCK}-{shard}"))
            try:
                yield
            except BaseException:
                if is_new and all(path.name.startswith(LOCK) for path in self.path.iterdir()):  # it never started
                    for path in self.path.iterdir():
                        path.unlink()
                    self.path.rmdir()
                raise

    @contextmanager
    def _lock(self, name: str, shared: bool = False) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / name, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise VitrailError(f"cannot write into the run folder {self.path}: {error.strerror or error}.") from None
        with file:
            if not _acquire(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                file.seek(0)
                raise _is_locked(self, file.read().strip())
            with suppress(OSError):  # a full disk: the owner is only information for others
                file.truncate(0)
                file.write(_owner())
                file.flush()
            yield


class ObjectFolder:
    """A prefix of an object store. Writing an object is atomic; a lock is an object that its owner renews."""

    def __init__(self, address: str, system: Any, path: str) -> None:
        self.address, self.system, self.path = address, system, path
        self.lost = False  # whether another process took the lock

    def __str__(self) -> str:
        return self.address

    def read(self, name: str) -> bytes:
        try:
            with self.system.open_input_stream(f"{self.path}/{name}") as stream:
                return stream.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", name, error) from None

    def write(self, name: str, content: bytes) -> None:
        if self.lost:
            raise VitrailError(f"{self} was taken over by another process while this one did not respond: stop one.")
        try:
            with self.system.open_output_stream(f"{self.path}/{name}") as stream:
                stream.write(content)
        except OSError as error:
            raise self._failed("write", name, error) from error

    def names(self, subfolder: str = "") -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(f"{self.path}/{subfolder}".rstrip("/"), allow_not_found=True)
        try:
            infos = self.system.get_file_info(selector)
        except OSError as error:
            raise self._failed("list", subfolder, error) from None
        return sorted(info.base_name for info in infos if info.type == FileType.File)

    def rename(self, name: str, new: str) -> None:
        """Copies and removes: if interrupted, both are there, and the next call goes on."""
        try:
            self.system.move(f"{self.path}/{name}", f"{self.path}/{new}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failed("rename", name, error) from error

    def tidy(self, subfolder: str) -> None:
        """Nothing to do: an object that was not completed does not exist."""

    @contextmanager
    def locked(self, shard: str | None = None) -> Iterator[None]:
        """Announces this process, then refuses if another one is there and alive: of two at once at most one stays.

        Aliveness is a change of its object, which no clock is needed for.
        """
        name = f"{LOCKS}/{shard or 'all'}.{secrets.token_hex(8)}"
        self.lost, stop = False, threading.Event()
        self._renew(name, 0)
        thread = threading.Thread(target=self._keep_renewing, args=(name, stop), daemon=True)
        thread.start()
        try:
            self._wait_for_others(name)
            yield
        finally:
            stop.set()
            thread.join()
            self._remove(name)

    def _renew(self, name: str, beat: int) -> None:
        self.write(name, f"{_owner()}\n{beat}".encode())

    def _keep_renewing(self, name: str, stop: threading.Event) -> None:
        beat = 0
        while not stop.wait(BEAT):
            beat += 1
            with suppress(VitrailError):  # the network may come back
                if name.removeprefix(f"{LOCKS}/") not in self.names(LOCKS):
                    self.lost = True
                    return
                self._renew(name, beat)

    def _wait_for_others(self, name: str) -> None:
        """Returns once no other process that this one excludes is alive."""
        kind = name.removeprefix(f"{LOCKS}/").partition(".")[0]
        seen: dict[str, bytes] = {}
        until = time.monotonic() + LEASE
        while others := [
            f"{LOCKS}/{other}"
            for other in self.names(LOCKS)
            if f"{LOCKS}/{other}" != name and (kind == "all" or other.partition(".")[0] in ("all", kind))
        ]:
            for other in others:
                try:
                    content = self.read(other)
                except FileNotFoundError:
                    continue
                if seen.setdefault(other, content) != content:
                    raise _is_locked(self, content.decode(errors="replace").partition("\n")[0])
                if time.monotonic() > until:
                    self._remove(other)
            time.sleep(BEAT / 5)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self.system.delete_file(f"{self.path}/{name}")

    def _failed(self, verb: str, name: str, error: OSError) -> VitrailError:
        return VitrailError(f"cannot {verb} {self}/{name}: {str(error).splitlines()[0].rstrip('.')}.")


def _owner() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_locked(folder: Folder, owner: str) -> VitrailError:
    return VitrailError(
        f"{folder} is locked by {owner or 'another process'}: wait for it, or watch it with vitrail bench --watch "
        f"{folder}."
    )


def _acquire(file: IO[str], kind: int) -> bool:
    """Whether the lock was acquired; the child of a process that was just killed may hold it for a moment."""
    for pause in (0, 0.1, 0.3, 0.6):
        time.sleep(pause)
        with suppress(OSError):
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
    return False
