"""Every white-box method against its literal oracle, on every family that it claims."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.families import FAMILIES
from tests.helpers import DOUBLE, batch, close, crossed, refusals, viewed
from tests.oracles import cams, decomposition, gradients, lrp, markov, relevance, transformation
from tests.oracles.attention import readout
from torch import Tensor

from vitrail.methods.registry import build_method, get_method

TARGET = torch.tensor([0, 3, 1])


@dataclass(frozen=True, eq=False)
class Case:
    """A method with parameters, and the oracle's call that must give the same."""

    method: str
    oracle: Callable[..., Tensor]
    params: dict[str, Any] = field(default_factory=dict)
    oracle_params: dict[str, Any] = field(default_factory=dict)
    pixels: bool = False
    up_to_scale: bool = False
    single: float | None = 1e-4  # tolerance in fp32; the LRP family divides by sums that may be near zero

    def __str__(self) -> str:
        return "-".join([self.method, *(f"{k}={v}" for k, v in self.params.items())])


def last_row(maps: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    def oracle(family, module, images, target, **params):  # type: ignore[no-untyped-def]
        return decomposition.row(family, module, images, maps(family, module, images, **params)[-1])

    return oracle


def row_sum(maps: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    def oracle(family, module, images, target, **params):  # type: ignore[no-untyped-def]
        return sum(decomposition.row(family, module, images, layer) for layer in maps(family, module, images, **params))

    return oracle


def plain_rollout(maps: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    """The product of maps that hold the residual themselves."""

    def oracle(family, module, images, target, **params):  # type: ignore[no-untyped-def]
        return decomposition.rolled(maps(family, module, images, **params), readout(family, module, images))

    return oracle


def half_rollout(maps: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
    """½I + ½T̄ with rows normalised to one (SkipPLUS, equation 2), as whole matrices; who gets nothing stays."""

    def oracle(family, module, images, target):  # type: ignore[no-untyped-def]
        layers = maps(family, module, images)
        eye = torch.eye(layers[0].shape[-1], dtype=DOUBLE)
        totals = [layer.sum(-1, keepdim=True) for layer in layers]
        mixed = [torch.where(t > 0, (eye + layer / t) / 2, eye) for layer, t in zip(layers, totals, strict=True)]
        return decomposition.rolled(mixed, readout(family, module, images))

    return oracle


def untargeted(oracle: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda family, module, images, target, **params: oracle(family, module, images, **params)


def summed(oracle: Callable[..., Tensor], **shared: Any) -> Callable[..., Tensor]:
    """Σ over the layers of a per-layer oracle; an attention pool, where it counts as a layer, included."""

    def total(family, module, images, target, *, start=0, pool_counts=False, stop=0, **params):  # type: ignore[no-untyped-def]
        depth = viewed(family.name)[2].num_layers
        pool = pool_counts and viewed(family.name)[2].architecture().head.pool == "attention"
        layers = range(start, depth + pool - stop)
        return sum(oracle(family, module, images, target, layer=l, **shared, **params) for l in layers)

    return total


def cam_of(name: str) -> Callable[..., Tensor]:
    return lambda family, module, images, target, **params: cams.cam(name, family, module, images, target, **params)


def published_cam(name: str) -> Callable[..., Tensor]:
    return lambda *case, **params: cams.cam_authors(name, *case, **params)


NO_BIAS = ({"protocol": "skipplus"}, {"value_bias": False})
FROZEN = ({"rule": "frozen"}, {"frozen": True})
PROBABILITY = ({"output": "probability"}, {"output": "probability"})
CASES = [
    Case("gradient", gradients.gradient, {}, {"kind": "l2"}),
    Case("gradient", gradients.gradient, {"reduce": "sum"}, {"kind": "sum"}),
    Case("gradient", gradients.gradient, {"start_layer": 1}, {"kind": "l2", "layer": 1}),
    Case("gradient", gradients.gradient, {"rule": "frozen"}, {"kind": "l2", "frozen": True}),
    Case("gradient.plus", summed(gradients.gradient), {}, {"kind": "l2"}),
    Case("attention_gradient", gradients.attention_gradient),
    Case("attention_gradient", gradients.attention_gradient, {"reduce": "abs"}, {"kind": "abs"}),
    Case("attention_gradient", gradients.attention_gradient, {"reduce": "relu"}, {"kind": "relu"}),
    Case("attention_gradient.plus", summed(gradients.attention_gradient), {}, {"pool_counts": True}),
    Case("input_x_gradient", gradients.input_x_gradient),
    Case("input_x_gradient", gradients.input_x_gradient, {"start_layer": 1}, {"layer": 1}),
    Case("input_x_gradient", gradients.input_x_gradient, *FROZEN),
    Case("input_x_gradient", gradients.input_x_gradient, *PROBABILITY),
    Case("cat", summed(gradients.input_x_gradient)),
    Case("full_grad", gradients.full_grad),
    Case("full_grad", gradients.full_grad, {"start_layer": 1, "rule": "frozen"}, {"layer": 1, "frozen": True}),
    Case("full_grad.plus", summed(gradients.full_grad)),
    Case("full_grad_plus", gradients.full_grad_plus),
    Case("full_grad_plus.plus", gradients.full_grad_plus, *FROZEN),
    Case("full_grad_plus.plus", gradients.full_grad_plus, {"start_layer": 1}, {"start": 1}),
    Case("att_ixg", gradients.att_ixg),
    Case("att_ixg", gradients.att_ixg, {"pairing": "output"}, {"pairing": "output"}),
    Case("att_cat", summed(gradients.att_ixg)),
    Case("att_cat", summed(gradients.att_ixg), *FROZEN),
    Case("att_cat", summed(gradients.att_ixg), {"protocol": "skipplus"}, {"pairing": "output", "stop": 1}),
    *[Case(name, published_cam(name)) for name in cams.CAMS],
    *[Case(name, cam_of(name), {"protocol": "signed"}) for name in cams.CAMS],
    *[Case(name, cam_of(name), {"protocol": "skipplus"}, {"average_over": "all"}) for name in cams.CAMS],
    Case("grad_cam", published_cam("grad_cam"), {"layer": 0, "rule": "frozen"}, {"layer": 0, "frozen": True}),
    Case("grad_cam", cam_of("grad_cam"), {"layer": 0, "rule": "frozen", "protocol": "signed"},
         {"layer": 0, "frozen": True}),
    Case("grad_cam.plus", summed(cam_of("grad_cam"))),
    Case("xgrad_cam_plus.plus", summed(cam_of("xgrad_cam_plus")), *FROZEN),
    Case("layer_cam.plus", cams.layer_cam_sum),
    Case("layer_cam.plus", cams.layer_cam_sum, *FROZEN),
    Case("layer_cam.skipplus", cams.layer_cam_sum, {"start_layer": 1}, {"start": 1}),
    Case("gen_att", relevance.gen_att),
    Case("gen_att", relevance.gen_att, *FROZEN),
    Case("gen_att.rollout", relevance.gen_att),
    Case("grad_sam", summed(relevance.gen_att_layer), {}, {"pool_counts": True}),
    Case("legrad", relevance.legrad),
    Case("legrad", relevance.legrad, *FROZEN),
    Case("legrad", relevance.legrad, {"output": "probability"}, {"output": "probability"}),
    Case("legrad", relevance.legrad, {"start_layer": 1}, {"start": 1}),
    Case("attn_cam", relevance.attn_cam_authors),
    Case("attn_cam", relevance.attn_cam, {"protocol": "signed"}),
    Case("attn_cam.plus", summed(relevance.attn_cam), {}, {"pool_counts": True}),
    Case("conservative_lrp", relevance.conservative_lrp),
    Case("conservative_lrp.plus", summed(relevance.conservative_lrp)),
    Case("attn_lrp", relevance.attn_lrp),
    Case("attn_lrp.plus", summed(relevance.attn_lrp)),
    Case("tam", markov.tam, {"steps": 4}, {"steps": 4, "start_layer": None}),
    Case("tam", markov.tam, {"steps": 4, "protocol": "tis"}, {"steps": 4}),
    Case("tam", markov.tam, {"steps": 3, "start_layer": 1}, {"steps": 3, "start_layer": 1}),
    Case("bt_h", markov.bt_h, {"steps": 3}, {"steps": 3, "start_layer": None}),
    Case("bt_h", markov.bt_h, {"steps": 3, "protocol": "tis"}, {"steps": 3}),
    Case("bt_h", markov.bt_h, {"steps": 2, "start_layer": 1}, {"steps": 2, "start_layer": 1}),
    Case("bt_t", markov.bt_t, {"steps": 3}, {"steps": 3, "start_layer": None}),
    Case("bt_t", markov.bt_t, {"steps": 3, "protocol": "tis"}, {"steps": 3}),
    Case("attin", last_row(decomposition.attin_maps)),
    Case("attin_residual", last_row(decomposition.attin_residual_maps)),
    Case("attin", last_row(decomposition.attin_maps), *NO_BIAS),
    Case("attin_residual", last_row(decomposition.attin_residual_maps), *NO_BIAS),
    Case("attin.plus", row_sum(decomposition.attin_maps)),
    Case("attin_residual.plus", row_sum(decomposition.attin_residual_maps), *NO_BIAS),
    Case("globenc.plus", row_sum(decomposition.globenc_maps)),
    Case("alti.plus", row_sum(decomposition.alti_maps)),
    Case("globenc.plus", row_sum(decomposition.globenc_maps), *NO_BIAS),
    Case("attin.rollout", half_rollout(decomposition.attin_maps)),
    Case("attin_residual.rollout", plain_rollout(decomposition.attin_residual_maps), up_to_scale=True),
    Case("attin_residual.rollout", plain_rollout(decomposition.attin_residual_maps), *NO_BIAS, up_to_scale=True),
    Case("globenc", untargeted(decomposition.globenc), up_to_scale=True),
    Case("globenc", untargeted(decomposition.globenc), *NO_BIAS, up_to_scale=True),
    Case("alti", untargeted(decomposition.alti)),
    Case("alti", untargeted(decomposition.alti), {"protocol": "skipplus"}, {"protocol": "skipplus"}),
    Case("vtranm", transformation.vtranm),
    Case("vtranm", transformation.vtranm, {"aggregate": False, "length": False, "necc": False},
         {"aggregate": False, "length": False, "necc": False}),
    Case("vtranm", transformation.vtranm, {"length": False, "necc": False}, {"length": False, "necc": False}),
    Case("vtranm", transformation.vtranm, {"necc": False}, {"necc": False}),
    Case("tokentm", transformation.vtranm, {"value_bias": False, "reference": "normed", "output": "probability"},
         {"value_bias": False, "reference": "normed", "output": "probability"}),
    Case("integrated_gradients", gradients.integrated_gradients, {"steps": 5}, {"steps": 5}, pixels=True),
    Case("trans_att", lrp.trans_att, single=None),
    Case("trans_att", lrp.trans_att, {"protocol": "authors"}, {"start_layer": 1}, single=None),
    Case("partial_lrp", lrp.partial_lrp, {}, {"variant": "ours"}, single=None),
    Case("partial_lrp", lrp.partial_lrp, {"protocol": "authors"}, {"variant": "orig"}, single=None),
    Case("lrp", lrp.lrp_pixels, pixels=True, single=None),
    Case("epsilon_lrp", lrp.epsilon_lrp_pixels, {"epsilon": 0.01}, {"eps": 0.01}, pixels=True, single=None),
]  # fmt: skip


FIRST = {case.method: case for case in reversed(CASES)}  # of each method, most often with its default parameters
CLAIMED = [
    (case, name) for name in FAMILIES for case in CASES if (get_method(case.method).info.name, name) not in refusals()
]


shared_batch = functools.cache(batch)  # the same tensor for all oracles, which record its traces once


@functools.lru_cache(maxsize=256)
def definition(case: Case, name: str) -> Tensor:
    """The oracle's map in double precision; the tiny models' weights are the same numbers in single precision."""
    family, module, _ = viewed(name)
    scores = case.oracle(family, module, shared_batch(name), TARGET, **case.oracle_params)
    return scores if case.pixels else scores[:, family.prefix :].reshape(-1, *family.grid)


def agrees(case: Case, name: str, dtype: torch.dtype, tolerance: float) -> bool:
    method = build_method(case.method, viewed(name, dtype)[2], **case.params)
    maps, expected = method.attribute(batch(name, dtype=dtype), TARGET).to(DOUBLE), definition(case, name)
    assert maps.shape == expected.shape, str(case)
    if case.up_to_scale:
        maps, expected = (m / m.sum((1, 2), keepdim=True) for m in (maps, expected))
    return close(maps, expected, tolerance)


def is_default(case: Case, name: str) -> bool:
    return FIRST[case.method] is case and "." not in case.method


def by_family(pairs: list[Any]) -> list[Any]:
    """One test for all cases of a family: as tests of their own they would cost more than what they compute."""
    cases: dict[str, list[Case]] = {}
    for case, name in (pair.values for pair in pairs):
        cases.setdefault(name, []).append(case)
    return [pytest.param(name, chosen, id=name) for name, chosen in cases.items()]


@pytest.mark.parametrize(("name", "cases"), by_family(crossed(CLAIMED, each=2, always=is_default)))
def test_methods_are_their_literal_definitions(name: str, cases: list[Case]) -> None:
    """Each method on each family; other parameters of it, and its aggregations, on some."""
    assert [str(case) for case in cases if not agrees(case, name, DOUBLE, 1e-8)] == []


SINGLE = [(case, name) for case, name in CLAIMED if case.single is not None]


@pytest.mark.parametrize(("name", "cases"), by_family(crossed(SINGLE)))
def test_single_precision_is_near_the_definition(name: str, cases: list[Case]) -> None:
    assert [str(case) for case in cases if not agrees(case, name, torch.float32, case.single or 0.0)] == []
