"""Nothing lost, nothing twice on a cluster: drivers, workers and whole machines are killed at random moments.

    python -m tests.soak.clusters [SECONDS]

A benchmark and an audit run on two Ray nodes, each in a round of at most ten kills after the other, until both were
killed as often as planned. The results must equal those of one machine that nobody disturbs, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen

import torch
from tests.audit import stickers
from tests.bench.nodes import Nodes, processes_of, ray_nodes
from tests.soak.kills import KILLS, PLAN, TABLES, Figures, _differing, _examine
from tests.soak.outcome import Outcome

from vitrail import VitrailError
from vitrail.audit import audit_images
from vitrail.bench import cluster
from vitrail.bench import run as running
from vitrail.bench.store import Store

SHARE = 3.3
SHARD = 2  # images
IMAGES = 24  # of the audit
ROUND = 10  # kills until a folder may be finished
NODE, WORKER = 0.1, 0.5  # the shares of the kills; the others hit the driver
PATIENCE = 240.0  # seconds in which a driver that nobody disturbs must end
OTHERS = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")  # without the agents a machine ends
GAVE_UP = 3  # exit code of a driver that lost too many workers: the same command goes on

Measure = Callable[[Path, str | None], object]  # into a folder, on the cluster at an address or on this machine
Compare = Callable[[Path, Path], int]


@dataclass
class ClusterFigures(Figures):
    """As of a single machine, with who was killed and what else happened."""

    killed: Counter[str] = field(default_factory=Counter)
    gave_up: int = 0  # drivers that ended because a shard lost its worker again and again
    failed: int = 0  # drivers that ended in another way, or not at all

    @property
    def clean(self) -> bool:
        return super().clean and not self.failed


def soak(seconds: float) -> list[Outcome]:
    """As ``run``, as lines of the report."""
    if find_spec("ray") is None:
        return []
    lines = []
    for kind, figures in run(seconds).items():
        killed = ", ".join(f"{count} {who}" for who, count in sorted(figures.killed.items()))
        note = f"{figures.starts} starts, {figures.rows} rows stored; killed: {killed}"
        broken = [] if figures.clean else [f"{kind}: {figures}"]
        lines.append(
            Outcome(
                f"nothing lost, nothing twice on a cluster: {kind}", figures.rows, figures.kills, None, note, broken
            )
        )
    return lines


def run(seconds: float) -> dict[str, ClusterFigures]:
    """Kills until both kinds of run were killed as often as planned, or the time is over."""
    torch.set_num_threads(1)
    cluster.SHARD, running.EVERY = SHARD, 0.0
    start, dice = time.monotonic(), random.Random(0)
    with tempfile.TemporaryDirectory() as name, ray_nodes(Path(name)) as nodes:
        place = Path(name)
        images = place / "images"
        images.mkdir()
        for number in range(IMAGES):
            stickers.picture(number % 4, number, False).save(images / f"{number}.png")

        def bench(folder: Path, address: str | None) -> None:
            if address is None:
                running.run(PLAN, folder)
            else:
                cluster.run_on_cluster(PLAN, folder, address)

        def audit(folder: Path, address: str | None) -> None:
            options = {"device": "cpu"}
            audit_images(
                "scenes", str(images), folder, trust=False, batch_size=1, options=options, cluster=address,
            )  # fmt: skip

        machines = [nodes.add(1), nodes.add(1)]
        return {
            "bench": _kill(nodes, machines, bench, _compare_runs, place / "bench", start + 0.5 * seconds, dice),
            "audit": _kill(nodes, machines, audit, _compare_audits, place / "audit", start + seconds, dice),
        }


def _compare_runs(folder: Path, alone: Path) -> int:
    return _differing(Store(folder), Store(alone))


def _compare_audits(folder: Path, alone: Path) -> int:
    if not (folder / TABLES[0]).exists():  # its driver failed, which is counted
        return 0
    (store,), (whole,) = ([Store(path) for path in place.glob("run-*")] for place in (folder, alone))
    tables = sum((folder / name).read_bytes() != (alone / name).read_bytes() for name in TABLES)
    return tables + _differing(store, whole)


def _kill(
    nodes: Nodes, machines: list[Popen[bytes]], measure: Measure, compare: Compare, place: Path, deadline: float,
    dice: random.Random,
) -> ClusterFigures:  # fmt: skip
    figures = ClusterFigures()
    fork = multiprocessing.get_context("fork")

    def drive(folder: Path) -> None:
        os.environ.update(nodes.environment)  # Ray reads its token when it is imported, which the parent does not
        try:
            measure(folder, nodes.address)
        except VitrailError as error:
            os._exit(GAVE_UP if "lost their worker" in str(error) else 1)
        os._exit(0)

    def finish(folder: Path, kills: int) -> None:
        """Starts drivers until one of them is done, and kills as often as told."""
        while True:
            driver = fork.Process(target=drive, args=(folder,))
            driver.start()
            figures.starts += 1
            while kills and time.monotonic() < deadline:
                driver.join(dice.uniform(0.0, whole))
                if driver.exitcode is not None:
                    break
                victim = _strike(nodes, machines, driver.pid or 0, dice)
                figures.killed[victim] += 1
                figures.kills, kills = figures.kills + 1, kills - 1
                if victim == "driver":
                    break
            driver.join(None if driver.exitcode is not None else PATIENCE)
            if driver.exitcode in (0, None) or driver.exitcode not in (-signal.SIGKILL, GAVE_UP):
                figures.failed += driver.exitcode != 0
                driver.kill()
                return
            figures.gave_up += driver.exitcode == GAVE_UP

    measure(place / "alone", None)
    whole = 10.0  # seconds, a first guess
    began = time.monotonic()
    finish(place / "timed", 0)
    whole = time.monotonic() - began
    _examine(place / "timed", lambda folder: compare(folder, place / "alone"), figures)
    while figures.kills < KILLS and time.monotonic() < deadline and not figures.failed:
        folder = place / f"round-{figures.starts}"
        finish(folder, min(ROUND, KILLS - figures.kills))
        _examine(folder, lambda folder: compare(folder, place / "alone"), figures)
    return figures


def _strike(nodes: Nodes, machines: list[Popen[bytes]], driver: int, dice: random.Random) -> str:
    """Kills a machine, which another replaces, a worker at work, or else the driver; returns who it was."""
    chance = dice.random()
    if chance < NODE:
        nodes.kill(machines.pop(dice.randrange(len(machines))))
        machines.append(nodes.add(1))
        return "machine"
    workers = [pid for machine in machines for pid in processes_of(machine.pid) if _has_a_task(pid)]
    if chance < NODE + WORKER and workers:
        os.kill(dice.choice(workers), signal.SIGKILL)
        return "worker"
    os.kill(driver, signal.SIGKILL)
    return "driver"


def _has_a_task(pid: int) -> bool:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False
    return title.startswith(b"ray::") and not title.startswith(OTHERS)


if __name__ == "__main__":
    measured = run(float(sys.argv[1]) if len(sys.argv) > 1 else 1200.0)
    print(json.dumps({kind: vars(figures) for kind, figures in measured.items()}, indent=1))  # noqa: T201
    sys.exit(not all(figures.clean for figures in measured.values()))
