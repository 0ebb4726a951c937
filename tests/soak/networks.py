"""No NaN, no silent nonsense: explanations of many random networks."""

from __future__ import annotations

import time
import traceback
import warnings

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from tests.properties import Case, cases, check
from tests.soak.outcome import Outcome

SHARE = 0.5
ROUND = 50


def soak(seconds: float) -> list[Outcome]:
    first, outcome = int(time.time()), Outcome("random networks, images and targets")
    warnings.simplefilter("ignore")
    check(find(cases(), lambda _: True))  # imports take a while
    end = time.monotonic() + seconds

    @settings(max_examples=ROUND, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=cases())
    def holds(case: Case) -> None:
        if time.monotonic() > end:
            return
        outcome.inputs += 1
        try:
            check(case)
        except Exception:
            outcome.broken.append(f"{case}: {traceback.format_exc()}")

    rounds = 0
    while time.monotonic() < end:
        seed(first + rounds)(holds)()
        rounds += 1
    outcome.note = f"seeds {first} to {first + rounds - 1}"
    return [outcome]
