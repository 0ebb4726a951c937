"""A file is written completely or not at all."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from vitrail import files
from vitrail.errors import VitrailError
from vitrail.files import save_atomically, write_together


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_save_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "out.bin"
    assert save_atomically(path, lambda file: file.write(b"one")) == path
    save_atomically(str(path), lambda file: file.write(b"two"))
    assert content(tmp_path) == {"new/deep/out.bin": b"two"}
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("bad pixels"), RuntimeError()])
def test_a_failed_write_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    old = tmp_path / "old.bin"
    old.write_bytes(b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    reason = getattr(error, "strerror", None) or str(error) or "RuntimeError"
    for path in (old, tmp_path / "new" / "deep" / "out.bin"):
        with pytest.raises(VitrailError, match=f"{path}.*{reason}"):
            save_atomically(path, fail)
    assert content(tmp_path) == {"old.bin": b"old"}
    assert not (tmp_path / "new").exists()


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(file: BinaryIO) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_atomically(tmp_path / "out.bin", interrupt)
    assert content(tmp_path) == {}


def test_errors_of_the_family_pass_unchanged(tmp_path: Path) -> None:
    def refuse(file: BinaryIO) -> None:
        raise VitrailError("no such format")

    with pytest.raises(VitrailError, match=r"^no such format$"):
        save_atomically(tmp_path / "out.bin", refuse)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path, reason in ((tmp_path, "folder"), (tmp_path / "file" / "below", "directory"), ("/dev/null", "regular")):
        with pytest.raises(VitrailError, match=f"{path}.*{reason}"):
            save_atomically(path, lambda file: file.write(b""))
    assert content(tmp_path) == {"file": b"x"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(VitrailError, match="Permission denied"):
        save_atomically(tmp_path / "out.bin", lambda file: file.write(b""))


def test_links_are_followed_and_long_names_work(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    save_atomically(tmp_path / "link", lambda file: file.write(b"y"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"y"
    save_atomically(tmp_path / ("n" * 255), lambda file: file.write(b"z"))


def test_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    write_together({tmp_path / "a": b"1", tmp_path / "sub" / "b": b"2"})
    assert content(tmp_path) == {"a": b"1", "sub/b": b"2"}
    write_together({})


def test_together_or_none_when_staging_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(VitrailError, match="folder"):
        write_together({tmp_path / "a": b"1", tmp_path / "folder": b"2"})
    assert content(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("links", [True, False])
def test_together_or_none_when_a_rename_fails(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    rename = os.replace

    def fail_on_c(source: Path, target: Path) -> None:
        if target.name == "c":
            raise OSError(5, "Input/output error")
        rename(source, target)

    def no_links(source: Path, target: Path) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr(files.os, "replace", fail_on_c)
    if not links:
        monkeypatch.setattr(files.os, "link", no_links)
    with pytest.raises(VitrailError, match="c': Input/output error"):
        write_together({tmp_path / name: b"new" for name in "abc"})
    assert content(tmp_path) == {"a": b"old"}
