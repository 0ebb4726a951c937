"""What every view of a model offers: names, preprocessing, logits, probabilities, classes."""

from __future__ import annotations

import difflib
import hashlib
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.labels import is_number, plain_name, plain_names

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.core.parts import Architecture, Block
    from vitrail.models.preprocessing import Preprocess

Output = Literal["softmax", "sigmoid"]

CELLS = (14, 14)  # of a model without tokens


@dataclass(eq=False, repr=False)
class View:
    """A model seen from outside. Subclasses: ``ViT`` (tokens and blocks) and ``Hierarchical`` (features only).

    ``spec`` holds the arguments of the ``load`` call that made it, so that a saved explanation can find it again.
    """

    module: nn.Module
    name: str
    preprocessing: Preprocess
    labels: Sequence[str] | None = None
    output: Output = "softmax"
    spec: dict[str, Any] | None = None
    note: str = field(default="", kw_only=True)  # one sentence a user should see, e.g. "random weights"
    known_fingerprint: str | None = field(default=None, kw_only=True)  # set where the weights cannot change

    def __repr__(self) -> str:
        height, width = self.size
        return f"<{type(self).__name__} {self.name}: {self.num_classes} classes, {height}×{width} pixels>"

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the model input."""
        return self.preprocessing.size

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def precision(self) -> torch.dtype:
        """The precision that explanations are computed in: half is too coarse for their sums and differences."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def num_outputs(self) -> int:
        raise NotImplementedError

    def layers(self) -> list[list[Tensor]]:
        """The weights layer by layer, in forward order, those of the head last."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """A head with one output has two classes: no and yes."""
        return max(2, self.num_outputs)

    def preprocess(self, image: Image.Image) -> Tensor:
        """An upright RGB image → (C, H, W), as the model was trained to see it."""
        return self.preprocessing(image)

    def logits(self, images: Tensor) -> Tensor:
        """(B, C, H, W) normalised → the model's own logits."""
        raise NotImplementedError

    def check_images(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The batch on the model's device, in its precision or ``dtype``, or an error that says what is wrong."""
        if self.device.type == "meta":
            raise VitrailError(f"{self.name} has no weights (it is on the meta device): load it on another device.")
        check_floats(images)
        images = self.preprocessing.trim(images)
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, *self.size):
            raise VitrailError(
                f"{self.name} takes normalised images of shape (B, 3, {self.size[0]}, {self.size[1]}), "
                f"but got {tuple(images.shape)}. Use model.preprocess(image), or load the model with img_size=."
            )
        return images.to(self.device, dtype or self.dtype)

    # What a view can do beyond logits. A plain ViT has tokens; a hierarchical one has stages with features.

    has_tokens: ClassVar[bool] = False
    reads_texts: ClassVar[bool] = False  # whether its classes are texts, and others can be asked about

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        raise self._without_tokens("a grid")

    @property
    def cells(self) -> tuple[int, int]:
        """(rows, columns) of the cells that are present or not: the patches, or 14 × 14 where there are none."""
        return self.grid if self.has_tokens else CELLS

    @property
    def num_prefix(self) -> int:
        """Tokens that are no patch: class, distillation, registers."""
        raise self._without_tokens("prefix tokens")

    @property
    def num_layers(self) -> int:
        raise self._without_tokens("blocks")

    @property
    def num_stages(self) -> int:
        raise VitrailError(f"{self.name} has no stages: it is a plain ViT.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens; for a hierarchical model roughly that of its first stage."""
        return self.grid[0] * self.grid[1] + self.num_prefix if self.has_tokens else 4096

    @property
    def width(self) -> int:
        """Channels of the residual stream; for a hierarchical model roughly those of its last stage."""
        return self.blocks[0].norm1.width if self.has_tokens else 1024

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.architecture().blocks

    def architecture(self) -> Architecture:
        """The network as canonical parts."""
        raise self._without_tokens("canonical blocks")

    @property
    def pools_patches(self) -> bool:
        """Whether the head needs at least one patch."""
        return self.architecture().head.reads is None

    @property
    def pools_by_attention(self) -> bool:
        return self.architecture().head.pool == "attention"

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised → x_0 (B, P + N, d): after positions, prefix tokens and the norm before blocks."""
        raise self._without_tokens("tokens to embed")

    def encode(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """x_0 → logits, with only some of the patches present."""
        raise self._without_tokens("tokens to encode")

    def present(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """(B, P + k, d): the prefix tokens and the patches ``keep`` (B, k) of (B or 1, P + N, d)."""
        raise self._without_tokens("tokens")

    def staged(self, images: Tensor, stages: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The logits, and the outputs of the last blocks of some stages, in the precision of the images."""
        raise VitrailError(f"{self.name} has no stages: it is a plain ViT.")

    def as_map(self, out: Tensor) -> Tensor:
        """The output of a stage, (B, h, w, C) or (B, h·w, C) → (B, C, h, w)."""
        raise VitrailError(f"{self.name} has no stages: it is a plain ViT.")

    def _without_tokens(self, what: str) -> VitrailError:
        return VitrailError(
            f"{self.name} ({type(self.module).__name__}) has no {what}: it is hierarchical, without fixed tokens. "
            f"`vitrail methods --model` lists the methods that work on it."
        )

    def class_scores(self, logits: Tensor) -> Tensor:
        """(B, C) logits, one column per class: a head with one output z has the classes −z and +z."""
        return torch.cat([-logits, logits], dim=1) if logits.shape[1] == 1 else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax, or sigmoid for one-output and multi-label heads, in fp32 or better."""
        scores = self.class_scores(logits)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        return scores.sigmoid() if self.output == "sigmoid" or logits.shape[1] == 1 else scores.softmax(1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The logarithms of ``probabilities``, which do not vanish where these do."""
        scores = self.class_scores(logits)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        single = self.output == "sigmoid" or logits.shape[1] == 1
        return torch.nn.functional.logsigmoid(scores) if single else scores.log_softmax(1)

    def score(self, logits: Tensor, target: Tensor | None, against: Tensor | None, output: str) -> Tensor:
        """(B,): the explained number, z_target or p_target, minus that of ``against`` where given."""
        if output not in ("logit", "probability"):
            raise VitrailError(f'output must be "logit" or "probability", but got {output!r}.')
        values = self.class_scores(logits) if output == "logit" else self.probabilities(logits)
        if target is None:
            target = values.detach().argmax(1)
        y = values.gather(1, target[:, None].to(values.device))[:, 0]
        return y if against is None else y - values.gather(1, against[:, None].to(values.device))[:, 0]

    def label(self, index: int) -> str:
        """The name of a class, or "class 17"."""
        return self.labels[index] if self.labels is not None else f"class {index}"

    def class_index(self, target: int | str) -> int:
        """A class by number, by name, by one of its synonyms or by a prefix that only it has.

        Case, spaces, hyphens and underscores do not matter, except to tell two classes apart.
        """
        if isinstance(target, str) and is_number(target):
            target = int(target)
        if not isinstance(target, str):
            try:
                index = operator.index(target)
            except TypeError:
                raise VitrailError(f"a class is an integer or a name, but got {target!r}.") from None
            if not 0 <= index < self.num_classes:
                raise VitrailError(f"there is no class {target} in {self.name}: expected 0…{self.num_classes - 1}.")
            return index
        if self.labels is None:
            raise VitrailError(f"{self.name} has no class names: give a number 0…{self.num_classes - 1}, or labels=.")
        matches = self.classes_named(target)
        if len(matches) == 1:
            return matches[0]
        if matches:
            some = "; ".join(f"{i}: {self.labels[i]}" for i in matches[:6])
            raise VitrailError(
                f"{target!r} matches {len(matches)} classes ({some}…): give a longer name or the number."
            )
        written = {plain_name(part): part.strip() for label in self.labels for part in label.split(",")}
        close = [written[name] for name in _similar(plain_name(target), [*written])]
        hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise VitrailError(f"{self.name} has no class {target!r}.{hint} It has {self.num_classes} classes.")

    def asked_about(self, *classes: Any) -> View:
        """A view that has these classes: this one, unless its classes are prompts."""
        return self

    def classes_named(self, name: str) -> list[int]:
        """The classes that a name means: those called so, else those with such a synonym, else with this beginning."""
        labels, wanted = tuple(self.labels or ()), plain_name(name)
        names = plain_names(labels)
        return (
            [i for i, label in enumerate(labels) if label == name]
            or [i for i, (whole, *_) in enumerate(names) if whole == wanted]
            or [i for i, parts in enumerate(names) if wanted in parts]
            or [i for i, parts in enumerate(names) if wanted and any(part.startswith(wanted) for part in parts)]
        )

    def fingerprint(self) -> str:
        """A hash of every parameter and buffer: two views with the same one give the same logits."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> View:
        """Moves the model (in place, as torch does) and returns the view."""
        self.module.to(device=device, dtype=dtype)
        return self


def check_floats(images: Any) -> None:
    """Refuses anything but a dense tensor of floats with values."""
    if not isinstance(images, Tensor):
        kind = type(images).__name__
    elif images.is_meta:
        kind = "a tensor on the meta device, which holds no values"
    elif images.layout is not torch.strided or images.is_nested:
        kind = "a nested tensor" if images.is_nested else f"a tensor of layout {images.layout}"
    elif not images.is_floating_point():
        kind = f"a tensor of {images.dtype}"
    else:
        return
    raise VitrailError(
        f"images must be a dense tensor of finite floats (normalised), but got {kind}: use model.preprocess(image), or "
        "give vitrail.explain the image itself."
    )


def _similar(wanted: str, names: Sequence[str]) -> list[str]:
    """Names that contain the word, whole words first; otherwise those spelled similarly."""
    inside = [name for name in dict.fromkeys(names) if wanted and wanted in name]
    whole = re.compile(rf"\b{re.escape(wanted)}\b")
    inside.sort(key=lambda name: whole.search(name) is None)
    return inside[:4] or difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)
