"""What every view of a model offers: names, preprocessing, logits, probabilities, classes."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core.precision import NARROWEST, cpu_multiplies_bf16, half_is_allowed
from vitrail.errors import VitrailError
from vitrail.models.labels import is_number, plain_name, plain_names
from vitrail.models.translation import unpacked

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.core.parts import Architecture, Block
    from vitrail.models.preprocessing import Preprocess

# What becomes of the logits: probabilities or, for outputs that are no classes, nothing.
Output = Literal["softmax", "sigmoid", "score"]

CELLS = (14, 14)  # of a model without tokens


@dataclass(eq=False, repr=False)
class View:
    """A model seen from outside. Subclasses: ``ViT`` (tokens and blocks), ``BlackBox`` (logits, at best features).

    ``spec`` holds the arguments of the ``load`` call that made it, so that a saved explanation can find it again.
    """

    module: nn.Module
    name: str
    preprocessing: Preprocess
    labels: Sequence[str] | None = None
    output: Output = "softmax"
    spec: dict[str, Any] | None = None
    note: str = field(default="", kw_only=True)  # one sentence a user should see, e.g. "random weights"
    # outputs that count as one class, the first classes of the view; the others follow in their order
    groups: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    # of a view that answers a question about something else than its classes: the question, as values of JSON, and for
    # models that cannot be seen into the function of the logits that answers it
    question: dict[str, Any] | None = field(default=None, kw_only=True)
    answer: Callable[[Any, Any, Tensor], Tensor] | None = field(default=None, kw_only=True)
    head: nn.Module | None = field(default=None, kw_only=True)  # of a backbone that ``wrap`` was given one for
    known_weights: str | None = field(default=None, kw_only=True)  # their hash, set where they cannot change
    commit: str | None = field(default=None, kw_only=True)  # of the repository on the hub that the weights come from
    differentiable: bool = field(default=True, kw_only=True)  # whether gradients reach the pixels
    is_embedding: bool = field(default=False, kw_only=True)  # whether its outputs are no classes, but an embedding

    def __repr__(self) -> str:
        height, width = self.size
        return f"<{type(self).__name__} {self.name}: {self.num_classes} classes, {height}×{width} pixels>"

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the model input."""
        return self.preprocessing.size

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return next((t.dtype for t in self._tensors() if t.is_floating_point()), torch.float32)

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self.module.parameters(), self.module.buffers())

    @property
    def precision(self) -> torch.dtype:
        """The precision that explanations are computed in: half is too coarse for their sums and differences."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gains_from_half(self) -> bool:
        """Whether a GPU is faster where matrix products are in half precision."""
        able = self.device.type == "cuda" and self.precision == torch.float32 and torch.cuda.is_bf16_supported()
        return half_is_allowed() and able

    @property
    def gains_from_bf16(self) -> bool:
        """Whether a CPU is faster where matrix products are in bf16."""
        able = self.device.type == "cpu" and self.dtype == torch.float32 and cpu_multiplies_bf16()
        return half_is_allowed() and able and self.has_tokens and self.width >= NARROWEST

    @property
    def num_outputs(self) -> int:
        raise NotImplementedError

    def layers(self) -> list[list[Tensor]]:
        """The weights layer by layer, in forward order, those of the head last."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """A head with one output has two classes, no and yes, unless it is a score."""
        if self.output == "score":
            return self.num_outputs if self.answer is None else 1
        return max(2, self.num_outputs) - sum(len(group) - 1 for group in self.groups)

    def preprocess(self, image: Image.Image) -> Tensor:
        """An upright RGB image → (C, H, W), as the model was trained to see it."""
        return self.preprocessing(image)

    def stacked(self, images: Sequence[Tensor]) -> Tensor:
        """Preprocessed images (C, H, W) as one batch on the model's device."""
        kinds = {(image.device.type, image.dtype) for image in images}
        if self.device.type != "cuda" or len(images) == 1 or len(kinds) > 1 or images[0].is_cuda:
            return torch.stack([image.to(self.device) for image in images])
        pinned = torch.empty((len(images), *images[0].shape), dtype=images[0].dtype, pin_memory=True)
        for row, image in zip(pinned.view(torch.uint8), images, strict=True):  # torch's threads would slow readers down
            row.numpy()[:] = image.contiguous().view(torch.uint8).numpy()
        return pinned.to(self.device, non_blocking=True)  # while other work is queued

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

    # What a view can do beyond logits. A plain ViT has tokens; other networks have stages with features, or nothing.

    has_tokens: ClassVar[bool] = False
    reads_texts: ClassVar[bool] = False  # whether its classes are texts, and others can be asked about
    structure: ClassVar[str] = "plain"  # in a word, for messages

    @property
    def has_features(self) -> bool:
        """Whether there are feature maps, of tokens or of stages."""
        return True

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        raise self._without_tokens("grid")

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
    def default_stage(self) -> int:
        """The stage whose features are used where none is named."""
        raise VitrailError(f"{self.name} has no stages: it is a plain ViT.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens; of a model without them, a number that stands for the size of its activations."""
        return self.grid[0] * self.grid[1] + self.num_prefix if self.has_tokens else 4096

    @property
    def width(self) -> int:
        """Channels of the residual stream; for a model without tokens roughly those of the last stage of a Swin."""
        return 1024

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.architecture().blocks

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of attention heads of each block."""
        raise self._without_tokens("attention heads")

    def architecture(self) -> Architecture:
        """The network as canonical parts."""
        raise self._without_tokens("canonical blocks")

    def snapshot(self) -> View:
        """A view that reads its network once, for many questions about its structure; it must not outlive them."""
        return self

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
            f"{self.name} ({type(self.module).__name__}) has no {what}: it is {self.structure}, without fixed tokens. "
            f"`vitrail methods --model` lists the methods that work on it."
        )

    def class_scores(self, logits: Tensor) -> Tensor:
        """(B, C) logits, one column per class: a head with one output z has the classes −z and +z.

        The score of a group is log Σ exp z, so that its probability is the sum of its members'. Where classes do not
        exclude each other (sigmoid), it is the log-odds that any member applies, all being independent.
        """
        if self.output == "score":
            return logits if self.answer is None else self.answer(None, None, logits)[:, None]
        scores = _one_per_class(logits)
        if not self.groups:
            return scores
        any_of = _log_sum if self.output == "softmax" else _log_odds_of_any
        groups = [any_of(scores[:, list(group)]) for group in self.groups]
        return torch.cat([torch.stack(groups, 1), scores[:, self.ungrouped]], dim=1)

    def sums_of_groups(self, values: Tensor) -> Tensor:
        """(…, outputs) → (…, classes): probabilities, or parts of them, added up where classes are grouped."""
        if not self.groups:
            return values
        sums = [values[..., list(group)].sum(-1, keepdim=True) for group in self.groups]
        return torch.cat([*sums, values[..., self.ungrouped]], dim=-1)

    def predicted(self, logits: Tensor) -> Tensor:
        """(B,): the class with the largest logit; where classes are grouped, the group that this class is in."""
        if self.is_embedding:
            raise self.without_classes()
        if not self.groups:
            return self.candidates(logits).argmax(1)
        outputs = _one_per_class(logits)
        places = torch.empty(outputs.shape[1], dtype=torch.long)
        for place, members in enumerate([*self.groups, *((index,) for index in self.ungrouped)]):
            places[list(members)] = place
        return places.to(logits.device)[outputs.argmax(1)]

    def without_classes(self) -> VitrailError:
        """The error for a question about the classes of an embedding."""
        return VitrailError(
            f"{self.name} has no classes, but an embedding: ask how similar images are (vitrail.similar, "
            f"targets.Similarity), about a function of it (targets.Callable) or a channel by its number, or give it a "
            "head (head= and pool=)."
        )

    def candidates(self, logits: Tensor) -> Tensor:
        """(B, k): the scores of the first classes, those that can be predicted."""
        return self.class_scores(logits)

    @property
    def ungrouped(self) -> list[int]:
        """The outputs that belong to no group."""
        grouped = {index for group in self.groups for index in group}
        return [index for index in range(max(2, self.num_outputs)) if index not in grouped]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax, or sigmoid for one-output and multi-label heads, in fp32 or better; a score stays as it is."""
        scores = self.class_scores(logits)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        if self.output == "score":
            return scores
        return scores.sigmoid() if self.output == "sigmoid" or logits.shape[1] == 1 else scores.softmax(1)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The logarithms of ``probabilities``, which do not vanish where these do; a score stays as it is."""
        scores = self.class_scores(logits)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        if self.output == "score":
            return scores
        single = self.output == "sigmoid" or logits.shape[1] == 1
        return F.logsigmoid(scores) if single else scores.log_softmax(1)

    @property
    def measure(self) -> str:
        """What ``probabilities`` are called: "probability", or the name of a score."""
        if self.output != "score":
            return "probability"
        return (self.question or {}).get("measure", "score")

    def score(self, logits: Tensor, target: Tensor | None, against: Tensor | None, output: str) -> Tensor:
        """(B,): the explained number, z_target or p_target, minus that of ``against`` where given."""
        if output not in ("logit", "probability"):
            raise VitrailError(f'output must be "logit" or "probability", but got {output!r}.')
        values = self.class_scores(logits) if output == "logit" else self.probabilities(logits)
        if target is None:
            target = self.predicted(logits.detach())
        y = values.gather(1, target[:, None].to(values.device))[:, 0]
        return y if against is None else y - values.gather(1, against[:, None].to(values.device))[:, 0]

    def label(self, index: int) -> str:
        """The name of a class, or "class 17"; of an embedding, "channel 17"."""
        if self.labels is not None:
            return self.labels[index]
        return f"{'channel' if self.is_embedding else 'class'} {index}"

    def class_index(self, target: int | str) -> int:
        """A class by number, by name, by one of its synonyms or by a prefix that only it has.

        Case, spaces, hyphens and underscores do not matter, except to tell two classes apart.
        """
        if isinstance(target, str) and not target.strip():
            raise VitrailError("the name of a class is empty: give a name or a number.")
        if isinstance(target, str) and is_number(target):
            target = int(target)
        if not isinstance(target, str):
            index = as_integer(target)
            if index is None:
                raise VitrailError(f"a class is an integer or a name, but got {target!r}.")
            if not 0 <= index < self.num_classes:
                raise VitrailError(f"there is no class {target} in {self.name}: expected 0…{self.num_classes - 1}.")
            return index
        if self.is_embedding:
            raise self.without_classes()
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

    def asking(self, question: dict[str, Any], labels: Sequence[str] | None, **changes: Any) -> Self:
        """A view of the same model for a question; ``changes``: what else is different in it."""
        if self.question is not None:
            raise VitrailError(f"{self.name} is a view for a question already: ask its model, not the view.")
        return replace(self, question=question, labels=labels, **{"is_embedding": False, **changes})

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
        """A hash of the weights and the question: two views with the same one give the same logits."""
        weights = self.known_weights or self.weights_hash()
        if self.question is None:
            return weights
        return hashlib.blake2b(f"{weights} {json.dumps(self.question)}".encode(), digest_size=16).hexdigest()

    def weights_hash(self) -> str:
        """A hash of every parameter and buffer."""
        digest = hashlib.blake2b(digest_size=16)
        for module in self.modules:
            for name, tensor in _flat(sorted(module.state_dict().items())):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                dense = tensor.detach().dequantize() if tensor.is_quantized else unpacked(tensor)
                digest.update(dense.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> View:
        """Moves the model (in place, as torch does) and returns the view."""
        for module in self.modules:
            module.to(device=device, dtype=dtype)
        return self

    @property
    def modules(self) -> list[nn.Module]:
        """The network, and the head that it was given."""
        return [self.module] if self.head is None else [self.module, self.head]


def _one_per_class(logits: Tensor) -> Tensor:
    """(B, C): a head with one output z has the classes −z and +z."""
    return torch.cat([-logits, logits], dim=1) if logits.shape[1] == 1 else logits


def _log_sum(scores: Tensor) -> Tensor:
    """(B, k) → (B,): the logit of a group of classes of which one applies."""
    return scores.logsumexp(1)


def _log_odds_of_any(scores: Tensor) -> Tensor:
    """(B, k) → (B,): the log-odds of 1 − Π (1 − σ(z)); those of a or b are log(exp a + exp b + exp(a + b))."""
    first, *others = scores.unbind(1)
    return functools.reduce(lambda a, b: torch.stack([a, b, a + b], 1).logsumexp(1), others, first)


def _flat(state: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, also those that quantised layers pack into tuples."""
    for name, value in state:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from _flat((f"{name}.{i}", part) for i, part in enumerate(value))


def as_integer(value: Any) -> int | None:
    """The number that an integer of any library is; None for anything else, a bool too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


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
