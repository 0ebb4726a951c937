"""Explanations as files of other tools: COCO, Label Studio, NumPy, TIFF."""

from __future__ import annotations

import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from PIL import Image

from vitrail.calls import call_name
from vitrail.data.coco_masks import encode_mask
from vitrail.data.images import image_hash
from vitrail.data.paths import names_below
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation
from vitrail.files import write_together
from vitrail.geometry import tight_box
from vitrail.integrations.fiftyone import FIFTYONE, add_to_fiftyone, dataset_named
from vitrail.integrations.label_studio import brush_runs
from vitrail.show.heatmap import fit_to_image
from vitrail.version import __version__

Format: TypeAlias = Literal["coco", "label_studio", "npz", "tiff"]
FORMATS: tuple[str, ...] = get_args(Format)
SUFFIXES = {".npz": "npz", ".tif": "tiff", ".tiff": "tiff"}
NAMES = {"coco": "coco.json", "label_studio": "label_studio.json", "npz": "maps.npz"}  # of the command line
SERVED = "/data/local-files/?d="  # where Label Studio serves files of its own disk
TIFF_DESCRIPTION = 270  # the tag
SHARE = 0.5  # of the evidence, in an area


def export(
    explanations: Explanation | Sequence[Explanation],
    path: str | os.PathLike[str],
    format: Format | None = None,  # noqa: A002
    *,
    share: float = SHARE,
) -> list[Path]:
    """Writes explanations for another tool; returns the files that were written.

    Args:
        explanations: one or several.
        path: the file; for several maps as "tiff" the folder of the files, which are named as the images; or
            "fiftyone:NAME", a data set of FiftyOne, to which they are added (see ``add_to_fiftyone``).
        format: "coco" or "label_studio" (areas), "npz" or "tiff" (values); None = by the suffix of the path.
        share: an area is the smallest one with this share of the evidence for the class, as ``Explanation.area``.

    COCO and Label Studio get an area for each explanation that has evidence for its class, NumPy all maps of one
    shape, a TIFF the values of the map at every pixel of the image, in float32, NaN where the model did not look.
    """
    listed = [explanations] if isinstance(explanations, Explanation) else list(explanations)
    if not listed:
        raise VitrailError("no explanation was given: expected at least one.")
    if str(path).startswith(FIFTYONE):
        add_to_fiftyone(dataset_named(str(path).removeprefix(FIFTYONE)), listed)
        return []
    path = Path(path)
    kind = format or SUFFIXES.get(path.suffix.lower())
    if kind not in FORMATS:
        raise VitrailError(
            f"cannot export to {path.name!r} as {format!r}: expected format= one of {', '.join(FORMATS)}, or a file "
            f"that ends in {', '.join(SUFFIXES)}."
        )
    if kind == "tiff":
        names = {path: listed[0]} if len(listed) == 1 else _tiff_names(path, listed)
        contents: dict[str | os.PathLike[str], bytes] = {name: tiff_bytes(each) for name, each in names.items()}
    else:
        file = export_file(kind, share)
        for explanation in listed:
            file.add(explanation)
        contents = {path: file.content()}
    write_together(contents)
    return [Path(name) for name in contents]


class ExportFile(ABC):
    """A file that grows with every explanation, of which it keeps only what it writes."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.paths: list[str | None] = []  # of the images; None for those that were never files
        self.sizes: list[tuple[int, int]] = []
        self._numbers: dict[str, int] = {}  # by path or hash

    @abstractmethod
    def add(self, explanation: Explanation) -> None:
        """Adds an explanation."""

    @abstractmethod
    def content(self) -> bytes:
        """The file with what was added so far."""

    def image(self, explanation: Explanation) -> int:
        """The number of an image; the same for several explanations of it."""
        key = explanation.image_path or image_hash(explanation.image)
        if key not in self._numbers:
            self._numbers[key] = len(self.paths)
            self.paths.append(explanation.image_path)
            self.sizes.append(explanation.image.size)
        return self._numbers[key]

    def names(self) -> list[str]:
        """The images as paths below the folder that they share; those that were never files are numbered."""
        files = iter(names_below([path for path in self.paths if path is not None]))
        return [f"image-{number}" if path is None else next(files) for number, path in enumerate(self.paths)]


class CocoFile(ExportFile):
    """COCO's annotations: the areas as packed run lengths, with the probability as the score."""

    def __init__(self, share: float = SHARE) -> None:
        super().__init__(share)
        self._annotations: list[tuple[tuple[int, str], dict[str, Any]]] = []  # with class and name

    def add(self, explanation: Explanation) -> None:
        image, mask = self.image(explanation), explanation.area(self.share)
        box = tight_box(mask)
        if box is None:
            return
        x0, y0, x1, y1 = box
        annotation = {
            "image_id": image + 1,
            "segmentation": encode_mask(mask),
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": int(mask.sum()),
            "iscrowd": 0,
            "score": explanation.probability,
            **numbers_of(explanation),
            "method": explanation.call,
            "model": explanation.model_name,
        }
        self._annotations.append(((explanation.target, explanation.label), annotation))

    def content(self) -> bytes:
        classes = sorted({key for key, _ in self._annotations})
        category = {key: number for number, key in enumerate(classes, 1)}
        return _json(
            {
                "info": {"description": f"areas with {self.share:.0%} of the evidence", "version": __version__},
                "images": [
                    {"id": number, "file_name": name, "width": width, "height": height}
                    for number, (name, (width, height)) in enumerate(zip(self.names(), self.sizes, strict=True), 1)
                ],
                "annotations": [
                    {"id": number, "category_id": category[key], **annotation}
                    for number, (key, annotation) in enumerate(self._annotations, 1)
                ],
                "categories": [{"id": category[key], "name": key[1], "class": key[0]} for key in classes],
            }
        )


class LabelStudioFile(ExportFile):
    """Tasks of Label Studio: each image with a prediction for every explanation, a brush of its class."""

    def __init__(self, share: float = SHARE) -> None:
        super().__init__(share)
        self._predictions: list[tuple[int, dict[str, Any]]] = []  # with the number of the image

    def add(self, explanation: Explanation) -> None:
        image, mask = self.image(explanation), explanation.area(self.share)
        width, height = explanation.image.size
        brush = {
            "id": str(len(self._predictions)),
            "type": "brushlabels",
            "from_name": "label",
            "to_name": "image",
            "original_width": width,
            "original_height": height,
            "image_rotation": 0,
            "value": {"format": "rle", "rle": brush_runs(mask), "brushlabels": [explanation.label]},
            "score": explanation.probability,
            "meta": {"text": [text for text in (explanation.detail, explanation.trust_line) if text]},
        }
        prediction = {
            "model_version": f"{explanation.call} on {explanation.model_name}",
            "score": explanation.probability,
            "result": [brush] if mask.any() else [],
        }
        self._predictions.append((image, prediction))

    def content(self) -> bytes:
        tasks: list[dict[str, Any]] = [{"data": {"image": SERVED + name}, "predictions": []} for name in self.names()]
        for image, prediction in self._predictions:
            tasks[image]["predictions"].append(prediction)
        return _json(tasks)


class ArrayFile(ExportFile):
    """NumPy's npz: maps (N, rows, columns), and an array of N values for everything else."""

    def __init__(self, share: float = SHARE) -> None:
        super().__init__(share)
        self._maps: list[Any] = []
        self._rows: list[dict[str, Any]] = []

    def add(self, explanation: Explanation) -> None:
        values = explanation.map.numpy()
        if self._maps and values.shape != self._maps[0].shape:
            shapes = " and ".join(str(shape) for shape in (self._maps[0].shape, values.shape))
            raise VitrailError(f"the maps of one npz file must have one shape, but got {shapes}: write one for each.")
        self._maps.append(values)
        self._rows.append(
            {
                "image": self.image(explanation),
                "size": explanation.image.size,
                "box": explanation.box,
                "target": explanation.target,
                "label": explanation.label,
                "probability": explanation.probability,
                "trust": np.nan if explanation.trust_score is None else explanation.trust_score,
                "method": explanation.call,
                "model": explanation.model_name,
            }
        )

    def content(self) -> bytes:
        buffer, names = io.BytesIO(), self.names()
        columns: dict[str, Any] = {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}
        columns["image"] = np.array([names[image] for image in columns["image"]])
        np.savez_compressed(buffer, maps=np.stack(self._maps), **columns)
        return buffer.getvalue()


FILES: dict[str, Callable[[float], ExportFile]] = {
    "coco": CocoFile,
    "label_studio": LabelStudioFile,
    "npz": ArrayFile,
}


def export_file(kind: str, share: float = SHARE) -> ExportFile:
    """An empty file of a format that holds several explanations."""
    return FILES[kind](share)


def tiff_bytes(explanation: Explanation) -> bytes:
    """The values of the map at every pixel of the image, not rescaled; NaN where the model did not look."""
    values = fit_to_image(explanation.map, explanation.box, explanation.image.size)
    about = {
        "label": explanation.label,
        "probability": explanation.probability,
        **numbers_of(explanation),
        "method": explanation.call,
        "model": explanation.model_name,
    }
    buffer = io.BytesIO()
    picture = Image.fromarray(values.float().numpy())
    picture.save(buffer, "TIFF", compression="tiff_adobe_deflate", tiffinfo={TIFF_DESCRIPTION: json.dumps(about)})
    return buffer.getvalue()


def numbers_of(explanation: Explanation) -> dict[str, float]:
    """What was measured of the map: trust and scores, by the names of their metrics."""
    trust = {} if explanation.trust_score is None else {"trust": explanation.trust_score}
    return trust | {call_name(name): value for name, value in explanation.scores.items()}


def _tiff_names(folder: Path, explanations: Sequence[Explanation]) -> dict[Path, Explanation]:
    """A file in the folder for each map, named as its image; a number follows where names agree."""
    names: dict[Path, Explanation] = {}
    for number, explanation in enumerate(explanations):
        stem = f"image-{number}" if explanation.image_path is None else Path(explanation.image_path).stem
        path = folder / f"{stem}.tif"
        names[path if path not in names else folder / f"{stem}-{number}.tif"] = explanation
    return names


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace")
