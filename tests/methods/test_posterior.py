"""posterior against its literal oracle, and what it promises."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.common import noise
from tests.helpers import DOUBLE, batch, relative, viewed
from tests.oracles import posterior as oracle
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.engine.noise import noise as numbered_noise
from vitrail.engine.requests import Subsets
from vitrail.methods.base import Attribution
from vitrail.methods.posterior import Additive, Belief, certainty, standardised, trend_basis
from vitrail.methods.registry import build_method, list_methods

TARGET = 3


def explained(name: str, against: int | None = None, images: int = 1, **params: Any) -> Attribution:
    return build_method("posterior", viewed(name)[2], **params).explain(batch(name, images), TARGET, against=against)


def random_model(patches: int = 36, smoothing: float = 0.0) -> Additive:
    """Random features and a random prior map."""
    generator = torch.Generator().manual_seed(0)
    prior, features = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in ((patches,), (patches, 8)))
    side = math.isqrt(patches)
    return Additive(prior, features, (side, patches // side), smoothing)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Belief]]:
    """The subsets (M, N) that the method draws, and what they are drawn from."""
    drawn: list[tuple[Tensor, Belief]] = []
    draw = Additive.draw

    def spy(self: Additive, count: int, seed: int, start: int, belief: Belief) -> Tensor:
        subsets = draw(self, count, seed, start, belief)
        drawn.append((subsets, belief))
        return subsets

    monkeypatch.setattr(Additive, "draw", spy)
    return drawn


@pytest.mark.parametrize(
    ("name", "params", "against"),
    [
        ("timm_vit", {}, None),
        ("timm_vit", {"scale": "probability", "smoothing": 0.0, "seed": 1}, None),
        ("timm_vit", {"smoothing": 0.0}, 1),
        ("timm_vit_avg", {"smoothing": 0.0}, None),
        ("timm_vit_avg", {"scale": "probability"}, None),
        ("timm_vit_not_square", {"masks": 25}, None),
        ("timm_siglip", {}, None),
        ("timm_vit", {"space": "tokens"}, None),
        ("timm_vit", {"space": "tokens", "smoothing": 0.0, "seed": 1}, 1),
        ("timm_vit_avg", {"space": "tokens", "smoothing": 0.0}, None),
        ("timm_vit_not_square", {"space": "tokens", "scale": "probability"}, None),
    ],
)
def test_posterior_is_its_literal_definition(
    name: str, params: dict[str, Any], against: int | None, rounds: list[tuple[Tensor, Belief]]
) -> None:
    family, module, _ = viewed(name)
    result = explained(name, against, **{"masks": 40, **params})
    how = {key: value for key, value in params.items() if key in ("scale", "smoothing", "space")}
    expected = oracle.posterior(family, module, batch(name, 1), rounds[0][0], TARGET, against, **how)
    assert relative(result.map[0], expected.map) < 1e-6
    assert relative(result.error[0], expected.error) < 1e-6
    assert float(result.extras["r2"][0]) == pytest.approx(float(expected.r2), rel=1e-6, abs=1e-9)
    assert float(result.extras["effective_masks"][0]) == pytest.approx(float(expected.fitted.effective), rel=1e-6)


def test_after_256_masks_subsets_are_drawn_from_the_posterior(rounds: list[tuple[Tensor, Belief]]) -> None:
    family, module, _ = viewed("timm_vit")
    result = explained("timm_vit", masks=272)
    (first, _), (second, belief) = rounds
    assert (len(first), len(second)) == (256, 16)
    fitted = oracle.posterior(family, module, batch("timm_vit", 1), first, TARGET).fitted
    assert relative(belief.mean, fitted.effects) < 1e-6
    assert relative(belief.spread @ belief.spread.T, fitted.covariance) < 1e-6
    expected = oracle.posterior(family, module, batch("timm_vit", 1), torch.cat([first, second]), TARGET)
    assert relative(result.map[0], expected.map) < 1e-6
    assert relative(result.error[0], expected.error) < 1e-6


def test_subsets_of_tokens_are_those_of_the_first_version(rounds: list[tuple[Tensor, Belief]]) -> None:
    """All from the prior, whose draws are local effects and a multiple of the white-box map."""
    for params in ({"masks": 300, "seed": 7}, {"masks": 300, "seed": 7, "until": 0.9999}):
        explained("timm_vit", space="tokens", **params)
    (subsets, prior), (again, _) = rounds
    drawn = numbered_noise("normal", (18,), range(150), 7, torch.device("cpu")).double()
    effects = drawn[:, :16] @ prior.spread[:, :16].T + drawn[:, 16:17] * prior.spread[:, 16]
    for k, row in enumerate(effects):
        tenths = min(1 + math.floor(9 * float(torch.special.ndtr(drawn[k, 17]))), 9)
        chosen = sorted(range(16), key=lambda i, row=row: -float(row[i]))[: round(1.6 * tenths)]
        assert subsets[2 * k].nonzero()[:, 0].tolist() == sorted(chosen)
    assert torch.equal(subsets[1::2], ~subsets[::2])
    assert torch.equal(subsets, again)


def test_draws_follow_what_is_believed() -> None:
    """Without any doubt, subsets are the largest patches of the mean."""
    model = random_model(20)
    mean = torch.arange(20.0, dtype=DOUBLE)
    for subset in model.draw(40, 3, 256, Belief(mean, torch.zeros(20, 4, dtype=DOUBLE)))[::2]:
        assert torch.equal(subset, mean >= 20 - subset.sum())
    assert torch.equal(model.draw(40, 3, 0, model.prior)[10:20], model.draw(10, 3, 10, model.prior))


def test_subsets_are_large_draws_of_the_prior_and_their_complements() -> None:
    model = random_model(100)
    drawn = model.draw(400, 0, 0, model.prior)
    assert torch.equal(drawn[0::2], ~drawn[1::2])
    sizes = drawn[0::2].sum(1)
    assert set(sizes.tolist()) == {10 * tenths for tenths in range(1, 10)}
    assert sizes.bincount(minlength=91)[10::10].min() >= 8, "all sizes are equally probable: about 22 of each"
    assert torch.equal(drawn, model.draw(400, 0, 0, model.prior))
    assert not torch.equal(drawn, model.draw(400, 1, 0, model.prior))
    assert torch.equal(drawn[:33], model.draw(33, 0, 0, model.prior)), (
        "the first subsets do not depend on how many there are"
    )
    pulled = (drawn[0::2].double() * model.direction).sum(1)
    assert pulled.abs().mean() > 1.5 * (100 * 0.25) ** 0.5, "subsets vary along the prior map more than at random"


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (1, 3), (2, 2), (3, 1)])
def test_tiny_grids(grid: tuple[int, int]) -> None:
    """Too few sizes for a cubic trend."""
    patches = grid[0] * grid[1]
    model = Additive(torch.arange(patches).double(), torch.eye(patches).double(), grid, 0.5)
    drawn = model.draw(16, 0, 0, model.prior)
    assert torch.equal(drawn[0::2], ~drawn[1::2])
    fit = model.fit(drawn, drawn.double() @ torch.arange(1.0, patches + 1, dtype=DOUBLE))
    assert fit.mean.isfinite().all()
    assert (fit.deviation > 0).all()


def test_the_trend_is_a_cubic_that_is_equal_for_nothing_and_all() -> None:
    shares = torch.linspace(0, 1, 11, dtype=DOUBLE)
    basis = trend_basis(shares)
    assert torch.allclose(basis.T @ basis, torch.eye(3, dtype=DOUBLE))
    cubic = 3 + 2 * shares * (1 - shares) - shares * (1 - shares) * (1 - 2 * shares)
    assert torch.allclose(basis @ (basis.T @ cubic), cubic)
    assert trend_basis(torch.full((9,), 0.5, dtype=DOUBLE)).shape == (9, 1)


def test_additive_effects_are_recovered_within_their_errors() -> None:
    """Effects of any sign that follow the prior map in part, and a trend, which is no effect."""
    model, generator = random_model(64), torch.Generator().manual_seed(1)
    effects = model.direction + torch.randn(64, generator=generator, dtype=DOUBLE) + 0.5
    drawn = model.draw(512, 0, 0, model.prior)
    share = drawn.double().mean(1)
    clean = drawn.double() @ effects + 3 - 40 * share * (1 - share)
    exact = model.fit(drawn, clean + 0.01 * torch.randn(512, generator=generator, dtype=DOUBLE))
    assert relative(exact.mean, effects) < 0.02
    assert float(exact.extras["r2"]) > 0.999
    noisy = model.fit(drawn, clean + 3 * torch.randn(512, generator=generator, dtype=DOUBLE))
    assert noisy.deviation.mean() > 3 * exact.deviation.mean()
    covered = ((noisy.mean - effects).abs() < 1.645 * noisy.deviation).double().mean()
    assert covered > 0.85
    assert float(noisy.mean.sum()) == pytest.approx(float(effects.sum()), rel=0.1)


def test_more_masks_leave_smaller_errors() -> None:
    few, many = (explained("timm_vit", masks=masks) for masks in (32, 512))
    assert many.error.mean() < few.error.mean()
    assert (many.extras["masks"], few.extras["masks"]) == (512, 32)
    assert 0 < few.extras["effective_masks"] < 32
    assert few.extras["effective_masks"] < many.extras["effective_masks"] < 16 + 2, "patches, mean and prior map"


def test_smoothing_keeps_the_sum() -> None:
    plain, smooth, wide = (explained("timm_vit", masks=64, smoothing=smoothing) for smoothing in (0.0, 0.5, 100.0))
    assert relative(plain.map.sum(), smooth.map.sum()) < 1e-9
    assert relative(smooth.map, plain.map) > 1e-3
    assert relative(explained("timm_vit", masks=64, smoothing=1e-200).map, plain.map) < 1e-9
    assert relative(wide.map, wide.map.mean().expand_as(wide.map)) < 1e-2
    assert (smooth.error.mean() < plain.error.mean()) & (wide.error.mean() < smooth.error.mean())


def test_the_sum_of_effects_is_what_all_patches_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose log-odds are a weighted sum of the patches that are there."""
    weights = torch.linspace(-0.2, 0.3, 16, dtype=DOUBLE)

    def logits(self: Subsets, parts: Any, present: Tensor, keep: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(TARGET), 5) * weights[keep].sum(1, keepdim=True)

    monkeypatch.setattr(Subsets, "logits", logits)
    result = explained("timm_vit", masks=256, space="tokens", smoothing=0.0)
    assert float(result.map.sum()) == pytest.approx(float(weights.sum()), abs=1e-3)
    assert relative(result.map.flatten(), weights) < 1e-2
    assert result.extras["r2"] > 0.999


@pytest.mark.parametrize("images", [1, 3])
def test_errors_are_positive_and_shaped_like_maps(images: int) -> None:
    for name in ("timm_vit", "timm_vit_not_square", "hf_dinov2"):
        result = explained(name, images=images, masks=16)
        assert result.error.shape == result.map.shape == (images, *viewed(name)[2].grid)
        assert (result.error > 0).all()
        assert result.error.isfinite().all()


def test_a_batch_has_the_errors_of_its_images() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 3)
    method = build_method("posterior", view, masks=32, until=0.8)
    whole = method.explain(images, [0, 3, 1])
    for i, target in enumerate((0, 3, 1)):
        alone = method.explain(images[i : i + 1], target)
        assert relative(whole.map[i], alone.map[0]) < 1e-9
        assert relative(whole.error[i], alone.error[0]) < 1e-9


def test_explanations_keep_their_errors(tmp_path: Path) -> None:
    view = viewed("timm_vit", torch.float32)[2]
    ex = vitrail.explain(view, noise(32, 32, 3), "posterior", masks=32)
    assert ex.error is not None
    assert (ex.error.shape, ex.error.dtype) == (ex.map.shape, torch.float32)
    assert (ex.error > 0).all()
    again = vitrail.open(ex.save(tmp_path / "map.png"), image=noise(32, 32, 3), model=view)
    assert torch.equal(again.error, ex.error)
    other = vitrail.explain(view, noise(32, 32, 3), "gen_att")
    assert other.error is None
    assert vitrail.open(other.save(tmp_path / "other.png"), image=noise(32, 32, 3), model=view).error is None
    together = vitrail.explain(view, [noise(32, 32, 3), noise(32, 32, 4)], "posterior", masks=32)
    assert relative(together[0].error, ex.error) < 1e-4


def test_pictures_fade_values_of_uncertain_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three patches in four; the strongest one keeps its colour."""
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(64, 64, 3), "posterior", masks=32)
    ex.map = torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 4)
    ex.error = torch.ones(4, 4)
    ex.error[0] = 0.1
    assert ex.certain is not None
    assert ex.certain.tolist() == [[True] * 4] + [[False] * 4] * 3
    assert ex.error_line == "90% intervals exclude zero on 25% of the map"
    faded, shown = (np.asarray(ex.overlay(style="blocks", uncertain=how), dtype=float) for how in ("fade", "show"))
    quarter = len(faded) // 4
    assert np.array_equal(faded[:quarter], shown[:quarter])
    assert not np.array_equal(faded[quarter:], shown[quarter:])
    pale, full = (np.ptp(picture[quarter:], axis=2).mean() for picture in (faded, shown))
    assert pale < 0.6 * full
    outlines = [ex.overlay(style="outline", uncertain=how) for how in ("fade", "show")]
    assert outlines[0].tobytes() == outlines[1].tobytes()
    lines: list[Any] = []
    monkeypatch.setattr("vitrail.explanation.labelled", lambda *arguments: lines.append(arguments[2]))
    for how in ({}, {"uncertain": "show"}, {"style": "outline"}):
        ex.picture(**how)
    assert [("(the rest is faded)" in " ".join(text), ex.error_line in " ".join(text)) for text in lines] == [
        (True, True),
        (False, True),
        (False, True),
    ]
    ex.error = None
    assert (ex.certain, ex.error_line) == (None, None)
    assert np.array_equal(np.asarray(ex.overlay(style="blocks")), shown)
    with pytest.raises(VitrailError, match="uncertain must be fade or show"):
        ex.overlay(uncertain="hide")


@pytest.mark.parametrize("space", ["pixels", "tokens"])
def test_until_asks_for_no_more_masks_than_it_takes(space: str) -> None:
    soon = explained("timm_vit", masks=640, until=0.55, space=space)
    asked = int(soon.extras["masks"])
    assert asked in range(64, 640, 64)
    assert soon.extras["certainty"] >= 0.55
    plain = explained("timm_vit", masks=asked, space=space)
    assert torch.equal(soon.map, plain.map)
    assert torch.equal(soon.error, plain.error)
    if asked > 64:
        assert explained("timm_vit", masks=asked - 64, space=space).extras["certainty"] < 0.55
    never = explained("timm_vit", masks=300, until=0.9999, space=space)
    assert int(never.extras["masks"]) == 300
    assert relative(never.map, explained("timm_vit", masks=300, space=space).map) < 1e-9


@pytest.mark.parametrize("params", [{}, {"space": "tokens"}, {"scale": "probability"}, {"until": 0.9}])
def test_scores_that_never_change_say_nothing(params: dict[str, Any]) -> None:
    module = copy.deepcopy(viewed("timm_vit")[1])
    torch.nn.init.zeros_(module.head.weight)
    method = build_method("posterior", vitrail.wrap(module), masks=80, **params)
    with pytest.warns(UserWarning, match="the same score whatever was removed, for 2 of 2 images"):
        result = method.explain(batch("timm_vit", 2), TARGET)
    assert result.map.abs().max() < 1e-6
    assert (result.error > 0).all()
    assert (result.error < 1e-4).all()
    assert (result.extras["r2"] == 0).all()
    assert (result.extras["masks"] == 80).all()


def test_a_constant_prior_map_leaves_the_rest_of_the_prior() -> None:
    assert torch.equal(standardised(torch.full((5,), 0.1, dtype=DOUBLE)), torch.zeros(5, dtype=DOUBLE))
    assert standardised(torch.tensor([1.0, 3.0])).tolist() == [-1, 1]
    model = Additive(torch.full((16,), 0.3, dtype=DOUBLE), torch.eye(16, dtype=DOUBLE), (4, 4), 0.0)
    drawn = model.draw(200, 0, 0, model.prior)
    fit = model.fit(drawn, drawn[:, 5].double())
    assert int(fit.mean.argmax()) == 5
    assert float(fit.mean[5]) == pytest.approx(1, abs=0.05)
    assert fit.extras["prior_agreement"] == 0


def test_certainty_is_a_half_where_nothing_is_known() -> None:
    flat = torch.zeros(40, dtype=DOUBLE)
    assert certainty(flat, torch.ones_like(flat)) == 0.5
    clear = torch.tensor([10.0] * 4 + [0.0] * 36)
    assert certainty(clear, torch.ones(40)) > 0.999


def test_passes_are_those_of_the_masks() -> None:
    """Painted over, an image is as long as before; of the tokens, half are there on average."""
    view = viewed("timm_vit")[2]
    for params, forwards in (({}, 257), ({"masks": 1024}, 1025), ({"space": "tokens", "masks": 100}, 51)):
        assert build_method("posterior", view, **params).passes() == (forwards, 1)
    assert list_methods()["posterior"].cost == (257, 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"masks": 7}, "masks must be between 8"),
        ({"masks": 10**15}, "masks must be between 8"),
        ({"until": 0.4}, "until"),
        ({"until": 1.0}, "until"),
        ({"until": math.nan}, "until"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"smoothing": math.inf}, "smoothing"),
        ({"smoothing": math.nan}, "smoothing"),
        ({"scale": "logit"}, "scale"),
        ({"space": "patches"}, "space"),
    ],
)
def test_wrong_parameters_are_told(params: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        build_method("posterior", viewed("timm_vit")[2], **params)
