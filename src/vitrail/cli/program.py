"""The ``vitrail`` program: its commands, error messages and exit codes."""

from __future__ import annotations

import codecs
import errno
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from vitrail.cli.audit import audit
from vitrail.cli.bench import bench
from vitrail.cli.codes import DONE, FAILED, INTERRUPTED, TERMINATED
from vitrail.cli.compare import compare
from vitrail.cli.explain import explain
from vitrail.cli.listing import data, methods, metrics, models
from vitrail.cli.report import report
from vitrail.cli.reproduce import reproduce
from vitrail.cli.serve import serve
from vitrail.cli.similar import similar
from vitrail.cli.train import train_explainer
from vitrail.errors import VitrailError
from vitrail.files import printable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # why output cannot be written
SAVING = 5.0  # seconds in which a second SIGTERM does not interrupt the saving: timeout(1) sends two

# Replacements for characters that an old encoding lacks.
ASCII = {"→": "->", "×": "x", "…": "...", "–": "-", "−": "-", "·": "-", "±": "+-", "↑": "(up)", "↓": "(down)"}


class Command(TyperCommand):
    """A command whose help has no Python type (``list[str]``) for arguments of several values: the name suffices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if parameter.nargs != 1 and isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]


app = typer.Typer(name="vitrail", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Explain the predictions of Vision Transformers, and measure how good the explanations are."""
    if version:
        from vitrail.version import __version__

        typer.echo(f"vitrail {__version__}")
        raise typer.Exit


for command in (
    explain,
    compare,
    similar,
    models,
    methods,
    metrics,
    data,
    bench,
    audit,
    report,
    reproduce,
    train_explainer,
    serve,
):
    app.command(cls=Command)(command)


def main() -> None:
    """Runs the command line; an error is one line on the standard error, never a traceback."""
    codecs.register_error("vitrail", _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="vitrail")  # "→" must not end a run whose output has an old encoding
    # matplotlib, used for its fonts and colour maps, complains where it cannot write its cache
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the hub would draw them into log files
    with warnings.catch_warnings(), _sigterm_as_keyboard_interrupt() as sigterms:
        warn_once = functools.cache(functools.partial(_print_error, "[yellow]Warning:[/]"))
        warnings.showwarning = lambda message, *_: warn_once(str(message))
        code = _run()
        if code == INTERRUPTED:
            _print_error("\nvitrail:", "stopped; everything written so far is complete.")
            code = TERMINATED if sigterms else INTERRUPTED
    sys.exit(code)


def _run() -> str | int | None:
    """Runs the command and returns the exit code."""
    try:
        try:
            app()
        finally:
            _flush()
        return DONE
    except SystemExit as stop:
        return stop.code
    except VitrailError as error:
        return _fail(str(error))
    except Exception as error:
        if os.environ.get("VITRAIL_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            return _fail(f"cannot read or write '{error.filename}': {error.strerror or error}.")
        if isinstance(error, OSError) and error.errno in FULL:  # vitrail.files names its files
            return _fail(f"cannot write to the standard output: {error.strerror}.")
        hint = "This is a bug, please report it; VITRAIL_TRACEBACK=1 prints the traceback."
        return _fail(f"{type(error).__name__}: {str(error).rstrip('.')}. {hint}")


@contextmanager
def _sigterm_as_keyboard_interrupt() -> Iterator[list[float]]:
    """Turns SIGTERM into a KeyboardInterrupt, so that results are saved; yields the times at which it arrived."""
    arrivals: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrivals
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if arrivals and time.monotonic() - arrivals[-1] < SAVING:
            return
        arrivals.append(time.monotonic())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield arrivals
    finally:
        signal.signal(signal.SIGTERM, before)


def _flush() -> None:
    """Writes buffered output while a failure can still be reported."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at exit
        if error.errno != errno.EPIPE:
            raise


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Error handler of the output's encoding: ASCII replacements where there are any, else escapes."""
    assert isinstance(error, UnicodeEncodeError)
    replaced = (ASCII.get(character) or printable(character) for character in error.object[error.start : error.end])
    return "".join(replaced).encode("ascii", "backslashreplace").decode(), error.end


def _fail(message: str) -> int:
    _print_error("[bold red]Error:[/]", message)
    return FAILED


def _print_error(prefix: str, text: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    with suppress(OSError):  # there is no other place to report it
        Console(stderr=True).print(f"{prefix} {escape(text)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
