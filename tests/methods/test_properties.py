"""No NaN and no silent nonsense, whatever the network, the image and the question; `make soak` tries many more."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from tests.properties import Case, cases, check

EXAMPLES = 12


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(case=cases())
def test_explanations_of_random_networks_are_finite_complete_and_consistent(case: Case) -> None:
    check(case)
