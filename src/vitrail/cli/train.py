"""``vitrail train-explainer``: trains the explainer that ``vit_shapley`` needs for a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vitrail.cli import options
from vitrail.cli.outputs import print_json


@options.grouped(load_options=options.load_options)
def train_explainer(
    *,
    model: options.ModelName = None,
    data: Annotated[
        str, typer.Option(help="Images like those to explain, without labels: a folder, scenes:20000, imagenet:DIR, …")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="File to write the explainer to.")],
    images: Annotated[int | None, typer.Option(min=2, help="Number of images to sample; default: all.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 5000,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 64,
    subsets: Annotated[
        int, typer.Option(min=16, help="Subsets of patches scored per image and step; a multiple of 16.")
    ] = 32,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    hidden: Annotated[
        int, typer.Option(min=1, help="Channels of the explainer; at most 32 or a multiple of 32.")
    ] = 160,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks of the explainer.")] = 2,
    surrogate_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps that first fine-tune a copy of the model to predict from some of the patches; for models that "
            "were not trained with missing patches.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights, the order of images and the subsets.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that load images; default: CPU cores minus one, at most 8."),
    ] = None,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Train the explainer of a model for vit_shapley, which then predicts Shapley values in one forward pass.

    An interrupted training is resumed by the same command.
    """
    from vitrail.data.names import open_data
    from vitrail.models.loading import load
    from vitrail.plugins import load_plugins
    from vitrail.training import Settings, check_writable, train_explainer

    check_writable(out)
    settings = Settings(
        steps=steps,
        batch=batch_size,
        subsets=subsets,
        rate=rate,
        hidden=hidden,
        blocks=blocks,
        surrogate_steps=surrogate_steps,
        seed=seed,
    )
    load_plugins(plugin or [])
    view, examples = load(model, device=device, **load_options), open_data(data)
    if images is not None:
        examples = examples.subset(images, seed)
    console = Console(stderr=as_json, highlight=False)
    console.print(
        f"{escape(view.name)}: {steps} steps of {batch_size} of the {len(examples)} images of {escape(examples.name)}, "
        f"{subsets} subsets each"
    )

    def watch(step: int, r2: float) -> None:
        console.print(f"step {step} of {steps}: R² {r2:.3f} of the scores of subsets of held-out images")

    if workers is None:
        workers = min(8, (os.cpu_count() or 1) - 1) if os.name == "posix" else 0
    report = train_explainer(view, examples, out, settings, workers=workers, watch=watch)
    console.print(
        f"rank correlation with Shapley values of {report.permutations} permutations, {report.images} held-out images: "
        f"{report.correlation:.3f}"
    )
    console.print(
        f"→ [bold]{escape(str(out))}[/]; use it with explain --method vit_shapley -p explainer={escape(str(out))}"
    )
    if as_json:
        print_json({"explainer": out, **report._asdict()})
