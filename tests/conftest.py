"""One thread per worker: the suite runs in parallel processes, its tests in any order."""

from collections.abc import Iterator

import pytest
import torch

from vitrail.methods import registry
from vitrail.metrics import base

torch.set_num_threads(1)

pytest_plugins = ["tests.browser", "tests.app.pages"]


@pytest.fixture(autouse=True)
def _own_methods_and_metrics_go_with_their_test() -> Iterator[None]:
    known = (registry._METHODS, base._METRICS)
    before = [set(names) for names in known]
    yield
    for names, old in zip(known, before, strict=True):
        for name in [n for n, own in names.items() if n not in old and not own.__module__.startswith("vitrail.")]:
            del names[name]
