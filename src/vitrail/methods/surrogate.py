"""Methods that fit something simple to the scores of random subsets: LIME, KernelSHAP, HSIC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.quasirandom import SobolEngine

from vitrail.engine.requests import Asking
from vitrail.errors import VitrailError
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import (
    Explained,
    MaskMethod,
    Space,
    Subject,
    refuse_baseline,
)
from vitrail.methods.registry import method


@dataclass(kw_only=True)
class SubsetMethod(MaskMethod):
    """Random sets of cells, present or not; in pixels an absent cell gets the colour ``baseline``.

    The cells are the patches; ``space="tokens"`` removes them instead of painting them.
    """

    output: Output = "probability"
    baseline: float = 0.0
    space: Space = "pixels"
    seed: int = 0

    def grid(self) -> tuple[int, int]:
        return self.model.cells

    def scores(self, subject: Subject, present: Tensor) -> Asking[Tensor]:
        """(M,): the scores of the sets (M, cells), True = present."""
        scorer = self.scorer(subject, self.output)
        if self.space == "tokens":
            refuse_baseline(self.baseline)
            return (yield from scorer.token_sets(present))
        return (yield scorer.painted(present, self.grid(), self.baseline))

    def check(self, samples: int) -> None:
        if samples < 2:
            raise VitrailError(f"{self.info.name} needs at least 2 samples, but got {samples}.")


@method("lime", family="mask", signed=True, needs="logits", cost=(1000, 0), paper="Ribeiro et al. 2016")
@dataclass(kw_only=True)
class Lime(SubsetMethod):
    """Weights of a ridge regression of the score on which patches are present, near samples counting more.

    The score is the logit; the paper's is the probability, ``output="probability"``.
    ``sigma``: width of the kernel exp(−D²/σ²) over the cosine distance D to the whole image; ``ridge``: the penalty.
    """

    output: Output = "logit"
    samples: int = 1000
    sigma: float = 0.25
    ridge: float = 1.0

    version: ClassVar[int] = 2

    def explain_one(self, subject: Subject) -> Explained:
        self.check(self.samples)
        if not (self.sigma > 0 and self.ridge >= 0):
            raise VitrailError(f"sigma must be above 0 and ridge not below, but got {self.sigma} and {self.ridge}.")
        rows, columns = self.grid()
        draw = torch.Generator().manual_seed(self.seed)
        present = torch.rand((self.samples, rows * columns), generator=draw, dtype=torch.float32) < 0.5
        present = present.to(subject.image.device)
        scores = yield from self.scores(subject, present)
        weights = ridge_regression(present, scores, self.sigma, self.ridge)
        return weights.view(rows, columns), {"samples": scores.new_tensor(self.samples), "mean_score": scores.mean()}


def ridge_regression(present: Tensor, scores: Tensor, sigma: float, ridge: float) -> Tensor:
    """β minimising Σ w (y − β₀ − β·z)² + ridge ‖β‖², the intercept free, in double precision."""
    z = F.pad(present.double(), (0, 1), value=1.0)
    distance = 1 - present.double().mean(1).sqrt()  # 1 − cos(z, all ones)
    weights = torch.exp(-(distance**2) / sigma**2)
    penalty = torch.full_like(z[0], ridge)
    penalty[-1] = 0
    normal = z.T @ (weights[:, None] * z) + penalty.diag()
    return torch.linalg.solve(normal, z.T @ (weights * scores.double()))[:-1].to(scores.dtype)


@method("kernel_shap", family="mask", signed=True, needs="logits", cost=(1000, 0), paper="Lundberg & Lee 2017")
@dataclass(kw_only=True)
class KernelShap(SubsetMethod):
    """Shapley values of the patches, from coalitions drawn by the Shapley kernel in opposite pairs.

    They add up to the score of the image minus that of nothing: of the baseline, or in token space of the prefix tokens
    alone, or, where the head pools patches, of the mean-colour image.
    """

    samples: int = 1000

    def explain_one(self, subject: Subject) -> Explained:
        self.check(self.samples)
        rows, columns = self.grid()
        present = coalitions(self.samples, rows * columns, self.seed).to(subject.image.device)
        ends = torch.stack([torch.zeros_like(present[0]), torch.ones_like(present[0])])
        both = yield from self.scores(subject, torch.cat([ends, present]))
        (empty, full), scores = both[:2], both[2:]
        values = shapley_fit(present, scores, empty, full)
        gained = full - empty
        gap = (values.sum() - gained).abs() / gained.abs().clamp(min=1)  # relative, as of other methods
        split = {"score": full, "score_patches": values.sum(), "score_baseline": empty}
        extras = {"samples": scores.new_tensor(len(scores)), "completeness_gap": gap, **split}
        return values.view(rows, columns), extras


def coalitions(count: int, players: int, seed: int) -> Tensor:
    """(count, players): sizes s drawn ∝ 1/(s(M−s)), members at random, each followed by its complement."""
    draw = torch.Generator().manual_seed(seed)
    if players == 1:
        return torch.ones(count, 1, dtype=torch.bool)
    sizes = torch.arange(1, players)
    odds = 1 / (sizes * (players - sizes)).double()
    half = (count + 1) // 2
    drawn = sizes[torch.multinomial(odds, half, replacement=True, generator=draw)]
    order = torch.rand((half, players), generator=draw, dtype=torch.float32).argsort(1).argsort(1)
    members = order < drawn[:, None]
    return torch.stack([members, ~members], dim=1).flatten(0, 1)[:count]


def shapley_fit(present: Tensor, scores: Tensor, empty: Tensor, full: Tensor) -> Tensor:
    """φ minimising Σ (v(S) − v(∅) − Σ_{i∈S} φ_i)² with Σ φ = v(N) − v(∅).

    That is equal shares plus a free part that sums to zero.
    """
    z = present.double()
    share = (full - empty).double() / z.shape[1]
    centred = z - z.mean(1, keepdim=True)  # the part of each row that moves a vector summing to zero
    rest = scores.double() - empty.double() - z.sum(1) * share
    # never of full rank, which only this CPU driver allows for
    free = torch.linalg.lstsq(centred.cpu(), rest[:, None].cpu(), driver="gelsd").solution[:, 0].to(z.device)
    return (share + free - free.mean()).to(scores.dtype)


@method("hsic", family="mask", signed=False, level="token", needs="logits", cost=(500, 0), paper="Novello et al. 2022")
@dataclass(kw_only=True)
class Hsic(SubsetMethod):
    """Dependence (HSIC) between the presence of a cell and the score, over a Sobol design.

    ``cells``: the cells per side (8 in the authors' library); None = the patches. The score is the logit;
    ``output="probability"`` takes the probability.
    """

    output: Output = "logit"
    samples: int = 500
    cells: int | None = None

    version: ClassVar[int] = 2

    def grid(self) -> tuple[int, int]:
        if self.cells is None:
            return super().grid()
        if self.cells < 1 or self.space == "tokens":
            raise VitrailError(f'cells must be at least 1, and is for space="pixels" only; got {self.cells}.')
        return self.cells, self.cells

    def explain_one(self, subject: Subject) -> Explained:
        self.check(self.samples)
        rows, columns = self.grid()
        if rows * columns > SobolEngine.MAXDIM:
            raise VitrailError(f"hsic takes at most {SobolEngine.MAXDIM} cells, but got {rows} × {columns}.")
        engine = SobolEngine(rows * columns, scramble=True, seed=self.seed)
        present = (engine.draw(self.samples, dtype=torch.float32) < 0.5).to(subject.image.device)
        scores = yield from self.scores(subject, present)
        return dependence(present, scores).view(rows, columns), {"mean_score": scores.mean()}


def dependence(present: Tensor, scores: Tensor) -> Tensor:
    """(cells,): tr(HKH·HLH)/n with K = 3/2 − (x − x')² and L an RBF as wide as the median score.

    For zeros and ones HKH is 2·Hx(Hx)ᵀ, so all cells cost one product.
    """
    y = scores.double()
    width = y.quantile(0.5).abs()
    width = torch.where(width > 0, width, torch.ones_like(width))
    kernel = torch.exp(-((y[:, None] - y[None]) ** 2) / (2 * width**2))
    kernel = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    x = present.double() - present.double().mean(0)
    return (2 * (x * (kernel @ x)).sum(0) / len(y)).to(scores.dtype)
