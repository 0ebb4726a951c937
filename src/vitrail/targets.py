"""What is asked: a target says which scalar of the network's output is explained, one per image of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.models.view import View

# A class by index or name, one per image, or None for the predicted one.
ClassSpec = int | str | Sequence[int | str] | Tensor | None


@dataclass(frozen=True)
class Reading:
    """What is read off the logits. Requests with equal readings are read together, each row ``about`` its own classes.

    The base class reads the logits themselves.
    """

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        """(m, C) logits and what each row is about (m, k) → (m, …)."""
        return logits


@dataclass(frozen=True)
class ClassScore(Reading):
    """y of a class; ``about`` holds the class and, if ``contrast``, the class it is opposed to."""

    output: str = "probability"
    contrast: bool = False

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        rival = about[:, 1] if self.contrast else None
        return view.score(at_least_single(logits), about[:, 0], rival, self.output)


@dataclass(frozen=True, eq=False)
class Target:
    """A class per image, (B,), or the predicted one where ``index`` is None; ``against``: the class it is opposed to.

    Requests compare targets by identity: methods that are asked about one target object share their traces.
    """

    index: Tensor | None = None
    against: Tensor | None = None

    @classmethod
    def of(cls, view: View, target: ClassSpec = None, against: ClassSpec = None, count: int = 1) -> Target:
        """From what a caller gives: indices or names, one for all images or one each."""
        index = None if target is None else class_indices(view, target, count, "target")
        rival = None if against is None else class_indices(view, against, count, "against")
        return cls(index, rival).checked(view)

    def checked(self, view: View) -> Target:
        """Itself; a class opposed to itself is refused."""
        if self.index is not None and self.against is not None:
            same = self.index[self.index == self.against]
            if len(same):
                raise VitrailError(
                    f"target and against are both {view.label(int(same[0]))}: give another target, or another class "
                    "against it."
                )
        return self

    def resolved(self, view: View, logits: Tensor) -> Target:
        """The target with the predicted classes filled in."""
        if self.index is not None:
            return self
        index = view.class_scores(logits).argmax(1)
        against = None if self.against is None else self.against.to(index.device)
        return Target(index, against).checked(view)

    def score(self, view: View, logits: Tensor, output: str) -> Tensor:
        """(B, C) → (B,): the explained number."""
        return view.score(logits, self.index, self.against, output)

    def row(self, i: int) -> Target:
        """The target of one image, (1,)."""
        return self.rows(slice(i, i + 1))

    def rows(self, part: slice) -> Target:
        """The target of some images."""
        return Target(*(None if classes is None else classes[part] for classes in (self.index, self.against)))

    def reading(self, output: str) -> ClassScore:
        """How the score is read off the logits of variants of an image."""
        return ClassScore(output, self.against is not None)

    @property
    def about(self) -> tuple[int, ...]:
        """Of one image with a known class: what its reading is about."""
        assert self.index is not None
        return tuple(int(classes) for classes in (self.index, self.against) if classes is not None)


def class_indices(view: View, spec: ClassSpec, count: int, name: str) -> Tensor:
    """(B,): classes by index or name, one for all images or as many as there are images."""
    values: Any = spec
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
        if isinstance(values, list) and len(values) == 1:  # captum's contract: a tensor of one number is for all
            values = values[0]
    if isinstance(values, Sequence) and not isinstance(values, str):
        indices = [view.class_index(value) for value in values]
    else:
        indices = [view.class_index(values)] * count
    if len(indices) != count:
        raise VitrailError(f"{name} names {len(indices)} classes for {count} images: give one, or one per image.")
    return torch.tensor(indices, device="cpu")


def on_device(target: Target, device: torch.device) -> Target:
    """The same target on another device; the same object where it is there already."""
    tensors = [tensor for tensor in (target.index, target.against) if tensor is not None]
    if all(tensor.device == device for tensor in tensors):
        return target
    index, against = (None if t is None else t.to(device) for t in (target.index, target.against))
    return replace(target, index=index, against=against)


def at_least_single(values: Tensor) -> Tensor:
    """Half precision to single; anything else as it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
