"""Command lines: every command with options it has and values it may not expect, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.font_manager
import typer
from tests import families
from tests.common import noise
from tests.fuzz.harness import Input, Use, fresh, offline
from tests.fuzz.mutation import TEXTS

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.cli.program import app, main

PLACE = "@place"  # in a stored command line: the folder of the files below
# Each command with enough to run at all, on little.
TINY = ["--model", f"hf:{PLACE}/model"]
COMMANDS: dict[str, list[str]] = {
    "explain": [f"{PLACE}/photo.png", "--no-trust", *TINY],
    "compare": [f"{PLACE}/photo.png", "--no-trust", "--methods", "random", *TINY],
    "similar": [f"{PLACE}/photo.png", f"{PLACE}/photo.png", "--method", "raw_attention", *TINY],
    "models": ["vit_tiny*"],
    "methods": ["r*"],
    "metrics": ["s*"],
    "bench": ["--data", f"{PLACE}/album", "--methods", "random", "--metrics", "sparseness", "--images", "1", *TINY],
    "audit": [f"{PLACE}/album", "--no-trust", "--images", "2", "--method", "raw_attention", *TINY],
    "report": ["run"],
    "reproduce": ["--list"],
    "train-explainer": ["--data", f"{PLACE}/album", "--out", "e.safetensors", "--steps", "1", "--images", "2",
                        "--batch-size", "2", "--subsets", "2", "--hidden", "8", "--blocks", "1",
                        "--surrogate-steps", "0", "--workers", "0", *TINY],
    "serve": ["--port", "0"],
}  # fmt: skip
# These start other machines, wait for others, or choose more work than there is time for.
LEFT_OUT = {"--cluster", "--workers", "--watch", "--all", "--trust", "--help", "--pairs", "--quick", "--plugin"}
FILES = (
    "photo.png",
    "album",
    "../out",
    "labels.txt",
    "labels.json",
    "plan.toml",
    "model",
    "none",
    "album/a.png",
    "empty",
)
FOLDERS = ("", "x", "a/b", "run", "é 😀", "-", "x.png", "run/plan.toml", "a" * 300)  # for --out, which may be anywhere
NUMBERS = ("-1", "0", "1", "2", "3", "7", "1.5", "x", "", "0x10", "1e3", "nan", "inf", "-0", "٣", "9" * 40)
WORDS = (
    "random", "raw_attention", "decompx", "rise(masks=2)", "rise(masks=0)", "tis(", "gen_att.plus", "*", "@predicted",
    "@true", "0", "4", "5", "-1", "ant", "LABEL_0", "LABEL_1,LABEL_2", "a=b", "masks=2", "=", "masks=", "seed=x", "cpu",
    "cuda", "meta", "float16", "bfloat16", "float64", "crop", "pad", "squash", "bicubic", "0,0,0", "1,2", "nan,1,1",
    "blocks", "outline", "hide", "RdBu_r", "viridis", "trust", "probability", "scenes", "hf:x", "md", "tex,html",
    "quick", "tis", "1/2", "0/0", "3/2", "cosine", "dot", "token", "avg", "patches", "label", "predicted",
    "127.0.0.1", "::1",
)  # fmt: skip


@contextmanager
def target(place: Path) -> Iterator[Use]:
    (place / "in").mkdir(exist_ok=True)
    files = place / "files"
    make_files(files)

    def use(path: Path, out: Path) -> None:
        arguments = [text.replace(PLACE, str(files)) for text in json.loads(path.read_bytes())]
        shutil.copytree(files / "run", out / "run")  # a report is written into it
        with contextlib.chdir(out):
            call(arguments)

    with offline(), mock.patch("vitrail.cli.serve._serve", served):
        matplotlib.font_manager.findfont("DejaVu Sans")  # writes its cache into the home folder
        yield fresh(use)


async def served(*_: Any) -> None:
    """In place of a server that would run until Ctrl-C."""


def call(arguments: list[str]) -> None:
    """Runs ``vitrail``; it must end with the code 0, 1 or 2, and with words of its own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["vitrail", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    said = err.getvalue()
    assert code in (None, 0, 1, 2), f"exit code {code}: {said[-500:]}"
    assert "Traceback" not in said, said[-2000:]
    assert "This is a bug" not in said, said[-500:]


def make_files(folder: Path) -> None:
    """What command lines name."""
    (folder / "album").mkdir(parents=True)
    for name, seed in (("photo.png", 0), ("album/a.png", 1), ("album/b.png", 2)):
        noise(40, 32, seed).save(folder / name)
    (folder / "album" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "empty").mkdir()
    (folder / "labels.txt").write_text("\n".join("abcde"))
    (folder / "labels.json").write_text(json.dumps(dict(enumerate("abcde"))))
    families.build("hf_vit").save_pretrained(folder / "model")
    plan = Plan(
        [ModelSpec(f"hf:{folder / 'model'}")],
        str(folder / "album"),
        ["random", "raw_attention"],
        ["sparseness"],
    )
    run(plan, folder / "run")
    shutil.copy(folder / "run" / "plan.toml", folder / "plan.toml")


@cache
def options(command: str) -> tuple[tuple[str, bool], ...]:
    """The options of a command, and whether each takes a value."""
    group: Any = typer.main.get_command(app)
    parameters = [parameter for parameter in group.commands[command].params if parameter.param_type_name == "option"]
    names = [(name, not parameter.is_flag) for parameter in parameters for name in parameter.opts]
    return tuple((name, takes_value) for name, takes_value in names if name not in LEFT_OUT)


def generate(draw: random.Random) -> Input:
    command = draw.choices(list(COMMANDS), [4 if name in ("explain", "compare", "bench") else 1 for name in COMMANDS])[
        0
    ]
    arguments = [command, *COMMANDS[command]]
    for _ in range(draw.choice((1, 1, 2, 3))):
        known = options(command)
        if known:
            name, takes_value = draw.choice(known)
            chosen = draw.choice(FOLDERS) if name == "--out" else value(draw)
            arguments += [name, chosen] if takes_value else [name]
    if draw.random() < 0.2:
        arguments.insert(draw.randrange(len(arguments) + 1), value(draw))
    if draw.random() < 0.1:
        del arguments[draw.randrange(len(arguments))]
    if draw.random() < 0.05:
        arguments.append(draw.choice(("--none", "-x", "--", "-", "--model", "--json=x")))
    return Input("arguments.json", json.dumps(arguments).encode())


def value(draw: random.Random) -> str:
    files = [f"{PLACE}/{name}" for name in FILES]
    texts = [text for text in TEXTS if "\0" not in text and not text.startswith("/dev/")]  # which no shell can pass on
    return draw.choice(
        (draw.choice(NUMBERS), draw.choice(WORDS), draw.choice(WORDS), draw.choice(files), draw.choice(texts))
    )
