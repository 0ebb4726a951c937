"""What a run of an audit has stored of every image."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.audit.measures import PREDICTION, REMOVAL, Prediction, without_storage
from vitrail.bench.store import Store
from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.geometry import Box
from vitrail.metrics.localization import mass
from vitrail.models.view import View

if TYPE_CHECKING:
    import pandas as pd

SIDE = 112  # pixels of the pictures that are compared with each other


@dataclass(frozen=True)
class Records:
    """All images of an audit that could be explained, in the order of the data set.

    ``frame`` has a row per image; ``maps`` (n, rows, columns) and ``jpegs`` belong to its rows.
    """

    frame: pd.DataFrame
    maps: Tensor
    storage: Sequence[Sequence[int]]
    jpegs: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.jpegs)

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The predicted class of every image."""
        return self.frame["class"].to_numpy()

    def evidence(self) -> Tensor:
        """(n, rows, columns): what share of an image's evidence lies in each cell; all 0 where there is none."""
        cells = (self.maps.shape[1], self.maps.shape[2])
        weights = [
            without_storage(mass(values), stored, cells).double()
            for values, stored in zip(self.maps, self.storage, strict=True)
        ]
        stacked = torch.stack(weights)
        return stacked / stacked.sum((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    def pictures(self) -> Tensor:
        """(n, 3, SIDE, SIDE) in 0…1: the model inputs."""
        images = []
        for jpeg in self.jpegs:
            with Image.open(io.BytesIO(jpeg)) as image:
                small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
            images.append(torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255)
        return torch.stack(images)


def read_records(store: Store, view: View, ids: Sequence[str], calls: Sequence[str]) -> Records:
    """The stored results of these images, measured by these metrics."""
    import pandas as pd

    rows = store.rows()
    rows = rows[rows["error"].isna() & rows["image"].isin(set(ids)) & rows["metric"].isin(set(calls))]
    order = {name: place for place, name in enumerate(ids)}
    predictions = rows[[split_call(call)[0] == PREDICTION for call in rows["metric"]]]
    predictions = predictions.drop_duplicates("image", keep="last")
    predictions = predictions.sort_values("image", key=lambda names: names.map(order))
    if not len(predictions):
        raise VitrailError(f"no image could be explained: see the errors above, or the rows in {store.folder}.")
    maps = {name.split("|", 1)[1].rsplit("|", 2)[0]: values for name, values in store.maps().items()}
    pictures = store.pictures().set_index("image")["jpeg"]
    removals = _removals(rows, view)
    lines, stored = [], []
    for image, label, target, parts in zip(
        predictions["image"], predictions["label"], predictions["target"], predictions["parts"], strict=True
    ):
        prediction, storage = Prediction.read(parts)
        stored.append(storage)
        lines.append(_line(view, image, label, int(target), prediction) | removals.get(image, {}))
    names = list(predictions["image"])
    stacked = torch.from_numpy(np.stack([maps[name] for name in names]).astype(np.float32))
    return Records(pd.DataFrame(lines), stacked, stored, [pictures[name] for name in names])


def _line(view: View, image: str, label: float, target: int, prediction: Prediction) -> dict[str, object]:
    known = not math.isnan(label)
    return {
        "image": image,
        "true": view.label(int(label)) if known else None,
        "predicted": view.label(target),
        "correct": int(label) == target if known else None,
        "probability": prediction.probability,
        "true_probability": prediction.true_probability,
        "second": view.label(int(prediction.second)),
        "margin": prediction.margin,
        "trust": prediction.trust,
        "object": prediction.object,
        "background": 1 - prediction.object,
        "object_area": prediction.object_area,
        "border": prediction.border,
        "corners": prediction.corners,
        "class": target,
        "label": int(label) if known else -1,
    }


def _removals(rows: pd.DataFrame, view: View) -> dict[str, dict[str, object]]:
    """Image → column → value, of the regions that were removed."""
    columns: dict[str, dict[str, object]] = {}
    for image, call, value, parts in zip(rows["image"], rows["metric"], rows["value"], rows["parts"], strict=True):
        name, params = split_call(call)
        if name == REMOVAL:
            region = region_name((params.get("x0", 0), params.get("y0", 0), params.get("x1", 1), params.get("y1", 1)))
            columns.setdefault(image, {}).update(
                {f"probability without {region}": value, f"predicted without {region}": view.label(int(parts[0]))}
            )
    return columns


def region_name(box: Box) -> str:
    """A region as it is written on the command line."""
    return ",".join(f"{side:g}" for side in box)


def share_in_box(evidence: Tensor, box: Box) -> Tensor:
    """(n,): the share of evidence (n, rows, columns) inside a box in shares of the width and of the height."""
    fine = F.interpolate(evidence[:, None], size=(SIDE, SIDE), mode="nearest-exact")[:, 0]
    x0, y0, x1, y1 = (round(side * SIDE) for side in box)
    total = fine.sum((1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    return fine[:, y0:y1, x0:x1].sum((1, 2)) / total
