"""What ``--target`` and ``--against`` ask of an image: classes by name or number, ``@label`` and ``@predicted``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.cli.outputs import class_part
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

    def check(self, view: View) -> None:
        """Refuses wrong classes before any work."""
        classes = [word if word is None or word.startswith("@") else view.class_index(word) for word in self.words]
        for word in self.words:
            if word is not None and word.startswith("@") and word not in (LABEL, PREDICTED):
                raise VitrailError(f"there is no class {word!r}: expected {LABEL}, {PREDICTED}, a name or a number.")
        target, against = classes
        if against is not None and against == (PREDICTED if target is None else target):
            name = view.label(against) if isinstance(against, int) else against
            raise VitrailError(
                f"--target and --against are both {name}: use two different classes, e.g. --target {LABEL}."
            )

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
        option = f"--target, e.g. --target {LABEL}" if self.target in (None, PREDICTED) else "--against"
        raise ContrastError(f"the {source} and --against are both {name}: choose another class with {option}.")

    def rival(self, view: View, label: int | None, predicted: int) -> int | None:
        """The class of ``against`` for such an image."""
        return None if self.against is None else _class(view, self.against, label, predicted)

    def parts(self, view: View) -> list[str]:
        """What it adds to the name of a file: ``281-tabby``, ``not-predicted``."""
        target, against = (None if word is None else word_part(view, word) for word in self.words)
        return [target or "", f"not-{against}" if against else ""]


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
            f"{view.name} is a classifier, which reads no texts: use --target CLASS, or a model that does, as "
            "--model scenes-text or a CLIP (--model hf:… --prompt …)."
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
