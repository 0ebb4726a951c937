"""A cluster of several machines, as far as processes can play them: killed, added, and left by their driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.bench.nodes import (
    LIMIT,
    Nodes,
    gated_method,
    kill_all,
    processes_of,
    ray_nodes,
    wait_until,
)  # fmt: skip
from tests.bench.plans import same, table
from tests.bench.test_faults import raw_keys

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.plugins import load_plugins

pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")
pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PLAN = Plan([ModelSpec("scenes", {"device": "cpu"})], "scenes:16@3", ["gen_att", "random"],
            ["sparseness", "insertion(steps=8)"], images=24, target="label", deterministic=True)  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without CPUs, and two unequal machines."""
    with ray_nodes(tmp_path_factory.mktemp("nodes")) as started:
        started.add(1)
        started.add(2, "--resources", '{"fast": 1}')
        yield started


def single_machine(plan: Plan, folder: Path) -> Path:
    """The run of the same plan without a cluster, on as many threads as a worker has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(plan, folder)
    finally:
        torch.set_num_threads(threads)
    return folder


def assert_equal_runs(folder: Path, alone: Path) -> None:
    same(table(folder), table(alone), exactly=True)
    assert table(folder)["error"].isna().all()
    keys = raw_keys(folder)
    assert len(keys) == len(set(keys)), "a row is stored twice"
    assert Store(folder).maps().keys() == Store(alone).maps().keys()


def test_the_driver_is_killed_and_another_goes_on_and_anyone_watches(nodes: Nodes, tmp_path: Path) -> None:
    """The first driver is a client from outside, the second one belongs to the cluster."""
    plugin, shut = gated_method(tmp_path, free=31)
    run_folder = tmp_path / "run"
    shut.touch()  # after a shard or two, of three
    plan = replace(PLAN, data="scenes:40@3", images=48, methods=["tests_gated", "random"])
    plan.write(tmp_path / "plan.toml")
    program = [sys.executable, "-c", "from vitrail.cli.program import main; main()", "bench"]
    words = [str(tmp_path / "plan.toml"), "--plugin", str(plugin), "--out", str(run_folder), "--workers", "2"]
    with subprocess.Popen(
        [*program, *words, "--cluster", nodes.client],
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as driver:
        try:
            wait_until(lambda: driver.poll() is not None or len(raw_keys(run_folder)) > 0, "the first rows")
            assert driver.poll() is None, driver.communicate()[0].decode()
        finally:
            driver.kill()
    stored = set(raw_keys(run_folder))
    shut.unlink()
    assert 0 < len(stored) < 48 * 4, "it was killed in the middle"

    second = subprocess.run(
        [*program, *words, "--cluster", nodes.address],
        env=nodes.environment,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert second.returncode == 0, second.stdout + second.stderr
    watched = subprocess.run(
        [*program, "--watch", str(run_folder), "--cluster", nodes.client],
        env=nodes.environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "48/48 images" in watched.stdout
    assert f"{len(stored) // 4} known before" in second.stdout
    load_plugins([plugin])
    assert_equal_runs(run_folder, single_machine(plan, tmp_path / "alone"))


def test_a_machine_is_killed_and_another_joins(nodes: Nodes, tmp_path: Path) -> None:
    plugin, _ = gated_method(tmp_path)
    plan = replace(PLAN, methods=["tests_gated", "random"])
    plan.write(tmp_path / "plan.toml")
    command = [sys.executable, "-m", "tests.bench.driver", nodes.address, str(tmp_path)]
    with (
        (tmp_path / "driver.log").open("w+") as log,
        subprocess.Popen(command, env=nodes.environment, stdout=log, stderr=log, cwd=ROOT) as driver,
    ):
        try:
            wait_until(lambda: driver.poll() is not None or (tmp_path / "first").exists(), "the first shard")
            nodes.kill(nodes.processes[2])
            nodes.add(1)
            (tmp_path / "changed").write_text("2")
            driver.wait(2 * LIMIT)
        finally:
            driver.kill()
        assert driver.returncode == 0, (tmp_path / "driver.log").read_text()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["images"], seen["errors"]) == (24, 0)
    load_plugins([plugin])
    assert_equal_runs(tmp_path / "run", single_machine(plan, tmp_path / "alone"))
    places, _, loads = zip(*(path.name.split(" ", 2) for path in (tmp_path / "loads").iterdir()), strict=True)
    assert set(seen["joined"]) & set(places), "the machine that joined has worked"
    assert max(seen["shards"]) <= 3, "never more shards than workers"
    assert set(loads) == {"scenes: load"}
    tasks = (tmp_path / "tasks").read_text(encoding="utf-8").splitlines()
    named = {f"scenes: images {first}–{first + 1}" for first in range(0, 24, 2)}
    assert set(filter(None, tasks)) == named, "names for the dashboard"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """The processes of a cluster end with the tests, even if these are killed."""
    script = (
        "import sys, time; from pathlib import Path; from tests.bench.nodes import Nodes\n"
        "nodes = Nodes(Path(sys.argv[1])); print(nodes.processes[0].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        head = int(holder.stdout.readline())
        holder.kill()

    try:
        wait_until(lambda: not processes_of(head), "the end of the head")
    finally:
        kill_all(head)
