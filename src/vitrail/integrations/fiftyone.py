"""FiftyOne: heatmaps and scores as fields of samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.calls import call_name
from vitrail.data.fiftyone import fiftyone, reaching_database
from vitrail.errors import VitrailError
from vitrail.explanation import Explanation
from vitrail.show.colours import Scale
from vitrail.show.heatmap import fit_to_image

FIFTYONE = "fiftyone:"  # before the name of a data set
EDGE = 320  # the longer side of a heatmap, in pixels: the App scales it to the image, and the database keeps it


def add_to_fiftyone(samples: Any, explanations: Explanation | Sequence[Explanation], field: str = "vitrail") -> None:
    """Adds explanations to the samples of a FiftyOne data set, by the paths of their images.

    A sample gets the fields ``vitrail`` (a ``Heatmap``), ``vitrail_class`` (a ``Classification`` with the explained
    class and its probability), ``vitrail_method``, and, where they were measured, ``vitrail_trust`` and
    ``vitrail_insertion`` and the like. An image without a sample gets one.

    Args:
        samples: a ``fiftyone.Dataset``, or a view of one that holds every image.
        explanations: one for each image, of image files.
        field: the name of the first field, with which the others begin.
    """
    fo = fiftyone()
    listed = [explanations] if isinstance(explanations, Explanation) else list(explanations)
    ids = {os.path.realpath(path): name for name, path in zip(*samples.values(["id", "filepath"]), strict=True)}
    for explanation in listed:
        path = explanation.image_path
        if path is None:
            raise VitrailError("FiftyOne knows images by their files, but an image in memory was explained.")
        sample = samples[ids[path]] if path in ids else _added(samples, path)
        sample[field] = heatmap_label(explanation)
        sample[f"{field}_class"] = fo.Classification(label=explanation.label, confidence=explanation.probability)
        sample[f"{field}_method"] = explanation.call
        if explanation.trust_score is not None:
            sample[f"{field}_trust"] = explanation.trust_score
        for name, value in explanation.scores.items():
            sample[f"{field}_{call_name(name)}"] = value
        sample.save()


def heatmap_label(explanation: Explanation) -> Any:
    """The map as a ``fiftyone.Heatmap`` over the whole image; a signed map has a range symmetric about zero."""
    width, height = explanation.image.size
    factor = min(1.0, EDGE / max(width, height))
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    across, down = size[0] / width, size[1] / height
    left, top, right, bottom = explanation.box
    values = fit_to_image(explanation.map.float(), (left * across, top * down, right * across, bottom * down), size)
    scale = Scale.of(values, explanation.signed)
    known = values.nan_to_num(0.0 if scale.signed else scale.low)
    return fiftyone().Heatmap(map=known.numpy(), range=[scale.low, scale.high])


def dataset_named(name: str) -> Any:
    """A data set of FiftyOne, which is made if there is none, and kept."""
    fo = fiftyone()
    with reaching_database():
        return fo.load_dataset(name) if fo.dataset_exists(name) else fo.Dataset(name, persistent=True)


def _added(samples: Any, path: str) -> Any:
    fo = fiftyone()
    if not isinstance(samples, fo.Dataset):
        raise VitrailError(f"the view has no sample of {Path(path).name}: give the data set, to which it can be added.")
    sample = fo.Sample(filepath=path)
    samples.add_sample(sample)
    return sample
