"""CLIP and SigLIP of Hugging Face as classifiers whose classes are prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models import huggingface
from vitrail.models.clone import evaluation_clone
from vitrail.models.labels import plain_name
from vitrail.models.translation import linear
from vitrail.models.view import View
from vitrail.models.vit import ViT

MODELS = ("CLIPModel", "SiglipModel")
NETWORKS = ("ZeroShot",)

# Prompts as classes: one for each, several that are averaged, or several by the name of the class.
Prompts = Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]]


class ZeroShot(nn.Module):
    """Images → logits of the prompts: the model's own scale, times the cosine of two embeddings, plus its own bias."""

    texts: Tensor  # (K, D): the embeddings of the classes, of length 1

    def __init__(self, model: Any, texts: Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("texts", texts)

    def forward(self, images: Tensor, **options: Any) -> Tensor:
        embedding = self.model.get_image_features(pixel_values=images, **options).pooler_output
        logits = F.normalize(embedding, dim=1, eps=0.0) @ self.texts.T * self.model.logit_scale.exp()
        return logits + self.bias if self.bias is not None else logits

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

    def asked_about(self, *classes: Any) -> View:
        """Itself, with the texts that are no classes yet as further prompts."""
        known = {plain_name(label) for label in self.labels or ()}
        texts = [item for spec in classes for item in (spec if isinstance(spec, list | tuple) else [spec])]
        unknown = [text for text in dict.fromkeys(texts) if is_text(text) and plain_name(text) not in known]
        return self.with_prompts({**self.prompts, **{text: [text] for text in unknown}}) if unknown else self

    def with_prompts(self, prompts: Prompts) -> ZeroShotViT:
        """The same model with other classes."""
        chosen = checked_prompts(prompts)
        module = ZeroShot(self.module.model, embed_texts(self.module.model, self.tokenizer, chosen)).eval()
        module.requires_grad_(False)
        size = self.preprocessing.size
        spec = None if self.spec is None else {**self.spec, "prompts": chosen}
        return replace(
            self,
            module=module,
            labels=tuple(chosen),
            prompts=chosen,
            spec=spec,
            known_fingerprint=None,
            describe=lambda: describe(module, size),
        )


def is_text(value: object) -> bool:
    """Whether it is a name and not a number of a class."""
    return isinstance(value, str) and not value.strip().lstrip("+-").isdecimal()


def checked_prompts(prompts: Prompts) -> dict[str, list[str]]:
    """Class → its prompts; the name of a class is its first prompt, unless it has one."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | Mapping):
        raise VitrailError(
            f"prompts must be a list of texts, or texts by the name of their class, but got {prompts!r}."
        )
    values = list(prompts.values()) if isinstance(prompts, Mapping) else list(prompts)
    lists = [[value] if isinstance(value, str) else list(value) for value in values]
    for texts in lists:
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise VitrailError(f"a prompt is a text that is not empty, but got {texts!r}.")
    names = [*map(str, prompts)] if isinstance(prompts, Mapping) else [texts[0] for texts in lists]
    if len(set(names)) < len(names):
        raise VitrailError(f"prompts hold {max(names, key=names.count)!r} twice: each class needs a name of its own.")
    if len(names) < 2:
        raise VitrailError("one prompt has nothing to be compared with: give at least two.")
    return dict(zip(names, lists, strict=True))


@torch.no_grad()
def embed_texts(model: Any, tokenizer: Any, prompts: Mapping[str, Sequence[str]]) -> Tensor:
    """(K, D): the mean embedding of the prompts of each class, of length 1."""
    if tokenizer is None:
        raise VitrailError(f"prompts= needs the tokenizer of {type(model).__name__}: give tokenizer=.")
    texts = [text for group in prompts.values() for text in group]
    longest = model.config.text_config.max_position_embeddings
    padding = "max_length" if type(model).__name__ == "SiglipModel" else True  # as it was trained
    options = {"max_length": longest} if padding == "max_length" else {}
    tokens = tokenizer(texts, padding=padding, return_tensors="pt", **options)
    if tokens["input_ids"].shape[1] > longest:
        text = max(texts, key=len)
        raise VitrailError(f"the prompt {text[:60]!r}… is longer than the {longest} tokens that the model takes.")
    tokens = {name: tokens[name].to(model.device) for name in ("input_ids", "attention_mask") if name in tokens}
    if padding == "max_length":
        tokens.pop("attention_mask", None)  # SigLIP attends to its padding
    embeddings = F.normalize(evaluation_clone(model).get_text_features(**tokens).pooler_output, dim=1)
    groups = embeddings.split([len(group) for group in prompts.values()])
    return F.normalize(torch.stack([group.mean(0) for group in groups]), dim=1)


def describe(module: Any, size: tuple[int, int], head: None = None, pool: None = None) -> parts.Architecture:
    """The canonical form: the image tower, and a head whose weights are the embeddings of the prompts."""
    model, texts = module.model, module.texts
    placeholder = nn.Linear(1, 1, device="meta")
    tower = huggingface.describe(model.vision_model, size, placeholder, "pooler")
    width = texts.shape[1]
    unit = parts.Norm(width, 0.0, texts.new_full((width,), width**-0.5), rms=True)  # x / |x|
    scale = model.logit_scale.detach().exp()
    bias = None if module.bias is None else module.bias.detach().expand(len(texts))
    projection = getattr(model, "visual_projection", None)
    dense = None if projection is None else linear(projection)
    end = replace(tower.head, linears=(parts.Linear(texts * scale, bias),), dense=dense, activation=None, unit=unit)
    return replace(tower, head=end)


def logits(module: Any, images: Tensor, head: None, pool: None) -> Tensor:
    """The network's own logits."""
    resized = tuple(images.shape[-2:]) != native_size(module)
    return module(images, **({"interpolate_pos_encoding": True} if resized else {}))


def native_size(module: Any) -> tuple[int, int]:
    return huggingface.native_size(module.model)


def takes_other_sizes(module: Any) -> bool:
    return huggingface.takes_other_sizes(module.model)


def adapts_to_input(module: Any) -> bool:
    return huggingface.adapts_to_input(module.model)
