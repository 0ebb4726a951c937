"""Files: atomic writes, and errors of the file system as ``VitrailError``."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.errors import VitrailError

TEMPORARY = (".vitrail-", ".part")  # how the names of temporary files begin and end


def save_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Calls ``write`` with an open file and moves the result to ``path`` atomically; returns the path.

    Missing folders are created. On failure an existing file is unchanged, no temporary file remains, and the error
    names the path.
    """
    with _all_or_nothing() as transaction:
        transaction.stage(Path(path), write)
    return Path(path)


def write_together(contents: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Writes several files, all or none."""
    with _all_or_nothing() as transaction:
        for path, content in contents.items():
            transaction.stage(Path(path), partial(_write_bytes, content))


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of processes that were killed; nobody else may be writing into the folder."""
    for path in folder.glob(f"{TEMPORARY[0]}*{TEMPORARY[1]}"):
        with contextlib.suppress(OSError):
            path.unlink()


def printable(text: str) -> str:
    """Text that can be encoded as UTF-8: undecodable bytes of a file name become escapes, a backslash and ``xe9``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """``json.loads``, for which text that is nested too deeply is a ValueError like any other mistake."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turns errors of the file system, such as a missing permission or a path that is too long, into VitrailError."""
    try:
        yield
    except OSError as error:
        path = "a file" if error.filename is None else f"'{error.filename}'"
        raise VitrailError(f"cannot read {path}: {error.strerror or error}.") from None


class _Transaction:
    """Files written under temporary names, then renamed together."""

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path]] = []
        self._backups: dict[Path, Path | None] = {}
        self._new_folders: list[Path] = []

    def stage(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Writes a file under a temporary name in its folder."""
        with _named_errors(path):
            target = Path(os.path.realpath(path))
            # Replacing a device such as /dev/null would break the machine.
            if target.is_dir():
                raise VitrailError(f"cannot write '{path}': it is a folder, expected a file name.")
            if target.exists() and not target.is_file():
                raise VitrailError(f"cannot write '{path}': it is not a regular file, choose another name.")
            self._make_folders(target.parent)
            temporary = _name_beside(target)
            with open(temporary, "xb") as file:
                self._staged.append((temporary, target))
                write(file)
                file.flush()
                os.fsync(file.fileno())

    def commit(self) -> None:
        """Renames every staged file to its target."""
        for temporary, target in self._staged:
            with _named_errors(target):
                if len(self._staged) > 1 and target not in self._backups:
                    self._backups[target] = _copy_beside(target) if target.exists() else None
                os.replace(temporary, target)
        for folder in {target.parent for _, target in self._staged}:
            _sync_folder(folder)

    def roll_back(self) -> None:
        """Undoes everything: restores previous files, removes new files and folders."""
        for target, backup in self._backups.items():
            with contextlib.suppress(OSError):
                os.replace(backup, target) if backup else target.unlink(missing_ok=True)
        for temporary, _ in self._staged:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        for folder in reversed(self._new_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def forget_backups(self) -> None:
        """Removes the copies of the previous files."""
        for backup in filter(None, self._backups.values()):
            with contextlib.suppress(OSError):
                backup.unlink(missing_ok=True)

    def _make_folders(self, folder: Path) -> None:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._new_folders.append(parent)


@contextlib.contextmanager
def _all_or_nothing() -> Iterator[_Transaction]:
    transaction = _Transaction()
    try:
        yield transaction
        transaction.commit()
    except BaseException:
        transaction.roll_back()
        raise
    transaction.forget_backups()


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turns any failure into an error that names the path and the reason."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise VitrailError(f"cannot write '{path}': {reason or type(error).__name__}.") from error


def _write_bytes(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _name_beside(target: Path) -> Path:
    # Independent of the target's name, which may already have the maximum length.
    return target.parent / f"{TEMPORARY[0]}{secrets.token_hex(8)}{TEMPORARY[1]}"


def _copy_beside(target: Path) -> Path:
    """Copies a file within its folder, as a hard link where the file system supports it."""
    copy = _name_beside(target)
    try:
        os.link(target, copy)
    except OSError:
        try:
            shutil.copy2(target, copy)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
    return copy


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable, where the system can sync folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
