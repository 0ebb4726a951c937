"""Colour scales of maps."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

# Blue–red reads the same with every common colour blindness; viridis is perceptually uniform. Both get darker with the
# strength of the evidence, and images are lightened below them.
DIVERGING, SEQUENTIAL = "RdBu_r", "viridis_r"

_ROBUST_PERCENTILE = 99.5
_ENOUGH_PIXELS = 4_000_000


@dataclass(frozen=True)
class Scale:
    """The values at the two ends of the colour map.

    A signed scale is symmetric about zero; an unsigned one starts at the smallest value.
    ``partial`` is true if the model did not see all pixels; ``below`` and ``above`` if there are values beyond an end.
    """

    low: float
    high: float
    signed: bool
    partial: bool = False
    below: bool = False
    above: bool = False

    @classmethod
    def of(cls, values: Tensor, signed: bool | None = None) -> "Scale":
        """The scale of a map: outliers beyond the 99.5th percentile are clipped; signed if any value is negative."""
        array = values.detach().cpu().float().numpy()
        partial = bool(np.isnan(array).any())
        known = array[np.isfinite(array)]
        if known.size == 0:
            return cls(0.0, 0.0, bool(signed), partial)
        if signed is None:
            signed = bool(known.min() < 0)
        # A regular sample has the same percentiles and is fast on huge images.
        sample = known[:: max(1, known.size // _ENOUGH_PIXELS)]
        if signed:
            high = _robust_maximum(np.abs(sample)) or float(np.abs(known).max())
            low = -high
        else:
            low, high = float(known.min()), _robust_maximum(sample)
            high = high if high > low else float(known.max())
        return cls(low, high, signed, partial, bool((array < low).any()), bool((array > high).any()))

    def positions(self, values: Array) -> Array:
        """The positions of values on the colour map, from 0 (its low end) to 1 (its high end)."""
        span = self.high - self.low
        if span <= 0:
            return np.full_like(values, 0.5 if self.signed else 0.0)
        # Halves keep the difference of two huge numbers finite.
        with np.errstate(invalid="ignore"):
            positions = (values.astype(np.float64) / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return np.clip(positions, 0, 1).astype(np.float32)

    def strengths(self, positions: Array) -> Array:
        """The strength of the evidence at each position, from 0 (none) to 1 (the end of the scale)."""
        return np.abs(2 * positions - 1) if self.signed else positions

    def support(self, positions: Array) -> Array:
        """The strength of the evidence for the class at each position; 0 where it is against it."""
        return np.clip(2 * positions - 1, 0, 1) if self.signed else positions

    def colours(self, positions: Array, colormap: str | None = None) -> Array:
        """The RGB colours (…, 3) in 0…255 at positions on a colormap of matplotlib; None = that of the scale."""
        palette = self.palette(colormap)
        return palette.take(self.places(positions, palette), axis=0, mode="clip")

    def palette(self, colormap: str | None = None) -> Array:
        """The colours (N + 2, 3) in 0…255 of a colormap: of what is unknown, then from 0 to 1, then the last again."""
        import matplotlib

        colours = matplotlib.colormaps[colormap or (DIVERGING if self.signed else SEQUENTIAL)]
        table = np.vstack([colours(np.nan), colours(np.arange(colours.N)), colours(1.0)])
        return np.asarray(table[:, :3] * 255, dtype=np.float32)

    def places(self, positions: Array, palette: Array) -> Places:
        """The rows of a palette for positions; NaN gives none, or the first."""
        # Weak evidence is transparent, so the near-white parts of the colormaps are left out.
        places: np.ndarray[Any, np.dtype[Any]]
        if self.signed:
            places = np.copysign(0.28 + 0.18 * self.strengths(positions), positions - 0.5).astype(np.float64)
            places += 0.5
        else:
            places = 0.3 + 0.7 * positions
        places *= len(palette) - 2
        with np.errstate(invalid="ignore"):
            return (places + 1).astype(np.intp)


def _robust_maximum(values: Array) -> float:
    return float(np.percentile(values, _ROBUST_PERCENTILE))
