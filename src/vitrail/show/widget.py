"""Controls of an explanation in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.show.look import ALPHA


@dataclass(frozen=True)
class Choice:
    """What the controls are set to."""

    target: int  # the class
    alpha: float  # opacity of the map
    share: float  # of the map's values, the largest
    signed: bool  # or absolute values


class Controls:
    """Widgets of ipywidgets and the picture that they redraw; where there is no kernel, notebooks show the picture."""

    def __init__(self, classes: Mapping[int, str], target: int, draw: Callable[[Choice], bytes]) -> None:
        """Draws the picture for the first time.

        Args:
            classes: those to choose from, by index.
            target: the first choice.
            draw: gives the PNG file of a choice.
        """
        try:
            import ipywidgets
        except ImportError:
            raise VitrailError(
                "ex.widget() needs ipywidgets, which is not installed: pip install 'vitrail[notebook]'. Without it, "
                "a notebook shows the picture of ex."
            ) from None
        slider = {"continuous_update": False, "readout_format": ".0%"}
        self.target = ipywidgets.Dropdown(
            options=[(label, index) for index, label in classes.items()], value=target, description="class"
        )
        self.alpha = ipywidgets.FloatSlider(ALPHA, min=0, max=1, step=0.05, description="opacity", **slider)
        self.share = ipywidgets.FloatSlider(1, min=0.01, max=1, step=0.01, description="top patches", **slider)
        self.signed = ipywidgets.ToggleButtons(options={"signed": True, "absolute": False}, description="values")
        self.picture = ipywidgets.Image(format="png")
        controls = (self.target, self.alpha, self.share, self.signed)
        self.box = ipywidgets.HBox([self.picture, ipywidgets.VBox(controls)])
        self._draw = draw
        for control in controls:
            control.observe(self._redraw, names="value")
        self._redraw()

    @property
    def choice(self) -> Choice:
        """What the controls are set to."""
        return Choice(self.target.value, self.alpha.value, self.share.value, self.signed.value)

    def _redraw(self, _: object = None) -> None:
        self.picture.value = self._draw(self.choice)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = self.box._repr_mimebundle_(**options)
        return {**bundle, "image/png": base64.b64encode(self.picture.value).decode()}


def only_strongest(values: Tensor, share: float, nothing: float) -> Tensor:
    """The largest values, this share of them and at least one; ``nothing`` elsewhere."""
    least = values.flatten().topk(max(1, round(share * values.numel()))).values[-1]
    return values.masked_fill(values < least, nothing)
