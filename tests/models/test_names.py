"""What is said of a name of timm is what its view is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
from tests.families import few

from vitrail import VitrailError
from vitrail.models.names import PLAIN, REASONS, kind_of_view, reason, source
from vitrail.models.wrapping import outline

SMALL = re.compile(r"tiny|nano|pico|xxs|_xs|small|_s\d|_9_|128|_m0|_b0|_t\d|test|mci0|_050|167m|_0_")


def representatives() -> list[str]:
    """For each module of timm and each level, one of its smallest models."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for name in timm.list_models():
        groups.setdefault((source(name), kind_of_view(name)), []).append(name)
    return [min(names, key=lambda name: (not SMALL.search(name), len(name), name)) for names in groups.values()]


def level(name: str) -> str | None:
    """What a view of the model offers, without its weights."""
    shallow: dict[str, Any] = {"depth": 2} if source(name) in (*PLAIN, "xcit") and "sapiens" not in name else {}
    with torch.device("meta"):
        module = timm.create_model(name, num_classes=3, **shallow)
        if not module.num_classes:
            with pytest.raises(VitrailError, match="no classification head"):
                outline(module)
            return None
        view = outline(module)
    return "tokens" if view.has_tokens else "features only" if view.has_features else "logits only"


@pytest.mark.parametrize("name", few(representatives(), 8))
def test_one_model_of_each_kind_has_the_level_that_is_said(name: str) -> None:
    assert level(name) == kind_of_view(name)


@pytest.mark.parametrize("name", few([n for n in timm.list_models() if source(n) in PLAIN], 12))
def test_every_plain_vit_is_seen_through(name: str) -> None:
    assert level(name) == kind_of_view(name)
    assert bool(reason(name)) == (kind_of_view(name) != "tokens")


def test_every_transformer_has_its_reason() -> None:
    pattern = re.compile(r"vit|deit|beit|eva|swin|cait|xcit|max|hiera")
    sources = {source(name) for name in timm.list_models() if pattern.search(name)}
    assert sources - set(PLAIN) <= set(REASONS)
    assert set(REASONS) <= sources
