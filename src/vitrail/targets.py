"""What is asked: a target says which scalar of the network's output is explained, one per image of a batch.

``Class``, ``Contrast``, ``Group``, ``Text``, ``Similarity``, ``Region``, ``Box`` and ``Callable`` are what callers ask.
Each becomes a class of a view: the model's own, or one of the same model with another head (``models/questions.py``).
So methods and metrics know classes alone, as a ``Target``.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable as Function
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.models.detection import Detector
from vitrail.models.labels import is_number, plain_name, plain_names
from vitrail.models.questions import (
    Answer,
    Measure,
    answering,
    as_detector,
    compared,
    embed,
    grouped,
    in_mask,
    segmenting,
)
from vitrail.models.view import View

# A path, picture or tensor → (3, H, W), as the model sees it.
See = Function[[Any], Tensor]


class SeenImage(Protocol):
    """An explained image and the model input made from it."""

    @property
    def image(self) -> Image.Image: ...

    @property
    def pixels(self) -> Tensor: ...


Look = Function[[], Sequence[SeenImage]]  # at all explained images


class BeyondClass:
    """A target that is not a class of the model."""

    @classmethod
    def pose(cls, view: View, questions: Sequence[Any], see: See) -> tuple[View, list[int]]:
        """A view for one or two questions of this kind, and the class that each is there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Class:
    """A class by index or name: the same as ``target="beagle"``."""

    name: int | str


@dataclass(frozen=True)
class Text:
    """A text, for models of images and texts: the same as ``target="a red car"``."""

    prompt: str


@dataclass(frozen=True)
class Contrast:
    """One target rather than another: the same as ``target=`` and ``against=``."""

    target: Any
    against: Any


@dataclass(frozen=True)
class Group(BeyondClass):
    """Any of several classes: indices, names, and patterns of names such as ``"*terrier*"``.

    The explained logit is log Σ exp z, the probability the sum. Where classes do not exclude each other (sigmoid heads)
    it is the probability that any of them applies, all being independent.
    """

    classes: Collection[int | str] | str
    name: str | None = None

    @classmethod
    def pose(cls, view: View, questions: Sequence[Group], see: See) -> tuple[View, list[int]]:
        members = [group.members(view) for group in questions]
        for shared in sorted(set(members[0]) & set(members[-1]) if len(members) > 1 else ()):
            raise VitrailError(f"{view.label(shared)!r} is both in the target and in what it is opposed to.")
        names = [group.title(view) for group in questions]
        if len(set(names)) < len(names):
            raise VitrailError(f"both groups are called {names[0]!r}: give them names, Group(…, name=).")
        return grouped(view, dict(zip(names, members, strict=True))), list(range(len(names)))

    def members(self, view: View) -> list[int]:
        """The indices of the classes."""
        if not isinstance(self.classes, Collection):
            raise VitrailError(f"a group is a list of classes, or their names as a text, but got {self.classes!r}.")
        entries = self.classes.split(",") if isinstance(self.classes, str) else list(self.classes)
        indices: dict[int, None] = {}
        for entry in entries:
            indices |= dict.fromkeys(_matching(view, entry.strip() if isinstance(entry, str) else entry))
        if not indices:
            raise VitrailError("a group needs at least one class.")
        if len(indices) == view.num_classes:
            raise VitrailError(
                f"the group holds all {view.num_classes} classes of {view.name}: nothing is left to ask."
            )
        return sorted(indices)

    def title(self, view: View) -> str:
        """Its name, or what it was made of."""
        if self.name is not None:
            return self.name
        if isinstance(self.classes, str):
            return self.classes
        first, *others = (view.label(index).partition(",")[0] for index in self.members(view))
        return " or ".join([first, *(others if len(others) < 2 else [f"{len(others)} other classes"])])


@dataclass(frozen=True, eq=False)
class Similarity(BeyondClass):
    """How similar the image is to another one: the cosine or the dot product of their embeddings.

    An embedding is what the head reads; ``patch=(row, column)``: of the other image, the token of this patch.
    """

    other: str | PathLike[str] | Image.Image | np.ndarray[Any, Any] | Tensor = field(repr=False)
    measure: Measure = "cosine"
    patch: tuple[int, int] | None = None
    name: str | None = None

    @classmethod
    def pose(cls, view: View, questions: Sequence[Similarity], see: See) -> tuple[View, list[int]]:
        measures = [question.measure for question in questions]
        if measures[0] not in ("cosine", "dot") or measures[0] != measures[-1]:
            named = " and ".join(map(repr, measures))
            raise VitrailError(f'measure must be "cosine" or "dot", the same for both images, but got {named}.')
        embeddings = {}
        for number, question in enumerate(questions):
            name = question.title("the other image" if len(questions) == 1 else f"image {number + 1}")
            embeddings[name] = question.embedding(view, see(question.other)).tolist()
        if len(embeddings) < len(questions):
            raise VitrailError("both images have the same name: give them names, Similarity(…, name=).")
        return compared(view, embeddings, questions[0].measure), list(range(len(questions)))

    def embedding(self, view: View, pixels: Tensor) -> Tensor:
        """(D,): of the other image or its patch."""
        return embed(view, self.measure, pixels[None], self.token(view))[0].double().cpu()

    def token(self, view: View) -> int | None:
        """The number of the token that ``patch`` is."""
        if self.patch is None or not view.has_tokens:
            return None
        rows, columns = view.grid
        try:
            row, column = map(operator.index, self.patch)
        except (TypeError, ValueError):
            raise VitrailError(f"patch must be two integers, (row, column), but got {self.patch!r}.") from None
        if not (0 <= row < rows and 0 <= column < columns):
            raise VitrailError(f"{view.name} has {rows} × {columns} patches, so there is no patch {self.patch}.")
        return view.num_prefix + row * columns + column

    def title(self, otherwise: str) -> str:
        """Its name, or that of its file."""
        name = self.name or (Path(self.other).name if isinstance(self.other, str | PathLike) else otherwise)
        return name if self.patch is None else f"patch {self.patch} of {name}"


@dataclass(frozen=True)
class Callable(BeyondClass):
    """Any function of what the network computes → a number for each image, (B,).

    It gets the tokens (B, n, d) after the final norm, the pooled vectors (B, D) that the head reads and the logits
    (B, C). Methods that use gradients differentiate it. Methods that remove patches leave their tokens out. Models that
    cannot be seen into give None for the first two.
    """

    function: Answer
    name: str | None = None

    @classmethod
    def pose(cls, view: View, questions: Sequence[Callable], see: See) -> tuple[View, list[int]]:
        if len(questions) > 1:
            raise VitrailError("a function is explained by itself: let it return the difference in place of against=.")
        function = questions[0].function
        if not callable(function):
            raise VitrailError(f"a function of (tokens, pooled, logits) was expected, but got {function!r}.")
        name = questions[0].name or str(getattr(function, "__name__", "function")).replace("<lambda>", "function")
        return answering(view, function, name), [0]


class Place:
    """A class at a place of the image. Its view has the classes of the model."""

    target: int | str | None

    def posed(self, view: View, look: Look) -> View:
        """The view of the place."""
        raise NotImplementedError

    def same_as(self, other: Any) -> bool:
        """Whether both are of the same place."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Region(Place):
    """A class in a region, for models with an output per patch: the mean logit over its pixels.

    ``mask``: a picture or its path, where anything but 0 is inside, or an array or tensor of booleans, of the size of
    the image or of the model input. Between the patches the logits are interpolated, as segmentation models do.
    ``target``: the class; None = the one with the largest mean logit there.
    """

    mask: str | Path | Image.Image | np.ndarray | Tensor
    target: int | str | None = None

    def posed(self, view: View, look: Look) -> View:
        segmenting(view)  # refuses a model without regions before anything is wrong with the mask
        mask = read_mask(self.mask)
        height, width = mask.shape
        sizes = {picture.image.size for picture in look()}
        if sizes == {(width, height)}:
            seen = view.preprocessing.mask(mask)
        elif (height, width) == view.size:
            seen = torch.from_numpy(mask)
        else:
            images = " and ".join(f"{size[0]} × {size[1]}" for size in sorted(sizes)[:3])
            raise VitrailError(
                f"the mask has {width} × {height} pixels, but the image has {images} and the input of {view.name} "
                f"{view.size[1]} × {view.size[0]}: give a mask of either size."
            )
        if not mask.any():
            raise VitrailError("the mask is empty: mark the pixels of the region with anything but 0.")
        if not seen.any():
            raise VitrailError(
                f"the region lies outside the part of the image that {view.name} sees "
                f'({view.preprocessing.describe()}): choose another region, or fit="squash" or "pad".'
            )
        return in_mask(view, seen)

    def same_as(self, other: Any) -> bool:
        return isinstance(other, Region) and np.array_equal(read_mask(self.mask), read_mask(other.mask))


@dataclass(frozen=True)
class Box(Place):
    """The class of a box of a detector; ``query`` is its number, as ``view.boxes(image)`` lists them.

    ``query``: None = the surest box of the image, or of the class. ``target``: the class; None = the likeliest, which
    "no object" never is.
    """

    query: int | None = None
    target: int | str | None = None

    def posed(self, view: View, look: Look) -> View:
        detector = as_detector(view)
        if self.query is not None:
            return detector.of_box(self.query)
        (picture,) = look()
        return detector.of_box(detector.surest(picture.pixels, self.index(view)))

    def index(self, view: View) -> int | None:
        """The number of the class."""
        target = _plain(view, self.target)
        return None if target is None else view.class_index(target)

    def same_as(self, other: Any) -> bool:
        return isinstance(other, Box) and self.query == other.query


def read_mask(source: str | Path | Image.Image | np.ndarray | Tensor) -> NDArray[np.bool_]:
    """(H, W): where a mask is not 0; of a picture, where any of its colours is not black and it is not transparent."""
    if isinstance(source, str | Path):
        path = source
        try:
            source = Image.open(path)
            source.load()
        except UnidentifiedImageError:
            raise VitrailError(f"cannot read the mask {path}: it is not an image.") from None
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise VitrailError(f"cannot read the mask {path}: {_reason(error)}.") from None
    values: NDArray[Any]
    if isinstance(source, Image.Image):
        values = np.asarray(source)
        if "A" in source.getbands():
            values = values[..., :-1] * (values[..., -1:] > 0)
        values = values if values.ndim == 2 else np.any(values, axis=-1)
    else:
        values = source.detach().cpu().numpy() if isinstance(source, Tensor) else np.asarray(source)
        values = values[0] if values.ndim == 3 and len(values) == 1 else values
    if values.ndim != 2 or not values.size or values.dtype.kind not in "biuf":
        raise VitrailError(
            f"a mask is a picture, or an array of shape (height, width), but got {values.dtype} {values.shape}."
        )
    return values != 0


def pose(view: View, target: Any, against: Any, see: See, look: Look) -> tuple[View, ClassSpec, ClassSpec]:
    """The view that answers a question, with the classes that ``target`` and ``against`` are there."""
    if isinstance(target, Contrast):
        if against is not None:
            raise VitrailError("a Contrast names what its target is opposed to: leave against= out.")
        target, against = target.target, target.against
    target, against = (_plain(view, spec) for spec in (target, against))
    if isinstance(target, Place) or isinstance(against, Place):
        if not isinstance(target, Place) or (isinstance(against, Place) and not target.same_as(against)):
            raise VitrailError("classes can only be opposed to each other at the same place: give against= a class.")
        rival = against.target if isinstance(against, Place) else against
        if isinstance(rival, BeyondClass):
            raise VitrailError(f"{_called(target)} cannot be opposed to {_called(rival)}: give against= a class.")
        return target.posed(view, look), _plain(view, target.target), _plain(view, rival)
    view = view.asked_about(target, against)
    questions = [spec for spec in (target, against) if isinstance(spec, BeyondClass)]
    if not questions:
        return view, target, against
    kind = type(questions[0])
    if kind is Group and target is None:  # the predicted class
        return kind.pose(view, [against], see)[0], None, 0
    if kind is Group and against is not None:  # a class is a group of itself
        questions = [spec if isinstance(spec, BeyondClass) else Group([spec]) for spec in (target, against)]
    if against is not None and [type(question) for question in questions] != [kind, kind]:
        first, second = (_called(spec) for spec in (target, against))
        raise VitrailError(f"{first} cannot be opposed to {second}: both must be questions of one kind.")
    posed, indices = kind.pose(view, questions, see)
    return posed, indices[0], indices[1] if len(indices) > 1 else None


def are_several(target: Any) -> bool:
    """Whether it is a target for each image."""
    return isinstance(target, list | tuple) or (isinstance(target, Tensor | np.ndarray) and target.ndim > 0)


def one_for_each(view: View, target: Any, against: Any, count: int) -> list[Any] | None:
    """Targets that need views of their own, one for each of ``count`` images; None if one view serves all.

    A class of a detector is that of the surest box in each image, unless it is opposed to more than a class.
    """
    several = are_several(target)
    targets = list(target) if several else [target] * count
    if isinstance(view, Detector) and view.question is None:
        targets = [_boxed(single, against) for single in targets]
    elif not several or not any(isinstance(single, BeyondClass | Place | Contrast) for single in targets):
        return None
    if len(targets) != count:
        raise VitrailError(f"there are {len(targets)} targets for {count} images: give one, or one per image.")
    return targets


def _boxed(target: Any, against: Any) -> Any:
    """A class of a detector as that of a box; as it is where the question is no class of a box."""
    if isinstance(target, Contrast):
        return Contrast(_boxed(target.target, target.against), target.against)
    return target if isinstance(target, BeyondClass | Place) or isinstance(against, BeyondClass) else Box(None, target)


def read_groups(path: str | Path) -> dict[str, Group]:
    """Groups from a text file with a line ``name: class, class, …`` for each; # starts a comment."""
    groups: dict[str, Group] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise VitrailError(f"cannot read the groups of {path}: it is not text in UTF-8.") from None
    except OSError as error:
        raise VitrailError(f"cannot read the groups of {path}: {_reason(error)}.") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        name, colon, classes = (part.strip() for part in text.partition(":"))
        if text and not (name and colon and classes):
            raise VitrailError(f"line {number} of {path} is {line!r}: expected `name: class, class, …`.")
        if name in groups:
            raise VitrailError(f"{path} holds the group {name!r} twice.")
        if text:
            groups[name] = Group(classes, name)
    return groups


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    return getattr(error, "strerror", None) or str(error)


def _plain(view: View, spec: Any) -> Any:
    """A class or text as callers may also write it."""
    if callable(spec):
        raise VitrailError(f"{_called(spec)} is no class: ask about a function as targets.Callable(function).")
    if isinstance(spec, Text):
        if not isinstance(spec.prompt, str) or not spec.prompt.strip():
            raise VitrailError(f"a prompt is a text that is not empty, but got {spec.prompt!r}.")
        if not view.reads_texts:
            raise VitrailError(
                f"{view.name} reads no texts: ask about one of its classes, or load a model of images and texts with "
                "prompts=."
            )
        if is_number(spec.prompt):
            raise VitrailError(f"the prompt {spec.prompt!r} would be the number of a class: write it in words.")
        return spec.prompt
    if isinstance(spec, list | tuple):
        for item in spec:
            if isinstance(item, BeyondClass | Contrast):
                raise VitrailError(f"{_called(item)} is a question about all images: give it alone, not in a list.")
        return [_plain(view, item) for item in spec]
    return spec.name if isinstance(spec, Class) else spec


def _called(spec: Any) -> str:
    """A target, as text."""
    if isinstance(spec, BeyondClass | Contrast | Place):
        return f"a {type(spec).__name__}"
    if callable(spec):
        return f"the function {getattr(spec, '__name__', type(spec).__name__)}"
    return "the predicted class" if spec is None else repr(spec)


def _matching(view: View, entry: int | str) -> list[int]:
    """The classes that an index, a name or a pattern means."""
    if isinstance(entry, str) and any(sign in entry for sign in "*?["):
        wanted = plain_name(entry)
        if view.labels is None:
            raise VitrailError(f"{view.name} has no class names that {entry!r} could match: give numbers, or labels=.")
        names = plain_names(tuple(view.labels))  # with synonyms
        matches = [i for i, parts in enumerate(names) if any(fnmatch.fnmatchcase(part, wanted) for part in parts)]
        if not matches:
            raise VitrailError(f"no class of {view.name} matches {entry!r}.")
        return matches
    return [view.class_index(entry)]


# A class by index or name, one per image, or None for the predicted one.
ClassSpec = int | str | Sequence[int | str] | Tensor | None
# One question: a class or any other target.
SingleTarget = int | str | Class | Text | Contrast | BeyondClass | Place | None
# The same, or one for each image.
TargetSpec = ClassSpec | SingleTarget | Sequence[BeyondClass | Place | Contrast]


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
        index = view.predicted(logits)
        against = None if self.against is None else self.against.to(index.device)
        return Target(index, against).checked(view)

    def score(self, view: View, logits: Tensor, output: str) -> Tensor:
        """(B, C) → (B,): the explained number."""
        return view.score(logits, self.index, self.against, output)

    def row(self, i: int) -> Target:
        """The target of one image, (1,)."""
        return self.rows(slice(i, i + 1))

    def repeated(self, count: int) -> Target:
        """The target of one image, for several."""
        return Target(*(None if classes is None else classes.expand(count) for classes in (self.index, self.against)))

    def rows(self, part: slice) -> Target:
        """The target of some images."""
        return Target(*(None if classes is None else classes[part] for classes in (self.index, self.against)))

    def reading(self, output: str) -> ClassScore:
        """How the score is read off the logits of variants of an image."""
        return ClassScore(output, self.against is not None)

    @property
    def about(self) -> tuple[int, ...]:
        """Of one image with a known class: what its reading is about."""
        (about,) = self.about_each
        return about

    @property
    def about_each(self) -> list[tuple[int, ...]]:
        """The same of each image: its class, and the one it is explained against."""
        assert self.index is not None
        return list(
            zip(*(classes.tolist() for classes in (self.index, self.against) if classes is not None), strict=True)
        )


def class_indices(view: View, spec: ClassSpec, count: int, name: str) -> Tensor:
    """(B,): classes by index or name, one for all images or as many as there are images."""
    values: Any = spec
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
        if isinstance(values, list) and len(values) == 1:  # captum's contract: a tensor of one number is for all
            values = values[0]
    if isinstance(values, Sequence) and not isinstance(values, str):
        present = view.snapshot()
        indices = [present.class_index(value) for value in values]
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
