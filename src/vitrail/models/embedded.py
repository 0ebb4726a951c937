"""Models that come with the package: a card (JSON), the weights and the labels, all in ``vitrail/weights``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import VitrailError
from vitrail.models.checkpoints import load_state, read_state
from vitrail.models.labels import read_labels
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View
from vitrail.models.wrapping import wrap

DEFAULT = "photo"
FOLDER = Path(str(files("vitrail"))) / "weights"


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """The embedded models."""
    cards = sorted(path.stem for path in FOLDER.glob("*.json"))
    return tuple(name for name in cards if (FOLDER / card(name)["weights"]).is_file())


def card(name: str) -> dict[str, Any]:
    """What is known of an embedded model: architecture, preprocessing, data, recipe, accuracy, limits, licence."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def load_embedded(name: str | None = None) -> View:
    """An embedded model in single precision."""
    from timm.models.vision_transformer import VisionTransformer

    name = name or DEFAULT
    if name not in names():
        raise VitrailError(f"this build of vitrail has no embedded model {name!r}: name another model.")
    about = card(name)
    with torch.random.fork_rng():  # the first weights are drawn from the global state, which is the user's
        module = VisionTransformer(**about["architecture"]).eval()
    state = {key: value.float() for key, value in read_state(FOLDER / about["weights"]).items()}
    load_state(module, state, about["weights"])
    labels = read_labels(FOLDER / about["labels"], about["architecture"]["num_classes"])
    view = wrap(module, labels=labels, output=about["output"], name=name)
    view.preprocessing = Preprocess.from_timm(about["preprocessing"])
    view.note = note(about, labels)
    return view


def note(about: dict[str, Any], labels: Sequence[str]) -> str:
    """What a user should know of an embedded model: what it is, what it recognises, and what else there is."""
    some = ", ".join(labels[:: max(1, len(labels) // 6)][:6])
    summary = about["summary"][0].upper() + about["summary"][1:]
    return (
        f"{summary}. It recognises nothing but its {len(labels)} classes ({some}, …). "
        f"For more, name a larger model: --model vit_base_patch16_224 (weights from the hub)."
    )
