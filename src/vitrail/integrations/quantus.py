"""vitrail's methods inside Quantus, which is not imported here: it calls ``explain`` wherever it calls its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.evaluation import default_method
from vitrail.methods.registry import build_method
from vitrail.models.loading import as_view
from vitrail.models.view import View


class LogitsModule(nn.Module):
    """A view as a module that gives a tensor of logits, for models that Quantus cannot call, such as Hugging Face's.

    ``explain`` knows it again, also copies of it whose weights were drawn anew.
    """

    def __init__(self, view: View) -> None:
        super().__init__()
        self.network, self.head = view.module, view.head
        self.view = replace(view, known_weights=None)  # copies get other weights
        self.training = False  # what the view computes is in evaluation mode, whatever the mode of the network

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised → (B, outputs)."""
        return self.view.logits(images)


def explain(
    model: nn.Module,
    inputs: np.ndarray | Tensor,
    targets: Iterable[int],
    method: str | None = None,
    device: str | torch.device | None = None,
    **params: Any,
) -> np.ndarray:
    """An ``explain_func`` for Quantus: normalised images (B, 3, H, W) → maps (B, 1, H, W), totals unchanged.

    Args:
        model: the module, or a ``LogitsModule``; it is looked at anew in each call, since Quantus changes weights.
        inputs: what the model sees.
        targets: a class for each image.
        method: a name of ``list_methods``; None = the default.
        device: what Quantus passes; maps are computed where the model is.
        params: parameters of the method.
    """
    view = model.view if isinstance(model, LogitsModule) else as_view(model)
    images = torch.as_tensor(inputs, dtype=view.precision)
    chosen = build_method(method or default_method(view), view, shape="input", **params)
    maps: Tensor = chosen.attribute(images, target=[int(target) for target in targets])
    return maps.sum(1, keepdim=True).cpu().numpy()
