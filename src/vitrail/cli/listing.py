"""``vitrail models``, ``vitrail methods``, ``vitrail metrics`` and ``vitrail data``: tables, or JSON."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vitrail.cli.options import Json, Plugins, Prompt
from vitrail.cli.outputs import plural, print_json
from vitrail.errors import VitrailError
from vitrail.plugins import load_plugins
from vitrail.registry import matching

if TYPE_CHECKING:
    from vitrail.models.view import View

HEADERS = {"class-specific": "class"}


def models(
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Only matching names, e.g. 'deit*'.")] = "*",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the models with the tag, classes and input size of their default weights, and what can be seen of them.

    tokens: a plain ViT, for every method; features only: masks, pixel gradients and CAMs; logits only: without CAMs.
    """
    load_plugins(plugin or [])
    note = "0 classes: no head; tag –: no weights; these need --checkpoint (or another tag, as NAME.TAG)"
    show(list_models(pattern), as_json, "model", f"{_matching(pattern)}; {note}")


def methods(
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Only matching names, e.g. '*.plus'.")] = "*",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Show which methods this model supports; default: no model.")
    ] = None,
    prompt: Prompt = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the methods; with --model, whether the model supports them, or why not."""
    from vitrail.methods.registry import describe_methods

    load_plugins(plugin or [])
    rows = describe_methods(pattern, None if model is None else load_without_weights(model, prompt))
    if as_json or pattern != "*":
        show(rows, as_json, "method", _matching(pattern))
    else:
        bare = [row for row in rows if "." not in row["name"]]
        show(bare, as_json, "method", "; aggregations over layers (.plus, .skipplus, .rollout): vitrail methods '*.*'")


def metrics(
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Only matching names, e.g. 'token_*'.")] = "*",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the metrics, what they need and whether higher or lower is better."""
    load_plugins(plugin or [])
    show(list_metrics(pattern), as_json, "metric", hidden=("family", "paper"))


def data(
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Only matching names, e.g. 'imagenet*'.")] = "*",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """List the data sets that --data takes by name, as NAME:PLACE?OPTION=VALUE; a folder of images needs no name."""
    from vitrail.data.names import describe_data

    load_plugins(plugin or [])
    rows = describe_data(pattern)
    if not as_json:
        rows = [{**row, "options": ", ".join(row["options"])} for row in rows]
    show(rows, as_json, "data set", _matching(pattern))


def list_models(pattern: str) -> list[dict[str, Any]]:
    """Embedded models, those of plugins and the classifiers of timm, with the tag of their default weights, classes and
    input size.
    """
    import timm

    from vitrail.models import embedded
    from vitrail.models.names import kind_of_view
    from vitrail.models.registry import MODELS

    rows: list[tuple[Any, ...]] = []
    for name in embedded.names():
        if fnmatchcase(name, pattern):
            about = embedded.card(name)
            size = about["architecture"]["img_size"]
            rows.append((name, "embedded", embedded.classes(about), f"{size}×{size}", "tokens"))
    rows += [(name, "plugin", None, None, None) for name in matching(MODELS.every_entry(), pattern)]
    for name in timm.list_models(pattern):
        kind = kind_of_view(name)
        if kind is None:
            continue
        config = timm.get_pretrained_cfg(name, allow_unregistered=True)
        if config is None:
            rows.append((name, None, None, None, kind))
        else:
            _, height, width = config.input_size
            tag = config.tag if config.has_weights else None
            rows.append((name, tag, config.num_classes, f"{height}×{width}", kind))
    if not rows:
        raise VitrailError(
            f"no model matches {pattern!r}: Hugging Face models are named hf:ORG/NAME, torchvision models "
            "torchvision:NAME."
        )
    return [dict(zip(("name", "tag", "classes", "input", "view"), row, strict=True)) for row in rows]


def list_metrics(pattern: str) -> list[dict[str, Any]]:
    """Every metric with its properties."""
    from vitrail.metrics import base

    infos = base.list_metrics(pattern)
    if not infos:
        raise VitrailError(f"no metric matches {pattern!r}; `vitrail metrics` lists all.")
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
        for name, info in infos.items()
    ]


def load_without_weights(name: str, prompts: list[str] | None = None) -> View:
    """A view whose structure can be inspected: weights are not downloaded or allocated where that can be avoided."""
    import torch

    from vitrail.models import embedded
    from vitrail.models.loading import load
    from vitrail.models.registry import is_registered

    if name.startswith("hf:") or name in embedded.names() or prompts is not None or is_registered(name):
        return load(name, prompts=prompts)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return load(name, pretrained=False, num_classes=2, device="meta")


def _matching(pattern: str) -> str:
    return "" if pattern == "*" else f" matching {pattern!r}"


def show(rows: list[dict[str, Any]], as_json: bool, noun: str, remark: str = "", hidden: Collection[str] = ()) -> None:
    """Prints a table, or JSON."""
    if as_json:
        print_json(rows)
        return
    hidden = {"summary", "parameters", "aliases", *hidden}
    if "supported" in rows[0]:  # the reason needs the room
        hidden |= {"class-specific", "level", "cost", "paper"}
    columns = [name for name in rows[0] if name not in hidden]
    headers = [Column(HEADERS.get(name, name), no_wrap=name != columns[-1]) for name in columns]
    title = escape(plural(len(rows), noun) + remark)
    table = Table(*headers, title=title, box=None, header_style="dim", title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else escape(str(value))
