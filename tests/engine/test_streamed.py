"""Streamed traces: matrices of tokens by tokens are computed again, a block at a time, instead of being stored."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from tests.families import FAMILIES
from tests.helpers import answered, batch, relative, viewed
from torch import Tensor

from vitrail.core.parts import Architecture
from vitrail.engine import scheduler
from vitrail.engine.requests import Batch, Traced
from vitrail.engine.trace import MATRICES, Lazy, Trace, TraceSpec, join_traces, make_traces, read_parts
from vitrail.methods.registry import build_method
from vitrail.models.view import View
from vitrail.targets import Target

TARGET = Target(torch.tensor([0, 3, 1]))


@pytest.mark.parametrize(("name", "rule"), [*zip(FAMILIES, cycle(["plain", "frozen", "attn_lrp"]))])
def test_blocks_that_are_computed_again_give_the_same_matrices(name: str, rule: str) -> None:
    _, _, view = viewed(name)
    spec = TraceSpec.of({"A", "W", "G", "x", "v", "gx", "bias"}, range(view.num_layers), rule)
    images, parts = batch(name), read_parts(view)
    (stored,) = make_traces(view, parts, images, [TARGET], spec)
    (streamed,) = make_traces(view, parts, images, [TARGET], TraceSpec(**{**vars(spec), "streamed": True}))
    assert set(streamed.kept) == set(stored.kept)
    for kept in stored.kept:
        assert isinstance(streamed[kept], Lazy) == (kept in MATRICES)
        for layer, expected in stored[kept].items():
            assert relative(streamed[kept][layer], expected) < 1e-9, (kept, layer)
    with pytest.raises(KeyError):
        streamed["A"][99]


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip"])
def test_parts_of_a_batch_are_joined_where_they_are_read(name: str) -> None:
    _, _, view = viewed(name)
    spec = TraceSpec.of({"A", "G"}, range(view.num_layers))
    images, parts = batch(name), read_parts(view)
    (whole,) = make_traces(view, parts, images, [TARGET], spec)
    halves = [
        make_traces(view, parts, images[part], [TARGET.rows(part)], TraceSpec(**{**vars(spec), "streamed": True}))[0]
        for part in (slice(0, 1), slice(1, 3))
    ]
    joined = join_traces(halves)
    for kept in ("A", "G"):
        assert isinstance(joined[kept], Lazy)
        assert set(joined[kept]) == set(whole[kept])
        for layer, expected in whole[kept].items():
            assert relative(joined[kept][layer], expected) < 1e-9


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip"])
@pytest.mark.parametrize("method", ["gen_att", "vtranm", "attn_cam.plus", "legrad", "att_ixg.plus", "alti", "rollout"])
def test_methods_give_the_same_maps(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, view = viewed(name)
    made: list[bool] = []
    traces = scheduler.make_traces

    def spy(view: View, parts: Architecture, images: Tensor, targets: list[Target], spec: TraceSpec) -> list[Trace]:
        made.append(spec.streamed)
        return traces(view, parts, images, targets, spec)

    monkeypatch.setattr(scheduler, "make_traces", spy)
    stored = build_method(method, view).attribute(batch(name), [0, 3, 1])
    monkeypatch.setattr(scheduler, "MOST_STORED", 0)
    streamed = build_method(method, view).attribute(batch(name), [0, 3, 1])
    assert made == [False, True]
    assert relative(streamed, stored) < 1e-8


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip"])
@pytest.mark.parametrize("every_layer", [False, True])
def test_blocks_are_computed_again_in_half_precision(
    name: str, every_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, images = viewed(name, torch.float32)[2], batch(name, 3, torch.float32)
    spec = replace(TraceSpec.of(MATRICES, range(view.num_layers), reduced=True), every_layer=every_layer)
    full: Trace = answered(Traced(Batch(view, images), TARGET, replace(spec, reduced=False)))
    monkeypatch.setattr(scheduler, "MOST_STORED", 0)
    streamed: Trace = answered(Traced(Batch(view, images), TARGET, spec))
    for kept in MATRICES:
        assert isinstance(streamed[kept], Lazy)
        for layer, expected in full[kept].items():
            assert streamed[kept][layer].dtype == torch.float32
            assert 0 < relative(streamed[kept][layer], expected) < 0.01, (kept, layer)


def test_a_large_trace_is_streamed() -> None:
    _, _, view = viewed("timm_vit")
    spec = TraceSpec.of({"A", "G"}, range(view.num_layers))
    matrices = 2 * sum(view.heads) * (view.grid[0] * view.grid[1]) ** 2
    assert scheduler.stored_bytes(view, 5, spec) == 5 * matrices * 8
    assert scheduler.stored_bytes(view, 5, TraceSpec.of({"G"}, range(view.num_layers))) == 5 * matrices * 8
    assert scheduler.stored_bytes(view, 5, TraceSpec.of({"x", "gx"}, range(view.num_layers))) == 0
