"""Random views of whole batches, made where the images lie."""

from __future__ import annotations

import torch
from tiny_imagenet import normalise
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

SMALLEST_CROP = 0.3  # share of the area
JITTER = 0.3
CELLS = 8  # pasted boxes follow the teacher's patches


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    return torch.rand(len(like), device=like.device) * (high - low) + low


def crop_and_flip(images: Tensor) -> Tensor:
    """A random rectangle of each image, resized to the full square and mirrored half of the time."""
    area, log_ratio = _uniform(images, SMALLEST_CROP, 1), _uniform(images, -0.29, 0.29)
    width = (area * log_ratio.exp()).sqrt().clamp(max=1)
    height = (area / log_ratio.exp()).sqrt().clamp(max=1)
    x, y = _uniform(images, -1, 1) * (1 - width), _uniform(images, -1, 1) * (1 - height)
    side = torch.where(_uniform(images, 0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(x)
    placement = torch.stack([torch.stack([width * side, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = affine_grid(placement, list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def jitter_colour(images: Tensor) -> Tensor:
    """Brightness, contrast and saturation of each image (0 … 255) changed a little."""
    brightness, contrast, saturation = (_uniform(images, 1 - JITTER, 1 + JITTER).view(-1, 1, 1, 1) for _ in range(3))
    images = images * brightness
    centre = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - centre) * contrast + centre
    grey = images.mean(dim=1, keepdim=True)
    return ((images - grey) * saturation + grey).clamp(0, 255)


def random_views(images: Tensor) -> Tensor:
    """uint8 to normalised views."""
    return normalise(jitter_colour(crop_and_flip(images.float())))


def mix(views: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Views blended with their batch read backwards, and the share that is still each image's own.

    "blend" adds them up, "paste" puts a box of the other over each, "none" leaves them alone.
    """
    share = _uniform(views, 0, 1)
    other = views.flip(0)
    if kind == "blend":
        share = torch.maximum(share, 1 - share)
        weight = share.view(-1, 1, 1, 1)
        return views * weight + other * (1 - weight), share
    if kind == "paste":
        side = (1 - share).sqrt().mul(CELLS).round()
        x, y = (torch.floor(_uniform(views, 0, 1) * (CELLS + 1 - side)) for _ in range(2))
        cell = torch.arange(views.shape[-1], device=views.device) * CELLS // views.shape[-1]
        across = (cell >= x[:, None]) & (cell < (x + side)[:, None])
        down = (cell >= y[:, None]) & (cell < (y + side)[:, None])
        box = (down[:, :, None] & across[:, None, :])[:, None]
        return torch.where(box, other, views), 1 - (side / CELLS) ** 2
    return views, torch.ones_like(share)
