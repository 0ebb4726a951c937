"""CLIP and SigLIP of Hugging Face: how their two towers read images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.core import parts
from vitrail.models import huggingface
from vitrail.models.translation import linear

MODELS = ("CLIPModel", "SiglipModel", "Siglip2Model")
KINDS = ("clip", "siglip", "siglip2")  # in their configurations
native_size = huggingface.native_size
takes_other_sizes = huggingface.takes_other_sizes
adapts_to_input = huggingface.adapts_to_input


def is_clip(module: Any) -> bool:
    return huggingface.is_huggingface(module) and type(module).__name__ in MODELS


def image_features(model: Any, images: Tensor) -> Tensor:
    """(B, D), before they get length 1."""
    features: Tensor = model.get_image_features(**huggingface.inputs(model, images)).pooler_output
    return features


def text_features(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """(K, D), likewise."""
    features: Tensor = model.get_text_features(**_tokens(model, tokenizer, list(texts))).pooler_output
    return features


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    return [len(tokens) for tokens in tokenizer(list(texts), verbose=False)["input_ids"]]


def most_tokens(model: Any) -> int:
    """The longest text that it takes."""
    return int(model.config.text_config.max_position_embeddings)


def _tokens(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    """The texts as the text tower was trained to read them: SigLIP attends to its padding."""
    if type(model).__name__ != "CLIPModel":
        tokens = tokenizer(texts, padding="max_length", max_length=most_tokens(model), return_tensors="pt")
        return {"input_ids": tokens["input_ids"].to(model.device)}
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    return {name: tokens[name].to(model.device) for name in ("input_ids", "attention_mask")}


def describe_images(model: Any, size: tuple[int, int]) -> tuple[parts.Architecture, parts.Linear | None]:
    """The image tower, and the projection of what it pools, if it has one; the weights of the head mean nothing."""
    placeholder = nn.Linear(1, 1, device="meta")
    projection = getattr(model, "visual_projection", None)
    tower = huggingface.describe(model.vision_model, size, placeholder, "pooler")
    return tower, None if projection is None else linear(projection)
