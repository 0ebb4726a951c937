"""What ``--target`` and ``--against`` ask of an image: classes by name or number, ``@label`` and ``@predicted``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.outputs import class_part, digest, file_part
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.models.view import View

LABEL, PREDICTED = "@label", "@predicted"


class ContrastError(VitrailError):
    """Target and against are the same class of this image, which is no failure: others may differ."""


@dataclass(frozen=True)
class Question:
    """A class, as opposed to another one; None = the predicted class, and no other one."""

    target: str | None = None
    against: str | None = None
    options: tuple[str, str] = ("--target", "--against")  # which say so
    digest: str = ""  # of a question about more than classes, whose names do not tell it from others

    def check(self, view: View) -> None:
        """Refuses wrong classes before any work."""
        classes = [word if word is None or word.startswith("@") else view.class_index(word) for word in self.words]
        for word in self.words:
            if word is not None and word.startswith("@") and word not in (LABEL, PREDICTED):
                raise VitrailError(f"there is no class {word!r}: expected {LABEL}, {PREDICTED}, a name or a number.")
        target, against = classes
        if against is not None and against == (PREDICTED if target is None else target):
            name = view.label(against) if isinstance(against, int) else against
            both = f"the target and {self.options[1]}" if target is None else " and ".join(self.options)
            example = f", e.g. --target {LABEL}" if against == PREDICTED else ""
            raise VitrailError(f"{both} are both {name}: use two different classes{example}.")

    @property
    def texts(self) -> list[str]:
        """The classes by name."""
        return [word for word in self.words if word is not None and not word.startswith("@")]

    @property
    def words(self) -> tuple[str | None, str | None]:
        return self.target, self.against

    @property
    def needs_prediction(self) -> bool:
        return self.against is not None or self.target in (LABEL, PREDICTED)

    def classes(self, view: View, label: int | None, predicted: int) -> tuple[int, int | None]:
        """(target, against) of an image with this true class, if known, and this prediction."""
        target = predicted if self.target is None else _class(view, self.target, label, predicted)
        against = self.rival(view, label, predicted)
        if target != against:
            return target, against
        name = view.label(target)
        if LABEL in self.words and label == predicted:
            raise ContrastError(f"the model is right here: it predicts {name}, the true class.")
        source = "predicted class" if self.target in (None, PREDICTED) else "target"
        option = f"--target, e.g. --target {LABEL}" if self.target in (None, PREDICTED) else self.options[1]
        raise ContrastError(f"the {source} and {self.options[1]} are both {name}: choose another class with {option}.")

    def class_of(self, view: View, label: int | None) -> int | None:
        """The class of ``target``; None = the predicted one."""
        return None if self.target is None or self.target == PREDICTED else _class(view, self.target, label, -1)

    def rival(self, view: View, label: int | None, predicted: int) -> int | None:
        """The class of ``against`` for such an image."""
        return None if self.against is None else _class(view, self.against, label, predicted)

    def parts(self, view: View) -> list[str]:
        """What it adds to the name of a file: ``281-tabby``, ``not-predicted``."""
        target, against = (None if word is None else word_part(view, word) for word in self.words)
        return [target or "", f"not-{against}" if against else "", self.digest]


@dataclass(frozen=True)
class OtherQuestion:
    """What is asked instead of a class, by options of its own; None = nothing else."""

    target: Any = None
    against: Any = None
    region: Path | None = None  # a mask
    box: int | None = None
    groups: tuple[str, ...] = ()  # the names of those that --groups has

    @property
    def place(self) -> str:
        """Where a class is asked about, in the names of files."""
        return f"region-{file_part(self.region)}" if self.region else "" if self.box is None else f"box-{self.box}"

    def posed(self, view: View, question: Question, paths: Sequence[Path]) -> tuple[View, Question]:
        """The view that answers, and the question about its classes; ``question``: that of the other options."""
        from vitrail.api import see
        from vitrail.targets import Box, Region, Similarity, pose

        if self.region is not None and len(paths) > 1:
            raise VitrailError(f"--region is the mask of a single image, but there are {len(paths)}: name one.")
        if self.region is not None:
            return Region(self.region).posed(view, lambda: [see(view, paths[0])]), question
        if self.box is not None:
            return Box(self.box).posed(view, list), question
        if self.target is None and self.against is None:
            return view.asked_about(question.texts), question
        sides = ((self.target, question.target), (self.against, question.against))
        if any(None not in side for side in sides):
            raise VitrailError(
                "--target and --against name classes, --group and --similar-to ask for something else: use "
                "only one for either side."
            )
        target, against = (asked if word is None else word for asked, word in sides)
        if any(isinstance(word, str) and word.startswith("@") for word in (target, against)):
            raise VitrailError(f"{LABEL} and {PREDICTED} are classes of single images: name the class instead.")
        self._check_names(view)
        posed, index, rival = pose(view, target, against, lambda source: see(view, source).pixels, list)
        assert posed.question is not None
        is_similarity = isinstance(self.target, Similarity)
        identity = str(Path(self.target.other).resolve()) if is_similarity else json.dumps(posed.question["groups"])
        target, against = (None if number is None else str(number) for number in (index, rival))
        return posed, Question(target, against, self._options(question), digest(identity))

    def _check_names(self, view: View) -> None:
        """Tells which groups the file holds where a word is neither one of them nor a class."""
        asked = [group for group in (self.target, self.against) if group is not None]
        for group in asked if self.groups else ():
            try:
                group.members(view)
            except VitrailError as error:
                if group.name is not None:
                    raise
                names = ", ".join(self.groups)
                raise VitrailError(f"{group.classes!r} is no group of --groups, which has {names}: {error}") from None

    def _options(self, question: Question) -> tuple[str, str]:
        """The options that say what is asked about and what it is opposed to."""
        target, against = question.options
        return target if self.target is None else "--group", against if self.against is None else "--against-group"


def other_question(
    *,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="CLASSES",
            help="Explain any of several classes: names, numbers and patterns such as '*terrier*', comma-separated, "
            "or a name of --groups.",
        ),
    ] = None,
    against_group: Annotated[
        str | None, typer.Option(metavar="CLASSES", help="Explain the target as opposed to any of these, likewise.")
    ] = None,
    groups: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text file with a line `name: class, class` for each group.")
    ] = None,
    similar_to: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Explain the similarity to another image, by the embeddings.")
    ] = None,
    region: Annotated[
        Path | None,
        typer.Option(
            metavar="MASK", help="Explain the class in a region: a picture of the image's size that is not black there."
        ),
    ] = None,
    box: Annotated[
        int | None, typer.Option(min=0, help="Explain the class of a box of a detector; default: the surest box.")
    ] = None,
) -> OtherQuestion:
    """The options that ask for something else than a class."""
    sides = against_group if group is None else group
    if sum(value is not None for value in (sides, similar_to, region, box)) > 1:
        raise VitrailError("--group, --similar-to, --region and --box ask different questions: use only one of them.")
    if sides is None and similar_to is None:
        if groups is not None:
            raise VitrailError("--groups names groups, but none is explained: use --group NAME.")
        return OtherQuestion(region=region, box=box)

    from vitrail.targets import Group, Similarity, read_groups

    if similar_to is not None:
        return OtherQuestion(Similarity(similar_to))
    named = {} if groups is None else read_groups(groups)
    target, against = (None if text is None else named.get(text, Group(text)) for text in (group, against_group))
    return OtherQuestion(target, against, groups=tuple(named))


def merged(option: str, name: str | None, text: str | None) -> str | None:
    """The class that ``--target`` names or ``--text`` spells out, likewise for the class against it."""
    from vitrail.models.labels import is_number

    if text is None:
        return name
    spelled = {"--target": "--text", "--against": "--against-text"}[option]
    if name is not None:
        raise VitrailError(f"{option} and {spelled} both say what to explain: use only one of them.")
    if is_number(text) or text.startswith("@"):
        raise VitrailError(f"{spelled} takes a text such as 'a red star', but got {text!r}: use {option} for a class.")
    return text


def check_reads_texts(view: View, *texts: str | None) -> None:
    """Refuses texts for a classifier."""
    if not view.reads_texts and any(text is not None for text in texts):
        raise VitrailError(
            f"{view.name} reads no texts: use --target CLASS, or a model that does, as --model scenes-text or a CLIP "
            "(--model hf:… --prompt …)."
        )


def word_part(view: View, word: str) -> str:
    """A class in the name of a file."""
    return word[1:] if word in (LABEL, PREDICTED) else class_part(view, view.class_index(word))


def _class(view: View, word: str, label: int | None, predicted: int) -> int:
    if word == PREDICTED:
        return predicted
    if word != LABEL:
        return view.class_index(word)
    if label is None:
        raise VitrailError(
            f"{LABEL} is the true class, which is not known of this image: put it into a folder with the name of its "
            "class, or list it in a table labels.csv (file, label) beside it."
        )
    return label
