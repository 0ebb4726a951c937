"""No traceback, no hang, nothing outside the output folder: every fuzzer, for its part of the time."""

from __future__ import annotations

import time
from pathlib import Path

from tests.fuzz import requests
from tests.fuzz.harness import fuzz, keep
from tests.fuzz.test_fuzz import FUZZERS
from tests.soak.outcome import Outcome

SHARE = 2.0
FOUND = Path("build") / "soak"  # inputs that break the promise, to be fixed and moved to tests/fuzz/corpus


def soak(seconds: float) -> list[Outcome]:
    outcomes, fuzzers = [], {**FUZZERS, "requests": requests}
    found, seed = FOUND.resolve(), int(time.time())
    for name, fuzzer in fuzzers.items():
        trial = fuzz(fuzzer, seed, seconds=seconds / len(fuzzers))
        reasons = [f"{keep(name, broken, found).name}: {broken.reason.strip()}" for broken in trial.broken]
        note = f"seed {seed}, {trial.refused} refused, slowest {trial.slowest[0]:.1f} s"
        outcomes.append(Outcome(f"fuzzed {name.replace('_', ' ')}", trial.inputs, trial.inputs, None, note, reasons))
    return outcomes
