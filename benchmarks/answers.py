"""What the tables with known answers share: which methods, on how many images, and rows in Markdown.

Run: python benchmarks/answers.py PAGE.md PAGE.md [...] --out PAGE.md
Makes one page of several that measured different methods of the same question; of a method that stands in two, the row
of the later page.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import vitrail
from vitrail.calls import split_call, split_list
from vitrail.errors import VitrailError
from vitrail.files import write_together
from vitrail.methods.base import Method
from vitrail.metrics.localization import mass
from vitrail.metrics.statistics import interval

OFTEN = 60  # forward passes from which a method is measured on fewer images
# Parameters that bring methods of many passes within reach of a CPU; an 8 × 8 grid needs fewer masks than 14 × 14.
CHEAPER = {"rise": "masks=300", "shapley": "permutations=4", "hsic": "samples=200", "lime": "samples=200",
           "kernel_shap": "samples=200", "tis": "masks=256"}  # fmt: skip
LAYERED = ["decompx.skipplus", "decompx.plus", "full_grad_plus.skipplus(rule=frozen)", "att_cat(rule=frozen)"]
LEFT_OUT = ("vit_shapley",)  # needs an explainer trained for the model
AGNOSTIC = ["raw_attention", "rollout", "random"]
REFUSED = "Refused: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file for the table; may be one of the pages")
    options = parser.parse_args()
    write_together({options.out: merged([page.read_text(encoding="utf-8") for page in options.pages]).encode()})


def default_calls() -> list[str]:
    """Every method that depends on the class and runs without training, and three that do not depend on it."""
    names = [name for name, info in vitrail.list_methods("*").items() if info.class_specific and "." not in name]
    calls = [f"{name}({CHEAPER[name]})" if name in CHEAPER else name for name in names if name not in LEFT_OUT]
    return [*LAYERED, *calls, *AGNOSTIC]


def answer(
    title: str,
    measure: Callable[[str, dict[str, Any]], tuple[int, dict[str, list[float]]]],
    columns: dict[str, str],
    facts: str,
    notes: list[str],
    options: argparse.Namespace,
    begin: float,
) -> None:
    """Prints a page and writes it to ``--out``, anew after every method.

    ``measure``: name and parameters of a method → the number of images and, for each column, a value per image.
    """
    print(f"{facts} {time.time() - begin:.0f} s", flush=True)
    lines: list[dict[str, Any]] = []
    refusals: list[str] = []
    text = ""
    for call in split_list(options.methods) if options.methods else default_calls():
        start = time.time()
        try:
            images, values = measure(*split_call(call))
        except VitrailError as error:
            refusals.append(f"`{call}`: {str(error).partition(' Methods that can:')[0]}")
            print(refusals[-1], flush=True)
        else:
            lines.append({"method": call, "images": images, **values})
            means = {key: f"{np.mean(value):.3f}" for key, value in values.items()}
            print(call, images, means, f"{time.time() - start:.1f} s", flush=True)
        table = pd.DataFrame(lines, columns=["method", "images", *columns])
        parts = [*header(title, options, time.time() - begin, facts), *notes, "\n".join(rows(table, columns))]
        text = "\n\n".join([*parts, *([REFUSED + " ".join(refusals)] if refusals else [])]) + "\n"
        if options.out:
            write_together({options.out: text.encode()})
    print(text)


def few_note(images: str, few: int) -> str:
    """What the intervals are over, for two maps per image, and how little the rows of few images say."""
    return (
        f"Means over {images} each, with 95 % bootstrap intervals. In {few} {images.split(maxsplit=1)[0]} one map is "
        f"{1 / (2 * few):.2f}, so those rows show that a method works and rank nothing."
    )


def asks_often(method: Method) -> bool:
    """Whether it asks the network so often that it is measured on few images."""
    forwards, backwards = method.passes()
    return forwards + 2 * backwards > OFTEN


def share(values: Tensor, mask: Tensor, others: Tensor) -> float:
    """Of the evidence of a map on two objects, the share on the first; one half where there is none."""
    weights = mass(F.interpolate(values[None, None], size=mask.shape, mode="bilinear")[0, 0])
    first, other = float(weights[mask].sum()), float(weights[others].sum())
    return first / (first + other) if first + other > 0 else 0.5


def painted(pixels: Tensor, mask: Tensor) -> Tensor:
    """A model input (3, H, W) in which the pixels of a mask have the mean colour of the image."""
    return pixels.where(~mask, pixels.mean((1, 2), keepdim=True))


def bounded(values: Sequence[float] | NDArray[np.floating]) -> str:
    """The mean with its 95 % interval over images."""
    numbers = np.asarray(values, dtype=np.float64)
    low, high = interval(numbers)
    return f"{numbers.mean():.2f} [{low:.2f}, {high:.2f}]"


def header(title: str, options: argparse.Namespace, seconds: float, facts: str) -> list[str]:
    """The first paragraphs of a page: what was run, when, with what, and what is known of the model.

    Of paths in the command, the last component.
    """
    script, *words = (Path(word).name for word in sys.argv)
    versions = f"{time.strftime('%Y-%m-%d')}, vitrail {vitrail.__version__}, torch {torch.__version__}"
    return [
        f"# {title}",
        f"`{' '.join(['python', f'benchmarks/{script}', *words])}`",
        f"{versions}, {platform.machine()} {options.device}, {seconds:.0f} s. {facts}",
    ]


def rows(table: pd.DataFrame, columns: dict[str, str]) -> list[str]:
    """Markdown: a row per method, and how many images it was measured on; ``columns``: column → its head.

    Methods measured on as many images stand together, those that point best first: few images rank nothing.
    """
    by_pointing = table.assign(pointing=table["pointing"].map(np.mean))
    ordered = by_pointing.sort_values(["images", "pointing"], ascending=False, kind="stable").index
    lines = [f"| method | images | {' | '.join(columns.values())} |", "|---|" + "---|" * (len(columns) + 1)]
    for _, row in table.loc[ordered].iterrows():
        cells = [bounded(row[column]) for column in columns]
        lines.append(f"| `{row['method']}` | {row['images']} | {' | '.join(cells)} |")
    return lines


def merged(pages: Sequence[str]) -> str:
    """One page of several: how each was made, what they say of the model, and all rows, those that point best first."""
    runs: dict[tuple[str, str], str] = {}  # (command, versions and seconds) → what was found of the model
    methods: dict[str, str] = {}
    refusals: dict[str, None] = {}
    frame: list[str] = []
    for page in pages:
        title, *paragraphs = page.strip().split("\n\n")
        while paragraphs[0].startswith("`python "):
            command, made = paragraphs.pop(0), paragraphs.pop(0)
            versions, end, facts = made.partition(" s.")
            runs[command, versions + end] = facts.strip()
        if paragraphs[-1].startswith(REFUSED):
            refusals[paragraphs.pop().removeprefix(REFUSED)] = None
        head, rule, *lines = paragraphs.pop().splitlines()
        if frame not in ([], [title, *paragraphs, head, rule]):
            raise SystemExit("the pages differ in more than methods: give pages of one script and one --few.")
        frame = [title, *paragraphs, head, rule]
        methods |= {line.split("`")[1]: line for line in lines}
    title, *notes, head, rule = frame
    parts, known = [title], {""}
    for (command, versions), facts in runs.items():
        parts += [command, versions if facts in known else f"{versions} {facts}"]
        known.add(facts)
    parts += [*notes, "\n".join([head, rule, *sorted(methods.values(), key=standing, reverse=True)])]
    return "\n\n".join([*parts, *([REFUSED + " ".join(refusals)] if refusals else [])]) + "\n"


def standing(line: str) -> tuple[int, float]:
    """The number of images of a row, and its mean of pointing."""
    images, pointing = line.split(" | ")[1:3]
    return int(images), float(pointing.split()[0])


if __name__ == "__main__":
    main()
