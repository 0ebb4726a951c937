"""``similar``: what two images have in common for a model, seen from either side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from vitrail.api import explain
from vitrail.data.images import ImageSource
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation
from vitrail.files import write_together
from vitrail.models.loading import as_view, load_embedder
from vitrail.models.questions import Measure
from vitrail.models.view import View
from vitrail.show.figure import labelled, linked, png_bytes
from vitrail.show.look import DEFAULT_LOOK, Look
from vitrail.targets import Similarity
from vitrail.version import __version__

LINKS = 6  # pairs of patches that a picture connects


@dataclass(frozen=True, eq=False)
class SimilarImages:
    """Two explanations of one similarity: of the first image as similar to the second, and the reverse."""

    first: Explanation
    second: Explanation

    @property
    def score(self) -> float:
        """The similarity."""
        return self.first.probability

    @property
    def title(self) -> str:
        """The similarity in words: ``cosine −0.050``."""
        return f"{self.first.measure} {self.score:.3f}".replace("-", "−")

    @property
    def pairs(self) -> Tensor | None:
        """(N, N): the share of each patch of the first image (rows) with each of the second; None but for decompx."""
        return self.first.pairs

    def links(self, count: int = LINKS) -> list[tuple[int, int, float]]:
        """The pairs of patches with the largest shares, each patch at most once: (first, second, share)."""
        if self.pairs is None:
            return []
        shares, links = self.pairs.clone(), []
        for _ in range(min(count, *shares.shape)):
            row, column = divmod(int(shares.argmax()), shares.shape[1])
            if shares[row, column] <= 0:
                break
            links.append((row, column, float(shares[row, column])))
            shares[row], shares[:, column] = -1, -1
        return links

    def picture(self, links: int = LINKS, look: Look = DEFAULT_LOOK) -> Image.Image:
        """Both maps side by side; lines connect the pairs of patches with the largest shares, where these are known."""
        boxes = [(self.first.patch_box(a), self.second.patch_box(b), share) for a, b, share in self.links(links)]
        sides = [self.first.draw(look), self.second.draw(look)]
        lines = [self.first.detail]
        if boxes:
            shown = sum(share for *_, share in boxes)
            lines.append(f"{len(boxes)} pairs of patches with the largest shares, together {shown:.3f}")
        return labelled(linked(sides[0], sides[1], boxes), self.title, lines, [self.first.legend(look)])

    def to_dict(self) -> dict[str, Any]:
        """Both explanations, as JSON values."""
        return {"vitrail": __version__, "first": self.first.to_dict(), "second": self.second.to_dict()}

    def save(self, path: str | Path, links: int = LINKS, look: Look = DEFAULT_LOOK) -> Path:
        """Writes the picture and, beside it, a JSON file with both explanations; both or none."""
        path = Path(path) if Path(path).suffix else Path(path).with_suffix(".png")
        if path.suffix.lower() != ".png":
            raise VitrailError(f"cannot save a picture as {path.name!r}: expected .png.")
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, default=str)
        picture = png_bytes(self.picture(links, look))
        write_together({path: picture, path.with_suffix(".json"): text.encode(errors="backslashreplace")})
        return path


def similar(
    model: View | nn.Module | str,
    first: ImageSource | Tensor,
    second: ImageSource | Tensor,
    method: str | None = None,
    *,
    measure: str = "cosine",
    pairs: bool = True,
    **params: Any,
) -> SimilarImages:
    """Explains how similar two images are to a model: the cosine or the dot product of their embeddings.

    Args:
        model: a view, a module that ``wrap`` accepts, or a name that ``load`` accepts; a plain Vision Transformer.
        first: path, PIL image, uint8 array HWC or normalised tensor CHW.
        second: likewise.
        method: a name from ``list_methods``, or a call; None = the default of ``explain``. With "decompx" the
            similarity is also split into ``pairs`` of patches, which takes two backward passes for each channel of the
            embedding.
        measure: "cosine" or "dot".
        pairs: False leaves the pairs out.
        params: parameters of the method.
    """
    view = load_embedder(model) if isinstance(model, str) else as_view(model)
    if measure not in ("cosine", "dot"):
        raise VitrailError(f'measure must be "cosine" or "dot", but got {measure!r}.')
    kind: Measure = "cosine" if measure == "cosine" else "dot"
    explained = explain(view, first, method, Similarity(second, kind), pairs=pairs, **params)
    reverse = explain(view, second, method, Similarity(first, kind), pairs=False, **params)
    if explained.pairs is not None:
        reverse.pairs = explained.pairs.T.contiguous()
    return SimilarImages(explained, reverse)
