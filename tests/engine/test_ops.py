"""A walk that nobody watches computes only what the head reads, and that is the same."""

from __future__ import annotations

import pytest
import torch
from tests.families import FAMILIES
from tests.helpers import batch, random_keep, relative, viewed
from torch import Tensor

from vitrail.core.operations import Walk
from vitrail.core.parts import Linear
from vitrail.core.rules import Plain
from vitrail.engine.trace import trace


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.prefix])
def test_a_block_of_the_first_tokens_is_the_whole_ones(name: str) -> None:
    """With rotary tables, score biases and sparse tokens."""
    family, _, view = viewed(name)
    tokens = view.embed(batch(name))
    keep = random_keep(family, len(tokens), family.patches // 2, seed=1)
    for walk, x in (
        (Walk(view.architecture()), tokens),
        (Walk(view.architecture(), keep=keep), view.present(tokens, keep)),
    ):
        whole = walk.block(x, view.blocks[-1], view.num_layers - 1)
        for only in range(1, family.prefix + 1):
            part = walk.block(x, view.blocks[-1], view.num_layers - 1, only)
            assert part.shape[1] == only
            assert relative(part, whole[:, :only]) < 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_a_watched_walk(name: str) -> None:
    view, images = viewed(name)[2], batch(name)
    target = torch.zeros(len(images), dtype=torch.long)
    with torch.enable_grad():
        tokens = view.embed(images).detach().requires_grad_()
        y = view.encode(tokens)[:, 0].sum()
    watched = trace(view, images, target, keep={"gx"}, layers=[0])["gx"][0]
    assert relative(torch.autograd.grad(y, tokens)[0], watched) < 1e-10


@pytest.mark.parametrize(("name", "rows"), [("timm_vit", 1), ("timm_deit_distilled", 2), ("timm_vit_avg", None)])
def test_the_last_block_ends_where_the_head_looks(name: str, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    family, _, view = viewed(name)
    last, recorded, linear = view.blocks[-1].mlp.fc1.weight.data_ptr(), [], Plain.linear

    def watched(rule: Plain, x: Tensor, layer: Linear) -> Tensor:
        if layer.weight.data_ptr() == last:
            recorded.append(x.shape[1])
        return linear(rule, x, layer)

    monkeypatch.setattr(Plain, "linear", watched)
    view.logits(batch(name))
    assert recorded == [rows or family.tokens]
