"""The command line."""

from __future__ import annotations

import codecs
import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from vitrail.errors import VitrailError
from vitrail.files import printable

app = typer.Typer(
    name="vitrail",
    help="See through any Vision Transformer: why did it say that?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

STOPPED, TERMINATED = 130, 143  # by Ctrl-C, as typer has it, and by SIGTERM

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # why output cannot be written
SAVING = 5.0  # seconds in which a second SIGTERM does not interrupt the saving: timeout(1) sends two

# What an old encoding does not have.
PLAIN = {"→": "->", "×": "x", "…": "...", "–": "-", "−": "-", "·": "-", "±": "+-", "↑": "(up)", "↓": "(down)"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="timm name, hf:ORG/NAME, hf:./folder, torchvision:NAME; default: the embedded one."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the pictures.")]
Params = Annotated[list[str] | None, typer.Option("--param", "-p", help="Parameter of the method, name=value.")]
Checkpoint = Annotated[Path | None, typer.Option(help="File with the model's weights.")]
Labels = Annotated[Path | None, typer.Option(help="File with the class names, one per line.")]
NumClasses = Annotated[int | None, typer.Option(help="Size of the head.")]
ImgSize = Annotated[int | None, typer.Option(help="Input size, if not the model's usual one.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, float64.")]


def main() -> None:
    """Runs the command line; every error of vitrail is one line, never a traceback."""
    codecs.register_error("vitrail", _spell_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="vitrail")  # "→" must not end a run whose output has an old encoding
    # matplotlib, whose fonts and colours are used, complains where it cannot keep files of its own at home
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings(), _sigterm_like_ctrl_c() as terminated:
        warnings.showwarning = _WarningsOnce()
        code = _run()
        if code == STOPPED:
            _say("\nvitrail:", "stopped; everything written so far is complete.")
            code = TERMINATED if terminated else STOPPED
    sys.exit(code)


def _run() -> str | int | None:
    """Runs the command and returns the exit code."""
    try:
        try:
            app()
        finally:
            _flush()
        return 0
    except SystemExit as stop:
        return stop.code
    except VitrailError as error:
        return _say_error(str(error))
    except Exception as error:
        if os.environ.get("VITRAIL_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            return _say_error(f"cannot read or write '{error.filename}': {error.strerror or error}.")
        if isinstance(error, OSError) and error.errno in FULL:  # files of ours have their own error
            return _say_error(f"cannot write to the standard output: {error.strerror}.")
        hint = "This should not happen: please report it; VITRAIL_TRACEBACK=1 shows where it comes from."
        return _say_error(f"{type(error).__name__}: {error}. {hint}")


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[list[float]]:
    """While it lasts, SIGTERM is a KeyboardInterrupt, so that what is done is saved; yields when it came."""
    received: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() - received[-1] < SAVING:
            return
        received.append(time.monotonic())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _flush() -> None:
    """Writes what is left of the output, while it can still be said that this fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at its end
        if error.errno != errno.EPIPE:
            raise


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks: signs in plain letters, bytes of file names and all else as escapes."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter) or _escape(letter) for letter in letters), error.end


def _escape(letter: str) -> str:
    return printable(letter).encode("ascii", "backslashreplace").decode()


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """See through any Vision Transformer: why did it say that?"""
    if version:
        from vitrail.version import __version__

        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


@app.command()
def explain(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE-OR-FOLDER…", help="Pictures, or folders of them.")],
    model: ModelName = None,
    method: Annotated[
        str | None,
        typer.Option(help="As tis or rise(masks=32), see `vitrail methods`; default: decompx.skipplus (Swin: vit_cx)."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Class, by name or number; default: the predicted one.")] = None,
    against: Annotated[str | None, typer.Option(help="Explain the class as opposed to this one.")] = None,
    top: Annotated[int, typer.Option(min=1, max=10, help="Explain the K likeliest classes side by side.")] = 1,
    out: Out = Path("vitrail-out"),
    param: Params = None,
    score: Annotated[bool, typer.Option("--score", help="Measure the map: insertion and deletion.")] = False,
    curves: Annotated[bool, typer.Option("--curves", help="Measure the map and draw the curves.")] = False,
    checkpoint: Checkpoint = None,
    labels: Labels = None,
    num_classes: NumClasses = None,
    img_size: ImgSize = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Explain pictures: which parts speak for the class, which against it."""
    from vitrail.cli.explain import find_pictures, run
    from vitrail.models.loading import load

    if top > 1 and target is not None:
        raise VitrailError("--top explains the likeliest classes and --target one class: give only one of the two.")
    paths = find_pictures(images, out)
    chosen = parse_params(param or [])
    view = load(
        model,
        device=device,
        dtype=dtype,
        checkpoint=checkpoint,
        labels=labels,
        num_classes=num_classes,
        img_size=img_size,
    )
    failed = run(view, paths, method, target, against, top, out, chosen, as_json, score, curves)
    if failed:
        raise typer.Exit(1)


@app.command()
def compare(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="One picture.")],
    model: ModelName = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Names, globs or calls as rise(masks=32), as a list or repeated; default: all but masks."),
    ] = None,
    targets: Annotated[
        list[str] | None, typer.Option(help="Classes, comma-separated or repeated: a row each; default: the predicted.")
    ] = None,
    out: Out = Path("vitrail-out"),
    param: Params = None,
    checkpoint: Checkpoint = None,
    labels: Labels = None,
    num_classes: NumClasses = None,
    img_size: ImgSize = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw what all (or some) methods say of one picture, side by side."""
    from vitrail.calls import split_list
    from vitrail.cli.compare import run
    from vitrail.cli.explain import find_pictures
    from vitrail.models.loading import load

    if Path(image).is_dir():
        raise VitrailError(f"compare takes one picture, but {image} is a folder: use vitrail explain for folders.")
    (path,) = find_pictures([image], out)
    view = load(
        model,
        device=device,
        dtype=dtype,
        checkpoint=checkpoint,
        labels=labels,
        num_classes=num_classes,
        img_size=img_size,
    )
    run(view, path, split_list(methods or []), split(targets), out, parse_params(param or []))


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(metavar="[GLOB]", help="Part of the names, e.g. 'deit*'.")] = "*",
    as_json: Json = False,
) -> None:
    """List the models that have a name, with the tag and the classes of their usual weights."""
    from vitrail.cli.listing import list_models, show

    note = "0 classes: no head; tag –: no weights; these need --checkpoint (or another tag, as NAME.TAG)"
    show(list_models(pattern), as_json, f"models that fit {pattern!r}; {note}")


@app.command()
def methods(
    pattern: Annotated[str, typer.Argument(metavar="[GLOB]", help="Part of the names, e.g. '*.plus'.")] = "*",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Say which methods this model supports; default: no model.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods; with --model, which of them it supports and why not the others."""
    from vitrail.cli.listing import show, without_weights
    from vitrail.methods.registry import describe_methods

    rows = describe_methods(pattern, None if model is None else without_weights(model))
    bare = [row for row in rows if "." not in row["name"]]
    if as_json or pattern != "*":
        show(rows, as_json, f"fit {pattern!r}")
    else:
        show(bare, as_json, "methods; sums over layers (.plus, .skipplus, .rollout): vitrail methods '*.*'")


@app.command()
def bench(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.toml]", help="A plan; options override it.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Models, as a list or repeated.")] = None,
    data: Annotated[str | None, typer.Option(help="scenes:100, imagenet:DIR, a folder…; see docs/data.md.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Methods, as tis or rise(masks=256).")] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="Metrics, as deletion(steps=32).")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="So many images, drawn by --seed.")] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    target: Annotated[str | None, typer.Option(help="Class that is explained: predicted or label.")] = None,
    protocol: Annotated[str | None, typer.Option(help="A paper's, for the metrics that know it.")] = None,
    preset: Annotated[str | None, typer.Option(help="full, or quick: few steps, few masks.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; begun ones are continued.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at a time; default: by device.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Same bits: image by image.")] = False,
    maps: Annotated[bool, typer.Option(help="Keep maps and small pictures for the report.")] = True,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed before.")] = False,
    cluster: Annotated[str | None, typer.Option(help="auto, local or ray://HOST:PORT: on a Ray cluster.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Of a cluster; default: one per GPU, or CPU.")] = None,
    watch: Annotated[Path | None, typer.Option(metavar="RUN", help="Only watch a run that goes on elsewhere.")] = None,
    checkpoint: Checkpoint = None,
    labels: Labels = None,
    num_classes: NumClasses = None,
    img_size: ImgSize = None,
    device: Device = "auto",
) -> None:
    """Measure many images, methods and metrics; the same command continues what was interrupted."""
    from vitrail.cli.bench import make_plan, run, watch_run

    if watch is not None:
        watch_run(watch)
        return
    weights = {"checkpoint": checkpoint, "labels": labels, "num_classes": num_classes, "img_size": img_size}
    given = {"data": data, "methods": methods, "metrics": metrics, "images": images, "seed": seed, "target": target,
             "protocol": protocol, "batch_size": batch_size, "deterministic": deterministic or None,
             "maps": None if maps else False}  # fmt: skip
    chosen = make_plan(plan, model, weights, given, preset)
    if run(chosen, out or Path("vitrail-run"), device, retry, cluster, workers):
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders of vitrail bench.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: report in the first run.")] = None,
    formats: Annotated[list[str] | None, typer.Option("--format", help="html, md, tex, csv, pdf, png, svg.")] = None,
) -> None:
    """Tables, figures and one HTML file of runs."""
    from vitrail.cli.report import run

    run(runs, out, split(formats))


@app.command()
def reproduce(
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]", help="A table or figure; see --list.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    data: Annotated[list[str] | None, typer.Option(help="NAME=PATH of each data set needed, repeated.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Another model for the paper's.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Fewer images than the paper.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only the columns of these models or data, by their keys (vit, boxes, …).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("vitrail-papers"),
    quick: Annotated[bool, typer.Option("--quick", help="Few steps and masks, to try it out.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed before.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a paper's table again, beside the published numbers."""
    from vitrail.cli.reproduce import list_targets, parse_data, run, show_targets

    if listing or target is None:
        show_targets(list_targets(target or "*"), as_json)
        return
    failed = run(target, parse_data(data or []), model, images, out, only=split(only), quick=quick, retry=retry,
                 device=device, as_json=as_json)  # fmt: skip
    if failed:
        raise typer.Exit(1)


@app.command()
def serve(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Models to offer, repeated; default: photo and scenes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's get a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any that is free.")] = 8000,
    token: Annotated[str | None, typer.Option(help="What clients must send; made up where it is needed.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="For computing; default: all cores but one.")] = None,
    queue: Annotated[int, typer.Option(min=1, help="Jobs that may wait, of each kind.")] = 16,
    job_seconds: Annotated[
        float, typer.Option(min=1, help="The most that a job, or a method compared, may take.")
    ] = 120,
    cache_mb: Annotated[int, typer.Option(min=1, help="Memory for pictures and answers, in MiB.")] = 256,
    checkpoint: Checkpoint = None,
    labels: Labels = None,
    num_classes: NumClasses = None,
    img_size: ImgSize = None,
) -> None:
    """Open the web page: drop a photo, see why. Also an HTTP interface for programs."""
    from vitrail.app.server.settings import MIB, Settings, spare_cores
    from vitrail.cli.serve import run

    options = {"checkpoint": checkpoint, "labels": labels, "num_classes": num_classes, "img_size": img_size}
    given = {name: value for name, value in options.items() if value is not None}
    settings = Settings(host, port, token, queue, job_seconds, threads=threads or spare_cores(),
                        cache_bytes=cache_mb * MIB, load_options=given)  # fmt: skip
    run(settings, split(model))


@app.command()
def metrics(
    pattern: Annotated[str, typer.Argument(metavar="[GLOB]", help="Part of the names, e.g. 'token_*'.")] = "*",
    as_json: Json = False,
) -> None:
    """List the metrics, what they need and which way is better."""
    from vitrail.cli.listing import describe_metrics, show

    show(describe_metrics(pattern), as_json, "metrics", without=("family", "paper"))


def split(given: list[str] | None) -> list[str]:
    """Lists are comma-separated or repeated."""
    return [part.strip() for text in given or [] for part in text.split(",") if part.strip()]


def parse_params(given: list[str]) -> dict[str, Any]:
    """``name=value`` texts → parameters; values are JSON where they can be, else text."""
    params: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise VitrailError(f"a parameter is given as name=value, but got {text!r}.")
        try:
            params[name] = json.loads(value)
        except json.JSONDecodeError:
            params[name] = value
    return params


def _say_error(message: str) -> int:
    _say("[bold red]Error:[/]", message)
    return 1


class _WarningsOnce:
    """Says each warning, but not a second time."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in self.said:
            self.said.add(str(message))
            _say("[yellow]Warning:[/]", str(message))


def _say(what: str, text: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    with suppress(OSError):  # there is nowhere else to say it
        Console(stderr=True).print(f"{what} {escape(text)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
