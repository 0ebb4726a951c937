"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Against = Annotated[str | None, typer.Option(help="Explain the target as opposed to this class.")]
Alpha = Annotated[float, typer.Option(help="Opacity of the map and fading of the image, from 0 (only the image) to 1.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Checkpoint file with the model's weights.")]
Colormap = Annotated[
    str | None,
    typer.Option(help="Colormap of matplotlib; default: RdBu_r for signed maps, viridis_r for unsigned ones."),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, …")]
Dtype = Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16, float16, float64.")]
ImgSize = Annotated[int | None, typer.Option(help="Input size in pixels; default: the model's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Labels = Annotated[Path | None, typer.Option(help="File with the class names, one per line.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: timm name, hf:ORG/NAME, hf:./folder or torchvision:NAME; default: the embedded model.",
    ),
]
NumClasses = Annotated[int | None, typer.Option(help="Number of classes of the head.")]
Out = Annotated[Path, typer.Option(help="Output folder.")]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-p", help="Parameter of the method as name=value; repeatable.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Retry what failed in earlier calls.")]
StyleName = Annotated[
    str,
    typer.Option(
        "--style",
        help="smooth, blocks (a rectangle per patch) or outline (around half of the evidence for the class).",
    ),
]


def weight_options(
    checkpoint: Path | None, labels: Path | None, num_classes: int | None, img_size: int | None
) -> dict[str, Any]:
    """The options of ``vitrail.load`` about a model's weights that are set."""
    options = {"checkpoint": checkpoint, "labels": labels, "num_classes": num_classes, "img_size": img_size}
    return {name: value for name, value in options.items() if value is not None}


def comma_separated(values: Sequence[str] | None) -> list[str]:
    """The items of an option that takes a comma-separated list and may be repeated."""
    return [item.strip() for value in values or [] for item in value.split(",") if item.strip()]
