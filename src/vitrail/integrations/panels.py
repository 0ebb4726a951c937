"""Panels: a few explained images on one page with numbers, to be drawn again and again during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from torch import Tensor, nn

from vitrail.api import explain
from vitrail.data.images import ImageSource
from vitrail.engine.modes import own_modes
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation
from vitrail.integrations.loggers import log_panel
from vitrail.models.view import View
from vitrail.models.wrapping import wrap
from vitrail.sheets import draw_sheet, tile_of


@dataclass(frozen=True)
class Panel:
    """A page with the explained images, and means over them: ``probability``, ``trust`` and ``accuracy``."""

    picture: Image.Image
    numbers: dict[str, float]
    explanations: list[Explanation]


def explained_panel(
    model: View | nn.Module | str,
    images: Sequence[ImageSource | Tensor],
    true_classes: Sequence[int | str] | None = None,
    *,
    target: Literal["predicted", "label"] = "predicted",
    method: str | None = None,
    trust: bool = True,
) -> Panel:
    """Explains images and draws them on one page.

    Args:
        model: a view, a module that ``wrap`` accepts, or a name that ``load`` accepts.
        images: as for ``explain``: paths, PIL images, arrays, normalised tensors.
        true_classes: their classes, by number or name; None = unknown.
        target: explain the "predicted" class, or the true one ("label").
        method: of the explanations; None = the model's default.
        trust: also ask how far to trust each map, in about 80 forward passes per image.
    """
    if target not in ("predicted", "label"):
        raise VitrailError(f'target must be "predicted" or "label", but got {target!r}.')
    if target == "label" and true_classes is None:
        raise VitrailError('target="label" explains the true classes of the images: give true_classes=.')
    if true_classes is not None and len(true_classes) != len(images):
        raise VitrailError(f"there are {len(images)} images, but {len(true_classes)} true_classes: expected one each.")
    with own_modes():
        view = wrap(model) if isinstance(model, nn.Module) else model
        classes: list[Any] | None = list(true_classes) if target == "label" and true_classes is not None else None
        explanations = explain(view, list(images), method, classes)
        for place, explanation in enumerate(explanations):
            if true_classes is not None and explanation.model is not None:
                explanation.true_label = explanation.model.label(explanation.model.class_index(true_classes[place]))
            if trust:
                explanation.trust()
    names = ["" if each.image_path is None else Path(each.image_path).name for each in explanations]
    tiles = [tile_of(explanation, name) for explanation, name in zip(explanations, names, strict=True)]
    first = explanations[0]
    sheet = draw_sheet(tiles, subtitle=f"{first.call} on {first.model_name}")
    return Panel(sheet, _numbers(explanations), explanations)


def _numbers(explanations: Sequence[Explanation]) -> dict[str, float]:
    columns: dict[str, list[float]] = {
        "probability": [explanation.probability for explanation in explanations],
        "trust": [each.trust_score for each in explanations if each.trust_score is not None],
        "accuracy": [each.top[0][1] == each.true_label for each in explanations if each.true_label is not None],
    }
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


class PanelLog:
    """What the callbacks of training loops share: which images, which part of the model, how often, and where to."""

    def __init__(
        self,
        images: Sequence[ImageSource | Tensor],
        true_classes: Sequence[int | str] | None = None,
        *,
        every: int = 1,
        model: str | None = None,
        to: Any = None,
        name: str = "explanations",
        target: Literal["predicted", "label"] = "predicted",
        method: str | None = None,
        trust: bool = True,
        **view: Any,
    ) -> None:
        """Keeps the settings.

        Args:
            images: the images to explain, always the same.
            true_classes: their classes, by number or name; None = unknown.
            every: number of epochs between panels; the first is drawn before training, so that mistakes show at once.
            model: path of the module that maps images to logits inside the trained one, such as "model"; None = itself.
            to: where panels go, as for ``log_panel``, one or a list; None = the loggers of the training.
            name: with which the names of everything logged begin.
            target: as for ``explained_panel``.
            method: likewise.
            trust: likewise.
            view: options of ``vitrail.wrap``, such as labels=, mean=, std= and img_size=.
        """
        super().__init__()
        if every < 1:
            raise VitrailError(f"every must be at least 1 epoch, but got {every}.")
        self.images, self.true_classes = list(images), None if true_classes is None else list(true_classes)
        self.every, self.model, self.name = every, model, name
        self.to = None if to is None else list(to) if isinstance(to, list | tuple) else [to]
        self.target, self.method, self.trust, self.view_options = target, method, trust, view

    def record(self, module: nn.Module, destinations: Sequence[Any], step: int, **view: Any) -> Panel:
        """Explains the images by the module as it is now, and logs the panel; ``view``: further options of ``wrap``."""
        with own_modes():
            explained = wrap(self._part(module), **{**view, **self.view_options})
        panel = explained_panel(
            explained,
            self.images,
            self.true_classes,
            target=self.target,
            method=self.method,
            trust=self.trust,
        )
        for destination in destinations:
            log_panel(panel, destination, step, self.name)
        return panel

    def _part(self, module: nn.Module) -> nn.Module:
        if self.model is None:
            return module
        try:
            return module.get_submodule(self.model)
        except AttributeError:
            known = ", ".join(name for name, _ in module.named_children()) or "none"
            raise VitrailError(f"{type(module).__name__} has no module {self.model!r}; it has: {known}.") from None
