"""posterior: a white-box map as the prior, the scores of subsets of the patches as evidence, a map with error bars."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.engine.requests import Asking, Batch, Traced, concurrently
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.aggregation import Aggregated, SkipPlus
from vitrail.methods.base import Attribution, TokenMethod
from vitrail.methods.decomposition import DecompX
from vitrail.methods.masking import MaskMethod, Scorer, Space, Subject, features_of
from vitrail.methods.registry import method
from vitrail.targets import Target

LENGTHS = (1.0, 2.0, 4.0)  # length scales ℓ of the prior, in patches
WEIGHTS = (0.0, 0.3, 1.0, 3.0, 10.0)  # prior variances t of the white-box map, relative to that of a patch
NOISES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # noise variances η of a score, likewise
NUGGET = 0.05  # share of a patch's variance that it has in common with no other patch
LEVEL = 100.0  # prior variance of the mean effect: so large that the mean is practically free
FEWEST, MOST = 8, 100_000  # masks; the trend alone takes three
ROUND = 64  # masks between two looks at the certainty
LEARNED = 256  # masks between two updates of the belief that subsets are drawn from
# With few masks, the likelihood prefers priors that are smoother than the effects, and errors come out too small. The
# factor is the one with which 90 % intervals hold the values of a run with 8,192 masks (benchmarks/coverage.py).
WIDENING = 1.6
SATURATION = 1e-4  # probabilities closer than this to 0 or 1 count as this close
ROUNDING = 1e-6  # of a score: no smaller noise is believed
DOUBLE = torch.float64


@method("posterior", family="mask", signed=True, cost=(257, 1), paper="vitrail")
@dataclass(kw_only=True)
class Posterior(TokenMethod, MaskMethod):
    """Effect of each patch on the score, with its standard error: ``decompx.skipplus``, corrected by masked images.

    The score of a subset of the patches is modelled as a sum of their effects, a smooth function of their number, and
    noise. Before any subset is scored, the effects are assumed to follow ``decompx.skipplus`` to some degree and to be
    similar for patches that are near and look alike; how much, the scores decide (restricted maximum likelihood). The
    map is the posterior mean of the effects, ``error`` its standard deviation.

    ``space``: whether the other patches are painted over in the image's mean colour or their tokens are removed.
    ``scale``: whether the score is the log-odds of the class or its probability; with ``against=`` it is always the
    difference of two logits. ``smoothing``: how far the effect of a patch is spread over its neighbours, as a standard
    deviation in patches. ``masks``: how many subsets are scored, at most; with ``until`` they are scored in rounds of
    64, until the patches of the top decile belong there with this probability, on average. Painted over, subsets after
    the first 256 are drawn from the posterior by then, those of tokens all from the prior.
    """

    masks: int = 256
    space: Space = "pixels"
    scale: Literal["log_odds", "probability"] = "log_odds"
    smoothing: float = 0.5
    until: float | None = None
    seed: int = 0

    version: ClassVar[int] = 2
    bears_bf16: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not FEWEST <= self.masks <= MOST:
            raise VitrailError(f"masks must be between {FEWEST} and {MOST}, but got {self.masks}.")
        if self.until is not None and not 0.5 <= self.until < 1:
            raise VitrailError(f"until must be a probability of at least 0.5 and below 1, but got {self.until}.")
        if not 0 <= self.smoothing < math.inf:
            raise VitrailError(f"smoothing must be at least 0 and finite, but got {self.smoothing}.")

    def passes(self) -> tuple[float, float]:
        """Half of the tokens are there on average, or, painted over, all of them."""
        return 1 + self.masks * (0.5 if self.space == "tokens" else 1), 1

    @property
    def prior(self) -> Aggregated:
        return SkipPlus(DecompX)(self.model, precision="full")

    def needs(self) -> Sequence[TraceSpec]:
        """The traces of the prior, and one of the same rule, so that all of them are one pass."""
        traces = self.prior.needs()
        values = frozenset({("x", 0), ("u", self.model.num_layers - 1)})
        return [*traces, TraceSpec(values, rule=traces[0].rule)]

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        *traces, values = yield [Traced(batch, target, spec) for spec in self.needs()]
        prior_maps = self.prior.read(*traces).map
        subjects = yield from self.subjects(batch, target, values)
        fits = yield from concurrently(
            [self.fit(subject, prior_map) for subject, prior_map in zip(subjects, prior_maps, strict=True)]
        )
        extras = {name: torch.stack([fit.extras[name] for fit in fits]) for name in fits[0].extras}
        if (unmoved := int((extras["r2"] == 0).sum())) > 0:  # exactly, where no score differs
            warnings.warn(
                f"{self.model.name} gave the same score whatever was removed, for {unmoved} of {len(fits)} images: "
                "nothing is evidence, and their maps are 0 up to rounding.",
                stacklevel=2,
            )
        return Attribution(
            torch.stack([fit.mean for fit in fits]).unflatten(1, self.model.grid),
            extras,
            torch.stack([fit.deviation for fit in fits]).unflatten(1, self.model.grid),
        )

    def fit(self, subject: Subject, prior_map: Tensor) -> Asking[Fit]:
        """Asks for the scores of subsets, all at once or, with ``until``, round by round."""
        bounded = subject.target.against is None and self.model.output != "score"
        scorer = self.scorer(subject, "probability" if bounded else "logit")
        features = features_of(subject, self.model, "norm1").flatten(1).T
        model = Additive(in_double(prior_map.flatten()), in_double(features), self.model.grid, self.smoothing)
        belief, scores = model.prior, model.direction.new_empty(0)
        subsets = scores.new_empty(0, len(features), dtype=torch.bool)
        # Maps of tokens are those of version 1, which drew all subsets from the prior.
        size = self.masks if self.space == "tokens" else LEARNED
        for start in range(0, self.masks, size):
            drawn = model.draw(min(size, self.masks - start), self.seed, start, belief)
            for part in drawn.split(size if self.until is None else ROUND):
                subsets = torch.cat([subsets, part])
                scores = torch.cat([scores, (yield from self.scores(scorer, part))])
                fit = model.fit(subsets, scores)
                if self.until is not None and fit.extras["certainty"] >= self.until:
                    return fit
            belief = fit.belief
        return fit

    def scores(self, scorer: Scorer, subsets: Tensor) -> Asking[Tensor]:
        """(M,): what the model says to the subsets (M, N)."""
        image = scorer.subject.image
        present = subsets.to(image.device)
        if self.space == "tokens":
            answers = in_double((yield from scorer.token_sets(present)))
        else:
            answers = in_double((yield scorer.painted(present, self.model.grid, image.mean((2, 3), keepdim=True))))
        logarithmic = scorer.output == "probability" and self.scale == "log_odds"
        return torch.logit(answers, eps=SATURATION) if logarithmic else answers


class Belief(NamedTuple):
    """Effects of the patches, as far as known: mean + spread z with z ~ N(0, I)."""

    mean: Tensor  # (N,)
    spread: Tensor  # (N, p)


class Fit(NamedTuple):
    """The posterior of the map: means and standard deviations (N,), what was measured (0-d), the effects unsmoothed."""

    mean: Tensor
    deviation: Tensor
    extras: dict[str, Tensor]
    belief: Belief


class Additive:
    """The additive model of one image: the prior of the effects, subsets drawn from it, and the fit to their scores."""

    def __init__(self, prior_map: Tensor, features: Tensor, grid: tuple[int, int], smoothing: float):
        rows, columns = (torch.arange(side, dtype=DOUBLE, device=prior_map.device) for side in grid)
        places = torch.cartesian_prod(rows, columns)
        self.distances = (places[:, None] - places).norm(dim=2)
        self.direction = standardised(prior_map)
        unit = F.normalize(features - features.mean(0), dim=1)
        self.similarity = ((1 + unit @ unit.T) / 2).square()
        spread = self.nearness(smoothing) if smoothing else torch.ones_like(self.direction).diag()
        self.smoother = spread / spread.sum(0)  # columns add up to 1, so that smoothing keeps the sum of the effects

    def nearness(self, length: float) -> Tensor:
        return torch.exp(-(self.distances / length).square() / 2)

    @cached_property
    def roots(self) -> Tensor:
        """(lengths, N, N): the Cholesky factors of the covariances K of the effects, white-box map and mean aside."""
        near = torch.stack([self.nearness(length) for length in LENGTHS])
        nugget = torch.full_like(self.direction, NUGGET).diag()
        return torch.linalg.cholesky((1 - NUGGET) * near * self.similarity + nugget)

    @cached_property
    def prior(self) -> Belief:
        """Before any score is known: the middle length scale, and the white-box map as heavy as a patch."""
        return Belief(torch.zeros_like(self.direction), torch.cat([self.roots[1], self.direction[:, None]], 1))

    def draw(self, count: int, seed: int, start: int, belief: Belief) -> Tensor:
        """(count, N): the largest patches in draws from the belief, each subset followed by its complement.

        They are numbers ``start`` and following of the seed's and do not depend on ``count``.
        """
        patches, device = len(self.direction), self.direction.device
        pairs = range(start // 2, (start + count + 1) // 2)
        drawn = noise("normal", (belief.spread.shape[1] + 1,), pairs, seed, device).to(DOUBLE)
        tenths = 1 + (9 * torch.special.ndtr(drawn[:, -1:])).floor().clamp(max=8)  # of the patches, equally probable
        sizes = (tenths * patches / 10).round().clamp(1, max(patches - 1, 1))
        effects = belief.mean + drawn[:, :-1] @ belief.spread.T
        kept = effects.argsort(1, descending=True).argsort(1) < sizes
        return torch.stack([kept, ~kept], dim=1).flatten(0, 1)[:count]

    def fit(self, subsets: Tensor, scores: Tensor) -> Fit:
        """The posterior at the length scale ℓ, the weight t of the white-box map and the noise η of largest likelihood.

        Effects are w = R u with u ~ N(0, σ²I) and R = [root of K, √t d, √LEVEL 1], so that this is a ridge regression
        on the design ZR, Z the subsets. The trend is projected out; the likelihood is the restricted one.
        """
        present = subsets.to(DOUBLE)
        trend = trend_basis(present.mean(1))
        freedom = len(scores) - trend.shape[1]

        def detrended(values: Tensor) -> Tensor:
            return values - trend @ (trend.T @ values)

        y = detrended(scores)
        noises, weights = (torch.tensor(values, dtype=DOUBLE, device=y.device) for values in (NOISES, WEIGHTS))
        level = torch.full_like(self.roots[:, :, :1], math.sqrt(LEVEL))
        bases = torch.cat([self.roots, level], 2)  # R without the white-box map, (lengths, N, N + 1)
        designs, column = detrended(present) @ bases, detrended(present @ self.direction)
        ridge = Ridge(designs.mT @ designs, designs.mT @ y, y @ y, freedom)
        likelihoods = ridge.likelihoods(noises, weights, designs.mT @ column, column @ column, column @ y)
        best = int(likelihoods.argmax())  # the only wait for the device
        length, at, weight = np.unravel_index(best, likelihoods.shape)
        end = weights[weight].sqrt()
        root = torch.cat([bases[length], end * self.direction[:, None]], 1)
        design = torch.cat([designs[length], end * column[:, None]], 1)
        noise_ratio = noises[at]
        ridge = Ridge(design.T @ design, design.T @ y, y @ y, freedom)
        factor, variance = ridge.solved(noise_ratio)
        coefficients = torch.cholesky_solve(ridge.moment[:, None], factor)[:, 0] / noise_ratio
        belief = Belief(root @ coefficients, variance.sqrt() * whitened(factor, root).T)
        mean = self.smoother @ belief.mean
        deviation = WIDENING * (self.smoother @ belief.spread).norm(dim=1)
        influence = whitened(factor, design).square().sum(0) / noise_ratio  # of each score in its own prediction
        leverage = trend.square().sum(1) + influence
        missed = (y - design @ coefficients) / (1 - leverage).clamp(min=1e-6)  # each score predicted from the others
        total = (scores - scores.mean()).square().sum()
        varies = total > len(scores) * ROUNDING**2
        extras = {
            "masks": scores.new_tensor(len(scores)),
            "mean_score": scores.mean(),
            "r2": torch.where(varies, 1 - missed.square().sum() / total, torch.zeros_like(total)),
            "effective_masks": influence.sum(),
            "prior_agreement": (standardised(mean) * standardised(self.smoother @ self.direction)).mean(),
            "certainty": certainty(mean, deviation),
        }
        return Fit(mean, deviation, extras, belief)


@dataclass(frozen=True)
class Ridge:
    """Ridge regressions with coefficients ~ N(0, σ²I) and noise of variance σ²η."""

    gram: Tensor  # (…, p, p)
    moment: Tensor  # (…, p)
    squares: Tensor  # 0-d: the sum of the squared scores
    freedom: int

    def solved(self, noise_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """The Cholesky factor of the precision of the coefficients in units of 1/σ², and the most likely σ²."""
        factor = torch.linalg.cholesky(self.gram / noise_ratio + torch.ones_like(self.moment).diag())
        return factor, self.variance(whitened(factor, self.moment[None]).square().sum(), noise_ratio)

    def variance(self, explained: Tensor, noises: Tensor) -> Tensor:
        """The σ² of the largest likelihood; ``explained``: squares of the whitened moments."""
        left = (self.squares - explained / noises).clamp(min=self.freedom * ROUNDING**2)
        return left / (self.freedom * noises)

    def likelihoods(self, noises: Tensor, weights: Tensor, cross: Tensor, norm: Tensor, moment: Tensor) -> Tensor:
        """(…, noises, weights): logarithms, up to a constant, with one more column c in the design, √t c for weight t.

        ``cross`` (…, p): the other columns times c; ``norm``: c·c; ``moment``: c·y. Only the last row of the Cholesky
        factors depends on t.
        """
        noises = noises[:, None]
        identity = torch.ones_like(self.gram[..., 0, :]).diag_embed()[..., None, :, :]
        factors = torch.linalg.cholesky(self.gram[..., None, :, :] / noises[..., None] + identity)
        rows = torch.stack([self.moment, cross], -2)[..., None, :, :].expand(*factors.shape[:-2], 2, -1)
        moments, crossed = whitened(factors, rows).mT[..., None, :, :].unbind(-2)  # (…, noises, 1, p) each
        corner = 1 + weights * (norm - crossed.square().sum(-1) / noises) / noises
        last = weights.sqrt() * (moment - (moments * crossed).sum(-1) / noises) / corner.sqrt()
        variances = self.variance(moments.square().sum(-1) + last.square(), noises)
        log_determinants = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True) + corner.log()
        return -0.5 * (self.freedom * (variances.log() + noises.log()) + log_determinants)


def whitened(factor: Tensor, rows: Tensor) -> Tensor:
    """L⁻¹X' for lower triangular L (…, p, p) and rows X (…, m, p)."""
    return torch.linalg.solve_triangular(factor, rows.mT, upper=False)


def trend_basis(shares: Tensor) -> Tensor:
    """An orthonormal basis (M, ≤ 3) of what the score may do with the share of the patches that are present.

    Together with the mean effect this is a cubic. Few shares, as on tiny grids, leave fewer than three directions.
    """
    bump = shares * (1 - shares)
    columns = torch.stack([torch.ones_like(shares), bump, bump * (1 - 2 * shares)], 1)
    basis, values, _ = torch.linalg.svd(columns, full_matrices=False)
    return basis[:, values > 1e-9 * values[0]]


def standardised(values: Tensor) -> Tensor:
    """Mean 0 and variance 1; values that are constant up to rounding become 0."""
    centred = values - values.mean()
    deviation = centred.square().mean().sqrt()
    return torch.where(deviation > 1e-6 * values.abs().max(), centred / deviation, torch.zeros_like(values))


def certainty(mean: Tensor, deviation: Tensor) -> Tensor:
    """The probability, on average, that a patch of the top decile is above the threshold between it and the rest."""
    count = max(1, len(mean) // 10)
    ranked, order = mean.sort(descending=True)
    threshold = ranked[count - 1 : count + 1].mean()
    top = order[:count]
    return torch.special.ndtr((mean[top] - threshold) / deviation[top]).mean()


def in_double(values: Tensor) -> Tensor:
    """In double precision, on the CPU where the device has none."""
    return values.to("cpu" if values.device.type == "mps" else values.device).to(DOUBLE)
