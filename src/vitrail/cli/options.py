"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from vitrail.errors import VitrailError
from vitrail.show.look import DEFAULT_LOOK, Look

Command: TypeAlias = Callable[..., None]

Against = Annotated[str | None, typer.Option(help="Explain the target as opposed to this class, e.g. @predicted.")]
Cluster = Annotated[str | None, typer.Option(help="Run on a Ray cluster: auto, local, HOST:PORT or ray://HOST:PORT.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, …")]
Dtype = Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16, float16, float64.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: timm name, hf_hub:ORG/NAME, hf:ORG/NAME, hf:./folder, torchvision:NAME or an embedded one "
        "(photo, the default); NAME@REVISION pins what comes from the hub.",
    ),
]
Out = Annotated[Path, typer.Option(help="Output folder.")]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="Parameter of the method; repeatable.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="Python file with methods, metrics, data sets or models of your own; repeatable.",
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Class of a model that reads texts; repeat it for each class."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Retry what failed in earlier calls.")]
Trusting = Annotated[
    bool,
    typer.Option("--trust/--no-trust", help="Ask the model, with about 80 forward passes, how far to trust each map."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of workers on the cluster; default: one per GPU, or CPU.")
]


def load_options(
    *,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint file with the model's weights.")] = None,
    head: Annotated[
        Path | None,
        typer.Option(
            help="File with weights that replace those of --checkpoint, e.g. a linear probe; with --pool, a linear "
            "head."
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            help="What the --head of a backbone reads: token, avg, map, pooler, or patches for a segmentation head."
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="File with the class names, one per line.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Number of classes of the head.")] = None,
    prompts: Prompt = None,
    img_size: Annotated[int | None, typer.Option(help="Input size in pixels; default: the model's.")] = None,
    fit: Annotated[
        str | None, typer.Option(help="How images become inputs: squash, crop or pad; default: the model's.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Colour mean of the preprocessing; default: the model's.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Colour standard deviation of the preprocessing, likewise.")
    ] = None,
    crop_pct: Annotated[
        float | None,
        typer.Option(help="Scale images to the input size divided by this before the crop; usually 0.8 to 1."),
    ] = None,
    interpolation: Annotated[
        str | None, typer.Option(help="Resampling: bicubic, bilinear, nearest or lanczos; default: the model's.")
    ] = None,
) -> dict[str, Any]:
    """The options of ``vitrail.load`` that are set."""
    values = {**locals(), "mean": _numbers("mean", mean), "std": _numbers("std", std)}
    return {name: value for name, value in values.items() if value is not None}


def check_workers(workers: int | None, cluster: str | None) -> None:
    """Refuses a number of workers without a cluster."""
    if workers is not None and cluster is None:
        raise VitrailError(f"--workers {workers} is for a cluster: give --cluster too.")


def flag(name: str) -> str:
    """The option of an argument of ``vitrail.load``."""
    return "--prompt" if name == "prompts" else f"--{name.replace('_', '-')}"


def look(
    *,
    colormap: Annotated[
        str | None,
        typer.Option(help="Colormap of matplotlib; default: RdBu_r for signed maps, viridis_r for unsigned ones."),
    ] = DEFAULT_LOOK.colormap,
    alpha: Annotated[
        float, typer.Option(help="Opacity of the map and fading of the image, from 0 (only the image) to 1.")
    ] = DEFAULT_LOOK.alpha,
    style: Annotated[
        str,
        typer.Option(
            help="smooth, blocks (a rectangle per patch) or outline (around half of the evidence for the class)."
        ),
    ] = DEFAULT_LOOK.style,
    storage: Annotated[
        str, typer.Option(help="Patches that the network uses as storage: mark them, or also hide them.")
    ] = DEFAULT_LOOK.storage,
    uncertain: Annotated[
        str, typer.Option(help="Values whose sign is uncertain, where errors are known: fade them, or show them.")
    ] = DEFAULT_LOOK.uncertain,
) -> Look:
    """How maps are drawn."""
    return Look(colormap, alpha, style, storage, uncertain)


def grouped(**groups: Callable[..., Any]) -> Callable[[Command], Command]:
    """Replaces each named parameter of a command by the options of a function, whose result the command gets."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def expanded(**values: Any) -> None:
            made = {
                name: group(**{option: values.pop(option) for option in _options(group)})
                for name, group in groups.items()
            }
            command(**values, **made)

        parameters: list[inspect.Parameter] = []
        for name, parameter in _options(command).items():
            parameters += _options(groups[name]).values() if name in groups else [parameter]
        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return expanded

    return decorate


def _options(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function, eval_str=True).parameters


def _numbers(name: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise VitrailError(f"--{name} is {text!r}, expected one number or three, as 0.5,0.5,0.5.") from None


def comma_separated(values: Sequence[str] | None) -> list[str]:
    """The items of an option that takes a comma-separated list and may be repeated."""
    return [item.strip() for value in values or [] for item in value.split(",") if item.strip()]
