"""``vitrail models``, ``vitrail methods`` and ``vitrail metrics``: tables, or JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vitrail.errors import VitrailError
from vitrail.models import embedded
from vitrail.models.names import kind_of_view
from vitrail.models.view import View

HEADERS = {"class-specific": "class"}


def list_models(pattern: str) -> list[dict[str, Any]]:
    """Embedded models and supported timm names, with the tag, classes and input size of their default weights."""
    rows = [_embedded_row(name) for name in embedded.names() if fnmatchcase(name, pattern)]
    import timm

    for name in timm.list_models(pattern):
        kind = kind_of_view(name)
        if kind is None:
            continue
        config = timm.get_pretrained_cfg(name, allow_unregistered=True)
        tag, classes, size = (
            (None, None, None) if config is None else (config.tag, config.num_classes, config.input_size)
        )
        tag = tag if config is not None and config.has_weights else None
        row = {
            "name": name,
            "tag": tag,
            "classes": classes,
            "input": None if size is None else f"{size[1]}×{size[2]}",
            "view": kind,
        }
        rows.append(row)
    if not rows:
        raise VitrailError(
            f"no model fits {pattern!r}. Hugging Face models are named hf:ORG/NAME, torchvision's torchvision:NAME."
        )
    return rows


def _embedded_row(name: str) -> dict[str, Any]:
    about = embedded.card(name)["architecture"]
    size = about["img_size"]
    return {
        "name": name,
        "tag": "embedded",
        "classes": about["num_classes"],
        "input": f"{size}×{size}",
        "view": "tokens",
    }


def describe_metrics(pattern: str) -> list[dict[str, Any]]:
    """Every metric with what it is."""
    from vitrail.metrics.base import list_metrics

    found = list_metrics(pattern)
    if not found:
        raise VitrailError(f"no metric fits {pattern!r}; `vitrail metrics` lists all.")
    return [
        {
            "name": name,
            "family": info.family,
            "better": "higher" if info.higher_is_better else "lower",
            "needs": info.needs,
            "protocols": ", ".join(info.protocols),
            "parameters": info.params,
            "paper": info.paper,
            "summary": info.summary,
        }
        for name, info in found.items()
    ]


def without_weights(name: str) -> View:
    """A view that can only be asked what it is: weights are neither fetched nor allocated where that can be helped."""
    import torch

    from vitrail.models.loading import load

    if name.startswith("hf:") or name in embedded.names():
        return load(name)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return load(name, pretrained=False, num_classes=2, device="meta")


def show(rows: list[dict[str, Any]], as_json: bool, title: str, without: Collection[str] = ()) -> None:
    """A table for people, or JSON for programs."""
    if as_json:
        print(json.dumps(rows, indent=1))  # noqa: T201
        return
    hidden = {"summary", "parameters", "aliases", *without}
    if "supported" in rows[0]:  # the reason needs the room
        hidden |= {"class-specific", "level", "cost", "paper"}
    columns = [name for name in rows[0] if name not in hidden]
    headers = [Column(HEADERS.get(name, name), no_wrap=name != columns[-1]) for name in columns]
    title = escape(f"{len(rows)} {title}")
    table = Table(*headers, title=title, box=None, header_style="dim", title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else escape(str(value))
