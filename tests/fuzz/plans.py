"""Plans of benchmark runs: what is read is run, on one small scene."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w
from tests.fuzz.harness import Input, Use, fresh, offline
from tests.fuzz.mutation import VALUES, altered, damaged

from vitrail.bench.plan import Plan
from vitrail.bench.run import run

SEED: dict[str, Any] = {
    "models": [{"name": "scenes", "options": {"dtype": "float32"}, "preprocessing": {"crop_pct": 1.0}}],
    "data": "scenes:2@5",
    "methods": ["random", "raw_attention"],
    "metrics": ["sparseness", "insertion(steps=2)"],
    "images": 1,
    "seed": 0,
    "target": "label",
    "batch_size": 1,
    "deterministic": False,
    "maps": True,
    "limits": {"sparseness": 1},
    "cheap_only": ["sparseness"],
}
NAMES = (
    "scenes", "photo", "vit", "hf:", "hf:./none", "hf:a/b", "torchvision:", "torchvision:vit_b_16", "scenes:0",
    "scenes:1@x", "random(", "random()", "random(seed=-1)", "rise(masks=0)", "insertion(steps=0)",
    "insertion(steps=1e9)", "tis(masks=2)", "decompx.plus", "decompx.", ".", "x(y=z)", "predicted", "label", "tis",
    "bicubic", "cuda", "meta", "float16", "cpu:9", "imagenet:/none", "coco:.", "cifar10:", "scenes:2?objects=9",
    "scenes?x=1",
)  # fmt: skip


@contextmanager
def target(place: Path) -> Iterator[Use]:
    def use(path: Path, out: Path) -> None:
        plan = Plan.read(path)
        if affordable(plan):
            run(plan, out / "run")

    with offline():
        yield fresh(use)


def affordable(plan: Plan) -> bool:
    """Whether it takes little: a network or a data set of thousands of images may well be asked for."""
    small = all(model.name in ("scenes", "") or not model.name.islower() for model in plan.models)
    return small and plan.images in (1, 2) and max(len(plan.models), len(plan.methods), len(plan.metrics)) < 4


def generate(draw: random.Random) -> Input:
    values = altered(SEED, draw, (*VALUES, *NAMES, *NAMES))
    text = b""
    with suppress(Exception):  # TOML has no None and no surrogates: such a plan is damaged as bytes instead
        text = tomli_w.dumps(values).encode()
    if not text or draw.random() < 0.2:
        text = damaged(text or tomli_w.dumps(SEED).encode(), draw)
    if draw.random() < 0.02:
        text = b"a=" + draw.choice((b"[", b"{b=")) * 50_000
    return Input("plan.toml", text)
