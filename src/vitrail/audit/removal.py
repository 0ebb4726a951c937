"""Tests of a suspicion: predict again without a region, and with a region of one image pasted into others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.audit.measures import ask_without, cells_in, check_shares
from vitrail.audit.patterns import Match, Pattern
from vitrail.data.base import DataSet
from vitrail.data.images import ImageSource, read_image
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Logits, concurrently
from vitrail.engine.scheduler import Scheduler
from vitrail.errors import VitrailError
from vitrail.geometry import Box
from vitrail.metrics.base import Case, average
from vitrail.models.loading import as_view
from vitrail.models.view import View

TRIED = 24  # images per test
MARGIN = 0.04  # by which a region is larger than the window that was found, in shares
DECISIVE = 0.1  # difference to the control from which content decides


@dataclass(frozen=True)
class Removal:
    """The prediction for an image with and without a region."""

    predicted: str
    probability: float
    predicted_without: str
    probability_without: float  # of the class that was predicted before

    @property
    def changed(self) -> bool:
        return self.predicted != self.predicted_without

    def words(self) -> str:
        """The result in a sentence."""
        before, after = f"{self.probability:.0%}", f"{self.probability_without:.0%}"
        outcome = f"the prediction becomes {self.predicted_without}" if self.changed else "the prediction stays"
        return f"without the region {self.predicted} goes from {before} to {after}, and {outcome}."


def without_region(model: View | nn.Module | str, image: ImageSource, box: Box) -> Removal:
    """Predicts an image again without a region.

    Args:
        model: a view, a module that ``wrap`` accepts, or a name that ``load`` accepts.
        image: path, PIL image or uint8 array.
        box: (x0, y0, x1, y1) in shares of the width and of the height of the model input. Its patches are removed from
            the sequence; a model without tokens sees the image's mean colour there.
    """
    view = as_view(model)
    with own_modes():
        pixels = view.check_images(view.preprocess(read_image(image))[None], view.precision)
        (asked,) = Scheduler().run([_ask_removal(view, pixels, cells_in(view, check_shares(box))[None])])
    before, (after,) = asked
    first, second = int(before.argmax()), int(after.argmax())
    return Removal(view.label(first), float(before[first]), view.label(second), float(after[first]))


def _ask_removal(view: View, pixels: Tensor, removed: Tensor) -> Asking[tuple[Tensor, Tensor]]:
    """The probabilities (C,) of an image (1, 3, H, W), and (M, C) without the cells of each mask."""
    batch = Batch(view, pixels)
    logits = yield Logits(batch)
    whole = view.probabilities(logits)[0].cpu()
    target = int(whole.argmax())
    blank = torch.zeros(view.cells)
    case = Case(view=view, pixels=pixels, map=blank, target=target, predicted=target)
    return whole, (yield from ask_without(case, removed))


@dataclass(frozen=True)
class Effect:
    """What content does to predictions, and what a region beside it does; shares and means over images."""

    fall: float  # of the probability without the content
    control_fall: float  # without another region of the same size
    taken: float  # share of images of other classes that get the class when the content is pasted in
    control_taken: float  # when another part of the same picture is
    tried: int  # images of the class
    others: int  # images of other classes

    @property
    def decides(self) -> bool:
        """Whether the content does more than other regions."""
        return max(self.fall - self.control_fall, self.taken - self.control_taken) >= DECISIVE


def measure_effect(view: View, data: DataSet, places: Sequence[int], pattern: Pattern, others: Sequence[int]) -> Effect:
    """Removes and transplants the content of a pattern.

    Args:
        view: the model.
        data: the images.
        places: position in the data of every image that the pattern numbers.
        pattern: the content.
        others: images of other predicted classes.
    """
    matches = pattern.matches[:TRIED]
    others = others[:: max(1, len(others) // TRIED)][:TRIED]
    with own_modes():
        pixels = {m.image: _pixels(view, data, places[m.image]) for m in matches}
        falls, controls = _falls(view, pattern.target, matches, pixels)
        donor = matches[0]
        region = widened(donor.box)
        pasted = []
        for image in others:
            into = _pixels(view, data, places[image])
            pasted += [_pasted(into, pixels[donor.image], box) for box in (region, _opposite(region))]
        taken = (
            _share_predicted(view, pasted[0::2], pattern.target),
            _share_predicted(view, pasted[1::2], pattern.target),
        )
    return Effect(falls, controls, *taken, len(matches), len(others))


def _falls(view: View, target: int, matches: Sequence[Match], pixels: dict[int, Tensor]) -> tuple[float, float]:
    def ask(match: Match) -> Asking[Tensor]:
        region = widened(match.box)
        removed = torch.stack([cells_in(view, region), cells_in(view, _opposite(region))])
        whole, without = yield from _ask_removal(view, pixels[match.image], removed)
        return whole[target] - without[:, target]

    falls: Any = Scheduler().run([concurrently([ask(match) for match in matches])])[0]
    drops = torch.stack(falls)
    return average(drops[:, 0]), average(drops[:, 1])


def _share_predicted(view: View, images: Sequence[Tensor], target: int) -> float:
    def ask(batch: Batch) -> Asking[Tensor]:
        return (yield Logits(batch))

    if not images:
        return 0.0
    batches = [Batch(view, torch.cat(list(images[start : start + 8]))) for start in range(0, len(images), 8)]
    logits = torch.cat(Scheduler().run([ask(batch) for batch in batches]))
    return average((view.class_scores(logits).argmax(1) == target).float())


def _pixels(view: View, data: DataSet, position: int) -> Tensor:
    return view.check_images(view.preprocess(data[position].image)[None], view.precision)


def widened(box: Box) -> Box:
    """The region that is removed or pasted for content at a box."""
    x0, y0, x1, y1 = box
    return max(0.0, x0 - MARGIN), max(0.0, y0 - MARGIN), min(1.0, x1 + MARGIN), min(1.0, y1 + MARGIN)


def _opposite(box: Box) -> Box:
    """A region of the same size on the other side of the image, or beside the box where it is at the centre."""
    x0, y0, x1, y1 = box
    if abs(x0 + x1 - 1) >= x1 - x0:
        return 1 - x1, y0, 1 - x0, y1
    if abs(y0 + y1 - 1) >= y1 - y0:
        return x0, 1 - y1, x1, 1 - y0
    return (0.0, 0.0, x1 - x0, y1 - y0) if x0 + y0 > (1 - x1) + (1 - y1) else (1 - (x1 - x0), 1 - (y1 - y0), 1.0, 1.0)


def _pasted(image: Tensor, donor: Tensor, box: Box) -> Tensor:
    """An image (1, 3, H, W) with a region of another."""
    height, width = image.shape[-2:]
    x0, y0, x1, y1 = box
    rows, columns = slice(round(y0 * height), round(y1 * height)), slice(round(x0 * width), round(x1 * width))
    copy = image.clone()
    copy[..., rows, columns] = donor[..., rows, columns]
    return copy


def parse_region(text: str) -> Box:
    """``X0,Y0,X1,Y1`` in shares of the width and of the height."""
    try:
        x0, y0, x1, y1 = (float(number) for number in text.split(","))
    except ValueError:
        raise VitrailError(
            f"{text!r} is no region: expected X0,Y0,X1,Y1 in shares of the width and of the height, as 0.7,0,1,0.3."
        ) from None
    return check_shares((x0, y0, x1, y1))
