"""``vitrail similar``: what two images have in common for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vitrail.calls import parse_parameters, split_call
from vitrail.cli import options
from vitrail.cli.explain import print_model
from vitrail.cli.outputs import file_part, file_stems, join_parts, params_part, print_json
from vitrail.cli.sources import find_sources
from vitrail.errors import VitrailError
from vitrail.show.look import Look


@options.grouped(load_options=options.load_options, look=options.look)
def similar(
    *,
    first: Annotated[str, typer.Argument(metavar="IMAGE", help="Image file.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Image file to compare it with.")],
    model: options.ModelName = None,
    method: Annotated[
        str | None, typer.Option(help="Method; default: decompx.skipplus, or decompx for --pairs.")
    ] = None,
    measure: Annotated[str, typer.Option(help="cosine or dot: how the embeddings are compared.")] = "cosine",
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Also split the similarity into pairs of patches, one of each image; takes a while on a CPU.",
        ),
    ] = False,
    out: options.Out = Path("vitrail-out"),
    param: options.Params = None,
    look: Look,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
) -> None:
    """Explain how similar two images are to a model: which patches of either make them alike."""
    name, params = split_call(method or ("decompx" if pairs else "decompx.skipplus"))
    if pairs and name != "decompx":
        raise VitrailError(f"--pairs needs the exact shares of decompx, but --method is {name}: leave --method out.")
    for image in (first, second):
        if Path(image).is_dir():
            raise VitrailError(f"similar takes two images, but {image} is a folder: give a file inside it.")
    paths = [find_sources([image], out)[0].path for image in (first, second)]

    from vitrail.models.loading import load_embedder
    from vitrail.plugins import load_plugins
    from vitrail.similarity import similar as explain_similarity

    load_plugins(plugin or [])
    console = Console(stderr=as_json, highlight=False)
    view = load_embedder(model, device=device, dtype=dtype, **load_options)
    print_model(console, view)
    params |= parse_parameters(param or [])
    images = explain_similarity(view, paths[0], paths[1], name, measure=measure, pairs=pairs, **params)
    question = [f"similar-to-{file_part(paths[1])}", measure if measure != "cosine" else ""]
    (stem,) = file_stems(paths[:1], out, f".{images.first.method}" + join_parts([params_part(params), *question]))
    out.mkdir(parents=True, exist_ok=True)
    picture = images.save(stem.with_name(stem.name + ".png"), look=look)
    console.print(f"[bold]{images.title}[/] → [bold]{escape(str(picture))}[/]", soft_wrap=True)
    if as_json:
        print_json({"score": images.score, "picture": picture, **images.to_dict()})
