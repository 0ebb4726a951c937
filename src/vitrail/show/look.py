"""How a map is drawn: its colours, its opacity and its style."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from vitrail.errors import VitrailError

Style: TypeAlias = Literal["smooth", "blocks", "outline"]
Storage: TypeAlias = Literal["mark", "hide"]
Uncertain: TypeAlias = Literal["fade", "show"]
STYLES: tuple[str, ...] = get_args(Style)
STORAGE: tuple[str, ...] = get_args(Storage)
UNCERTAIN: tuple[str, ...] = get_args(Uncertain)
ALPHA = 0.85


@dataclass(frozen=True)
class Look:
    """The choices of a drawing.

    Args:
        colormap: a colormap of matplotlib; None = ``RdBu_r`` for signed maps and ``viridis_r`` for unsigned ones.
        alpha: opacity of the strongest evidence, and how much the image below it is faded.
        style: ``smooth`` (interpolated), ``blocks`` (a rectangle per value of the map) or ``outline`` (a contour around
            the smallest area with half of the evidence).
        storage: whether patches that the network uses as storage are only marked (``mark``), or drawn as if they had no
            evidence (``hide``); numbers are not changed.
        uncertain: whether colours whose sign is uncertain, of maps with known errors, are faded (``fade``) or drawn
            like all others (``show``); outlines are not affected.
    """

    colormap: str | None = None
    alpha: float = ALPHA
    style: str = "smooth"
    storage: str = "mark"
    uncertain: str = "fade"

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise VitrailError(f"alpha must be between 0 (only the image) and 1, but got {self.alpha}.")
        if self.style not in STYLES:
            raise VitrailError(f"there is no style {self.style!r}: expected {', '.join(STYLES[:-1])} or {STYLES[-1]}.")
        if self.storage not in STORAGE:
            raise VitrailError(f"storage must be {' or '.join(STORAGE)}, but got {self.storage!r}.")
        if self.uncertain not in UNCERTAIN:
            raise VitrailError(f"uncertain must be {' or '.join(UNCERTAIN)}, but got {self.uncertain!r}.")
        if self.colormap is not None:
            import matplotlib

            if self.colormap not in matplotlib.colormaps:
                raise VitrailError(
                    f"there is no colormap {self.colormap!r}: expected one of matplotlib's, such as RdBu_r or PuOr for "
                    "signed maps and viridis_r or Greys for unsigned ones."
                )


DEFAULT_LOOK = Look()
