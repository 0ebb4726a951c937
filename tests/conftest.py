"""One thread per worker: the suite runs in parallel processes, its tests in any order."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from tests import families
from tests.common import LABELS, noise
from torch import Tensor

from vitrail.core.operations import Walk
from vitrail.data.names import DATA_SETS
from vitrail.methods.registry import METHODS
from vitrail.metrics.base import METRICS
from vitrail.models.registry import MODELS
from vitrail.models.view import View
from vitrail.models.wrapping import wrap

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
if not torch.cuda.is_available():
    os.environ["VITRAIL_PRECISION"] = "full"  # also in these; whether a CPU gains from bf16 must change no value
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # they would compile everything again
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # `make test &` in a script; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.packages",
    "tests.browser",
    "tests.integrations.samples",
    "tests.app.servers",
    "tests.app.pages",
    "tests.report.opening",
]


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for a browser, a server or another process."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: they are not searched for garbage again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _what_a_test_registers_goes_with_it() -> Iterator[None]:
    with METHODS.scope(), METRICS.scope(), DATA_SETS.scope(), MODELS.scope():
        yield


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all batches that go through the blocks of a ViT."""
    sizes: list[int] = []
    encode = Walk.encode

    def spy(self: Walk, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return encode(self, x)

    monkeypatch.setattr(Walk, "encode", spy)
    return sizes


@pytest.fixture(scope="module")
def model() -> View:
    return wrap(families.build("timm_vit"), labels=LABELS)


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """A wide picture: the crop of the preprocessing does not see its sides."""
    return noise(64, 40, 0)
