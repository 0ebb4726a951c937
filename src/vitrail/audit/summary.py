"""The results of an audit: accuracy, calibration, classes, clusters and findings, the most suspicious first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.audit.clusters import OUTLIER, Clusters, cluster, describe
from vitrail.audit.patterns import Match, Pattern, Search
from vitrail.audit.records import Records
from vitrail.audit.removal import Effect
from vitrail.geometry import box_area
from vitrail.progress import shown

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
BINS = 10  # of the calibration
FOCUSED = 2.0  # times its share of the area: content with less of the evidence is not what the model looks at
NORMAL = 1.96  # quantile of 95 % intervals


@dataclass(frozen=True)
class Suspicion:
    """Recurring content and what it does to predictions."""

    name: str  # of the class
    pattern: Pattern
    effect: Effect

    @property
    def is_confirmed(self) -> bool:
        """Whether the model looks at the content and decides by it."""
        area = box_area(self.pattern.matches[0].box)
        return self.effect.decides and self.pattern.share >= FOCUSED * area

    @property
    def score(self) -> float:
        """In 0…1: the evidence on the content times how far it decides."""
        effect = self.effect
        decided = max(effect.fall - effect.control_fall, effect.taken - effect.control_taken, 0.0)
        return self.pattern.share * decided

    def words(self) -> list[str]:
        """The finding in sentences."""
        pattern, effect = self.pattern, self.effect
        sentences = [
            f"{len(pattern.matches)} images that the model calls {self.name} show the same detail "
            f"({percent(pattern.inside)} of those searched; {percent(pattern.outside)} of images of other classes).",
            f"On average {percent(pattern.share)} of the evidence for {self.name} lies on it, on "
            f"{percent(box_area(pattern.matches[0].box))} of the image.",
            f"Without it the probability of {self.name} falls by {points(effect.fall)} on average; without another "
            f"region of the same size by {points(effect.control_fall)}.",
        ]
        if effect.others:
            sentences.append(
                f"Pasted into {effect.others} images of other classes, it turns {percent(effect.taken)} of them into "
                f"{self.name}; another part of the same picture {percent(effect.control_taken)}."
            )
        return sentences


@dataclass(frozen=True)
class Totals:
    """Numbers of the whole set; None where no true class is known."""

    images: int
    labelled: int
    errors: int
    accuracy: float | None
    interval: tuple[float, float] | None  # 95 %, Wilson
    calibration_error: float | None
    confidence: float  # mean probability of the predicted class


@dataclass(frozen=True)
class Bin:
    """Predictions of similar probability."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass
class Summary:
    """Everything that the report shows. ``frame`` has a row per image, with cluster, outlier and suspicion."""

    records: Records
    frame: pd.DataFrame
    totals: Totals
    bins: Sequence[Bin]
    confusions: pd.DataFrame
    classes: pd.DataFrame
    clusters: pd.DataFrame
    suspicions: Sequence[Suspicion]
    evidence: Tensor
    maps: Mapping[str, Tensor] = field(default_factory=dict)  # mean evidence by class, "" = of all

    @property
    def confirmed(self) -> list[Suspicion]:
        """Suspicions that the model confirms, the strongest first."""
        return [suspicion for suspicion in self.suspicions if suspicion.is_confirmed]

    def headline(self) -> str:
        """The result in a sentence."""
        names = list(dict.fromkeys(suspicion.name for suspicion in self.confirmed))
        if not names:
            return "No class is suspicious: no recurring detail decides predictions."
        if len(names) == 1:
            return f"The class {names[0]} is suspicious: a detail that recurs in its images decides predictions."
        return f"{len(names)} classes are suspicious, recurring details decide predictions: {', '.join(names)}."


def find_patterns(records: Records) -> tuple[list[Pattern], dict[int, tuple[list[int], Clusters]]]:
    """The recurring content of every class, and its clusters with the images that they number."""
    search, evidence = Search(records), records.evidence()
    patterns: list[Pattern] = []
    clusters: dict[int, tuple[list[int], Clusters]] = {}
    for target in shown(search.classes, "patterns", "class"):
        appearance = search.appearance(target)
        patterns += search.patterns(appearance, target)
        clusters[target] = list(appearance.members), cluster(describe(evidence, appearance))
    return patterns, clusters


def summarise(
    records: Records, suspicions: Sequence[Suspicion], clusters: Mapping[int, tuple[list[int], Clusters]]
) -> Summary:
    """Puts the results together."""
    frame = records.frame.copy()
    ordered = sorted(suspicions, key=lambda suspicion: (not suspicion.is_confirmed, -suspicion.score))
    frame["cluster"], frame["outlier"] = _assigned(frame, clusters)
    frame["suspicion"] = _suspicion(len(frame), ordered)
    frame["evidence"] = [_words(row) for row in frame.to_dict("records")]
    evidence = records.evidence()
    names = sorted(set(frame["predicted"]))
    maps = {"": evidence.mean(0)} | {
        name: evidence[np.flatnonzero(frame["predicted"] == name).tolist()].mean(0) for name in names
    }
    classes = class_table(frame, ordered)
    return Summary(
        records=records,
        frame=frame,
        totals=totals_of(frame),
        bins=calibration(frame),
        confusions=confusions_of(frame),
        classes=classes,
        clusters=cluster_table(frame),
        suspicions=ordered,
        evidence=evidence,
        maps=maps,
    )


def totals_of(frame: pd.DataFrame) -> Totals:
    known = frame[frame["label"] >= 0]
    right = int(known["correct"].astype(bool).sum()) if len(known) else 0
    bins = calibration(frame)
    gap = sum(entry.count * abs(entry.accuracy - entry.confidence) for entry in bins)
    return Totals(
        images=len(frame),
        labelled=len(known),
        errors=len(known) - right,
        accuracy=right / len(known) if len(known) else None,
        interval=wilson(right, len(known)) if len(known) else None,
        calibration_error=gap / len(known) if len(known) else None,
        confidence=float(frame["probability"].mean()),
    )


def calibration(frame: pd.DataFrame) -> list[Bin]:
    """Accuracy by the probability of the predicted class, in bins of equal width."""
    known = frame[frame["label"] >= 0]
    places = np.minimum((known["probability"].to_numpy() * BINS).astype(int), BINS - 1)
    bins = []
    for place in range(BINS):
        inside = known[places == place]
        if len(inside):
            accuracy = float(inside["correct"].astype(float).mean())
            confidence = float(inside["probability"].mean())
            bins.append(Bin(place / BINS, (place + 1) / BINS, len(inside), confidence, accuracy))
    return bins


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, square = right / total, NORMAL**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = NORMAL / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def confusions_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Pairs of a true and a predicted class, the most frequent first; without right predictions."""
    wrong = frame[(frame["label"] >= 0) & (frame["true"] != frame["predicted"])]
    counts = wrong.groupby(["true", "predicted"]).agg(
        images=("image", "size"), probability=("probability", "mean"), example=("image", "first")
    )
    return counts.reset_index().sort_values(["images", "probability"], ascending=False).reset_index(drop=True)


def class_table(frame: pd.DataFrame, suspicions: Sequence[Suspicion]) -> pd.DataFrame:
    """A row per class, the most suspicious first: of the images that are predicted as it."""
    import pandas as pd

    scores: dict[str, float] = {}
    for suspicion in suspicions:
        if suspicion.is_confirmed:
            scores[suspicion.name] = max(scores.get(suspicion.name, 0.0), suspicion.score)
    lines = []
    for name in sorted({*frame["predicted"], *frame["true"].dropna()}):
        predicted, true = frame[frame["predicted"] == name], frame[frame["true"] == name]
        labelled = predicted[predicted["label"] >= 0]
        lines.append(
            {
                "class": name,
                "suspicion": scores.get(name, 0.0),
                "predicted": len(predicted),
                "true": len(true),
                "recall": _mean(true["correct"].astype(float)),
                "precision": _mean(labelled["correct"].astype(float)),
                "probability": _mean(predicted["probability"]),
                "trust": _mean(predicted["trust"]),
                "object": _mean(predicted["object"]),
                "object_area": _mean(predicted["object_area"]),
                "border": _mean(predicted["border"]),
                "corners": _mean(predicted["corners"]),
                "outliers": int((predicted["outlier"] > OUTLIER).sum()),
            }
        )
    table = pd.DataFrame(lines)
    return table.sort_values(["suspicion", "recall", "class"], ascending=[False, True, True]).reset_index(drop=True)


def cluster_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per cluster, the most suspicious first."""
    import pandas as pd

    lines = []
    for (name, number), inside in frame[frame["cluster"] >= 0].groupby(["predicted", "cluster"]):
        labelled = inside[inside["label"] >= 0]
        lines.append(
            {
                "class": name,
                "cluster": int(number),
                "images": len(inside),
                "suspicion": float(inside["suspicion"].mean()),
                "errors": int((~labelled["correct"].astype(bool)).sum()),
                "probability": _mean(inside["probability"]),
                "trust": _mean(inside["trust"]),
                "object": _mean(inside["object"]),
                "border": _mean(inside["border"]),
                "corners": _mean(inside["corners"]),
            }
        )
    columns = [
        "class",
        "cluster",
        "images",
        "suspicion",
        "errors",
        "probability",
        "trust",
        "object",
        "border",
        "corners",
    ]
    table = pd.DataFrame(lines, columns=columns)
    return table.sort_values(["suspicion", "images"], ascending=False).reset_index(drop=True)


def percent(share: float) -> str:
    """``67 %``"""
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def points(difference: float) -> str:
    """``12 points``, of percent."""
    number = f"{round(100 * difference)}".replace("-", "−")
    return f"{number} point{'' if number in ('1', '−1') else 's'}"


def _words(row: Mapping[str, Any]) -> str:
    """Where the evidence of an image lies, in a sentence."""
    edges = f"{percent(row['border'])} along the border and {percent(row['corners'])} in the corners of the image"
    if math.isnan(row["object"]):
        return f"Of the evidence, {edges}."
    inside, beside = percent(row["object"]), percent(row["background"])
    return f"{inside} of the evidence lies on the {row['true'] or 'object'}, {beside} beside it; {edges}."


def _assigned(
    frame: pd.DataFrame, clusters: Mapping[int, tuple[list[int], Clusters]]
) -> tuple[NDArray[np.int64], Floats]:
    """The cluster of every image within its class, −1 where it was not compared, and how unusual it is there."""
    numbers, distances = np.full(len(frame), -1, dtype=np.int64), np.full(len(frame), np.nan)
    for members, found in clusters.values():
        numbers[members], distances[members] = found.labels, found.distances
    return numbers, distances


def _suspicion(count: int, suspicions: Sequence[Suspicion]) -> Floats:
    """The share of each image's evidence on content that decides."""
    values = np.zeros(count)
    for suspicion in suspicions:
        if suspicion.is_confirmed:
            for match in suspicion.pattern.matches:
                values[match.image] = max(values[match.image], match.share)
    return values


def _mean(values: pd.Series) -> float:
    return float(values.mean()) if len(values) and values.notna().any() else math.nan


def best_matches(suspicion: Suspicion, most: int) -> list[Match]:
    """The images of a suspicion that show it best: those with most evidence on it."""
    return sorted(suspicion.pattern.matches, key=lambda match: -match.share)[:most]
