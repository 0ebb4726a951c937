"""Metrics specific to one paper: registered only while a target is reproduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vitrail.engine.requests import Asking, Traced
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.methods.masking import Scorer, Subject, features_of, features_spec
from vitrail.methods.vit_cx import VitCx, extremes, scaled, similarities
from vitrail.metrics.base import METRICS, NOT_APPLICABLE, Case, MapMetric, MethodMetric, Metric, Needs, Scored, metric
from vitrail.metrics.curves import TOP, ranks
from vitrail.metrics.tokens import TokenDeletionAccuracy
from vitrail.targets import Target

BINS = 20  # of the histogram of similarities, from 0 to 1

PAPER_METRICS: dict[str, type[Metric]] = {}

M = TypeVar("M", bound=type[Metric])


def _paper_metric(name: str, *, higher_is_better: bool, needs: Needs = "map", paper: str) -> Callable[[M], M]:
    def add(cls: M) -> M:
        with METRICS.scope():  # sets its info without registering it
            metric(name, family="papers", higher_is_better=higher_is_better, needs=needs, paper=paper)(cls)
        PAPER_METRICS[name] = cls
        return cls

    return add


@contextmanager
def paper_metrics() -> Iterator[None]:
    """Registers the papers' metrics within the context."""
    with METRICS.scope():
        for name, cls in PAPER_METRICS.items():
            METRICS.add(name, cls, cls.__module__)
        yield


@_paper_metric("extra", higher_is_better=False, paper="ViT-CX")
@dataclass(kw_only=True)
class Extra(MapMetric):
    """A by-product of a method, such as the number of its masks."""

    name: str = "masks"

    def score(self, case: Case) -> Scored:
        return Scored(case.extras[self.name]) if self.name in case.extras else NOT_APPLICABLE


@_paper_metric("mask_redundancy", higher_is_better=False, paper="ViT-CX, section 3.2")
@dataclass(kw_only=True)
class MaskRedundancy(MapMetric):
    """mSim: mean cosine similarity of two feature masks of the image; the curve is the histogram over all pairs.

    It depends on the model and the image, not on the map.
    """

    layer: Literal["norm1", "attention"] = "norm1"

    def ask(self, case: Case) -> Asking[Scored]:
        trace = yield Traced(case.batch, Target(), features_spec(case.view, self.layer))
        subject = Subject(image=case.pixels, logits=trace.logits, target=Target(), trace=trace, row=0)
        features = features_of(subject, case.view, self.layer)
        low, high = extremes(features, case.size)
        live = high > low  # a constant channel is not a mask
        if int(live.sum()) < 2:
            return NOT_APPLICABLE
        similarity = similarities(scaled(features[live], case.size), case.size)
        count = len(similarity)
        pairs = similarity[*torch.triu_indices(count, count, 1, device=similarity.device)].clamp(0, 1)
        shares = torch.histc(pairs.float().cpu(), BINS, 0, 1) / len(pairs)
        return Scored(float(pairs.double().mean()), shares.double().tolist())


@_paper_metric("impact_scores", higher_is_better=False, needs="method", paper="ViT-CX, section 3.4")
@dataclass(kw_only=True)
class ImpactScores(MethodMetric):
    """Mean causal impact of ViT-CX's masks; the parts are the mean, the variance and the number of scores."""

    def ask(self, method: Method, cases: Sequence[Case]) -> Asking[list[Scored]]:
        if not isinstance(method, VitCx):
            raise VitrailError(f"impact_scores requires the method vit_cx, but got {method.info.name}.")
        results = []
        for case in cases:
            recording = _RecordingVitCx(method.model, **method.params)
            yield from recording.explained(case.batch, Target(torch.tensor([case.target])))
            assert recording.recorded is not None
            variance, mean = torch.var_mean(recording.recorded.double(), correction=0)
            results.append(Scored(float(mean), parts=[float(mean), float(variance), float(len(recording.recorded))]))
        return results

    @staticmethod
    def combine(parts: Tensor) -> Tensor:
        return parts[..., 0].mean(-1)


@_paper_metric("object_removed", higher_is_better=True, needs="region", paper="TIS, figure 4")
@dataclass(kw_only=True)
class ObjectRemoved(MapMetric):
    """Share of the object that is removed with the most important ``share`` of all pixels."""

    share: float = 50 / 224
    seed: int = 0

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        region = case.region.flatten()
        if not region.any():
            return NOT_APPLICABLE
        removed = ranks(case.on_input, self.seed) < round(self.share * region.numel())
        return Scored(float(removed[region].double().mean()))


@_paper_metric("token_deletion_agreement", higher_is_better=False, needs="tokens", paper="LibraGrad")
@dataclass(kw_only=True)
class TokenDeletionAgreement(TokenDeletionAccuracy):
    """As ``token_deletion_accuracy``, but relative to the prediction on the intact image instead of the label."""

    def heights(self, case: Case, points: Tensor) -> Tensor:
        return (points[:, TOP] == case.predicted).double()


class _RecordingVitCx(VitCx):
    """ViT-CX that records the scores of its masks."""

    recorded: Tensor | None = None

    def scores(self, scorer: Scorer, make: Callable[[slice], Tensor], count: int) -> Asking[Tensor]:
        self.recorded = yield from super().scores(scorer, make, count)
        return self.recorded
