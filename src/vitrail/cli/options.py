"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from vitrail.errors import VitrailError
from vitrail.show.look import DEFAULT_LOOK, Look

Command: TypeAlias = Callable[..., None]

Against = Annotated[str | None, typer.Option(help="Explain the target as opposed to this class, e.g. @predicted.")]
Alpha = Annotated[float, typer.Option(help="Opacity of the map and fading of the image, from 0 (only the image) to 1.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Checkpoint file with the model's weights.")]
Colormap = Annotated[
    str | None,
    typer.Option(help="Colormap of matplotlib; default: RdBu_r for signed maps, viridis_r for unsigned ones."),
]
CropPct = Annotated[
    float | None, typer.Option(help="Scale images to the input size divided by this before the crop; usually 0.8 to 1.")
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, …")]
Dtype = Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16, float16, float64.")]
Fit = Annotated[str | None, typer.Option(help="How images become inputs: squash, crop or pad; default: the model's.")]
ImgSize = Annotated[int | None, typer.Option(help="Input size in pixels; default: the model's.")]
Interpolation = Annotated[
    str | None, typer.Option(help="Resampling: bicubic, bilinear, nearest or lanczos; default: the model's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Head = Annotated[
    Path | None, typer.Option(help="File with weights that replace those of --checkpoint, e.g. a linear probe.")
]
Labels = Annotated[Path | None, typer.Option(help="File with the class names, one per line.")]
Mean = Annotated[
    str | None, typer.Option(metavar="R,G,B", help="Colour mean of the preprocessing; default: the model's.")
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: timm name, hf:ORG/NAME, hf:./folder, torchvision:NAME or an embedded one (photo, the default).",
    ),
]
NumClasses = Annotated[int | None, typer.Option(help="Number of classes of the head.")]
Out = Annotated[Path, typer.Option(help="Output folder.")]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="Parameter of the method; repeatable.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="Python file with methods or metrics of your own; repeatable."),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Class of a model that reads texts; repeat it for each class."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Retry what failed in earlier calls.")]
Std = Annotated[
    str | None, typer.Option(metavar="R,G,B", help="Colour standard deviation of the preprocessing, likewise.")
]
StorageName = Annotated[
    str,
    typer.Option("--storage", help="Patches that the network uses as storage: mark them, or also hide them."),
]
UncertainName = Annotated[
    str,
    typer.Option(
        "--uncertain", help="Values whose sign is uncertain, where errors are known: fade them, or show them."
    ),
]
StyleName = Annotated[
    str,
    typer.Option(
        "--style",
        help="smooth, blocks (a rectangle per patch) or outline (around half of the evidence for the class).",
    ),
]
Trusting = Annotated[
    bool,
    typer.Option("--trust/--no-trust", help="Ask the model, with about 80 forward passes, how far to trust each map."),
]


def load_options(*, mean: str | None, std: str | None, **values: Any) -> dict[str, Any]:
    """The options of ``vitrail.load`` that are set."""
    values |= {"mean": _numbers("mean", mean), "std": _numbers("std", std)}
    return {name: value for name, value in values.items() if value is not None}


def flag(name: str) -> str:
    """The option of an argument of ``vitrail.load``."""
    return "--prompt" if name == "prompts" else f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Group:
    """Options that belong together, and what is made of them."""

    types: Mapping[str, Any]
    make: Callable[..., Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # None for the others

    def parameters(self) -> list[inspect.Parameter]:
        kind = inspect.Parameter.KEYWORD_ONLY
        return [
            inspect.Parameter(name, kind, default=self.defaults.get(name), annotation=annotation)
            for name, annotation in self.types.items()
        ]


MODEL = Group(
    {
        "checkpoint": Checkpoint,
        "head": Head,
        "labels": Labels,
        "num_classes": NumClasses,
        "prompts": Prompt,
        "img_size": ImgSize,
        "fit": Fit,
        "mean": Mean,
        "std": Std,
        "crop_pct": CropPct,
        "interpolation": Interpolation,
    },
    load_options,
)
LOOK = Group(
    {
        "colormap": Colormap,
        "alpha": Alpha,
        "style": StyleName,
        "storage": StorageName,
        "uncertain": UncertainName,
    },
    Look,
    asdict(DEFAULT_LOOK),
)


def grouped(**groups: Group) -> Callable[[Command], Command]:
    """A command in whose place of each named parameter the options of a group are; it gets what the group makes."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def expanded(**values: Any) -> None:
            made = {
                name: group.make(**{option: values.pop(option) for option in group.types})
                for name, group in groups.items()
            }
            command(**values, **made)

        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            single = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += groups[name].parameters() if name in groups else [single]
        expanded.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return expanded

    return decorate


def _numbers(name: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise VitrailError(f"--{name} is {text!r}, expected one number or three, as 0.5,0.5,0.5.") from None


def comma_separated(values: Sequence[str] | None) -> list[str]:
    """The items of an option that takes a comma-separated list and may be repeated."""
    return [item.strip() for value in values or [] for item in value.split(",") if item.strip()]
