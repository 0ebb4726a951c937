"""No traceback, no hang, nothing outside the output folder: a few fuzzed inputs, and all that ever failed.

`make soak` tries many more.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz import checkpoints, command_lines, explanations, images, labels, plans, requests
from tests.fuzz.harness import Input, Trial, Use, attempt, fuzz, replay, workplace

from vitrail import VitrailError

CORPUS = Path(__file__).parent / "corpus"
FUZZERS: dict[str, Any] = {
    "images": images,
    "labels": labels,
    "checkpoints": checkpoints,
    "explanations": explanations,
    "plans": plans,
    "command_lines": command_lines,
}
INPUTS = {"images": 60, "labels": 60, "checkpoints": 24, "explanations": 12, "plans": 12, "command_lines": 12}
REQUESTS = 24


def assert_kept(trial: Trial) -> None:
    """The promise, with the first input that breaks it."""
    assert not trial.broken, f"{trial.broken[0].input!r}: {trial.broken[0].reason}"


@pytest.mark.parametrize("name", FUZZERS)
def test_damaged_inputs_end_in_success_or_one_error(name: str) -> None:
    trial = fuzz(FUZZERS[name], seed=0, inputs=INPUTS[name])
    assert_kept(trial)
    assert trial.inputs == INPUTS[name]


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_inputs_that_once_failed_do_so_no_more(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    trial = replay(FUZZERS[name], files)
    assert_kept(trial)
    assert trial.inputs == len(files) > 0


def test_damaged_requests_get_an_answer(small: Any) -> None:
    use, trial = requests.sending(small.url), Trial()
    with workplace() as place:
        for number in range(REQUESTS):
            attempt(use, requests.generate(random.Random(f"0:{number}")), place, trial)
    assert_kept(trial)


class Breaking:
    """A fuzzer whose target does what it is told."""

    def __init__(self, use: Use) -> None:
        self.use = use

    def generate(self, draw: random.Random) -> Input:
        return Input("x", draw.randbytes(4))

    def target(self, place: Path) -> AbstractContextManager[Use]:
        return nullcontext(self.use)


def raise_error(path: Path, out: Path) -> None:
    raise KeyError("a traceback")


def write_outside(path: Path, out: Path) -> None:
    (out.parent / "elsewhere").write_bytes(path.read_bytes())


def write_inside(path: Path, out: Path) -> None:
    (out / "folder").mkdir(exist_ok=True)
    (out / "folder" / "file").write_bytes(path.read_bytes())
    raise VitrailError("refused")


@pytest.mark.parametrize(
    ("use", "reason"), [(raise_error, "a traceback"), (write_outside, "changed outside the output folder")]
)
def test_what_breaks_the_promise_is_noticed(use: Use, reason: str) -> None:
    trial = fuzz(Breaking(use), seed=0, inputs=1)
    assert reason in trial.broken[0].reason


def test_errors_and_files_in_the_output_folder_are_fine() -> None:
    trial = fuzz(Breaking(write_inside), seed=0, inputs=3)
    assert (trial.inputs, trial.refused, trial.broken) == (3, 3, [])
