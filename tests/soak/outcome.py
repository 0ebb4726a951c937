"""What a part of the soak reports.

A part is a module of this folder with ``soak(seconds) -> list[Outcome]``, which tries one promise for about so long,
and perhaps ``SHARE``, its part of the time relative to others (default 1). ``make soak`` runs every part in a process
of its own and writes docs/results/soak.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """A line of the report."""

    promise: str
    inputs: int = 0  # tried
    faults: int = 0  # injected: damaged inputs, kills, cancelled jobs, …
    peak: int | None = None  # bytes of memory, where that is the promise
    note: str = ""
    broken: list[str] = field(default_factory=list)  # how the promise was broken


def peak_memory() -> int:
    """The most bytes that this process has held; getrusage would tell the peak of the one that started it, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
