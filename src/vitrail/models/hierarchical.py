"""The view of a hierarchical transformer (Swin): logits and spatial features, no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import huggingface, timm, torchvision
from vitrail.models.view import View


def is_hierarchical(module: nn.Module) -> bool:
    """Whether the module is one of the Swin classifiers known here."""
    name = type(module).__name__
    return (
        (timm.is_timm(module) and name in timm.HIERARCHICAL)
        or (torchvision.is_torchvision(module) and name in torchvision.HIERARCHICAL)
        or (huggingface.is_huggingface(module) and name in huggingface.HIERARCHICAL)
    )


@dataclass(eq=False)
class Hierarchical(View):
    """Windows move and patches merge: there is no fixed token grid, so only black-box methods and CAMs apply."""

    @property
    def num_outputs(self) -> int:
        module: Any = self.module
        if huggingface.is_huggingface(module):
            return int(module.config.num_labels)
        head = module.head
        return int(getattr(head, "fc", head).out_features)

    @property
    def num_stages(self) -> int:
        module: Any = self.module
        if huggingface.is_huggingface(module):
            return len(module.config.depths)
        return len(module.layers) if timm.is_timm(module) else (len(module.features)) // 2

    def logits(self, images: Tensor) -> Tensor:
        with evaluating(self.module):
            out = self.module(self.check_images(images))
        return out.logits if hasattr(out, "logits") else out

    def features(self, images: Tensor, stage: int = -2) -> Tensor:
        """Output of the last block of a stage, (B, C, h, w); the default is the second-to-last stage."""
        if not -self.num_stages <= stage < self.num_stages:
            raise VitrailError(f"{self.name} has {self.num_stages} stages; there is no stage {stage}.")
        stage, module = stage % self.num_stages, self.module
        images = self.check_images(images)
        with evaluating(module):
            if huggingface.is_huggingface(module):
                swin: Any = module.base_model
                tokens, grid = swin.embeddings(images)
                wanted = {"output_hidden_states": True, "output_hidden_states_before_downsampling": True}
                states: Tensor = swin.encoder(tokens, grid, **wanted).reshaped_hidden_states[stage + 1]
                return states
            if timm.is_timm(module):
                found = module.forward_intermediates(  # type: ignore[operator]
                    images, indices=[stage], intermediates_only=True, output_fmt="NCHW"
                )
                return found[0]
            stages: Any = module.features
            out: Tensor = stages[: 2 * stage + 2](images)  # patch embedding, then stage and merging by turns; NHWC
            return out.permute(0, 3, 1, 2)

    def embed(self, images: Tensor) -> NoReturn:
        raise self._no("embed tokens")

    def encode(self, tokens: Tensor, keep: Tensor | None = None) -> NoReturn:
        raise self._no("encode tokens")

    @property
    def blocks(self) -> NoReturn:
        raise self._no("list canonical blocks")

    def _no(self, what: str) -> VitrailError:
        from vitrail.methods.registry import supported_methods

        names = ", ".join(supported_methods(self)) or "none yet"
        return VitrailError(
            f"cannot {what}: {self.name} ({type(self.module).__name__}) is hierarchical and has no fixed tokens. "
            f"Methods that work on it: {names}."
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every submodule's own mode comes back, also after an error."""
    modes = [(m, m.training) for m in module.modules()]
    for m, _ in modes:
        m.training = False
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
