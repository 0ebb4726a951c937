"""Runs in object stores, where nothing can be renamed or locked by the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.bench.nodes import LIMIT, free_port, gated_method, wait_until
from tests.bench.plans import own_methods, plan, same, table  # noqa: F401
from tests.bench.test_faults import go

import vitrail
from vitrail import VitrailError
from vitrail.bench import folders
from vitrail.bench.folders import LEASE, LOCKS, LocalFolder, ObjectFolder, open_folder
from vitrail.bench.run import Step, run
from vitrail.bench.store import Store
from vitrail.cli.bench import watch_run
from vitrail.models.view import View
from vitrail.plugins import load_plugins
from vitrail.report.report import report

PLAN = plan(images=3, methods=["random"], metrics=["sparseness"])


@pytest.fixture(scope="module")
def view() -> View:
    torch.set_num_threads(1)
    return vitrail.load("scenes")


@pytest.fixture
def address(tmp_path: Path) -> str:
    """An object store in the memory of this process."""
    return f"fsspec+memory://{tmp_path.name}/run"


@pytest.fixture
def folder(address: str) -> ObjectFolder:
    opened = open_folder(address)
    assert isinstance(opened, ObjectFolder)
    return opened


def test_a_run_in_an_object_store_is_that_of_a_folder(
    address: str, tmp_path: Path, view: View, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(BaseException):
        pass

    def stop(step: Step) -> None:
        if step.done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        go(PLAN, address, view, watch=stop)
    outcome = go(PLAN, address, view)
    assert (outcome.images, outcome.known) == (1, 2)
    go(PLAN, tmp_path / "run", view)
    same(table(address), table(tmp_path / "run"), exactly=True)
    assert Store(address).plan() == PLAN
    assert Store(address).environment()["preprocessing"].keys() == {"scenes"}
    assert Store(address).maps().keys() == Store(tmp_path / "run").maps().keys()
    assert open_folder(address).names(LOCKS) == [], "the lock goes with its owner"
    watch_run(address, once=True)
    assert "3/3 images" in capsys.readouterr().out
    with pytest.raises(VitrailError, match=r"a report is written to a folder, not to fsspec.*--out"):
        report([address])
    summary, _ = report([address, tmp_path / "run"], tmp_path / "report", ["csv"])
    assert len({setting.run for setting in summary.results.settings}) == 2


def test_a_damaged_object_is_set_aside_and_measured_again(address: str, folder: ObjectFolder, view: View) -> None:
    go(PLAN, address, view)
    before = table(address)
    part = folder.names("rows")[1]
    folder.write(f"rows/{part}", folder.read(f"rows/{part}")[:-9])
    with pytest.warns(UserWarning, match=f"{part} is damaged"):
        assert go(PLAN, address, view).rows == 1
    assert f"{part}.damaged" in folder.names("rows")
    assert part not in folder.names("rows")
    same(table(address), before, exactly=True)


class Clock:
    """Time that passes only while somebody waits, and what happens meanwhile."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def wait_with(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> Clock:
    clock = Clock(meanwhile)
    monkeypatch.setattr(folders, "time", clock)
    return clock


def test_an_owner_that_renews_its_lock_excludes_others(folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = iter(range(1, 1000))
    folder.write(f"{LOCKS}/all.other", b"process 7 on afar\n0")
    wait_with(monkeypatch, lambda: folder.write(f"{LOCKS}/all.other", f"process 7 on afar\n{next(beats)}".encode()))
    with pytest.raises(VitrailError, match="is locked by process 7 on afar: wait for it"), folder.locked():
        pytest.fail("two processes hold the lock")
    assert folder.names(LOCKS) == ["all.other"], "who is refused leaves nothing behind"


def test_an_owner_that_died_is_succeeded(folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(f"{LOCKS}/all.other", b"process 7 on afar\n41")
    clock = wait_with(monkeypatch)
    with folder.locked():
        (name,) = folder.names(LOCKS)
        assert name != "all.other"
        assert f"process {os.getpid()} on " in folder.read(f"{LOCKS}/{name}").decode()
    assert LEASE < clock.now < 2 * LEASE
    assert folder.names(LOCKS) == []


def test_shards_exclude_equal_ones_and_whole_runs(folder: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wait_with(monkeypatch)
    folder.write(f"{LOCKS}/1-of-2.other", b"process 7 on afar\n0")
    with folder.locked("2-of-2"):
        assert clock.now == 0
    for shard in ("1-of-2", None):
        folder.write(f"{LOCKS}/1-of-2.other", b"process 7 on afar\n0")
        clock.now = 0
        with folder.locked(shard):
            assert clock.now > LEASE, "it waited for the other to be dead"


def test_who_lost_its_lock_writes_no_more(folder: ObjectFolder) -> None:
    class Once(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return False

    folder._keep_renewing(f"{LOCKS}/all.gone", Once())
    with pytest.raises(VitrailError, match="was taken over by another process"):
        folder.write("rows/part", b"")


def test_addresses_and_paths(tmp_path: Path) -> None:
    assert isinstance(open_folder("runs/a"), LocalFolder)
    assert isinstance(open_folder(f"file://{tmp_path}"), LocalFolder), "written atomically, as any folder"
    with pytest.raises(VitrailError, match=r"cannot open 'ftp://host/run': .*expected a path or an address as s3://"):
        Store("ftp://host/run")
    with pytest.raises(VitrailError, match="'s3:/bucket/run' is a path, in which an address loses a slash"):
        Store(Path("s3://bucket/run"))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an S3-compatible server of this machine, with a bucket."""
    pytest.importorskip("moto", reason="moto is not installed (extra peers)")
    pytest.importorskip("flask", reason="moto[server] is not installed (extra peers)")
    from pyarrow.fs import S3FileSystem

    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)

        def is_ready() -> bool:
            try:
                S3FileSystem(
                    endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
                ).create_dir("bucket")
            except OSError:
                return False
            return True

        try:
            wait_until(is_ready, "the start of the server")
            yield variables
        finally:
            server.kill()
            server.wait()


@pytest.mark.full
def test_a_command_that_is_killed_goes_on_in_s3_and_two_at_once_are_refused(
    s3: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "s3://bucket/killed"
    plugin, shut = gated_method(tmp_path, free=2)
    words = ["bench", "--data", "scenes:4@5", "--methods", "tests_gated", "--metrics", "sparseness", "--target",
             "label", "--deterministic", "--device", "cpu", "--plugin", str(plugin), "--out", address]  # fmt: skip
    command = [sys.executable, "-c", "from vitrail.cli.program import main; main()", *words]
    shut.touch()
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: first.poll() is not None or Store(address).has_rows, "the first rows")
        second = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (second.returncode, first.poll()) == (1, None)
        assert f"is locked by process {first.pid} on" in " ".join(second.stderr.split())
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
        shut.unlink()
    stored = len(Store(address).rows())
    again = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{stored} known before" in again.stdout
    load_plugins([plugin])
    run(Store(address).plan(), tmp_path / "alone")
    same(table(address), table(tmp_path / "alone"))
    assert 0 < stored < len(table(address)), "it was killed in the middle"
    assert Store(address).maps().keys() == Store(tmp_path / "alone").maps().keys()
    assert open_folder(address).names(LOCKS) == []
    watch_run(address, once=True)
    assert "6/6 images" in capsys.readouterr().out


@pytest.mark.full
def test_a_bucket_that_is_missing_or_a_server_that_is_gone_is_told(s3: dict[str, str], view: View) -> None:
    with pytest.raises(VitrailError, match=r"cannot write s3://nobody/run/locks/.*bucket"):
        go(PLAN, "s3://nobody/run", view)


@pytest.mark.full
def test_a_cluster_writes_to_s3(s3: dict[str, str], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from vitrail.bench.cluster import run_on_cluster

    chosen = replace(PLAN, methods=["random"])
    try:
        run_on_cluster(chosen, "s3://bucket/cluster", "local", workers=1)
    finally:
        ray.shutdown()
    run(chosen, tmp_path / "alone")
    same(table("s3://bucket/cluster"), table(tmp_path / "alone"))
