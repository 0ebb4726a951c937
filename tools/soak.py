"""The long tests: every part of tests/soak for its share of the time; writes docs/results/soak.md.

``python tools/soak.py --minutes 30``; ``--only fuzzing`` runs one part and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "soak.md"
MIB = 2**20
sys.path.insert(0, str(ROOT))  # of the processes that are started, too: the tests are no package that is installed

from tests.soak.outcome import Outcome, peak_memory  # noqa: E402


def parts() -> dict[str, float]:
    """The parts and their shares of the time: modules of tests/soak that have a function ``soak``."""
    modules = {
        path.stem: importlib.import_module(f"tests.soak.{path.stem}") for path in (ROOT / "tests/soak").glob("*.py")
    }
    return {name: getattr(module, "SHARE", 1.0) for name, module in sorted(modules.items()) if hasattr(module, "soak")}


def run_part(name: str, seconds: float, answers: Any) -> None:
    """In a process of its own, so that its peak is its own and a crash ends nothing else."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        outcomes = importlib.import_module(f"tests.soak.{name}").soak(seconds)
    except Exception:
        outcomes = [Outcome(name, broken=[traceback.format_exc()])]
    peak = peak_memory()
    answers.put([dataclasses.asdict(dataclasses.replace(item, peak=item.peak or peak)) for item in outcomes])


def run(name: str, seconds: float) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    process = context.Process(target=run_part, args=(name, seconds, answers))
    process.start()
    while process.is_alive() and answers.empty():
        process.join(1)
    if answers.empty():
        return [Outcome(name, broken=[f"the process ended with {process.exitcode}"])]
    outcomes = [Outcome(**values) for values in answers.get()]
    process.join()
    return outcomes


def page(minutes: float, outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The results as Markdown."""
    everything = [outcome for group in outcomes.values() for outcome in group]
    versions = ", ".join(f"{name} {version(name)}" for name in ("vitrail", "torch", "timm", "pillow"))
    lines = [
        "# Soak",
        "",
        f"`make soak SOAK_MINUTES={minutes:g}` on {datetime.now(UTC):%d %B %Y}: Python {platform.python_version()}, "
        f"{versions}, {os.cpu_count()} cores. [Reliability](../reliability.md) says what is promised.",
        "",
        f"{sum(item.inputs for item in everything):,} inputs, {sum(item.faults for item in everything):,} faults, "
        f"{sum(len(item.broken) for item in everything)} broken promises.",
        "",
        "| part | promise | inputs | faults injected | broken | peak memory | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, group in outcomes.items():
        for item in group:
            memory = "" if item.peak is None else f"{item.peak / MIB:,.0f} MiB"
            counts = f"{item.inputs:,} | {item.faults:,} | {len(item.broken)}"
            lines.append(f"| {name} | {item.promise} | {counts} | {memory} | {item.note} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", help="a part of tests/soak")
    arguments = parser.parse_args()
    shares = {name: share for name, share in parts().items() if arguments.only in (None, name)}
    outcomes: dict[str, list[Outcome]] = {}
    for name, share in shares.items():
        seconds = 60 * arguments.minutes * share / sum(shares.values())
        print(f"{name}: {seconds:.0f} s …", flush=True)
        begin = time.monotonic()
        outcomes[name] = run(name, seconds)
        print(f"  {time.monotonic() - begin:.0f} s, {sum(item.inputs for item in outcomes[name]):,} inputs", flush=True)
    broken = [(item.promise, reason) for group in outcomes.values() for item in group for reason in item.broken]
    for promise, reason in broken[:20]:
        print(f"BROKEN {promise}: {reason}\n")
    if arguments.only is None:
        PAGE.write_text(page(arguments.minutes, outcomes), encoding="utf-8")
        print(f"→ {PAGE.relative_to(ROOT)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
