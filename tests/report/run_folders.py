"""Run folders made by hand, in the format of `vitrail bench`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store
from vitrail.calls import join_call, split_call

START = datetime(2024, 1, 1, tzinfo=UTC)
CURVES = {"insertion": 9, "deletion": 9, "token_deletion_accuracy": 10}
QUALITY = {"decompx.skipplus": 0.8, "rollout": 0.75, "grad_cam": 0.5, "random": 0.1}


@dataclass
class Made:
    """A run to be written: who is how good is in ``quality``, from 0 to 1."""

    quality: Mapping[str, float] = field(default_factory=lambda: dict(QUALITY))
    metrics: Sequence[str] = ("insertion(steps=8)", "deletion(steps=8)", "pointing_game", "completeness")
    images: int = 24
    classes: Sequence[str] = ("cat", "dog", "owl")
    names: Sequence[str] = ()  # of images
    model: str = "vit_tiny"
    data: str = "folder:/somewhere/deep/photos"
    explained: str = "predicted"
    noise: float = 0.1
    seed: int = 0
    maps: bool = True
    errors: int = 0
    broken: int = 0

    def image(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f"photo-{i:03d}"

    def write(self, folder: Path) -> Path:
        store = Store(folder)
        Plan([ModelSpec(self.model)], self.data, list(self.quality), list(self.metrics)).write(folder / "plan.toml")
        about = {"vitrail": "0.0", "device": "cpu", "started": START.isoformat(), "git": None, "platform": "a machine"}
        (folder / "environment.json").write_text(json.dumps(about), encoding="utf-8")
        store.add_rows(self.rows())
        if self.maps:
            store.add_maps(self.drawn_maps())
            store.add_pictures(self.pictures())
        return folder

    def rows(self) -> list[dict[str, Any]]:
        draw = np.random.default_rng(self.seed)
        rows = []
        for i in range(self.images):
            ease = draw.normal(0, 0.05)  # what all methods share on an image
            for call, quality in self.quality.items():
                for metric in self.metrics:
                    rows.append(self.row(i, call, metric, quality + ease + draw.normal(0, self.noise)))
        for i in range(self.errors):
            call = list(self.quality)[-1]
            rows[-1 - i] = {
                **self.row(i, call, self.metrics[0], float("nan")),
                "error": "out of memory <b>",
                "curve": None,
            }
        for i in range(self.broken):
            empty = {"method": "", "params": "{}", "metric": "", "explained": "", "value": float("nan"), "curve": None}
            rows.append(
                {**self.row(0, "random", "pointing_game", 0.0), **empty, "image": f"bad-{i}", "error": "no image"}
            )
        return [{**row, "key": row.get("key") or f"k{place}"} for place, row in enumerate(rows)]

    def row(self, i: int, call: str, metric: str, quality: float) -> dict[str, Any]:
        method, params = split_call(call)
        name = split_call(metric)[0]
        value = {"deletion": 1 - quality, "pointing_game": float(quality > 0.5)}.get(name, quality)
        if name == "completeness":
            value = abs(quality) * 1e-4 if method.startswith("decompx") else float("nan")
        curve = None
        if name in CURVES:
            share = np.linspace(0, 1, CURVES[name])
            curve = (share ** (2 - quality) if name == "insertion" else (1 - share) ** (1 + quality)).tolist()
        label = i % len(self.classes)
        return {
            "model": self.model, "model_hash": "0123456789abcdef", "data": self.data, "image": self.image(i),
            "image_hash": f"h{i}", "method": method, "params": json.dumps(params, sort_keys=True), "metric": metric,
            "value": value, "target": label, "explained": self.explained, "label": label, "curve": curve, "parts": None,
            "seconds": 0.01 * (1 + len(method)), "memory": 1, "error": None, "time": START + timedelta(seconds=i),
        }  # fmt: skip

    def drawn_maps(self) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        return {
            f"{self.model}|{self.image(i)}|{call}|{self.explained}": torch.randn(4, 4, generator=draw)
            for i in range(self.images)
            for call in self.quality
        }

    def pictures(self) -> list[dict[str, Any]]:
        found = []
        for i in range(self.images):
            buffer = io.BytesIO()
            Image.new("RGB", (48, 48), (10 * i % 255, 90, 140)).save(buffer, "JPEG")
            name = self.classes[i % len(self.classes)]
            found.append({"image": self.image(i), "model": self.model, "jpeg": buffer.getvalue(), "label": name,
                          "predicted": name, "probability": 0.75})  # fmt: skip
        return found


def frame_of(folder: Path) -> pd.DataFrame:
    """The rows of a run that are no errors, with the call of each method."""
    rows = Store(folder).rows()
    rows = rows[rows["error"].isna()].copy()
    rows["call"] = [join_call(m, json.loads(p)) for m, p in zip(rows["method"], rows["params"], strict=True)]
    return rows
