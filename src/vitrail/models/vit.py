"""The view of a Vision Transformer: tokens in, logits out, its blocks in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.core.operations import ReadoutRecorder, Walk
from vitrail.core.parts import Architecture, tensors_of
from vitrail.errors import VitrailError
from vitrail.models.translation import is_packed
from vitrail.models.view import View
from vitrail.progress import passed


@dataclass(eq=False, repr=False)
class ViT(View):
    """Any supported Vision Transformer through one interface.

    ``describe`` reads the module anew each time, so a view always follows its model's present weights.
    """

    describe: Callable[[], Architecture] = field(kw_only=True)

    has_tokens: ClassVar[bool] = True

    def architecture(self) -> Architecture:
        return self.describe()

    def snapshot(self) -> ViT:
        parts = self.architecture()
        return replace(self, describe=lambda: parts)

    @cached_property
    def num_layers(self) -> int:
        return len(self.blocks)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        return tuple(block.attention.heads for block in self.blocks)

    def layers(self) -> list[list[Tensor]]:
        """The weights of each block, then those of all that follows: the live parameters, or views of them."""
        quantised = next((name for name, tensor in self.module.named_parameters() if is_packed(tensor)), None)
        if quantised is not None:
            raise VitrailError(
                f"the weights of {self.name} cannot be read layer by layer, as {quantised} is quantised: give the "
                "model before that conversion."
            )
        parts = self.architecture()
        # what a part holds may be a copy (fused biases, tables of positions): a block's own parameters are not
        known = [block.mlp.fc2.weight.untyped_storage().data_ptr() for block in parts.blocks]
        ends = _places([*tensors_of(parts.embedding), *tensors_of(parts.head)])
        owned: dict[int, list[Tensor]] = {}  # of the largest module that holds this block and nothing else
        alike: list[list[Tensor]] = []  # blocks that hold copies only are children of one class
        for module in self.module.modules():
            weights, children = [p.detach() for p in module.parameters()], list(module.children())
            places = _places(weights)
            held = [number for number, place in enumerate(known) if place in places]
            if len(held) == 1 and not places & ends:
                owned.setdefault(held[0], weights)
            if not alike and len(children) == len(known) and len({type(child) for child in children}) == 1:
                lists = [[p.detach() for p in child.parameters()] for child in children]
                alike = lists if all(lists) else []
        blocks = [owned[number] for number in range(len(known))] if len(owned) == len(known) else alike
        if not blocks:
            raise VitrailError(f"the blocks of {self.name} are no modules of their own.")
        return [*blocks, list(tensors_of(parts.head))]

    @cached_property
    def width(self) -> int:
        return self.architecture().embedding.weight.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.architecture().head.outputs

    @cached_property
    def num_prefix(self) -> int:
        return self.architecture().embedding.prefix.shape[0]

    @cached_property
    def pools_patches(self) -> bool:
        parts = self.architecture()
        if parts.head.answer is None:
            return parts.head.reads is None
        if replace(parts.head, answer=None).reads is None:
            return True
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.device)
        try:
            with torch.inference_mode():
                answer = Walk(parts, keep=nothing).encode(parts.embedding.prefix[None])
        except (VitrailError, RuntimeError):  # a function of the patches
            return True
        return not bool(answer.isfinite().all())

    @cached_property
    def pools_by_attention(self) -> bool:
        return self.architecture().head.pool == "attention"

    @cached_property
    def patch_size(self) -> tuple[int, int]:
        return self.architecture().embedding.patch

    @property
    def grid(self) -> tuple[int, int]:
        return self.size[0] // self.patch_size[0], self.size[1] // self.patch_size[1]

    def logits(self, images: Tensor) -> Tensor:
        return self.encode(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        return Walk(self.architecture()).embed(self.check_images(images))

    def encode(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """x_0 → logits, with only some of the patches present.

        Args:
            tokens: (B, P + N, d) from ``embed``; a batch of one serves every row of ``keep``.
            keep: (B, k) grid indices of the patches that stay, a different set per image; None = all of them.
        """
        parts = self.architecture()
        if keep is not None:
            keep = self._check_keep(keep.to(tokens.device), tokens.shape[0], tokens.shape[1] - self.num_prefix)
            tokens = self.present(tokens, keep)
        logits = Walk(parts, keep=keep).encode(tokens)
        passed(len(logits))
        return logits

    def present(self, tokens: Tensor, keep: Tensor) -> Tensor:
        tokens = tokens.expand(keep.shape[0], -1, -1)
        index = keep[..., None].expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, : self.num_prefix], tokens[:, self.num_prefix :].gather(1, index)], dim=1)

    def readout(self, images: Tensor) -> Tensor:
        """ρ (B, P + N): the share of each token in what the head pools."""
        parts = self.architecture()
        recorder = ReadoutRecorder(len(parts.blocks))
        with torch.no_grad():
            walk = Walk(parts, recorder=recorder)
            walk.encode(walk.embed(self.check_images(images)))
        assert recorder.readout is not None
        return recorder.readout

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


def _places(tensors: Iterable[Tensor]) -> set[int]:
    """Where tensors are in memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
