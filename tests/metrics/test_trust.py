"""How far to trust a map: against a literal version, and where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from tests import families
from tests.common import noise
from tests.helpers import DOUBLE, batch, viewed
from tests.oracles.masked_forward import masked_logits

import vitrail
from vitrail import VitrailError
from vitrail.core.operations import Walk
from vitrail.data import Scenes
from vitrail.explanation import Explanation
from vitrail.metrics.measuring import measure_trust
from vitrail.metrics.trust import PASSES, Trust
from vitrail.models.view import View
from vitrail.models.wrapping import wrap


@pytest.fixture(scope="module")
def scenes() -> View:
    return vitrail.load("scenes")


@pytest.fixture
def scene(scenes: View) -> Explanation:
    return vitrail.explain(scenes, Image.fromarray(Scenes(1, seed=4, objects=2)[0].image))


def literal(name: str, values: torch.Tensor, target: int, against: int | None) -> dict[str, float]:
    """Every subset by its own, with all tokens present and the removed ones hidden from attention."""
    family, module, _ = viewed(name)
    image, (rows, columns) = batch(name, 1), families.find(name).grid
    cells = rows * columns
    generator = torch.Generator().manual_seed(0)

    def probability(kept: torch.Tensor) -> float:
        logits = masked_logits(family, module, image, kept[None])[0]
        return float(logits.softmax(0)[target] if against is None else (logits[target] - logits[against]).sigmoid())

    removed = max(1, round(cells / 10))
    order = sorted(range(cells), key=lambda patch: -float(values.flatten()[patch]))
    random_orders = torch.rand(16, cells, generator=generator).argsort(dim=1)
    blobs = F.interpolate(torch.randn(64, 1, 4, 4, generator=generator), (rows, columns), mode="bicubic").flatten(1)
    subsets = [blob.topk(round(0.4 * cells)).indices for blob in blobs]
    whole, top = probability(torch.arange(cells)), probability(torch.tensor(order[removed:]))
    random = float(np.mean([probability(kept[removed:]) for kept in random_orders]))
    sums = [float(values.flatten()[kept].sum()) for kept in subsets]
    agreement = float(np.corrcoef(sums, [probability(kept) for kept in subsets])[0, 1])
    removal = min(1.0, max(0.0, 1 - top / random))
    score = (removal + max(0.0, agreement)) / 2
    return {"score": score, "drop": whole - top, "random_drop": whole - random, "agreement": agreement}


@pytest.mark.parametrize("against", [None, 1])
@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "hf_beit_mean", "timm_deit_distilled"])
def test_trust_is_its_literal_definition(name: str, against: int | None) -> None:
    view = viewed(name)[2]
    values = torch.randn(view.grid, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    trust = measure_trust(view, batch(name, 1)[0], values, 0, against, None)
    for field, expected in literal(name, values, 0, against).items():
        assert getattr(trust, field) == pytest.approx(expected, abs=1e-6), field


def test_the_opposite_map_agrees_as_much_with_the_opposite(scene: Explanation) -> None:
    trust = scene.trust()
    opposite = replace(scene, map=-scene.map).trust()
    assert opposite.agreement == pytest.approx(-trust.agreement, abs=1e-6)
    assert opposite.drop < trust.drop
    assert opposite.random_drop == pytest.approx(trust.random_drop, abs=1e-6)
    assert trust.score > 0.5 > 0.2 > opposite.score


def test_real_maps_are_trusted_and_random_ones_are_not(scenes: View) -> None:
    pictures = [Image.fromarray(scene.image) for scene in Scenes(8, seed=5, objects=2)]
    means = {}
    for method in ("decompx.skipplus", "random"):
        means[method] = np.mean([ex.trust().score for ex in vitrail.explain(scenes, pictures, method)])
    assert means["decompx.skipplus"] > 0.6
    assert means["random"] < 0.3


def test_fewer_than_a_hundred_forward_passes(scene: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    encode = Walk.encode

    def spy(self: Walk, x: torch.Tensor) -> torch.Tensor:
        passes.append(len(x))
        return encode(self, x)

    monkeypatch.setattr(Walk, "encode", spy)
    scene.trust()
    assert PASSES <= sum(passes) <= PASSES + 1 <= 96


def test_a_constant_map_agrees_with_nothing(scene: Explanation) -> None:
    trust = replace(scene, map=torch.ones_like(scene.map)).trust()
    assert trust.agreement == 0
    assert trust.interval[0] < 0 < trust.interval[1]


def test_the_interval_holds_the_agreement_and_narrows_towards_one(scene: Explanation) -> None:
    trust = scene.trust()
    low, high = trust.interval
    assert -1 <= low < trust.agreement < high <= 1
    assert high - low < 0.5


def test_pixel_masks_where_there_are_no_tokens() -> None:
    view = viewed("timm_swin", torch.float32)[2]
    ex = vitrail.explain(view, noise(64, 64, 2), "grad_cam")
    trust = ex.trust()
    assert 0 <= trust.score <= 1
    assert trust.patch_share is None
    assert replace(ex, map=-ex.map).trust().agreement == pytest.approx(-trust.agreement, abs=1e-5)


def test_trust_is_saved_and_reopened(scene: Explanation, tmp_path: Path) -> None:
    scene.image.save(tmp_path / "scene.png")
    ex = vitrail.explain("scenes", tmp_path / "scene.png")
    assert vitrail.open(ex.save(tmp_path / "a.png")).trusted is None
    trust = ex.trust()
    again = vitrail.open(ex.save(tmp_path / "b.png"))
    assert again.trusted == trust
    assert again.trust_line == ex.trust_line
    assert again.trust() == trust, "the same subsets every time"


def test_in_words() -> None:
    trust = Trust(0.62, 0.33, 0.03, -0.08, (-0.3, 0.14), 0.47, 0.54)
    assert trust.words("red-eyed frog") == (
        "0.62 – removing the top 10% of patches takes red-eyed frog from 54% to 21%, a random 10% to 51%; "
        "agreement with 64 subsets −0.08 [−0.30, 0.14]; 47% of the score is on patches"
    )


def test_one_patch_cannot_be_removed() -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=3, embed_dim=24, num_heads=3, depth=1)
    ex = vitrail.explain(wrap(module), noise(32, 32, 1), "gen_att")
    with pytest.raises(VitrailError, match=r"at least two patches, but .* has 1"):
        ex.trust()
