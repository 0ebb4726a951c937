"""One thread per worker: the suite runs in parallel processes, its tests in any order."""

from collections.abc import Iterator

import pytest
import torch

from vitrail.methods.registry import METHODS
from vitrail.metrics.base import METRICS

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a pair of the full cross product that `make test-all` runs")


pytest_plugins = ["tests.browser", "tests.app.pages"]


@pytest.fixture(autouse=True)
def _what_a_test_registers_goes_with_it() -> Iterator[None]:
    with METHODS.scope(), METRICS.scope():
        yield
