"""What can be seen of each model that timm has a name for."""

from __future__ import annotations

import re
from typing import Literal

Level = Literal["tokens", "features only", "logits only"]

# timm modules whose models are plain ViTs, and the names among them whose blocks are not.
PLAIN = (
    "vision_transformer", "vision_transformer_relpos", "vision_transformer_hybrid", "vitamin", "deit", "eva", "beit",
    "cait", "naflexvit", "qwen3_vit", "deepseek_vit", "gemma4_vit",
)  # fmt: skip
DIFFERENTIAL = re.compile(r"vit_d(p?wee|little)_")
CLIPPING = re.compile(r"gemma4_vit_167m")
HEADLESS = re.compile(r"_vit_\w+_enc$")  # encoders of language models, without a classifier
# timm modules without a map of features that everything passes, and names of others that have none either.
MAPLESS = (
    "convit", "crossvit", "efficientvim", "hiera", "mlp_mixer", "mvitv2", "pit",
    "tnt", "xcit",
)  # fmt: skip
MAPLESS_NAMES = re.compile(r"levit_\d|coat_(mini|small|tiny)$")
MERGING = re.compile(r"_vit_\w+_(merge|align)$")  # encoders that merge patches behind their blocks
# Why the models of a timm module are no plain ViTs; that they are convolutional networks is not said of each.
REASONS = {
    "convit": "its attention is mixed with fixed positions by a gate",
    "crossvit": "it has two streams of patches",
    "davit": "it attends to windows and to channels",
    "efficientvit_mit": "its attention is linear, between convolutions",
    "efficientvit_msra": "its attention is cascaded over groups, between convolutions",
    "fastvit": "it is convolutional but for its last stage",
    "gcvit": "it attends to windows",
    "hiera": "it attends to units of patches and merges them",
    "hieradet_sam2": "it attends to windows and merges patches",
    "levit": "its attention shrinks, and it is convolutional before",
    "maxxvit": "it attends to windows, between convolutions",
    "mobilevit": "it attends within blocks of convolutions",
    "mvitv2": "its attention pools patches",
    "nextvit": "it attends within blocks of convolutions",
    "repvit": "it is convolutional",
    "shvit": "its attention has one head, between convolutions",
    "swin_transformer": "windows shift and patches merge",
    "swin_transformer_v2": "windows shift and patches merge",
    "swin_transformer_v2_cr": "windows shift and patches merge",
    "tiny_vit": "it attends to windows, between convolutions",
    "vision_transformer_sam": "it attends to windows",
    "xcit": "its attention is between channels",
}


def source(name: str) -> str:
    """The timm module that a name belongs to."""
    import timm

    return timm.model_entrypoint(name).__module__.rpartition(".")[2]


def kind_of_view(name: str) -> Level | None:
    """What a view of a timm model offers; None if it is no classifier."""
    module, stem = source(name), name.partition(".")[0]
    if HEADLESS.search(stem):
        return None
    if module in PLAIN:
        if MERGING.search(stem):
            return "features only" if module == "qwen3_vit" else "logits only"
        return "logits only" if DIFFERENTIAL.search(stem) or CLIPPING.search(stem) else "tokens"
    return "logits only" if module in MAPLESS or MAPLESS_NAMES.match(stem) else "features only"


def reason(name: str) -> str:
    """Why a timm model is not seen through, as a clause; empty where it is."""
    if kind_of_view(name) == "tokens":
        return ""
    if kind_of_view(name) is None:
        return "it has no classifier"
    if source(name) in PLAIN:
        if CLIPPING.search(name):
            return "its linear layers clip (set_clamp_enabled(False) turns that off)"
        return "patches are merged behind its last block" if MERGING.search(name) else "its attention is differential"
    return REASONS.get(source(name), "it is no Vision Transformer")


def tags(name: str) -> list[str]:
    """The full names (with tag) of the weights that timm has for a name."""
    import timm

    names: list[str] = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    return names


def with_head(name: str) -> list[str]:
    """Weights like those of a name that have classes (ImageNet's or more), nearest names first."""
    import timm

    stem = re.sub(r"(_\d+)+$", "", name.partition(".")[0])
    patterns = (f"{name.partition('.')[0]}.*", f"{stem}_*", f"{'_'.join(stem.split('_')[:2])}_*")
    names = [n for pattern in patterns for n in timm.list_pretrained(pattern)]
    return [n for n in dict.fromkeys(names) if classes(n) >= 1000 and kind_of_view(n) == "tokens"]


def is_backbone(name: str) -> bool:
    """Whether it is a timm name whose (default) weights have no classes."""
    import timm

    is_known = timm.is_model(name) and timm.get_pretrained_cfg(name, allow_unregistered=True) is not None
    return is_known and not classes(name)


def is_projecting(name: str) -> bool:
    """Whether the outputs of a timm name are the projection of a CLIP tower, an embedding and no classes."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return config is not None and bool(config.num_classes) and not classes(name)


def classes(name: str) -> int:
    """Number of classes of the (default) weights of a timm name; 0 if none or unknown."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or ("clip" in name and "ft" not in (config.tag or "")):
        return 0  # the outputs of a CLIP tower that was not fine-tuned are an embedding, not classes
    return config.num_classes or 0
