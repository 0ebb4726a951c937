"""The model and the process are left as they were, however an explanation ends and whatever the caller has set."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests import families
from tests.helpers import MODES, assert_same_state, batch, crossed, state_of, wrapped
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.api import explain_each
from vitrail.methods.registry import build_method
from vitrail.models.view import View

THREADS = 8
# One of each kind: a trace, attention, gradients of pixels, token subsets, masked images.
CALLS: dict[str, dict[str, Any]] = {
    "decompx.skipplus": {},
    "gen_att": {},
    "integrated_gradients": {"steps": 3},
    "tis": {"masks": 6},
    "rise": {"masks": 6},
}
SITUATIONS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    **MODES,
}


class InjectedError(Exception):
    """An error in the middle of a forward pass."""


# Ending → what is raised inside, and what the caller sees.
ENDINGS: dict[str, tuple[BaseException | None, type[BaseException]]] = {
    "success": (None, BaseException),
    "error": (InjectedError(), InjectedError),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), VitrailError),
}


def used() -> nn.Module:
    """A module in the middle of training: gradients, frozen parameters, hooks of its owner."""
    module = families.build("timm_vit").train()
    parameters = list(module.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    parameters[1].requires_grad_(False)
    module.blocks[0].register_forward_hook(lambda *_: None)
    return module


def image() -> Tensor:
    return batch("timm_vit", 1, torch.float32)[0]


def explained(view: View, method: str, picture: Tensor | None = None) -> Tensor:
    return vitrail.explain(view, image() if picture is None else picture, method, 1, **CALLS[method]).map


@functools.cache
def expected(method: str) -> Tensor:
    return explained(vitrail.wrap(families.build("timm_vit")), method)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 0, above: int = 0) -> None:
    """Raises in linear layers: after so many calls (a forward pass has 13), above so many inputs at once."""
    counted, linear = itertools.count(), F.linear

    def failing_linear(inputs: Tensor, *args: Any) -> Tensor:
        if next(counted) >= after and len(inputs) > above:
            raise error
        return linear(inputs, *args)

    monkeypatch.setattr(F, "linear", failing_linear)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("method", "ending"), crossed(itertools.product(CALLS, ENDINGS), each=2))
def test_everything_is_as_it_was(method: str, ending: str, situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = used()
    view, picture = vitrail.wrap(module), image()
    (raised, seen), undisturbed = ENDINGS[ending], expected(method)
    with SITUATIONS[situation]():
        before = state_of(module)
        with monkeypatch.context() as patch:
            if raised is None:
                assert torch.equal(explained(view, method, picture), undisturbed)
            else:
                failing(patch, raised, after=4)
                with pytest.raises(seen):
                    explained(view, method, picture)
        assert_same_state(before, state_of(module))
    assert torch.equal(explained(view, method), undisturbed), "the next answer is that of an undisturbed model"


@pytest.mark.parametrize("method", ["tis", "rise"])
def test_memory_for_two_images_gives_the_answer_of_plenty(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = used()
    view, before = vitrail.wrap(module), state_of(module)
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), above=2)
    torch.testing.assert_close(explained(view, method), expected(method), rtol=1e-5, atol=1e-6)
    assert_same_state(before, state_of(module))


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", ["timm_vit", "timm_eva02_tiny"])
def test_eight_threads_on_one_model_give_the_answers_of_one(name: str) -> None:
    module = families.build(name).train()
    view, before = wrapped(name, module), state_of(module)
    # of different pictures: threads that get in each other's way with the same values are not noticed
    calls = [(method, picture) for picture in batch(name, 4, torch.float32) for method in CALLS]
    serial = [explained(view, *call) for call in calls]
    with ThreadPoolExecutor(THREADS) as pool:
        threaded = list(pool.map(lambda call: explained(view, *call), calls))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(threaded, serial, strict=True))
    assert_same_state(before, state_of(module))


def test_two_models_take_turns() -> None:
    names = ("timm_vit", "hf_vit")
    modules = [families.build(name).train() for name in names]
    views = [wrapped(name, module) for name, module in zip(names, modules, strict=True)]
    images = [list(batch(name, 3, torch.float32)) for name in names]
    alone = [vitrail.explain(view, pictures, "decompx", 1) for view, pictures in zip(views, images, strict=True)]
    before = [state_of(module) for module in modules]
    turns = [
        explain_each(build_method("decompx", view), pictures, 1, None, batch_size=1)
        for view, pictures in zip(views, images, strict=True)
    ]
    for place, pair in enumerate(zip(*turns, strict=True)):
        for explanation, separate in zip(pair, alone, strict=True):
            torch.testing.assert_close(explanation.map, separate[place].map, rtol=1e-5, atol=1e-7)
    for state, module in zip(before, modules, strict=True):
        assert_same_state(state, state_of(module))


def maps(module: nn.Module) -> Tensor:
    """Of several images, which threads read ahead."""
    pictures = [Image.new("RGB", (32, 32), colour) for colour in ("red", "teal", "white")]
    explanations = vitrail.explain(vitrail.wrap(module), pictures, "decompx.skipplus", 1)
    return torch.stack([explanation.map for explanation in explanations])


def child(module: nn.Module | None, answers: Any) -> None:
    """In another process: explanations, and whether the model stayed as it was."""
    torch.set_num_threads(1)
    module = module or families.build("timm_vit").train()
    before = state_of(module)
    result = maps(module)
    assert_same_state(before, state_of(module))
    answers.put(result.tolist())


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_model_that_was_used_works_in_a_child(start: str) -> None:
    module = families.build("timm_vit").train()
    result, before = maps(module), state_of(module)
    context = multiprocessing.get_context(start)
    answers: Any = context.SimpleQueue()
    process = context.Process(target=child, args=(module if start == "fork" else None, answers), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(answers.get()), result)
    assert_same_state(before, state_of(module))
