"""Which timm names can be explained."""

from __future__ import annotations

import re
from typing import Literal

# timm modules whose models are supported, and the names among them whose blocks are not.
PLAIN = ("vision_transformer", "deit", "eva", "beit")
HIERARCHICAL = ("swin_transformer", "swin_transformer_v2")
REFUSED = re.compile(
    r"_xp_|_18x2_|_rpn_|vit_(d|p|dp)(wee|little)_|_parallel|_prr|sapiens2|enormous|_r\d+_|gated|genlip|gemma"
)


def kind_of_view(name: str) -> Literal["tokens", "features only"] | None:
    """What a view of a timm model offers; None if it cannot be explained."""
    import timm

    source = timm.model_entrypoint(name).__module__.rpartition(".")[2]
    if REFUSED.search(name) or source not in PLAIN + HIERARCHICAL:
        return None
    return "features only" if source in HIERARCHICAL else "tokens"


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
    return [n for n in dict.fromkeys(names) if classes(n) >= 1000 and kind_of_view(n)]


def classes(name: str) -> int:
    """Number of classes of the (default) weights of a timm name; 0 if none or unknown."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if config is None or ("clip" in name and "ft" not in (config.tag or "")):
        return 0  # the outputs of a CLIP tower that was not fine-tuned are an embedding, not classes
    return config.num_classes or 0
