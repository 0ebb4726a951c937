"""PAMI: what each region of the image alone is worth (Shi et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import Explained, MaskMethod, Subject
from vitrail.methods.registry import method

# The release has 20 segmentations. Its three of SEEDS exist in OpenCV alone: three more scales of SLIC stand for them.
FELZENSZWALB = (50, 100, 150, 200, 250, 300)
SLIC = (10, 20, 30, 40, 50, 60, 70, 80, 100, 150, 200)
WATERSHED = (25, 50, 100)
SHIFTS = (24, 30, 36)  # of the release, in pixels of a 224 × 224 image

Labels = NDArray[np.int64]


@method("pami", family="mask", signed=False, level="pixel", needs="logits", cost=(1500, 0), paper="Shi et al. 2023")
@dataclass(kw_only=True)
class Pami(MaskMethod):
    """Mean score of the regions that hold a pixel, each region seen alone.

    The regions are those of 20 segmentations (Felzenszwalb, SLIC, watershed; scikit-image). ``background``: what is
    seen in place of the rest. ``shifts``: moves all regions by so many pixels too (of 224), in 4 directions each; None
    = no shift, under ``protocol="authors"`` 24, 30 and 36, which is 13 times the work.
    """

    output: Output = "probability"
    background: Literal["blur", "black", "white"] = "blur"
    shifts: tuple[int, ...] | None = None
    protocol: Literal["default", "authors"] = "default"

    def explain_one(self, subject: Subject) -> Explained:
        image = subject.image
        shifts = self.shifts if self.shifts is not None else SHIFTS if self.protocol == "authors" else ()
        if any(round(abs(shift) * length / 224) >= length for shift in shifts for length in image.shape[-2:]):
            raise VitrailError(f"shifts are pixels of a 224 × 224 image and must leave some of it, but got {shifts}.")
        pixels = np.asarray(self.model.preprocessing.denormalise(image[0]))
        maps = torch.from_numpy(np.stack(list(segmentations(pixels, shifts)))).to(image.device)  # (S, H, W)
        regions = torch.tensor(
            [(i, label) for i, labels in enumerate(maps) for label in labels.unique().tolist() if label >= 0],
            device=image.device,
        )
        rest = self.rest(image)

        def inside(part: slice) -> Tensor:
            segmentation, label = regions[part].T
            return maps[segmentation] == label[:, None, None]

        scores = yield self.scorer(subject, self.output).pictures(
            len(regions), lambda part: torch.where(inside(part)[:, None], image, rest)
        )
        # a pixel's region in each segmentation, hence its score there: no mask is made again
        total = scores.new_zeros(maps.shape[1:])
        kept = scores.new_zeros(maps.shape[1:])
        for i, labels in enumerate(maps):
            inside_map = regions[:, 0] == i
            value = scores.new_zeros(int(labels.max()) + 1)
            value[regions[inside_map, 1]] = scores[inside_map]
            total += torch.where(labels >= 0, value[labels.clamp(min=0)], 0)
            kept += labels >= 0
        extras = {"masks": scores.new_tensor(len(scores)), "mean_score": scores.mean()}
        return torch.where(kept > 0, total / kept.clamp(min=1), 0), extras

    def rest(self, image: Tensor) -> Tensor:
        """The image that is seen outside a region, (1, 3, H, W)."""
        from torchvision.transforms.functional import gaussian_blur

        if self.background == "blur":
            widest = 2 * (min(image.shape[-2:]) - 1) + 1  # what mirrored borders allow
            return gaussian_blur(image, [min(49, widest)] * 2, [100.0] * 2)
        colour = torch.full((3, 1, 1), float(self.background == "white"), dtype=torch.float32)
        return self.model.preprocessing.normalise(colour).to(image).expand_as(image)


def segmentations(pixels: NDArray[np.uint8], shifts: tuple[int, ...]) -> Iterator[Labels]:
    """Label maps (H, W) of an image (H, W, 3); −1 where a shift moved nothing in."""
    for labels in _segmentations(pixels):
        yield labels
        for shift in shifts:
            rows, columns = (round(shift * length / 224) for length in labels.shape)
            for down, right in ((rows, 0), (-rows, 0), (0, columns), (0, -columns)):
                yield shifted(labels, down, right)


def shifted(labels: Labels, down: int, right: int) -> Labels:
    moved = np.full_like(labels, -1)
    height, width = labels.shape
    moved[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = labels[
        max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return moved


def _segmentations(pixels: NDArray[np.uint8]) -> Iterator[Labels]:
    try:
        from skimage.color import rgb2gray
        from skimage.filters import sobel
        from skimage.segmentation import felzenszwalb, slic, watershed
    except ImportError as error:
        raise VitrailError(
            "pami needs scikit-image for its regions, which is not installed: pip install 'vitrail[data]'."
        ) from error
    smallest = max(2, pixels.shape[0] * pixels.shape[1] // 1000)
    for scale in FELZENSZWALB:
        yield felzenszwalb(pixels, scale=scale, sigma=0.8, min_size=smallest).astype(np.int64)
    for count in SLIC:
        yield slic(pixels, n_segments=count, start_label=0).astype(np.int64)
    edges = sobel(rgb2gray(pixels))
    for count in WATERSHED:
        yield watershed(edges, markers=count, compactness=0.001).astype(np.int64)
