"""FiftyOne's data sets: samples with a class and boxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.data.base import Example, Listed, Object
from vitrail.data.images import read_image
from vitrail.data.paths import names_below
from vitrail.errors import VitrailError
from vitrail.geometry import clip_box

# The field that FiftyOne's own importers fill; any other field with classes may hold predictions.
GROUND_TRUTH = "ground_truth"


def fiftyone() -> Any:
    """The library, or an error that says how to install it."""
    try:
        import fiftyone as library
    except ImportError:
        raise VitrailError("data sets of FiftyOne need its package: pip install fiftyone.") from None
    return library


def is_fiftyone(data: Any) -> bool:
    """Whether something is a data set of FiftyOne or a view of one."""
    return type(data).__module__.startswith("fiftyone.") and hasattr(data, "get_field_schema")


@contextmanager
def reaching_database() -> Iterator[None]:
    """Turns what FiftyOne raises, above all where it finds no MongoDB, into VitrailError."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise VitrailError(f"FiftyOne cannot open its database: {reason}.") from error


class FiftyOneData(Listed):
    """The samples of a FiftyOne data set, with a ``Classification`` as the class and ``Detections`` as the objects.

    Labels are the names that occur, in sorted order.
    """

    def __init__(self, samples: Any, label: str | None = None, boxes: str | None = None) -> None:
        """Reads paths and annotations; images are read lazily.

        Args:
            samples: the name of a data set, a ``fiftyone.Dataset`` or a view of one.
            label: the field with the true class; None = ``ground_truth``, if there is one.
            boxes: the field with the objects' boxes; None = no objects.
        """
        fo = fiftyone()
        with reaching_database():
            if isinstance(samples, str):
                if not fo.dataset_exists(samples):
                    known = ", ".join(fo.list_datasets()) or "none"
                    raise VitrailError(f"there is no FiftyOne data set {samples!r}; it has: {known}.")
                samples = fo.load_dataset(samples)
            self.name = samples.name
            field = _field(samples, fo.Classification, label, "label")
            if field is None and GROUND_TRUTH in samples.get_field_schema(embedded_doc_type=fo.Classification):
                field = GROUND_TRUTH
            boxes = _field(samples, fo.Detections, boxes, "boxes")
            self._paths: list[str] = samples.values("filepath")
            classes = [None] * len(self._paths) if field is None else samples.values(f"{field}.label")
            self._boxes = [None] * len(self._paths) if boxes is None else samples.values(f"{boxes}.detections")
            ids = samples.values("id")
        if not self._paths:
            raise VitrailError(f"the FiftyOne data set {self.name!r} has no samples.")
        names = names_below(self._paths)
        self._ids = names if len(set(names)) == len(names) else ids
        known_classes = sorted({name for name in classes if name is not None})
        self.labels = tuple(known_classes) or None
        self._place = {name: place for place, name in enumerate(known_classes)}
        self._classes = [None if name is None else self._place[name] for name in classes]

    def load(self, position: int) -> Example:
        image, label = read_image(self._paths[position]), self._classes[position]
        objects = []
        for detection in self._boxes[position] or ():
            left, top, width, height = detection.bounding_box  # in shares of the image
            across, down = image.size
            corners = (left * across, top * down, (left + width) * across, (top + height) * down)
            box = clip_box(corners, *image.size)
            if box is not None:
                objects.append(Object(self._place.get(detection.label), box))
        return Example(self._ids[position], image, label, tuple(objects))


def _field(samples: Any, kind: Any, name: str | None, option: str) -> str | None:
    """The field of a name, which must hold labels of this kind."""
    if name is None:
        return None
    fields = list(samples.get_field_schema(embedded_doc_type=kind))
    if name not in fields:
        known = ", ".join(fields) or "none"
        raise VitrailError(
            f"the FiftyOne data set {samples.name!r} has no field {name!r} of {kind.__name__} for {option}=; it has: "
            f"{known}."
        )
    return name
