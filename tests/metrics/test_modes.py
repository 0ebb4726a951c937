"""What must not change a value: the caller's modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import MODES, viewed
from tests.metrics.common import TOKEN_KINDS, bench

from vitrail.methods.registry import build_method
from vitrail.metrics import list_metrics, measure

OF = "timm_vit_not_square"
QUICK = {"steps": 4, "samples": 2, "runs": 4}


def known(name: str) -> dict[str, Any]:
    """What every metric can be measured with, in single precision, which modes could change."""
    view, info = viewed(OF, torch.float32)[2], list_metrics()[name]
    masks = torch.zeros(2, *view.size, dtype=torch.bool)
    masks[:, 3:9, 5:15] = True
    again = {"method": build_method("decompx", view)} if info.needs in ("method", "completeness") else {}
    return {
        "model": view,
        "images": bench(OF).images.float(),
        "maps": bench(OF).maps(TOKEN_KINDS).float(),
        "target": [1, 0],
        "label": [1, 2],
        "masks": masks,
        "others": masks.flip(1),
        "ignore": masks.flip(2),
        "boxes": [[(5.3, 3.1, 15.7, 9.9)]] * 2,
        **{key: value for key, value in QUICK.items() if key in info.params},
        **again,
    }


@pytest.mark.parametrize("name", list_metrics())
def test_the_callers_modes_change_no_value(name: str) -> None:
    options = known(name)
    unchanged = measure(name, **options)
    for mode, entered in MODES.items():
        with entered():
            assert measure(name, **options) == unchanged, mode
