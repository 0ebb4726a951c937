"""Measurements that one paper makes once: known to the registry only while its target is reproduced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vitrail.engine.scheduler import Asking, Scorer
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.methods.masking import patch_features
from vitrail.methods.vit_cx import VitCx, extremes, scaled, similarities
from vitrail.metrics import base
from vitrail.metrics.base import NOT_APPLICABLE, Case, MapMetric, MethodMetric, Metric, MetricInfo, Needs, Scored
from vitrail.metrics.curves import TOP, ranks
from vitrail.metrics.tokens import TokenDeletionAccuracy

BINS = 20  # of the histogram of similarities, from 0 to 1

OWN: dict[str, type[Metric]] = {}

M = TypeVar("M", bound=type[Metric])


def _own(name: str, *, higher_is_better: bool, needs: Needs = "map", paper: str) -> Callable[[M], M]:
    def add(cls: M) -> M:
        summary = (inspect.getdoc(cls) or "").split("\n")[0]
        cls.info = MetricInfo(name, "papers", higher_is_better, needs, ("default",), cls.parameters(), paper, summary)
        OWN[name] = cls
        return cls

    return add


@contextmanager
def paper_metrics() -> Iterator[None]:
    """While it lasts the papers' own measurements can be asked for by name."""
    known = dict(base._METRICS)
    base._METRICS.update(OWN)
    try:
        yield
    finally:
        for name in OWN.keys() - known.keys():
            del base._METRICS[name]


@_own("extra", higher_is_better=False, paper="ViT-CX")
@dataclass(kw_only=True)
class Extra(MapMetric):
    """What a method measured on its way: the number of its masks, say."""

    name: str = "masks"

    def score(self, case: Case) -> Scored:
        return Scored(case.extras[self.name]) if self.name in case.extras else NOT_APPLICABLE


@_own("mask_redundancy", higher_is_better=False, paper="ViT-CX, section 3.2")
@dataclass(kw_only=True)
class MaskRedundancy(MapMetric):
    """mSim: mean cosine similarity of two feature masks of the image; the curve is the histogram over all pairs.

    It belongs to the model and the image, whatever the map.
    """

    layer: Literal["norm1", "attention"] = "norm1"

    def score(self, case: Case) -> Scored:
        features = patch_features(case.view, case.pixels, self.layer).float()
        low, high = extremes(features, case.size)
        live = high > low  # a constant channel is no mask
        if int(live.sum()) < 2:
            return NOT_APPLICABLE
        similarity = similarities(scaled(features[live], case.size), case.size)
        count = len(similarity)
        pairs = similarity[*torch.triu_indices(count, count, 1, device=similarity.device)].clamp(0, 1)
        shares = torch.histc(pairs.float().cpu(), BINS, 0, 1) / len(pairs)
        return Scored(float(pairs.double().mean()), shares.double().tolist())


class _Recording(VitCx):
    """ViT-CX that keeps the scores of its masks."""

    kept: Tensor | None = None

    def scores(self, scorer: Scorer, image: Tensor, make: Callable[[slice], Tensor], count: int) -> Asking[Tensor]:
        self.kept = yield from super().scores(scorer, image, make, count)
        return self.kept


@_own("impact_scores", higher_is_better=False, needs="method", paper="ViT-CX, section 3.4")
@dataclass(kw_only=True)
class ImpactScores(MethodMetric):
    """Mean causal impact of ViT-CX's masks; the parts are the mean, the variance and the number of scores."""

    def measure(self, method: Method, cases: Sequence[Case]) -> list[Scored]:
        if not isinstance(method, VitCx):
            raise VitrailError(f"impact_scores are those of vit_cx, but the method is {method.info.name}.")
        recording = _Recording(method.model, **{name: getattr(method, name) for name in method.parameters()})
        found = []
        for case in cases:
            recording.explain(case.pixels, case.target)
            assert recording.kept is not None
            variance, mean = torch.var_mean(recording.kept.double(), correction=0)
            found.append(Scored(float(mean), parts=[float(mean), float(variance), float(len(recording.kept))]))
        return found

    @staticmethod
    def combine(parts: Tensor) -> Tensor:
        return parts[..., 0].mean(-1)


@_own("object_removed", higher_is_better=True, needs="region", paper="TIS, figure 4")
@dataclass(kw_only=True)
class ObjectRemoved(MapMetric):
    """Share of the object that is gone once the most important ``share`` of all pixels is removed."""

    share: float = 50 / 224
    seed: int = 0

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        region = case.region.flatten()
        if not region.any():
            return NOT_APPLICABLE
        gone = ranks(case.on_input, self.seed) < round(self.share * region.numel())
        return Scored(float(gone[region].double().mean()))


@_own("token_deletion_agreement", higher_is_better=False, needs="tokens", paper="LibraGrad")
@dataclass(kw_only=True)
class TokenDeletionAgreement(TokenDeletionAccuracy):
    """As ``token_deletion_accuracy``, but what counts is the class first predicted, whatever the label."""

    def accuracy(self, case: Case) -> Asking[Scored]:
        points = yield from self.points(case)
        return self.scored(case, (points[:, TOP] == case.predicted).double())
