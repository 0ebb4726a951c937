"""Class activation maps on tokens (specs/whitebox.md 4.9), as functions of h = x_l and g = ∂y/∂x_l, both (B, n, d).

`used` is the slice of tokens i over which channel weights are averaged or summed: the patches, or all. Maps are (B, n).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.families import Family
from tests.oracles.network import run
from torch import Tensor, nn


def weighted(w: Tensor, h: Tensor) -> Tensor:
    """Σ_k w_k h_jk."""
    return torch.einsum("bk,bjk->bj", w, h)


def grad_cam(h: Tensor, g: Tensor, used: slice) -> Tensor:
    """w_k = mean_i g_ik."""
    return weighted(g[:, used].mean(dim=1), h)


def xgrad_cam(h: Tensor, g: Tensor, used: slice, eps: float = 1e-7) -> Tensor:
    """w_k = Σ_i g_ik h_ik / (Σ_i h_ik + 1e-7)."""
    w = (g[:, used] * h[:, used]).sum(dim=1) / (h[:, used].sum(dim=1) + eps)
    return weighted(w, h)


def xgrad_cam_plus(h: Tensor, g: Tensor, used: slice, eps: float = 1e-7) -> Tensor:
    """As XGradCAM with |h| in both sums of the weight; the map uses the signed h."""
    w = (g[:, used] * h[:, used].abs()).sum(dim=1) / (h[:, used].abs().sum(dim=1) + eps)
    return weighted(w, h)


def grad_cam_pp(h: Tensor, g: Tensor, used: slice, eps: float = 1e-6) -> Tensor:
    """a_ik = g² / (2g² + (Σ_i h_ik) g³ + ε), w_k = Σ_i a_ik ReLU(g_ik)."""
    hu, gu = h[:, used], g[:, used]
    a = gu**2 / (2 * gu**2 + hu.sum(dim=1, keepdim=True) * gu**3 + eps)
    return weighted((a * gu.clamp(min=0)).sum(dim=1), h)


def hires_cam(h: Tensor, g: Tensor, used: slice) -> Tensor:
    """Σ_k g_jk h_jk."""
    return (g * h).sum(dim=-1)


def grad_cam_elementwise(h: Tensor, g: Tensor, used: slice) -> Tensor:
    """Σ_k ReLU(g_jk h_jk)."""
    return (g * h).clamp(min=0).sum(dim=-1)


def layer_cam(h: Tensor, g: Tensor, used: slice) -> Tensor:
    """Σ_k ReLU(g_jk) h_jk."""
    return (g.clamp(min=0) * h).sum(dim=-1)


CAMS: dict[str, Callable[[Tensor, Tensor, slice], Tensor]] = {
    "grad_cam": grad_cam,
    "xgrad_cam": xgrad_cam,
    "xgrad_cam_plus": xgrad_cam_plus,
    "grad_cam_pp": grad_cam_pp,
    "hires_cam": hires_cam,
    "grad_cam_elementwise": grad_cam_elementwise,
    "layer_cam": layer_cam,
}


def cam(
    method: str,
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int | None = None,
    average_over: str = "patches",
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """The map of `method` at x_layer (None: the input of the last block); average_over "patches" or "all"."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    layer = recorded.depth - 1 if layer is None else layer
    used = slice(recorded.prefix if average_over == "patches" else 0, None)
    return CAMS[method](recorded.x[layer], recorded.gx[layer], used)


def layer_cam_sum(
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    start: int = 0,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """LayerCAM over layers (SkipPLUS, 3.4): Σ_l m_l / max_j |m_lj|, j over an image's patches; a zero m_l adds 0."""
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    total = torch.zeros_like(recorded.x[0][:, :, 0])
    for l in range(start, recorded.depth):
        m = layer_cam(recorded.x[l], recorded.gx[l], slice(None))
        for image in range(len(m)):
            largest = m[image, recorded.prefix :].abs().max()
            if largest > 0:
                total[image] += m[image] / largest
    return total


def cam_authors(
    method: str,
    family: Family,
    module: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: int = -1,
    frozen: bool = False,
    output: str = "logit",
) -> Tensor:
    """pytorch-grad-cam: the output of a block's norm1, patches only, ReLU, then m − min over 1e-7 + the new maximum.

    Prefix columns are zero. Both extremes are of one image, over its patches.
    """
    recorded = run(family, module, images, target, frozen=frozen, output=output)
    h, g = recorded.u[layer][:, recorded.prefix :], recorded.gu[layer][:, recorded.prefix :]
    m = CAMS[method](h, g, slice(None)).clamp(min=0)
    m = m - m.amin(dim=1, keepdim=True)
    return nn.functional.pad(m / (1e-7 + m.amax(dim=1, keepdim=True)), (recorded.prefix, 0))
