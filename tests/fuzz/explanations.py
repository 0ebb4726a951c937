"""Stored explanations: whatever opens can also be drawn, described and saved again."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests import families
from tests.common import LABELS, noise
from tests.fuzz.harness import Input, Use
from tests.fuzz.mutation import VALUES, altered, damaged

import vitrail
from vitrail.models.view import View

IMAGE = noise(24, 16, 3)


@cache
def view() -> View:
    return vitrail.wrap(families.build("timm_vit"), labels=LABELS)


@contextmanager
def target(place: Path) -> Iterator[Use]:
    def use(path: Path, out: Path) -> None:
        for options in ({"check": False}, {"model": view()}):
            explanation = vitrail.open(path, image=IMAGE, **options)
            drawn = explanation.map
            assert drawn.dtype == torch.float32
            assert drawn.ndim == 2
            assert drawn.isfinite().all()
            assert explanation.heatmap().shape == (IMAGE.height, IMAGE.width)
            assert explanation.title
            assert repr(explanation)
            json.dumps(explanation.to_dict(), default=str)
        explanation.save(out / "again.png")

    for saved in stored():
        (place / "seed.json").write_bytes(as_json(saved))
        use(place / "seed.json", place / "out")
    yield use


@cache
def stored() -> tuple[dict[str, Any], ...]:
    """Valid explanations: a contrast, one with scores and trust, one with errors, one with pairs."""
    scored = vitrail.explain(view(), IMAGE)
    scored.score(["insertion(steps=2)"])
    scored.trust()
    explanations = [
        vitrail.explain(view(), IMAGE, target="elk", against="ant"),
        scored,
        vitrail.explain(view(), IMAGE, "rise", masks=8),
        vitrail.explain(view(), IMAGE, "decompx", vitrail.targets.Similarity(IMAGE)),
        vitrail.explain(view(), IMAGE, target=vitrail.targets.Group(["ant", "bee"])),
    ]
    return tuple(json.loads(json.dumps(explanation.to_dict(), default=str)) for explanation in explanations)


def packed(shape: list[int], value: float, count: int) -> dict[str, Any]:
    content = base64.b64encode(np.full(count, value, "<f4").tobytes()).decode()
    return {"shape": shape, "dtype": "float32", "base64": content}


# Maps of wrong shapes and values.
MAPS = (
    packed([4, 4], float("nan"), 16), packed([4, 4], float("inf"), 16), packed([4, 4], 1e38, 16), packed([16], 1.0, 16),
    packed([0, 4], 1.0, 0), packed([2, 2, 4], 1.0, 16), packed([-1, 4], 1.0, 16), packed([1, 16], 1.0, 16),
    packed([4, 4], 1.0, 4), packed([2**40, 0], 1.0, 0), packed([1, 1], 0.0, 1),
)  # fmt: skip


def generate(draw: random.Random) -> Input:
    saved = draw.choice(stored())
    choice = draw.random()
    if choice < 0.1:
        name = draw.choice(("map", "standard_error", "pairs"))
        return Input("why.json", as_json(saved | {name: draw.choice(MAPS)}))
    if choice < 0.2:
        return Input("why.json", damaged(as_json(saved), draw))
    if choice < 0.22:
        return Input("why.json", draw.choice((b'{"vitrail":' * 50_000, b"[" * 100_000, as_json(saved) * 2)))
    return Input("why.json", as_json(altered(saved, draw, (*VALUES, *MAPS))))


def as_json(values: Any) -> bytes:
    return json.dumps(values).encode()
