"""What an audit measures of every image, as metrics of a run: stored, resumed and batched as those of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.requests import Asking, Batch, Logits, concurrently
from vitrail.errors import VitrailError
from vitrail.geometry import Box, check_box, fill_boxes
from vitrail.methods.base import Method
from vitrail.methods.masking import Space
from vitrail.methods.storage import ask_storage
from vitrail.metrics.base import METRICS, Case, MapMetric, MethodMetric, Scored, metric
from vitrail.metrics.localization import mass, share_inside
from vitrail.metrics.presence import ask_present
from vitrail.metrics.trust import Trust, ask_trust
from vitrail.models.view import View
from vitrail.targets import Reading, Target

BORDER = 0.1  # of the height and of the width, at each edge
CORNER = 0.2  # of the height and of the width
PREDICTION, REMOVAL = "audit_prediction", "audit_removal"  # names of the metrics


@contextmanager
def audit_metrics() -> Iterator[None]:
    """Inside, the metrics of an audit are registered; they do not judge maps, so no listing of metrics has them."""
    with METRICS.scope():
        register_metrics()
        yield


def register_metrics() -> None:
    """Registers the metrics of an audit."""
    metric(PREDICTION, family="audit", higher_is_better=True, needs="method")(AuditPrediction)
    metric(REMOVAL, family="audit", higher_is_better=True)(AuditRemoval)


@dataclass(frozen=True)
class Prediction:
    """The prediction for an image and where its evidence lies; NaN = unknown.

    Shares are of the evidence for the predicted class, without patches that the network uses as storage.
    """

    probability: float  # of the predicted class
    true_probability: float
    second: float  # the class that comes next
    second_probability: float
    trust: float
    object: float  # share of the evidence on the objects
    object_area: float  # share of the image that they cover
    border: float
    corners: float

    @property
    def margin(self) -> float:
        """How far the predicted class is ahead of the next."""
        return self.probability - self.second_probability

    def parts(self, storage: Sequence[int]) -> list[float]:
        """As numbers; the storage patches follow."""
        return [*astuple(self), *map(float, storage)]

    @classmethod
    def read(cls, parts: Sequence[float]) -> tuple[Prediction, list[int]]:
        """From ``parts``: the prediction and its storage patches."""
        count = len(fields(cls))
        return cls(*map(float, parts[:count])), [int(patch) for patch in parts[count:]]


@dataclass(kw_only=True)
class AuditPrediction(MethodMetric):
    """Prediction, trust and places of the evidence of an image."""

    trust: bool = True

    def ask(self, method: Method, cases: Sequence[Case]) -> Asking[list[Scored]]:
        view = method.model
        batch = Batch(view, torch.cat([case.pixels for case in cases]))
        target = Target(torch.tensor([case.target for case in cases]))
        askers: list[Asking[Any]] = [ask_storage(batch, target)] if view.has_tokens else []
        askers += [ask_trust(case) for case in cases] if self.trust else []
        answers = yield from concurrently(askers)
        logits = yield Logits(batch)
        storage = answers[0] if view.has_tokens else torch.zeros(len(cases), 0, dtype=torch.bool)
        trusts: list[Trust | None] = answers[-len(cases) :] if self.trust else [None] * len(cases)
        probabilities = view.probabilities(logits).cpu()
        return [
            self._scored(case, probabilities[i], storage[i].nonzero()[:, 0].tolist(), trusts[i])
            for i, case in enumerate(cases)
        ]

    def _scored(self, case: Case, probabilities: Tensor, storage: list[int], trust: Trust | None) -> Scored:
        others = probabilities.clone()
        others[case.target] = -1
        second = int(others.argmax())
        weights = evidence_of(case, storage)
        region = case.region
        prediction = Prediction(
            probability=float(probabilities[case.target]),
            true_probability=math.nan if case.label is None else float(probabilities[case.label]),
            second=float(second),
            second_probability=float(probabilities[second]),
            trust=math.nan if trust is None else trust.score,
            object=math.nan if region is None else share_inside(weights, region),
            object_area=math.nan if region is None else float(region.float().mean()),
            border=share_inside(weights, border_of(case.size).to(weights.device)),
            corners=share_inside(weights, corners_of(case.size).to(weights.device)),
        )
        return Scored(prediction.probability, parts=prediction.parts(storage))


@dataclass(kw_only=True)
class AuditRemoval(MapMetric):
    """The prediction without the patches of a box, which is given in shares of the width and of the height."""

    x0: float = 0.0
    y0: float = 0.0
    x1: float = 1.0
    y1: float = 1.0

    def ask(self, case: Case) -> Asking[Scored]:
        """Parts: the class that is then predicted, and its probability."""
        box = check_shares((self.x0, self.y0, self.x1, self.y1))
        (probabilities,) = yield from ask_without(case, cells_in(case.view, box)[None])
        predicted = int(probabilities.argmax())
        return Scored(float(probabilities[case.target]), parts=[float(predicted), float(probabilities[predicted])])


def ask_without(case: Case, removed: Tensor) -> Asking[Tensor]:
    """(M, C): the probabilities without the cells of each mask (M, rows, columns), bool."""
    if bool(removed.flatten(1).all(1).any()):
        raise VitrailError("the region covers the whole image: nothing is left to predict from; give a smaller one.")
    space: Space = "tokens" if case.view.has_tokens else "pixels"
    logits = yield from ask_present(case, ~removed, space, Reading(), (), "removal")
    return case.view.probabilities(logits).cpu()


def evidence_of(case: Case, storage: Sequence[int]) -> Tensor:
    """(H, W): the evidence for the class at the model input, none on storage patches."""
    weights = without_storage(mass(case.map), storage, case.view.cells)
    return F.interpolate(weights[None, None].double(), size=case.size, mode="nearest-exact")[0, 0]


def without_storage(weights: Tensor, storage: Sequence[int], cells: tuple[int, int]) -> Tensor:
    """Weights (h, w) with none on some of the patches (rows, columns), which are numbered row by row."""
    stored = torch.zeros(cells[0] * cells[1], device=weights.device)
    stored[list(storage)] = 1
    covered = F.interpolate(stored.view(1, 1, *cells), size=weights.shape, mode="nearest-exact")[0, 0] > 0
    return weights.masked_fill(covered, 0)


def border_of(size: tuple[int, int]) -> Tensor:
    """(H, W) bool: the strip along the edges."""
    height, width = size
    inner = (BORDER * width, BORDER * height, (1 - BORDER) * width, (1 - BORDER) * height)
    return ~fill_boxes([inner], size)


def corners_of(size: tuple[int, int]) -> Tensor:
    """(H, W) bool: a rectangle at each corner."""
    height, width = size
    across, down = CORNER * width, CORNER * height
    sides = [(0.0, across), (width - across, float(width))]
    ends = [(0.0, down), (height - down, float(height))]
    return fill_boxes([(x0, y0, x1, y1) for x0, x1 in sides for y0, y1 in ends], size)


def check_shares(box: Box) -> Box:
    """A box in shares of the width and of the height."""
    box = check_box(box)
    if min(box) < 0 or max(box) > 1:
        raise VitrailError(
            f"a region is X0,Y0,X1,Y1 in shares of the width and of the height, from 0 to 1, but got {box}."
        )
    return box


def cells_in(view: View, box: Box) -> Tensor:
    """(rows, columns) bool: the cells that a box, in shares, covers by half or more; at least the one at its centre."""
    (rows, columns), (x0, y0, x1, y1) = view.cells, box
    cells = (_covered(rows, y0, y1)[:, None] * _covered(columns, x0, x1)) >= 0.5
    row, column = int((y0 + y1) / 2 * rows), int((x0 + x1) / 2 * columns)
    cells[min(row, rows - 1), min(column, columns - 1)] = True
    return cells


def _covered(count: int, low: float, high: float) -> Tensor:
    """The share of each of ``count`` equal intervals of 0…1 that lies between two places."""
    starts = torch.arange(count, dtype=torch.float64) / count
    return ((starts + 1 / count).clamp(max=high) - starts.clamp(min=low)).clamp(min=0) * count
