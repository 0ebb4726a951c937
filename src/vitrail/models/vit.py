"""The view of a Vision Transformer: tokens in, logits out, its blocks in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vitrail.engine.ops import Walk
from vitrail.errors import VitrailError
from vitrail.models.lowering import lowered
from vitrail.models.parts import Architecture, Block, converted, tensors_of
from vitrail.models.view import View

# Views are kept with what was read of them: the number of one that is gone would soon be another's.
Key = tuple[int, torch.dtype, torch.dtype | None]
_read: ContextVar[dict[Key, tuple[ViT, Architecture]] | None] = ContextVar("_read", default=None)
_products: ContextVar[torch.dtype | None] = ContextVar("_products", default=None)


@contextmanager
def unchanged() -> Iterator[None]:
    """While it lasts nobody changes a model's weights: views read their modules once, not at every question."""
    token = _read.set(_read.get() or {})
    try:
        yield
    finally:
        _read.reset(token)


def forget(view: View) -> None:
    """The weights of this view were changed on purpose: read them again."""
    known = _read.get() or {}
    for key in [key for key in known if key[0] == id(view)]:
        del known[key]


@contextmanager
def products_in(dtype: torch.dtype | None) -> Iterator[None]:
    """While it lasts the blocks' linear layers have this precision; for use within ``unchanged`` and autocast."""
    token = _products.set(dtype)
    try:
        yield
    finally:
        _products.reset(token)


@dataclass(eq=False, repr=False)
class ViT(View):
    """Any supported Vision Transformer through one interface.

    ``describe`` reads the module anew each time, so a view always follows its model's present weights.
    """

    describe: Callable[[], Architecture] = field(kw_only=True)

    def architecture(self) -> Architecture:
        """The network as canonical parts."""
        known, products = _read.get(), _products.get()
        if known is None:
            return self._described()
        key = (id(self), self.dtype, products)
        if key not in known:
            with torch.inference_mode(False):  # gradients may pass through what is read here
                known[key] = (self, self._described() if products is None else self._lowered(products))
        return known[key][1]

    def _described(self) -> Architecture:
        parts = self.describe()
        if self.dtype == self.weight_dtype:
            return parts
        widened: Architecture = converted(parts, self.dtype)
        return widened

    def _lowered(self, dtype: torch.dtype) -> Architecture:
        with products_in(None), torch.autocast(self.device.type, enabled=False), torch.no_grad():
            return lowered(self.architecture(), dtype)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.architecture().blocks

    @cached_property
    def num_layers(self) -> int:
        return len(self.blocks)

    def layers(self) -> list[list[Tensor]]:
        """The weights of each block, then those of all that follows: the live parameters, or views of them."""
        parts = self.architecture()
        # what a part holds may be a copy (fused biases, tables of positions): a block's own parameters are not
        known = [block.mlp.fc2.weight.untyped_storage().data_ptr() for block in parts.blocks]
        for container in self.module.modules():
            owned = [[p.detach() for p in child.parameters()] for child in container.children()]
            if len(owned) == len(known) and all(
                any(p.untyped_storage().data_ptr() == place for p in own)
                for own, place in zip(owned, known, strict=True)
            ):
                return [*owned, list(tensors_of(parts.head))]
        raise VitrailError(f"the blocks of {self.name} are not the children of one module.")

    @property
    def num_outputs(self) -> int:
        return self.architecture().head.linears[0].weight.shape[0]

    @cached_property
    def num_prefix(self) -> int:
        """Tokens that are no patch: class, distillation, registers."""
        return self.architecture().embedding.prefix.shape[0]

    @cached_property
    def patch_size(self) -> tuple[int, int]:
        height, width = self.architecture().embedding.weight.shape[-2:]
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.size[0] // self.patch_size[0], self.size[1] // self.patch_size[1]

    @property
    def pools_patches(self) -> bool:
        """Whether the head needs at least one patch."""
        return self.architecture().head.reads is None

    def logits(self, images: Tensor) -> Tensor:
        return self.encode(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised → x_0 (B, P + N, d): after positions, prefix tokens and the norm before blocks."""
        return Walk(self.architecture()).embed(self.check_images(images))

    def encode(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """x_0 → logits, with only some of the patches present.

        Args:
            tokens: (B, P + N, d) from ``embed``; a batch of one serves every row of ``keep``.
            keep: (B, k) grid indices of the patches that stay, a different set per image; None = all of them.
        """
        parts = self.architecture()
        if keep is None:
            return Walk(parts).encode(tokens)
        keep = self._check_keep(keep.to(tokens.device), tokens.shape[0], tokens.shape[1] - self.num_prefix)
        return Walk(parts, keep=keep).encode(self.present(tokens, keep))

    def present(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """(B, P + k, d): the prefix tokens and the patches ``keep`` (B, k) of (B or 1, P + N, d)."""
        tokens = tokens.expand(keep.shape[0], -1, -1)
        index = keep[..., None].expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, : self.num_prefix], tokens[:, self.num_prefix :].gather(1, index)], dim=1)

    def readout(self, images: Tensor) -> Tensor:
        """ρ (B, P + N): the share of each token in what the head pools."""
        from vitrail.engine.trace import trace

        return trace(self, images, keep=()).readout

    def _check_keep(self, keep: Tensor, batch: int, patches: int) -> Tensor:
        keep = keep[None].expand(batch, -1) if keep.ndim == 1 else keep
        if keep.ndim != 2 or keep.dtype not in (torch.int64, torch.int32) or (batch != 1 and keep.shape[0] != batch):
            raise VitrailError(
                f"keep must hold patch numbers of shape ({batch}, k), but got {keep.dtype} {tuple(keep.shape)}."
            )
        if keep.numel() and not (int(keep.min()) >= 0 and int(keep.max()) < patches):
            raise VitrailError(f"keep holds patch numbers outside 0…{patches - 1}.")
        if keep.shape[1] == 0 and self.pools_patches:
            raise VitrailError(f"no patch is left, but the head of {self.name} pools patches: keep at least one.")
        return keep.long()
