"""Random networks, images and targets, and what holds of every explanation of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from tests.families import CLASSES, randomize
from tests.helpers import required_parameters
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.methods.registry import build_method, get_method, list_methods
from vitrail.models.view import View
from vitrail.targets import Group

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-3}  # halves are explained in single precision
COMPLETE = ("decompx", "decompx.plus", "decompx.skipplus", "full_grad(rule=frozen)")


@dataclass(frozen=True)
class Network:
    """The sizes and parts of a ViT, or of an EVA with rotary positions."""

    kind: str
    width: int  # of a head
    heads: int
    depth: int
    patch: int
    grid: tuple[int, int]
    registers: int
    pool: str
    layer_scale: bool
    swiglu: bool
    qk_norm: bool
    pre_norm: bool
    dtype: torch.dtype
    seed: int

    @property
    def size(self) -> tuple[int, int]:
        return self.grid[0] * self.patch, self.grid[1] * self.patch

    def build(self) -> nn.Module:
        from timm.layers import SwiGLU
        from timm.models.eva import Eva
        from timm.models.vision_transformer import VisionTransformer

        shared: dict[str, Any] = {
            "img_size": self.size, "patch_size": self.patch, "embed_dim": self.width * self.heads, "depth": self.depth,
            "num_heads": self.heads, "num_classes": CLASSES, "init_values": 0.1 if self.layer_scale else None,
            "qk_norm": self.qk_norm, "global_pool": self.pool, "mlp_ratio": 2.0,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            if self.kind == "eva":
                swiglu = {"swiglu_mlp": self.swiglu, "use_rot_pos_emb": True, "num_reg_tokens": self.registers}
                module: nn.Module = Eva(**shared, **swiglu)
            else:
                parts = {"mlp_layer": SwiGLU} if self.swiglu else {}
                has_token = self.pool == "token"
                module = VisionTransformer(
                    **shared, **parts, class_token=has_token, reg_tokens=self.registers, pre_norm=self.pre_norm
                )
        randomize(module, self.seed)
        return module.eval().to(self.dtype)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    kind = draw(st.sampled_from(("vit", "eva")))
    pools = ("token", "avg") if kind == "eva" else ("token", "avg", "max", "avgmax", "map")
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    assume(rows * columns > 1)
    return Network(
        kind=kind,
        width=draw(st.sampled_from((4, 8))),
        heads=draw(st.integers(1, 3)),
        depth=draw(st.integers(1, 3)),
        patch=draw(st.sampled_from((2, 4, 8))),
        grid=(rows, columns),
        registers=draw(st.integers(0, 3)),
        pool=draw(st.sampled_from(pools)),
        layer_scale=draw(st.booleans()),
        swiglu=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        pre_norm=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16))),
        seed=draw(st.integers(0, 99)),
    )


IMAGES = ("noise", "black", "constant", "gradient", "one pixel", "large", "tiny")


@dataclass(frozen=True)
class Case:
    """A network, an image and a question."""

    network: Network
    image: str
    method: str
    target: int
    rival: int
    params: dict[str, Any] = field(default_factory=dict)

    def pixels(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.network.seed)
        noise = torch.randn(3, *self.network.size, generator=generator)
        if self.image == "one pixel":
            noise = torch.zeros_like(noise)
            noise[:, -1, -1] = 9.0
        ramp = torch.linspace(-2, 2, noise[0].numel()).view(1, *noise.shape[1:]).expand(3, -1, -1)
        return {
            "black": torch.full_like(noise, -2.0),
            "constant": torch.zeros_like(noise),
            "gradient": ramp,
            "large": 1e3 * noise,
            "tiny": 1e-30 * noise,
        }.get(self.image, noise)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(st.integers(0, CLASSES - 1))
    rival = draw(st.sampled_from([index for index in range(CLASSES) if index != target]))
    method = draw(st.sampled_from(sorted(list_methods())))
    return Case(draw(networks()), draw(st.sampled_from(IMAGES)), method, target, rival)


def check(case: Case) -> None:
    """What holds of every explanation."""
    module = case.network.build()
    view, image = vitrail.wrap(module), case.pixels()
    assert view.grid == case.network.grid
    check_logits(view, module, image)
    check_map(view, image, case)
    check_score(view, image, case)


def check_logits(view: View, module: nn.Module, image: Tensor) -> None:
    """The view computes what the module does, and probabilities are such."""
    with torch.no_grad():
        expected = module(image[None].to(view.dtype))
        logits = view.logits(image[None])
    # timm's fused attention and norms round differently in half precision
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[view.dtype]
    assert (logits - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert abs(float(view.probabilities(logits.double()).sum()) - 1) < 1e-6


def quick(method: str, view: View) -> dict[str, Any]:
    """Few passes."""
    few = {"steps": 2, "samples": 4, "masks": 8 if method == "posterior" else 4, "permutations": 4}
    known = get_method(method).info.params
    return {key: value for key, value in few.items() if key in known} | required_parameters(method, view)


def check_map(view: View, image: Tensor, case: Case) -> None:
    """A finite map of the right shape, the same each time, or one error that says why."""
    try:
        params = quick(case.method, view)
        explanation, again = (vitrail.explain(view, image, case.method, case.target, **params) for _ in range(2))
    except VitrailError:  # it says which methods can
        return
    level = get_method(case.method).info.level
    assert tuple(explanation.map.shape) == (view.size if level == "pixel" else view.grid)
    assert explanation.map.isfinite().all()
    assert torch.equal(explanation.map, again.map)
    assert 0 <= explanation.probability <= 1
    assert explanation.heatmap().isfinite().all()
    assert (explanation.heatmap() >= 0).all()
    assert (explanation.heatmap() <= 1).all()


def check_score(view: View, image: Tensor, case: Case) -> None:
    """The shares of decompositions add up to the score; differences of classes have differences of maps."""
    from vitrail.calls import split_call

    tolerance = TOLERANCE[case.network.dtype]
    for call in COMPLETE:
        name, params = split_call(call)
        method = build_method(name, view, **params)
        result = method.explain(image[None], case.target)
        scale = max(1.0, float(result.extras["score"].abs().max()), float(result.map.abs().sum()))
        assert float(result.extras["completeness_gap"].max()) <= tolerance * scale, call
        parts = sum(result.extras[f"score_{part}"] for part in ("patches", "prefix", "biases"))
        assert float((parts - result.extras["score"]).abs().max()) <= tolerance * scale, call
    method = build_method("decompx", view)
    ours, theirs = (method.attribute(image[None], target) for target in (case.target, case.rival))
    contrast = method.attribute(image[None], case.target, against=case.rival)
    scale = max(1.0, float(ours.abs().sum()), float(theirs.abs().sum()))
    assert float((contrast - (ours - theirs)).abs().max()) <= tolerance * scale
    alone = vitrail.explain(view, image, "decompx", Group([case.target]))
    assert float((alone.map - ours[0].float()).abs().max()) <= max(tolerance, 1e-5) * scale
    both = vitrail.explain(view, image, "decompx", Group([case.target, case.rival]))
    chances = [vitrail.explain(view, image, "decompx", target).probability for target in (case.target, case.rival)]
    assert abs(both.probability - sum(chances)) < 1e-4
