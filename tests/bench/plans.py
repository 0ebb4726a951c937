"""Small plans, methods that note or fail, and how tables of runs are compared."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vitrail
from vitrail import VitrailError
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store

COLUMNS = ["image", "method", "params", "metric", "target", "explained"]


@pytest.fixture(autouse=True)
def own_methods(tmp_path: Path) -> None:
    """A method that notes each image it explains and takes its time, and one that fails on some images."""
    log = tmp_path / "explained.log"

    @vitrail.method("tests_noted")
    def noted(model, images, target):  # type: ignore[no-untyped-def]
        with log.open("a", encoding="utf-8") as file:
            file.writelines(f"{float(image.double().sum())}\n" for image in images)
        time.sleep(0.03)
        return images.mean(1)[:, ::8, ::8]

    @vitrail.method("tests_failing")
    def failing(model, images, target):  # type: ignore[no-untyped-def]
        if float(images[0].mean()) > 0.05:
            raise VitrailError("this image is too bright for me")
        return images.mean(1)[:, ::8, ::8] * (np.nan if float(images[0].mean()) > -0.3 else 1.0)


def plan(**changes: object) -> Plan:
    usual = {"models": [ModelSpec("scenes")], "data": "scenes:16@5", "methods": ["tests_noted", "random"],
             "metrics": ["sparseness", "insertion(steps=4)"], "target": "label", "batch_size": 1}  # fmt: skip
    return Plan(**{**usual, **changes})  # type: ignore[arg-type]


def table(folder: Path | str) -> pd.DataFrame:
    return Store(folder).rows().sort_values(COLUMNS).reset_index(drop=True)


def same(one: pd.DataFrame, other: pd.DataFrame, exactly: bool = False) -> None:
    assert one[COLUMNS].equals(other[COLUMNS])
    a, b = one["value"].to_numpy(), other["value"].to_numpy()
    assert np.array_equal(a, b, equal_nan=True) if exactly else np.allclose(a, b, rtol=1e-6, equal_nan=True)
