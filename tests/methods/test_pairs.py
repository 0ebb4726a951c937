"""Similarity split into pairs of patches, against a literal decomposition of both embeddings."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tests.families import FAMILIES, PAIRED, expected_embedding, few
from tests.helpers import DOUBLE, batch, close, relative, viewed
from tests.oracles.decompx import decompose_embedding
from tests.oracles.pairs import split
from torch import Tensor

import vitrail
from vitrail.engine.scheduler import Scheduler
from vitrail.methods import pairs
from vitrail.methods.pairs import Pairs, ask_pairs
from vitrail.methods.registry import build_method
from vitrail.models.questions import compared, embedding
from vitrail.progress import counted, watched
from vitrail.targets import Callable, Contrast, Similarity

Measure = Literal["cosine", "dot"]
# class token, mean, maximum, attention pool, LayerScale, gated MLP, registers, two towers
DIVERSE = [
    "timm_vit_not_square",
    "timm_vit_avg",
    "timm_vit_avgmax",
    "timm_siglip",
    "timm_deit3",
    "timm_dinov2_giant",
    "timm_dinov2_reg4",
    "hf_dinov2",
    "hf_beit_mean",
    "hf_clip",
    "hf_clip_text",
    "hf_siglip_text",
    "timm_headless_avg",
]
MORE = few([name for name in FAMILIES if name not in (*DIVERSE, *PAIRED)], 6)


@functools.cache
def split_by_vitrail(name: str, measure: Measure = "cosine", layer: int = 0, token: int | None = None) -> Pairs:
    """Of the first two pictures, in double precision."""
    images, view = batch(name, 2), viewed(name)[2]
    sides = [(embedding(view, measure, which), image[None]) for which, image in zip((None, token), images, strict=True)]
    with counted(sum(side.num_outputs for side, _ in sides), "pairs", "channel") as bar:
        return Scheduler().run([ask_pairs(sides[0], sides[1], layer, bar)])[0]


@functools.cache
def vectors(name: str, which: int, layer: int, cosine: bool, patch: int | None = None) -> tuple[Tensor, Tensor]:
    family, module, _ = viewed(name)
    tokens, bias = decompose_embedding(family, module, batch(name, 2)[which : which + 1], layer, cosine, patch)
    return tokens[0], bias[0]


def cosine_of(name: str) -> float:
    """By the library itself."""
    family, module, _ = viewed(name)
    return float(F.cosine_similarity(*expected_embedding(family, module, batch(name, 2)), dim=0))


@pytest.mark.parametrize(
    ("name", "measure", "layer"),
    [(name, "cosine", 0) for name in [*DIVERSE, *MORE]] + [(name, "dot", 1) for name in DIVERSE[::3]],
)
def test_pairs_against_the_literal_decomposition(name: str, measure: Measure, layer: int) -> None:
    sides = [vectors(name, which, layer, measure == "cosine") for which in (0, 1)]
    shares, rest = split(*sides, FAMILIES[name].prefix)
    result = split_by_vitrail(name, measure, layer)
    assert relative(result.shares, shares) < 1e-9
    assert float(result.rest) == pytest.approx(rest, rel=0, abs=1e-9 * float(shares.abs().sum()))
    family, module, _ = viewed(name)
    first, second = expected_embedding(family, module, batch(name, 2))
    expected = float(first @ second) if measure == "dot" else float(F.cosine_similarity(first, second, dim=0))
    total = float(result.shares.sum() + result.rest)
    assert total == pytest.approx(expected, rel=0, abs=1e-9 * max(1.0, float(shares.abs().sum())))


@pytest.mark.parametrize("name", ["timm_vit_avg", "timm_dinov2_reg4", "hf_clip_text"])
def test_pairs_with_one_patch_of_the_other_image(name: str) -> None:
    family = FAMILIES[name]
    patch = family.patches - 2
    shares, rest = split(vectors(name, 0, 0, True), vectors(name, 1, 0, True, patch), family.prefix)
    result = split_by_vitrail(name, token=family.prefix + patch)
    assert relative(result.shares, shares) < 1e-9
    assert float(result.rest) == pytest.approx(rest, abs=1e-9)
    ex = vitrail.explain(
        viewed(name)[2],
        batch(name, 2)[0],
        "decompx",
        Similarity(batch(name, 2)[1], patch=divmod(patch, family.grid[1])),
    )
    assert ex.pairs is not None
    assert relative(ex.pairs, shares.float()) < 1e-5
    assert ex.probability == pytest.approx(float(shares.sum()) + rest, abs=1e-9)


@pytest.mark.parametrize(("name", "layer"), [(name, 0) for name in DIVERSE] + [("timm_vit_not_square", 1)])
def test_rows_and_the_rest_of_the_other_image_are_the_map_of_decompx(name: str, layer: int) -> None:
    """A row is what a patch has in common with the patches of the other image; its prefix and biases remain."""
    family, _, view = viewed(name)
    (tokens, _), (others, bias) = (vectors(name, which, layer, True) for which in (0, 1))
    rest = tokens[family.prefix :] @ (others[: family.prefix].sum(0) + bias)
    rows = split_by_vitrail(name, layer=layer).shares.sum(1) + rest
    images = batch(name, 2)
    other = (others.sum(0) + bias).tolist()
    asked = compared(view, {"other": other}, "cosine")
    expected = build_method("decompx", asked, start_layer=layer).attribute(images[:1], 0)[0]
    assert relative(rows, expected.flatten()) < 1e-9
    if layer == 1:
        ex = vitrail.explain(view, images[0], "decompx", Similarity(images[1]), start_layer=layer)
        assert relative(ex.map, expected.float()) < 1e-6
        assert relative(ex.pairs, split_by_vitrail(name, layer=layer).shares.float()) < 1e-6
        assert ex.extras["completeness_gap"] < 1e-9


@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["timm_vit_not_square", "timm_siglip", "hf_clip_text"])
def test_an_explanation_holds_pairs_that_add_up_to_its_score(name: str, dtype: torch.dtype, tolerance: float) -> None:
    family, _, view = viewed(name, dtype)
    images = batch(name, 2, dtype)
    ex = vitrail.explain(view, images[0], "decompx", Similarity(images[1]))
    assert ex.pairs is not None
    assert (ex.pairs.shape, ex.pairs.dtype) == ((family.patches, family.patches), torch.float32)
    assert ex.extras["score_pairs"] + ex.extras["score_pairs_rest"] == pytest.approx(ex.probability, abs=tolerance)
    assert ex.probability == pytest.approx(cosine_of(name), abs=max(tolerance, 1e-9))
    assert float(ex.pairs.sum()) == pytest.approx(ex.extras["score_pairs"], abs=1e-4)
    reverse = vitrail.explain(view, images[1], "decompx", Similarity(images[0]))
    assert reverse.pairs is not None
    assert relative(reverse.pairs, ex.pairs.T) < 1e-4, "pairs are symmetric"


def test_pairs_do_not_depend_on_how_channels_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = split_by_vitrail("timm_vit_not_square")
    monkeypatch.setattr(pairs, "CHANNELS", {"cpu": 5})
    assert close(split_by_vitrail.__wrapped__("timm_vit_not_square").shares, expected.shares, 1e-12)


def test_every_image_of_a_batch_has_its_own_pairs() -> None:
    _, _, view = viewed("timm_vit_not_square", torch.float32)
    images = batch("timm_vit_not_square", 3, torch.float32)
    explanations = vitrail.explain(view, images[:2], "decompx", Similarity(images[2]), batch_size=2)
    for image, ex in zip(images, explanations, strict=False):
        alone = vitrail.explain(view, image, "decompx", Similarity(images[2]))
        assert ex.pairs is not None
        assert alone.pairs is not None
        assert relative(ex.pairs, alone.pairs) < 1e-5
    first, second = explanations
    assert first.pairs is not None
    assert second.pairs is not None
    assert relative(first.pairs, second.pairs) > 1e-2


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("decompx", 3),
        ("decompx", Callable(lambda tokens, pooled, logits: logits[:, 0])),
        ("decompx.skipplus", "similarity"),
        ("input_x_gradient", "similarity"),
        ("decompx", "contrast"),
    ],
)
def test_other_questions_and_methods_have_no_pairs(method: str, target: Any) -> None:
    _, _, view = viewed("timm_vit_not_square")
    first, *others = batch("timm_vit_not_square", 3)
    similarities = [Similarity(image) for image in others]
    target = (
        {"similarity": similarities[0], "contrast": Contrast(*similarities)}.get(target, target)
        if isinstance(target, str)
        else target
    )
    ex = vitrail.explain(view, first, method, target)
    assert ex.pairs is None
    assert "score_pairs" not in ex.extras


def test_progress_counts_the_channels_of_both_embeddings() -> None:
    view, images = viewed("timm_vit_avg")[2], batch("timm_vit_avg", 2)
    seen: list[tuple[int, int]] = []
    with watched(lambda name, done, total: seen.append((done, total)) if name == "pairs" else None):
        vitrail.explain(view, images[0], "decompx", Similarity(images[1]))
    channels = 2 * embedding(view, "cosine").num_outputs
    steps = [done for done, _ in seen]
    assert {total for _, total in seen} == {channels}
    assert (steps[0], steps[-1]) == (0, channels)
    assert steps == sorted(steps)
    assert len(steps) > 2
