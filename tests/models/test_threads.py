"""A module is read, never written: not even during a call, so that several threads may share it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests import families
from tests.families import HIERARCHICAL
from tests.helpers import assert_same_state, batch, state_of, wrapped
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import TraceSpec, make_traces
from vitrail.models.view import View
from vitrail.targets import Target

METHODS = ("vit_cx", "score_cam", "grad_cam", "layer_cam")
THREADS = 4


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


def features_and_gradient(view: View, images: Tensor) -> tuple[Tensor, Tensor]:
    """Of the second-to-last stage, for the predicted class."""
    spec = TraceSpec.of(("features", "gfeatures"), [-2])
    (trace,) = make_traces(view, None, view.check_images(images), [Target()], spec)
    return trace["features"][-2], trace["gfeatures"][-2]


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", ["timm_swin", "torchvision_swin", "hf_swin"])
def test_threads_on_one_swin_give_the_maps_of_one_thread(name: str) -> None:
    module = families.build(name).train()
    before = state_of(module)
    view, image = wrapped(name, module), batch(name, 1, torch.float32)[0]

    def explained(method: str) -> Tensor:
        return torch.as_tensor(vitrail.explain(view, image, method, target=1).map)

    expected = [explained(method) for method in METHODS]
    found = in_threads([partial(explained, method) for method in 2 * METHODS])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, 2 * expected, strict=True))
    assert_same_state(before, state_of(module))


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", ["timm_swin", "torchvision_swin", "hf_swin"])
def test_calls_that_fail_do_not_disturb_those_of_other_threads(name: str) -> None:
    module = families.build(name).train()

    def broken(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) == 3:
            raise RuntimeError("injected")

    norm = [m for m in module.modules() if isinstance(m, nn.LayerNorm)][-1]
    norm.register_forward_pre_hook(broken)
    before = state_of(module)
    view = wrapped(name, module)
    good, bad = batch(name, 2, torch.float32), batch(name, 3, torch.float32)
    expected = features_and_gradient(view, good)

    def failing() -> None:
        for call in (view.logits, view.features, partial(features_and_gradient, view)):
            with pytest.raises(RuntimeError, match="injected"):
                call(bad)

    for found in in_threads(8 * [failing, lambda: features_and_gradient(view, good)])[1::2]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert_same_state(before, state_of(module))


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_nothing_of_a_swin_changes_even_during_a_call(name: str) -> None:
    module, during = families.build(name).train(), []
    head = next(m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == families.CLASSES)
    head.register_forward_hook(lambda *_: during.append(state_of(module)))
    before = state_of(module)
    view = wrapped(name, module)
    images = batch(name, 2, torch.float32)
    during.clear()
    view.logits(images)
    view.features(images)
    features_and_gradient(view, images)
    with torch.autocast("cpu", torch.bfloat16):
        view.logits(images)
    assert len(during) == 4, "a hook of the user runs once in a forward pass"
    for state in during:
        assert_same_state({**before, "modes": None}, {**state, "modes": None})


@pytest.mark.parametrize(
    ("name", "part", "method"),
    [("hf_dinov3_token", "rope_embeddings", "forward"), ("timm_dinov3", "rope", "get_embed")],
)
def test_rotary_tables_are_read_without_leaving_training_mode(
    name: str, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = families.build(name)
    view, images = wrapped(name, module), batch(name, 2, torch.float32)
    expected = view.logits(images)
    source = getattr(module.train(), part)
    original, modes = getattr(type(source), method), []

    def watched(self: nn.Module, *args: Any, **options: Any) -> Any:
        modes.append((self.training, source.training))
        return original(self, *args, **options)

    monkeypatch.setattr(type(source), method, watched)
    assert torch.equal(view.logits(images), expected)
    assert set(modes) == {(False, True)}


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", ["hf_dinov3_token", "timm_dinov3"])
def test_threads_on_one_dinov3_in_training_mode(name: str) -> None:
    module = families.build(name)
    view, images = wrapped(name, module), batch(name, 1, torch.float32)
    expected = view.logits(images)
    before = state_of(module.train())
    for found in in_threads(200 * [lambda: view.logits(images)]):
        assert torch.equal(found, expected)
    assert_same_state(before, state_of(module))
