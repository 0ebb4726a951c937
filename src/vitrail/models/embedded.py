"""Models that come with the package: a card (JSON), the weights and the labels, all in ``vitrail/weights``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.errors import VitrailError
from vitrail.models.captions import CaptionModel, WordTokenizer
from vitrail.models.checkpoints import load_state, read_state
from vitrail.models.labels import read_labels
from vitrail.models.plain import VisionTransformer
from vitrail.models.view import View
from vitrail.models.wrapping import wrap
from vitrail.models.zero_shot import Prompts

DEFAULT = "photo"
FOLDER = Path(str(files("vitrail"))) / "weights"


@dataclass(frozen=True)
class _Steps:
    """How a card says that images become inputs, as ``wrap`` takes it."""

    data_config: dict[str, Any]


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """The embedded models."""
    cards = sorted(path.stem for path in FOLDER.glob("*.json"))
    return tuple(name for name in cards if (FOLDER / card(name)["weights"]).is_file())


def card(name: str) -> dict[str, Any]:
    """What is known of an embedded model: architecture, preprocessing, data, recipe, accuracy, limits, licence."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def reads_texts(name: str) -> bool:
    """Whether the classes of an embedded model are texts."""
    return "text" in card(name)


def load_embedded(name: str | None = None, prompts: Prompts | None = None) -> View:
    """An embedded model in single precision; ``prompts`` are the classes of one that reads texts, if not its own."""
    name = name or DEFAULT
    if name not in names():
        raise VitrailError(f"this build of vitrail has no embedded model {name!r}: name another model.")
    about = card(name)
    with torch.random.fork_rng():  # the first weights are drawn from the global state, which is the user's
        module = _build(about).eval()
    state = {key: value.float() for key, value in read_state(FOLDER / about["weights"]).items()}
    load_state(module, state, about["weights"])
    labels = read_labels(FOLDER / about["labels"], classes(about))
    if reads_texts(name):
        tokenizer = WordTokenizer(about["words"], about["fillers"])
        options: dict[str, Any] = {"prompts": prompts or labels, "tokenizer": tokenizer}
    else:
        options = {"labels": labels}
    view = wrap(module, output=about["output"], name=name, processor=_Steps(about["preprocessing"]), **options)
    view.note = note(about, labels)
    return view


def classes(about: dict[str, Any]) -> int:
    """The number of classes of an embedded model; those of one that reads texts are its first prompts."""
    count: int = about["prompts"] if "text" in about else about["architecture"]["num_classes"]
    return count


def _build(about: dict[str, Any]) -> nn.Module:
    if "text" in about:
        return CaptionModel(about["architecture"], about["text"])
    return VisionTransformer(**about["architecture"])


def note(about: dict[str, Any], labels: Sequence[str]) -> str:
    """What a user should know of an embedded model: what it is, what it recognises, and what else there is."""
    summary = about["summary"][0].upper() + about["summary"][1:]
    if "words" in about:
        words = ", ".join(about["words"])
        return (
            f"{summary}. It reads nothing but texts of these words: {words}. "
            f"For more, name a larger model: --model hf:openai/clip-vit-base-patch16 --prompt … (weights from the hub)."
        )
    some = ", ".join(labels[:: max(1, len(labels) // 6)][:6])
    return (
        f"{summary}. It recognises nothing but its {len(labels)} classes ({some}, …). "
        f"For more, name a larger model: --model vit_base_patch16_224 (weights from the hub)."
    )
