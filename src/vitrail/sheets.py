"""Contact sheets: many explanations on one page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vitrail.files import printable
from vitrail.show.look import DEFAULT_LOOK, Look

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.explanation import Explanation
    from vitrail.show.legend import Legend


@dataclass(frozen=True)
class Tile:
    """A cell of the contact sheet."""

    name: str
    picture: Image.Image
    caption: str
    legend: Legend
    probability: float
    trust: float | None


ORDERS: dict[str, Callable[[Tile], Any]] = {
    "name": lambda tile: tile.name,
    "probability": lambda tile: -tile.probability,
    "trust": lambda tile: math.inf if tile.trust is None else -tile.trust,
}


def tile_of(explanation: Explanation, name: str = "", look: Look = DEFAULT_LOOK) -> Tile:
    """The overlay with its class and probability, below the name of the image, if it has one."""
    from vitrail.show.figure import thumbnail

    picture = thumbnail(explanation.overlay(**asdict(look)), focus=explanation.focus)
    caption = f"{printable(name)}: {explanation.title}" if name else explanation.title
    if explanation.true_label is not None:
        predicted = explanation.top[0][1] if explanation.top else explanation.label
        caption += f"\n{'✓' if predicted == explanation.true_label else '✗'} true class: {explanation.true_label}"
    if explanation.trust_score is not None:
        caption += f"\ntrust {explanation.trust_score:.2f}"
    return Tile(name, picture, caption, explanation.legend(look), explanation.probability, explanation.trust_score)


def draw_sheet(tiles: Sequence[Tile], order: str | None = None, subtitle: str = "") -> Image.Image:
    """The contact sheet with its legend; ``order``: one of ``ORDERS``, None = as given."""
    from vitrail.show.figure import contact_sheet, labelled
    from vitrail.show.legend import shared_legends

    shown = tiles if order is None else sorted(tiles, key=ORDERS[order])
    sheet = contact_sheet([(tile.picture, tile.caption) for tile in shown])
    return labelled(sheet, "", subtitle, shared_legends([tile.legend for tile in tiles]))
