"""What mask methods share: one image at a time, variants of it to be scored, sums over masks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.noise import Kind, noise
from vitrail.engine.requests import (
    Asking,
    Batch,
    Logits,
    Pictures,
    Request,
    Subsets,
    Traced,
    check_finite,
    concurrently,
)
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.models.view import View
from vitrail.targets import Target

SEEDS = (-(2**63), 2**64)  # those that torch takes
MASKS_AT_ONCE = {"cpu": 64, "cuda": 256}  # at image size

Space = Literal["pixels", "tokens"]
# The map of one image, what was measured and, if it is known, the standard deviation of the map.
Explained = Asking[tuple[Tensor, dict[str, Tensor]] | tuple[Tensor, dict[str, Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One image and what is known of it before it is masked."""

    image: Tensor  # (1, 3, H, W)
    logits: Tensor  # (1, C)
    target: Target
    trace: Trace | None
    row: int  # of the image in the trace

    @property
    def size(self) -> tuple[int, int]:
        return self.image.shape[-2], self.image.shape[-1]

    @property
    def tokens(self) -> Tensor:
        """x_0 (1, n, d)."""
        assert self.trace is not None
        return self.trace["x"][0][self.row : self.row + 1]

    def score(self, view: View, output: str) -> Tensor:
        """The score of the untouched image, 0-d."""
        about = torch.tensor([self.target.about], device=self.logits.device)
        return self.target.reading(output)(view, self.logits, about)[0]


@dataclass(kw_only=True)
class MaskMethod(Method):
    """A method that asks the model about many variants of an image; several images are asked about together.

    Scores bear half precision; the traces that masks are drawn from do not: clusters of slightly other values differ.
    """

    bears_half: ClassVar[bool] = True
    bears_bf16: ClassVar[bool] = False  # which has seven bits where fp16 has ten
    no_aggregation: ClassVar[str] = "a mask method has no layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        seed = getattr(self, "seed", 0)
        if not SEEDS[0] <= seed < SEEDS[1]:
            raise VitrailError(f"seed must be an integer of at most 64 bits, but got {seed}.")

    @property
    def products(self) -> torch.dtype | None:
        """The half precision in which it asks for scores, if any."""
        if self.bears_bf16 and self.precision == "auto" and self.model.gains_from_bf16:
            return torch.bfloat16
        return super().products

    def needs(self) -> Sequence[TraceSpec]:
        return [tokens_spec(self.model)] if getattr(self, "space", "pixels") == "tokens" else []

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        """The one forward pass of the whole images is the trace, where the method needs one."""
        traces = yield [Traced(batch, target, spec) for spec in self.needs()]
        subjects = yield from self.subjects(batch, target, traces[0] if traces else None)
        results = yield from concurrently([self.explain_one(subject) for subject in subjects])
        names, device = results[0][1], batch.images.device
        extras = {name: torch.stack([result[1][name].to(device) for result in results]) for name in names}
        errors = [result[2] for result in results if len(result) == 3]
        return Attribution(
            torch.stack([result[0] for result in results]), extras, torch.stack(errors) if errors else None
        )

    def subjects(self, batch: Batch, target: Target, trace: Trace | None) -> Asking[list[Subject]]:
        """The images of a batch one by one, each with its own class."""
        logits = yield Logits(batch, self.reduced)
        check_finite(self.model, logits)
        target = target.resolved(self.model, logits)
        return [
            Subject(image=image, logits=logits[i : i + 1], target=target.row(i), trace=trace, row=i)
            for i, image in enumerate(batch.images.split(1))
        ]

    def explain_one(self, subject: Subject) -> Explained:
        """The map of one image, by name what was measured (0-d tensors) and, if it is known, the map's error."""
        raise NotImplementedError

    def scorer(self, subject: Subject, output: str) -> Scorer:
        return Scorer(view=self.model, subject=subject, output=output, name=self.info.name, products=self.products)


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Makes requests for the scores of variants of one image."""

    view: View
    subject: Subject
    output: str
    name: str  # of the progress bar
    products: torch.dtype | None = None  # half precision, if they are computed in one

    def subsets(self, keep: Tensor) -> Subsets:
        """The scores (M,) with only the patches ``keep`` (M, k) present."""
        length = keep.shape[1] + self.view.num_prefix
        return Subsets(**self._common(), count=len(keep), length=length, tokens=self.subject.tokens, keep=keep)

    def pictures(self, count: int, make: Callable[[slice], Tensor], same: Hashable = None) -> Pictures:
        """The scores (M,) of the images that ``make`` gives chunk by chunk, (m, 3, H, W) each."""
        return Pictures(**self._common(), count=count, length=self.view.num_tokens, make=make, same=same)

    def painted(self, present: Tensor, grid: tuple[int, int], colour: Tensor | float) -> Pictures:
        """The scores (M,) with the cells that are not in a set (M, cells) painted over."""
        image = self.subject.image

        def make(part: slice) -> Tensor:
            mask = present[part].view(-1, 1, *grid).to(image.dtype)
            return torch.where(F.interpolate(mask, size=image.shape[-2:], mode="nearest") > 0, image, colour)

        return self.pictures(len(present), make)

    def token_sets(self, present: Tensor) -> Asking[Tensor]:
        """The scores (M,) with only the patches of each set (M, N) present; sets of one size go together.

        Nothing present is the prefix tokens alone or, where the head pools patches, the mean-colour image.
        """
        sizes = present.sum(1)
        groups = {count: (sizes == count).nonzero()[:, 0] for count in sizes.unique().tolist()}

        def request(count: int, rows: Tensor) -> Request:
            if count == 0 and self.view.pools_patches:
                return self.pictures(1, lambda _: torch.zeros_like(self.subject.image))
            return self.subsets(present[rows].to(torch.int8).topk(count, dim=1).indices)

        answers = yield [request(count, rows) for count, rows in groups.items()]
        scores = torch.cat([score.expand(len(rows)) for score, rows in zip(answers, groups.values(), strict=True)])
        return torch.empty_like(scores).index_copy_(0, torch.cat([*groups.values()]), scores)

    def _common(self) -> dict[str, Any]:
        target = self.subject.target
        return {
            "view": self.view,
            "reading": target.reading(self.output),
            "about": target.about,
            "name": self.name,
            "products": self.products,
        }


def tokens_spec(model: View) -> TraceSpec:
    """A trace that keeps x_0, for methods that remove tokens."""
    if not model.has_tokens:
        raise VitrailError(f'space="tokens" needs tokens, which {model.name} does not have: use space="pixels".')
    return TraceSpec.of({"x"}, [0])


def features_spec(model: View, layer: str) -> TraceSpec:
    """A trace that keeps features: the output of the last first norm or attention, or of the default stage."""
    if model.has_tokens:
        name, number = _feature_layer(model, layer)
        return TraceSpec.of({name}, [number])
    if layer != "norm1":
        raise VitrailError(
            f'layer="{layer}" needs the tokens of a ViT, which {model.name} does not have: leave layer at "norm1", '
            "which stands for its default stage."
        )
    return TraceSpec.of({"features"}, [model.default_stage])


def _feature_layer(model: View, layer: str) -> tuple[str, int]:
    """What of which block: the output of attention is that of the last block whose patches attend."""
    if layer != "attention":
        return "u", model.num_layers - 1
    return "attention_out", max(number for number, block in enumerate(model.blocks) if block.asking is None)


def features_of(subject: Subject, model: View, layer: str) -> Tensor:
    """(D, h, w), in at least single precision."""
    trace = subject.trace
    assert trace is not None
    if model.has_tokens:
        name, number = _feature_layer(model, layer)
        features = trace[name][number][subject.row, trace.num_prefix :].T.unflatten(1, model.grid)
    else:
        features = trace["features"][model.default_stage][subject.row]
    return features.to(torch.promote_types(features.dtype, torch.float32))


def weighted_sum(scores: Tensor, make: Callable[[slice], Tensor], size: tuple[int, int]) -> Tensor:
    """Σ s_k M_k (H, W) with the masks made chunk by chunk, (m, H, W)."""
    total, chunk = scores.new_zeros(size), MASKS_AT_ONCE.get(scores.device.type, 64)
    for start in range(0, len(scores), chunk):
        part = slice(start, min(start + chunk, len(scores)))
        total += torch.einsum("k,khw->hw", scores[part], make(part).to(scores.dtype))
    return total


def drawn(kind: Kind, like: Tensor, part: slice, seed: int) -> Tensor:
    """Noise shaped like ``like`` (1, …) for the masks ``part``: it depends on a mask's number, not on the chunks."""
    return noise(kind, like.shape[1:], range(part.start, part.stop), seed, like.device).to(like.dtype)


def refuse_baseline(baseline: float) -> None:
    """Token space has no colours."""
    if baseline != 0:
        raise VitrailError(f'baseline is for space="pixels" only: tokens are removed, not painted; got {baseline}.')
