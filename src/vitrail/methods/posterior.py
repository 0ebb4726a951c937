"""posterior: what a white-box map makes of the network, corrected by what token subsets say of it, with error bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.requests import Asking, Batch, Logits, Traced, check_finite, concurrently
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.aggregation import Aggregated, SkipPlus
from vitrail.methods.base import Attribution, TokenMethod
from vitrail.methods.decomposition import DecompX
from vitrail.methods.masking import SturdyMaskMethod, Subject, features_of
from vitrail.methods.registry import method
from vitrail.targets import Target

RATIOS = tuple(share / 10 for share in range(1, 10))  # of the patches that a subset keeps
LENGTHS = (1.0, 2.0, 4.0)  # length scales ℓ of the prior, in patches
WEIGHTS = (0.0, 0.3, 1.0, 3.0, 10.0)  # prior variance of the white-box map, that of a patch being 1
NOISES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # variance of a score, that of a patch being 1
NUGGET = 0.05  # share of a patch's variance that no other patch shares
LEVEL = 100.0  # prior variance of the mean effect, which is all but free
FEWEST = 16  # masks: below, the trend alone takes most of them
ROUND = 64  # masks between two looks at the certainty
# The likelihood of few masks prefers a prior that is smoother than the effects are, so that errors come out too small:
# widened by this factor, 90 % intervals hold the values of a run with 8,192 masks (benchmarks/coverage.py).
WIDENED = 1.3
SATURATED = 1e-4  # probabilities closer to 0 or 1 count as this close
DOUBLE = torch.float64


@method("posterior", family="mask", signed=True, cost=(132, 1), paper="vitrail")
@dataclass(kw_only=True)
class Posterior(TokenMethod, SturdyMaskMethod):
    """Effects of the patches on the score: a Gaussian prior about ``decompx.skipplus``, updated by token subsets.

    The score of a subset S is b(|S|) + Σ_{i∈S} w_i + noise, with a cubic b and
    w ~ N(0, σ²(K + t·dd')): d is the standardised ``decompx.skipplus`` map, K falls with the distance of two patches
    and rises with the similarity of their features. Length scale, t and noise maximise the marginal likelihood. The map
    is the posterior mean, the effect of each patch shared with its neighbours (``smoothing``: standard deviation in
    patches; 0 = none), and ``error`` its standard deviation.

    ``scale``: what is explained, the log-odds of the class or its probability. ``masks``: the most that are asked for;
    with ``until`` they come in rounds, and the last is the one after which the patches of the top decile belong there
    with that probability on average.
    """

    masks: int = 256
    scale: Literal["log_odds", "probability"] = "log_odds"
    smoothing: float = 0.5
    until: float | None = None
    seed: int = 0

    def needs(self) -> Sequence[TraceSpec]:
        last = self.model.num_layers - 1
        return [*self.prior.needs(), TraceSpec.of({"x"}, [0]), TraceSpec.of({"u"}, [last])]

    @property
    def prior(self) -> Aggregated:
        return SkipPlus(DecompX)(self.model)

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        self.check()
        *traces, tokens, features = yield [Traced(batch, target, spec) for spec in self.needs()]
        logits = yield Logits(batch)
        check_finite(self.model, logits)
        target = target.resolved(self.model, logits)
        priors = self.prior.read(*traces).map
        images = batch.images.split(1)
        fits = yield from concurrently(
            [
                self.fit(
                    Subject(image=images[i], logits=logits[i : i + 1], target=target.row(i), trace=tokens, row=i),
                    priors[i],
                    features,
                )
                for i in range(len(batch))
            ]
        )
        maps, errors = (torch.stack([getattr(fit, name) for fit in fits]) for name in ("mean", "deviation"))
        grid = (len(batch), *self.model.grid)
        extras = {name: torch.stack([fit.extras[name] for fit in fits]) for name in fits[0].extras}
        return Attribution(maps.view(grid), extras, errors.view(grid))

    def check(self) -> None:
        if self.masks < FEWEST:
            raise VitrailError(f"posterior needs at least {FEWEST} masks, but got {self.masks}.")
        if self.until is not None and not 0.5 <= self.until < 1:
            raise VitrailError(f"until must be a probability of at least 0.5 and below 1, but got {self.until}.")
        if not 0 <= self.smoothing < math.inf:
            raise VitrailError(f"smoothing must be at least 0, but got {self.smoothing}.")

    def fit(self, subject: Subject, prior: Tensor, features: Trace) -> Asking[Fit]:
        """Asks for the scores of subsets, in rounds if ``until`` is given."""
        scorer = self.scorer(subject, "logit" if subject.target.against is not None else "probability")
        patches = features_of(replace(subject, trace=features), self.model, "norm1").flatten(1).T
        model = Additive(prior.flatten().to(DOUBLE), patches.to(DOUBLE), self.model.grid, self.smoothing)
        subsets = model.draw(self.masks, self.seed)
        count = self.masks if self.until is None else ROUND
        scores: list[Tensor] = []
        while True:
            asked = sum(len(part) for part in scores)
            scores.append(self.scaled((yield from scorer.token_sets(subsets[asked : asked + count])), scorer.output))
            values = torch.cat(scores)
            fit = model.fit(subsets[: len(values)], values)
            if len(values) == self.masks or (self.until is not None and fit.extras["certainty"] >= self.until):
                return fit

    def scaled(self, scores: Tensor, output: str) -> Tensor:
        """Scores in double precision; between two classes, the difference of their logits is the log-odds."""
        scores = scores.to(DOUBLE)
        return scores if output == "logit" or self.scale == "probability" else torch.logit(scores, eps=SATURATED)


@dataclass(frozen=True)
class Fit:
    """The posterior of the map: mean and standard deviation (N,), and what was measured (0-d)."""

    mean: Tensor
    deviation: Tensor
    extras: dict[str, Tensor]


class Additive:
    """The additive model of one image: the prior of its patches' effects, subsets drawn by it, and the fit."""

    def __init__(self, prior: Tensor, features: Tensor, grid: tuple[int, int], smoothing: float):
        rows, columns = (torch.arange(side, dtype=DOUBLE, device=prior.device) for side in grid)
        places = torch.cartesian_prod(rows, columns)
        self.distances = torch.cdist(places, places) ** 2
        self.direction = standardised(prior)
        unit = F.normalize(features - features.mean(0), dim=1)
        self.similarity = ((1 + unit @ unit.T) / 2) ** 2
        weights = self.near(smoothing) if smoothing else torch.eye(len(prior), dtype=DOUBLE, device=prior.device)
        self.smooth = weights / weights.sum(0)  # columns sum to 1: what all patches add up to stays

    def near(self, length: float) -> Tensor:
        return torch.exp(-self.distances / (2 * length**2))

    def root(self, length: float) -> Tensor:
        """The Cholesky factor of K (N, N)."""
        diagonal = torch.full_like(self.direction, NUGGET)
        return torch.linalg.cholesky((1 - NUGGET) * self.near(length) * self.similarity + diagonal.diag())

    def draw(self, count: int, seed: int) -> Tensor:
        """(count, N): the patches that are largest in draws from the prior, each subset followed by its complement."""
        generator, patches = torch.Generator().manual_seed(seed), len(self.direction)
        half = (count + 1) // 2
        normal = torch.randn((half, patches + 1), generator=generator, dtype=DOUBLE).to(self.direction.device)
        shares = torch.tensor(RATIOS, dtype=DOUBLE)[torch.randint(len(RATIOS), (half,), generator=generator)]
        sizes = (shares * patches).round().clamp(1, max(patches - 1, 1)).to(self.direction.device)
        values = normal[:, :-1] @ self.root(LENGTHS[1]).T + normal[:, -1:] * self.direction
        kept = values.argsort(1, descending=True).argsort(1) < sizes[:, None]
        return torch.stack([kept, ~kept], dim=1).flatten(0, 1)[:count]

    def fit(self, subsets: Tensor, scores: Tensor) -> Fit:
        """The posterior under the length scale, weight of the prior map and noise that explain the scores best.

        Effects are w = R u, u ~ N(0, σ²I), with R = [root of K, √t d, √LEVEL 1]; the trend b is projected out, and σ²
        is the one of the largest restricted likelihood.
        """
        present = subsets.to(DOUBLE)
        share = present.mean(1)
        # with the mean effect, which is in w, a cubic of the share; b is equal for nothing and all
        trend = torch.stack([torch.ones_like(share), share * (1 - share), share * (1 - share) * (1 - 2 * share)], 1)
        basis = torch.linalg.qr(trend)[0]

        def detrended(values: Tensor) -> Tensor:
            return values - basis @ (basis.T @ values)

        y, freedom = detrended(scores), len(scores) - trend.shape[1]
        ones = torch.ones_like(self.direction)
        roots = [torch.cat([self.root(length), torch.stack([self.direction, ones], 1)], 1) for length in LENGTHS]
        designs = torch.stack([detrended(present @ root) for root in roots])  # (lengths, M, N + 2)
        weights = torch.tensor(WEIGHTS, dtype=DOUBLE, device=y.device).sqrt()
        columns = torch.ones(len(WEIGHTS), designs.shape[2], dtype=DOUBLE, device=y.device)
        columns[:, -2], columns[:, -1] = weights, math.sqrt(LEVEL)
        gram = (designs.mT @ designs)[:, None] * columns[:, :, None] * columns[:, None]  # (lengths, weights, p, p)
        moment = (designs.mT @ y)[:, None] * columns
        noises = torch.tensor(NOISES, dtype=DOUBLE, device=y.device)
        identity = torch.eye(gram.shape[-1], dtype=DOUBLE, device=y.device)
        factors = torch.linalg.cholesky(gram[:, :, None] / noises[:, None, None] + identity)
        moments = moment[:, :, None, :, None].expand(*factors.shape[:-1], 1)
        solved = torch.linalg.solve_triangular(factors, moments, upper=False)[..., 0]
        unexplained = (y @ y - solved.square().sum(-1) / noises).clamp(min=torch.finfo(DOUBLE).tiny) / noises
        variance = unexplained / freedom
        log_determinants = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1) + freedom * noises.log()
        likelihood = -0.5 * (freedom * variance.log() + log_determinants)
        i, j, k = torch.unravel_index(likelihood.argmax(), likelihood.shape)
        factor, noise = factors[i, j, k], noises[k]
        root = torch.stack(roots)[i] * columns[j]
        design = designs[i] * columns[j]
        effects = torch.cholesky_solve(moment[i, j][:, None], factor)[:, 0] / noise
        shown = self.smooth @ root
        mean = shown @ effects
        spread = torch.linalg.solve_triangular(factor, shown.T, upper=False)
        deviation = WIDENED * (variance[i, j, k] * spread.square().sum(0)).sqrt()
        leverage = basis.square().sum(1)
        leverage = leverage + torch.linalg.solve_triangular(factor, design.T, upper=False).square().sum(0) / noise
        missed = (y - design @ effects) / (1 - leverage).clamp(min=1e-6)  # each score predicted from the others
        total = (scores - scores.mean()).square().sum()
        extras = {
            "masks": scores.new_tensor(len(scores)),
            "mean_score": scores.mean(),
            "r2": torch.where(total > 0, 1 - missed.square().sum() / total, torch.zeros_like(total)),
            "prior_agreement": (standardised(mean) * standardised(self.smooth @ self.direction)).mean(),
            "certainty": certainty(mean, deviation),
        }
        return Fit(mean, deviation, extras)


def standardised(values: Tensor) -> Tensor:
    """Mean 0 and variance 1; constant values become 0."""
    centred = values - values.mean()
    scale = centred.square().mean().sqrt()
    return centred / torch.where(scale > 0, scale, torch.ones_like(scale))


def certainty(mean: Tensor, deviation: Tensor) -> Tensor:
    """How probable it is, on average, that a patch of the top decile is above the threshold between it and the rest."""
    count = max(1, len(mean) // 10)
    ranked, order = mean.sort(descending=True)
    threshold = ranked[count - 1 : count + 1].mean()
    chosen = order[:count]
    return torch.special.ndtr((mean[chosen] - threshold) / deviation[chosen].clamp(min=1e-12)).mean()
