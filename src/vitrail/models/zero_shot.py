"""CLIP and SigLIP, of Hugging Face or open_clip, and the embedded caption model: their classes are prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.core.parts import tensors_of
from vitrail.errors import VitrailError
from vitrail.models import captions, clip, open_clip
from vitrail.models.clone import evaluation_clone
from vitrail.models.labels import is_number, plain_name
from vitrail.models.view import View
from vitrail.models.vit import ViT

# Prompts as classes: one for each, several that are averaged, or several by the name of the class.
Prompts = Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]


class ZeroShot(nn.Module):
    """Images → logits of the prompts: the model's own scale, times the cosine of two embeddings, plus its own bias."""

    texts: Tensor  # (K, D): the embeddings of the classes, of length 1

    def __init__(self, model: Any, texts: Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("texts", texts, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        embedding = library(self.model).image_features(self.model, images)
        logits = F.normalize(embedding, dim=1, eps=0.0) @ self.texts.to(embedding).T * self.model.logit_scale.exp()
        return logits if self.bias is None else logits + self.bias

    @property
    def bias(self) -> Tensor | None:
        """SigLIP's."""
        bias: Tensor | None = getattr(self.model, "logit_bias", None)
        return bias


@dataclass(eq=False, repr=False)
class ZeroShotViT(ViT):
    """A view of a model with a text tower. Its classes are prompts, and others can be asked about at any time."""

    prompts: dict[str, list[str]] = field(kw_only=True)
    tokenizer: Any = field(kw_only=True)

    reads_texts: ClassVar[bool] = True

    @property
    def texts(self) -> Tensor:
        """(K, D): the embeddings of the classes."""
        module: Any = self.module
        texts: Tensor = module.texts
        return texts

    def asked_about(self, *classes: Any) -> View:
        """Itself, or a view of the same model that has the texts that are no classes yet as further classes."""
        names, read = {plain_name(label) for label in self.prompts}, {*self._read_alone}
        texts = [item for spec in classes for item in (spec if isinstance(spec, list | tuple) else [spec])]
        added: dict[str, list[str]] = {}
        for text in texts:
            if not isinstance(text, str) or is_number(text):
                continue
            if plain_name(text) not in names and self._plain(text) not in read:
                names.add(plain_name(text))
                read.add(self._plain(text))
                added |= checked_prompts([text], fewest=1)
        return self.with_further(added) if added else self

    def classes_named(self, name: str) -> list[int]:
        """As of any view, but a text that a class reads is this class, before it is the beginning of another."""
        named, alike = super().classes_named(name), self._read_alone.get(self._plain(name))
        is_name = any(plain_name(self.label(index)) == plain_name(name) for index in named)
        return named if is_name or alike is None else [alike]

    @cached_property
    def _read_alone(self) -> dict[str, int]:
        """The classes that read a single text, by this text."""
        return {self._plain(texts[0]): i for i, texts in enumerate(self.prompts.values()) if len(texts) == 1}

    def _plain(self, text: str) -> str:
        """A text without what the model does not read."""
        return self.tokenizer.plain(text) if isinstance(self.tokenizer, captions.WordTokenizer) else plain_name(text)

    def with_further(self, added: dict[str, list[str]]) -> ZeroShotViT:
        """A view of the same model with more classes; the embeddings of the present ones stay."""
        prompts, present = {**self.prompts, **added}, self.texts
        texts = embed_texts(self.module.model, self.tokenizer, added).to(present)
        module = ZeroShot(self.module.model, torch.cat([present, texts]))
        return replace(
            self,
            module=module,
            labels=tuple(prompts),
            prompts=prompts,
            spec=None if self.spec is None else {**self.spec, "prompts": prompts},
            describe=partial(describe, module, self.preprocessing.library_size),
        )

    def layers(self) -> list[list[Tensor]]:
        *blocks, _ = super().layers()
        head = self.architecture().head
        return [*blocks, [*tensors_of(replace(head, linears=(), unit=None)), self.texts]]

    def fingerprint(self) -> str:
        """A hash of the weights and the prompts: the last bits of embeddings depend on the machine."""
        prompts = json.dumps(self.prompts, ensure_ascii=False)
        return hashlib.blake2b(f"{super().fingerprint()} {prompts}".encode(), digest_size=16).hexdigest()


def library(model: Any) -> ModuleType:
    """The functions that run and describe a model with a text tower."""
    if isinstance(model, captions.CaptionModel):
        return captions
    return open_clip if open_clip.is_open_clip(model) else clip


def is_zero_shot(module: Any) -> bool:
    """Whether it is a model that compares images with texts."""
    return isinstance(module, captions.CaptionModel) or clip.is_clip(module) or open_clip.is_open_clip(module)


def checked_prompts(prompts: Prompts, fewest: int = 2) -> dict[str, list[str]]:
    """Class → its prompts; the name of a class is its first prompt, unless it has one."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence | Mapping):
        raise VitrailError(
            f"prompts must be a list of texts, or texts by the name of their class, but got {prompts!r}."
        )
    named = isinstance(prompts, Mapping)
    groups = [_checked_group(value) for value in (prompts.values() if isinstance(prompts, Mapping) else prompts)]
    names = [*prompts] if isinstance(prompts, Mapping) else [texts[0] for texts in groups]
    for name in names if named else []:
        if not isinstance(name, str) or not name.strip():
            raise VitrailError(f"the name of a class must be a text that is not empty, but got {name!r}.")
    if len(set(names)) < len(names):
        raise VitrailError(f"prompts hold {max(names, key=names.count)!r} twice: each class needs a name of its own.")
    if len(names) < fewest:
        count = "one prompt has nothing to be compared with" if names else "there are no prompts"
        raise VitrailError(f"{count}: give at least two.")
    return dict(zip(names, groups, strict=True))


def _checked_group(value: Any) -> list[str]:
    """The prompts of a class."""
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise VitrailError(f"a prompt is a text that is not empty, but got {value!r}.")
    return texts


@torch.inference_mode(False)  # explanations by gradients could not use the embeddings otherwise
@torch.no_grad()
def embed_texts(model: Any, tokenizer: Any, prompts: Mapping[str, Sequence[str]]) -> Tensor:
    """(K, D): the mean embedding of the prompts of each class, of length 1."""
    kind, functions = type(model).__name__, library(model)
    if tokenizer is None:
        raise VitrailError(f"prompts= needs the tokenizer of {kind}: give tokenizer=.")
    texts = [text for group in prompts.values() for text in group]
    try:
        _check_lengths(texts, functions.token_counts(tokenizer, texts), functions.most_tokens(model))
        with torch.autocast(model.logit_scale.device.type, enabled=False):
            embeddings = functions.text_features(evaluation_clone(model), tokenizer, texts)
    except VitrailError:
        raise
    except Exception as error:  # a tokenizer is any function
        reason = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
        raise VitrailError(
            f"{kind} cannot encode the prompts ({type(error).__name__}: {reason}): is tokenizer= the one that it was "
            f"trained with?"
        ) from error
    groups = F.normalize(embeddings, dim=1).split([len(group) for group in prompts.values()])
    return F.normalize(torch.stack([group.mean(0) for group in groups]), dim=1)


def _check_lengths(texts: list[str], lengths: list[int], most: int) -> None:
    length, text = max(zip(lengths, texts, strict=True))
    if length > most:
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise VitrailError(f"the prompt {shown!r} has {length} tokens, but the model takes at most {most}.")


def describe(module: Any, size: tuple[int, int], head: None = None, pool: None = None) -> parts.Architecture:
    """The canonical form: the image tower, and a head whose weights are the embeddings of the prompts."""
    model = module.model
    texts = module.texts.to(model.logit_scale)
    tower, projection = library(model).describe_images(model, size)
    width = texts.shape[1]
    unit = parts.Norm(width, 0.0, texts.new_full((width,), width**-0.5), rms=True)  # x / |x|
    scale = model.logit_scale.detach().exp()
    bias = None if module.bias is None else module.bias.detach().expand(len(texts))
    linears = (parts.Linear(texts * scale, bias),)
    dense = () if projection is None else (parts.Dense(projection),)
    return replace(tower, head=replace(tower.head, linears=linears, dense=dense, unit=unit))


def logits(module: Any, images: Tensor, head: None, pool: None) -> Tensor:
    """The network's own logits."""
    return module(images)


def native_size(module: Any) -> tuple[int, int]:
    size: tuple[int, int] = library(module.model).native_size(module.model)
    return size


def takes_other_sizes(module: Any) -> bool:
    return bool(library(module.model).takes_other_sizes(module.model))


def adapts_to_input(module: Any) -> bool:
    return bool(library(module.model).adapts_to_input(module.model))
