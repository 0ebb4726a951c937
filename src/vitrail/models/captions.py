"""A small model that compares images with texts, of torch alone: it is embedded as `scenes-text`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models import timm
from vitrail.models.plain import VisionTransformer


class WordTokenizer:
    """Texts → numbers of words, 0 after the end. Words that carry no meaning are skipped, unknown ones refused."""

    def __init__(self, words: Sequence[str], fillers: Sequence[str]) -> None:
        self.words, self.fillers = tuple(words), frozenset(fillers)
        self._numbers = {word: number for number, word in enumerate(self.words, 1)}

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n, longest text)."""
        rows = [torch.tensor(self._read(text)) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def plain(self, text: str) -> str:
        """The words that it reads of a text."""
        return " ".join(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in self.fillers)

    def _read(self, text: str) -> list[int]:
        words = self.plain(text).split()
        unknown = [word for word in words if word not in self._numbers]
        if unknown or not words:
            problem = f"does not know {', '.join(map(repr, unknown))}" if unknown else "finds nothing to look for"
            raise VitrailError(f"the model {problem} in {text!r}: its words are {', '.join(self.words)}.")
        return [self._numbers[word] for word in words]


class TextTower(nn.Module):
    """Numbers of words → an embedding: a transformer, the mean of its tokens and a projection."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int, outputs: int) -> None:
        super().__init__()
        self.length = length
        self.words = nn.Embedding(words + 1, width, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, outputs, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        is_word = tokens > 0
        encoded = self.blocks(self.words(tokens) + self.positions[: tokens.shape[1]], src_key_padding_mask=~is_word)
        summed = (self.norm(encoded) * is_word[..., None]).sum(1)
        embedding: Tensor = self.projection(summed / is_word.sum(1, keepdim=True))
        return embedding


class CaptionModel(nn.Module):
    """Two towers: a ViT whose head is its projection, and a ``TextTower``; scale and bias make logits of cosines."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        super().__init__()
        self.vision = VisionTransformer(**vision)
        self.text = TextTower(outputs=vision["num_classes"], **text)
        self.logit_scale = nn.Parameter(torch.tensor(2.8))
        self.logit_bias = nn.Parameter(torch.tensor(-4.0))


def image_features(model: CaptionModel, images: Tensor) -> Tensor:
    """(B, D), before they get length 1."""
    features: Tensor = model.vision(images)
    return features


def text_features(model: CaptionModel, tokenizer: WordTokenizer, texts: Sequence[str]) -> Tensor:
    """(K, D), likewise."""
    features: Tensor = model.text(tokenizer(texts).to(model.logit_scale.device))
    return features


def token_counts(tokenizer: WordTokenizer, texts: Sequence[str]) -> list[int]:
    return [int(count) for count in (tokenizer(texts) > 0).sum(1)]


def most_tokens(model: CaptionModel) -> int:
    """The longest text that it takes."""
    return model.text.length


def describe_images(model: CaptionModel, size: tuple[int, int]) -> tuple[parts.Architecture, parts.Linear | None]:
    """The image tower and the projection of what it pools, which is its head."""
    tower = timm.describe(model.vision, size)
    return tower, tower.head.linears[0]


def native_size(model: CaptionModel) -> tuple[int, int]:
    return timm.native_size(model.vision)


def takes_other_sizes(model: CaptionModel) -> bool:
    return timm.takes_other_sizes(model.vision)


def adapts_to_input(model: CaptionModel) -> bool:
    return timm.adapts_to_input(model.vision)
