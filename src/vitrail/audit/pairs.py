"""Paired images: the same pictures, clean and altered."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from vitrail.audit.records import SIDE, Records
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    import pandas as pd

CHANGED = 0.08  # difference of colours, 0…1, above which a pixel was altered


def compare_pairs(clean: Records, altered: Records) -> pd.DataFrame:
    """What an alteration does, one row per image that both have: by its path, else by its name without the suffix.

    ``changed_area`` is the share of the image that was altered, ``evidence_on_change`` the share of the evidence of the
    altered image there, ``similarity`` the cosine of both maps of evidence.
    """
    import pandas as pd

    partners = _partners(list(clean.frame["image"]), list(altered.frame["image"]))
    if not partners:
        raise VitrailError(
            f"no altered image has the name of a clean one: there are, as examples, {clean.frame['image'].iloc[0]!r} "
            f"and {altered.frame['image'].iloc[0]!r}."
        )
    before, after = clean.evidence(), altered.evidence()
    pictures, others = clean.pictures(), altered.pictures()
    rows = []
    for i, j in partners:
        differs = (pictures[i] - others[j]).abs().amax(0) > CHANGED
        fine = F.interpolate(after[j][None, None], size=(SIDE, SIDE), mode="nearest-exact")[0, 0]
        first, second = clean.frame.iloc[i], altered.frame.iloc[j]
        rows.append(
            {
                "image": first["image"],
                "altered": second["image"],
                "true": first["true"],
                "predicted": first["predicted"],
                "predicted_altered": second["predicted"],
                "changed": first["predicted"] != second["predicted"],
                "probability": first["probability"],
                "probability_altered": second["probability"],
                "changed_area": float(differs.float().mean()),
                "evidence_on_change": float(fine[differs].sum() / fine.sum()) if float(fine.sum()) > 0 else 0.0,
                "similarity": float(torch.cosine_similarity(before[i].flatten(), after[j].flatten(), dim=0)),
            }
        )
    return pd.DataFrame(rows)


def _partners(clean: list[str], altered: list[str]) -> list[tuple[int, int]]:
    """Positions of images of the same path, else of the same name."""
    paths = {name: place for place, name in enumerate(altered)}
    stems = {PurePosixPath(name).stem: place for place, name in enumerate(altered)}
    places = [paths.get(name, stems.get(PurePosixPath(name).stem)) for name in clean]
    return [(i, place) for i, place in enumerate(places) if place is not None]
