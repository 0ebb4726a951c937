"""Nothing lost, nothing twice: kills at every write, disks that are full or read-only, clocks that go back, files cut
short.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tests.bench.plans import own_methods, plan, same, table  # noqa: F401

import vitrail
from vitrail import VitrailError, files
from vitrail.bench import run as running
from vitrail.bench import store as storing
from vitrail.bench.plan import Plan
from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.cli.bench import watch_run
from vitrail.models.view import View
from vitrail.report.results import read_results

PLAN = plan(images=2, methods=["random"], metrics=["sparseness"])
RENAMES = 2 + 2 * 3  # of the plan, the environment, and the map, picture and row of each image


@pytest.fixture(scope="module")
def view() -> View:
    torch.set_num_threads(1)
    return vitrail.load("scenes")


@pytest.fixture(scope="module")
def whole(view: View, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(PLAN, folder, view)
    return folder


def go(chosen: Plan, folder: Path | str, view: View, **options: Any) -> running.Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "EVERY", 0.0)  # a part for every image
        return run(chosen, folder, load=lambda spec: view, **options)


def raw_keys(folder: Path) -> list[str]:
    """The keys of all rows as they are stored, without anybody who leaves out what is there twice."""
    return [key for part in sorted((folder / "rows").glob("part-*.parquet")) for key in pd.read_parquet(part)["key"]]


def assert_whole(folder: Path, whole: Path) -> None:
    same(table(folder), table(whole), exactly=True)
    keys = raw_keys(folder)
    assert len(keys) == len(set(keys)), "a row is stored twice"
    assert Store(folder).maps().keys() == Store(whole).maps().keys()
    assert len(Store(folder).pictures()) == len(Store(whole).pictures())
    assert not list(folder.glob("*/.vitrail-*")), "something half-written is left"


def before(call: Callable[..., Any], act: Callable[[], object], count: int) -> Callable[..., Any]:
    """The function, with something that happens before its ``count``-th call."""
    calls = iter(range(1, 1000))

    def disturbed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == count:
            act()
        return call(*arguments, **options)

    return disturbed


@pytest.mark.parametrize(
    ("moment", "rename"),
    [
        *(("before", rename) for rename in range(1, RENAMES + 1)),
        *(pytest.param("after", rename, marks=pytest.mark.full) for rename in range(1, RENAMES + 1)),
    ],
)
def test_a_kill_at_any_rename_loses_nothing(tmp_path: Path, view: View, whole: Path, moment: str, rename: int) -> None:
    folder = tmp_path / "run"

    def killed() -> None:
        def kill() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        name = "replace" if moment == "before" else "_sync_folder"  # which follows the rename
        owner: Any = os if moment == "before" else files
        setattr(owner, name, before(getattr(owner, name), kill, rename))
        go(PLAN, folder, view)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    left = len(list(folder.glob("*/.vitrail-*")))
    assert left == (moment == "before" and rename > 2), "the file that was being written"
    stored = set(raw_keys(folder)) if (folder / "rows").exists() else set()
    outcome = go(PLAN, folder, view)
    assert outcome.rows == 2 - len(stored), "what is stored is not computed again"
    assert_whole(folder, whole)


class FullFile:
    """A file of which the disk holds only half."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, content: bytes) -> None:
        self.file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("moment", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.full), 7])
def test_a_disk_that_is_full_at_any_moment_is_an_error_and_loses_nothing(
    tmp_path: Path, view: View, whole: Path, moment: str, count: int
) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        if moment == "open":
            patch.setattr(files, "open", before(open, no_space, count), raising=False)
        elif moment == "write":
            opened = iter(range(1, 1000))

            def full(*arguments: Any, **options: Any) -> Any:
                file = open(*arguments, **options)  # noqa: SIM115
                return FullFile(file) if next(opened) >= count else file

            patch.setattr(files, "open", full, raising=False)
        else:
            calls = 2 * count - 1 if moment == "fsync" else count  # every second one syncs a folder
            patch.setattr(os, moment, before(getattr(os, moment), no_space, calls))
        with pytest.raises(VitrailError, match=f"cannot write .*{os.strerror(errno.ENOSPC)}"):
            go(PLAN, folder, view)
    assert not list(folder.rglob(".vitrail-*"))
    go(PLAN, folder, view)
    assert_whole(folder, whole)


@pytest.fixture
def read_only(tmp_path: Path, whole: Path) -> Iterator[Path]:
    """The whole run, in a folder that nothing can be written into."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid():
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        for path in (folder / ".lock", folder):
            path.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_run_is_read_and_refuses_to_go_on(
    read_only: Path, whole: Path, view: View, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VitrailError, match=f"cannot write into the run folder {read_only}: "):
        go(PLAN, read_only, view)
    same(table(read_only), table(whole), exactly=True)
    assert len(read_results([read_only]).settings[0].images) == 2
    watch_run(read_only, once=True)
    assert "2/2 images" in capsys.readouterr().out


def test_a_damaged_part_that_cannot_be_renamed_is_an_error(
    tmp_path: Path, whole: Path, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    next((folder / "rows").iterdir()).write_bytes(b"")

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(VitrailError, match=r"cannot rename .*Read-only"):
        go(PLAN, folder, view)


def test_a_clock_that_goes_back_hides_no_row(
    tmp_path: Path, view: View, monkeypatch: pytest.MonkeyPatch, pictures: Path
) -> None:
    """What failed at noon and is repaired at eleven, by the clock, is repaired."""
    now = [datetime(2026, 1, 2, 12, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now[0]

    monkeypatch.setattr(running, "datetime", Clock)
    monkeypatch.setattr(storing.time, "time_ns", lambda: int(now[0].timestamp() * 1e9))
    chosen = plan(data=str(pictures), methods=["tests_moody", "random"], metrics=["sparseness"], target=None)
    mood = ["bad"]

    @vitrail.method("tests_moody")
    def moody(model, images, target):  # type: ignore[no-untyped-def]
        if mood[0] == "bad":
            raise VitrailError("not now")
        return images.mean(1)[:, ::8, ::8]

    broken = (pictures / "1.png").read_bytes()
    (pictures / "1.png").write_bytes(b"no picture")
    first = go(chosen, tmp_path / "run", view)
    assert first.errors == 1 + 1
    (pictures / "1.png").write_bytes(broken)
    mood[0] = "good"
    for retry in (True, False):
        now[0] -= timedelta(hours=1)
        outcome = go(chosen, tmp_path / "run", view, retry=retry)
        assert outcome.errors == outcome.failed_before == 0
        rows = Store(tmp_path / "run").rows()
        assert rows["error"].isna().all()
        assert len(rows) == 2 * 2
    assert outcome.rows == 0, "nothing is left to do"
    numbers = [int(part.name.split("-")[1]) for part in sorted((tmp_path / "run" / "rows").iterdir())]
    assert numbers[-1] > numbers[0] >= int(1e9 * datetime(2026, 1, 2, 12, tzinfo=UTC).timestamp())


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, scene in enumerate(vitrail.data.Scenes(2, seed=2)):
        Image.fromarray(scene.image).save(folder / f"{number}.png")
    return folder


CUTS: dict[str, Callable[[int], int]] = {
    "empty": lambda size: 0,
    "one byte": lambda size: 1,
    "a header": lambda size: 12,
    "half": lambda size: size // 2,
    "all but eight": lambda size: size - 8,
    "all but one": lambda size: size - 1,
}


@pytest.mark.parametrize("cut", CUTS)
def test_files_that_are_cut_short_are_measured_again(tmp_path: Path, view: View, whole: Path, cut: str) -> None:
    """The last file of every kind, and the plan and the environment, as a file system may leave them after a crash."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    lasts = [sorted((folder / kind).iterdir())[-1] for kind in ("rows", "maps", "pictures")]
    for path in (*lasts, folder / "plan.toml", folder / "environment.json"):
        os.truncate(path, CUTS[cut](path.stat().st_size))
    with pytest.warns(UserWarning, match="is damaged|cannot be read"):
        outcome = go(PLAN, folder, view)
    assert (outcome.known, outcome.rows) == (1, 1)
    assert_whole(folder, whole)
    assert Store(folder).plan() == PLAN
    assert Store(folder).environment()["preprocessing"].keys() == {"scenes"}
    assert all(path.with_name(path.name + ".damaged").exists() for path in lasts)
