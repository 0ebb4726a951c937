"""Nothing lost, nothing twice: a benchmark and an audit, killed at random moments and started until they are done.

    python -m tests.soak.kills [SECONDS]

Each process is a fork of a warm one, so that 50 kills fit into minutes; a few are whole commands, killed from their
first instant on. The results must equal those of a run that nobody disturbs, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tests.audit import stickers
from tests.soak.outcome import Outcome

import vitrail
from vitrail import VitrailError
from vitrail.audit import audit_images
from vitrail.bench import run as running
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store

SHARE = 1.2
KILLS = 50  # of the benchmark, and as many of the audit
COMMANDS = 6  # of the benchmark, and as many of the audit, as commands
PLAN = Plan(
    [ModelSpec("scenes", {"device": "cpu"})], "scenes:12@5", ["gen_att", "random", "rise(masks=64)"],
    ["sparseness", "insertion(steps=8)"], images=10, target="label", deterministic=True,
)  # fmt: skip
AUDITED = 24  # images
COLUMNS = ["key", "image", "method", "params", "metric", "target", "explained", "value", "error"]
TABLES = ("images.csv", "classes.csv", "clusters.csv", "confusions.csv")


@dataclass
class Figures:
    """What became of a run that was killed again and again."""

    kills: int = 0
    starts: int = 0
    rows: int = 0
    stored_twice: int = 0
    differing: int = 0  # rows or tables that are not those of the undisturbed run
    half_written: int = 0  # files left in the folders of the results

    @property
    def clean(self) -> bool:
        return not (self.stored_twice or self.differing or self.half_written)


def soak(seconds: float) -> list[Outcome]:
    """As ``run``, as lines of the report."""
    lines = []
    for kind, figures in run(seconds).items():
        if not isinstance(figures, dict):
            continue
        measured = Figures(**figures)
        note = f"{measured.starts} starts, {measured.rows} rows stored"
        broken = [] if measured.clean else [f"{kind}: {figures}"]
        lines.append(Outcome(f"nothing lost, nothing twice: {kind}", measured.rows, measured.kills, None, note, broken))
    return lines


def run(seconds: float) -> dict[str, object]:
    """Kills until every kind of process was killed as often as planned, or the time is over."""
    torch.set_num_threads(1)
    start, dice = time.monotonic(), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        figures = {
            "bench": _bench(place / "bench", start + 0.3 * seconds, dice),
            "audit": _audit(place / "audit", start + 0.6 * seconds, dice),
            "commands": _commands(place / "commands", start + 0.85 * seconds, dice),
            "full disk": _full_disk(place / "disk", start + seconds),
        }
    return {
        **{kind: vars(measured) for kind, measured in figures.items() if measured is not None},
        "clean": all(measured is None or measured.clean for measured in figures.values()),
        "seconds": round(time.monotonic() - start, 1),
    }


def _bench(place: Path, deadline: float, dice: random.Random) -> Figures:
    view = vitrail.load("scenes", device="cpu")

    def measure(folder: Path) -> None:
        running.EVERY = 0.0
        running.run(PLAN, folder, load=lambda _: view)

    def compare(folder: Path) -> int:
        return _differing(Store(folder), Store(place / "whole"))

    return _kill(measure, compare, place, deadline, dice)


def _audit(place: Path, deadline: float, dice: random.Random) -> Figures:
    model, data = stickers.model(True), stickers.pictures(True, AUDITED)

    def measure(folder: Path) -> None:
        running.EVERY = 0.0
        audit_images(model, data, folder, trust=False, batch_size=1)

    def compare(folder: Path) -> int:
        (store,) = (Store(path) for path in folder.glob("run-*"))
        (whole,) = (Store(path) for path in (place / "whole").glob("run-*"))
        tables = sum((folder / name).read_bytes() != (place / "whole" / name).read_bytes() for name in TABLES)
        return tables + _differing(store, whole)

    return _kill(measure, compare, place, deadline, dice)


def _kill(
    measure: Callable[[Path], None], compare: Callable[[Path], int], place: Path, deadline: float, dice: random.Random
) -> Figures:
    """Rounds of kills: within each, a folder is finished however often its process is killed."""
    figures = Figures()
    fork = multiprocessing.get_context("fork")

    def work(folder: Path) -> None:
        measure(folder)
        os._exit(0)

    measure(place / "whole")
    began = time.monotonic()
    measure(place / "timed")  # what is warm now is warm in every fork
    whole = time.monotonic() - began
    while figures.kills < KILLS and time.monotonic() < deadline:
        folder = place / f"round-{figures.starts}"
        kills = min(10, KILLS - figures.kills)  # of this round
        while True:
            child = fork.Process(target=work, args=(folder,))
            child.start()
            figures.starts += 1
            child.join(dice.uniform(0.0, 0.3 * whole) if kills else None)
            if child.exitcode is not None:
                if child.exitcode:
                    raise VitrailError(f"a process ended with {child.exitcode} that nobody killed.")
                break
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            figures.kills, kills = figures.kills + 1, kills - 1
        _examine(folder, compare, figures)
    return figures


def _commands(place: Path, deadline: float, dice: random.Random) -> Figures:
    """The same with commands, of which most of the time is spent on starting."""
    figures = Figures()
    images = place / "images"
    images.mkdir(parents=True)
    for number in range(8):
        stickers.picture(number % 4, number, False).save(images / f"{number}.png")
    plan = (place / "plan.toml").absolute()
    PLAN.write(plan)
    commands = {"bench": ["bench", str(plan)], "audit": ["audit", str(images), "--model", "scenes", "--no-trust"]}
    for name, words in commands.items():
        command = [sys.executable, "-c", "from vitrail.cli import main; main()", *words]
        began = time.monotonic()
        subprocess.run([*command, "--out", str(place / name / "whole")], check=True, stdout=subprocess.DEVNULL)
        whole = time.monotonic() - began
        folder, kills = place / name / "killed", COMMANDS
        while True:
            process = subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.DEVNULL)
            figures.starts += 1
            try:
                late = kills <= 0 or time.monotonic() > deadline
                if process.wait(None if late else dice.uniform(0.3, 1.0) * whole):
                    raise VitrailError(f"vitrail {name} ended with {process.returncode}, but nobody killed it.")
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                figures.kills, kills = figures.kills + 1, kills - 1

        def compare(folder: Path, name: str = name) -> int:
            stores = [
                Store(path if name == "bench" else next(path.glob("run-*")))
                for path in (folder, place / name / "whole")
            ]
            return _differing(*stores)

        _examine(folder, compare, figures)
    return figures


def _full_disk(place: Path, deadline: float) -> Figures | None:
    """Disks of growing size, each full in the middle of a run that then goes on elsewhere; None without root."""
    figures = Figures()
    view = vitrail.load("scenes", device="cpu")
    running.EVERY = 0.0
    running.run(PLAN, place / "whole", load=lambda _: view)
    for size in range(40, 400, 40):
        if time.monotonic() > deadline:
            break
        with _small_disk(place / f"disk-{size}", size) as disk:
            if disk is None:
                return None
            figures.starts += 1
            try:
                running.run(PLAN, disk, load=lambda _: view)
            except VitrailError:
                figures.kills += 1  # by the disk
            folder = Path(shutil.copytree(disk, place / f"copy-{size}"))
        running.run(PLAN, folder, load=lambda _: view)
        _examine(folder, lambda folder: _differing(Store(folder), Store(place / "whole")), figures)
    return figures


@contextmanager
def _small_disk(folder: Path, kibibytes: int) -> Iterator[Path | None]:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _examine(folder: Path, compare: Callable[[Path], int], figures: Figures) -> None:
    keys = [
        key for part in folder.rglob("rows/part-*.parquet") for key in pd.read_parquet(part, columns=["key"])["key"]
    ]
    figures.rows += len(keys)
    figures.stored_twice += len(keys) - len(set(keys))
    figures.half_written += sum(path.parent.name in ("rows", "maps", "pictures") for path in folder.rglob(".vitrail-*"))
    figures.differing += compare(folder)


def _differing(store: Store, whole: Store) -> int:
    """How many rows and maps of a run are not those of the other, bit for bit."""
    rows, expected = (
        part.rows().set_index("key", drop=False)[COLUMNS].astype(str).fillna("") for part in (store, whole)
    )
    common = rows.index.intersection(expected.index)
    differing = len(rows.index.symmetric_difference(expected.index))
    differing += int((rows.loc[common] != expected.loc[common]).any(axis=1).sum())
    maps, others = store.maps(), whole.maps()
    return differing + sum(
        name not in maps or name not in others or not np.array_equal(maps[name], others[name]) for name in maps | others
    )


if __name__ == "__main__":
    measured = run(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0)
    print(json.dumps(measured, indent=1))  # noqa: T201
    sys.exit(not measured["clean"])
