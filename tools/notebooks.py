"""Executes the scripts of examples/ and writes them as notebooks with small pictures: ``python tools/notebooks.py``.

A script is plain Python: ``# %%`` starts a cell of code and ``# %% [markdown]`` one of text, whose lines are comments.
Names of scripts as arguments: only those. Needs ``pip install "vitrail[peers]"``.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from PIL import Image

from vitrail.files import write_together

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LARGEST = 300_000  # bytes of a notebook
WIDEST, QUALITY = 900, 80  # pixels of a picture, and of JPEG
SKIPPED = "skip-execution"  # nbclient's tag of cells that it leaves out
WIDGET = "application/vnd.jupyter.widget-view+json"

Cell = dict[str, Any]


def notebook(script: Path) -> dict[str, Any]:
    """The notebook of a script, without outputs: a badge, the installation, and the cells of the script."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    repository = source.removeprefix("https://github.com/")
    address = f"https://colab.research.google.com/github/{repository}/blob/main/examples/{script.stem}.ipynb"
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
    install = f'%pip install --quiet "vitrail[notebook] @ git+{source}"'
    cells = [_cell("markdown", badge), _cell("code", install, tags=[SKIPPED]), *_cells(script)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def without_outputs(executed: dict[str, Any]) -> dict[str, Any]:
    """A notebook as it was before its execution."""
    blank = {"outputs": [], "execution_count": None}
    cells = [{**cell, **blank} if cell["cell_type"] == "code" else cell for cell in executed["cells"]]
    return {**executed, "cells": cells}


def execute(blank: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a kernel that starts in an empty folder."""
    import nbformat
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        read = nbformat.reads(text_of(blank), as_version=4)
        executed = NotebookClient(read, record_timing=False, coalesce_streams=True, resources=place).execute()
    outputs = ("outputs", "execution_count")
    cells = [
        {**cell, **{name: run[name] for name in outputs if name in cell}}
        for cell, run in zip(blank["cells"], executed["cells"], strict=True)
    ]
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        if output.get("name") == "stderr":
            raise SystemExit(f"a cell wrote to stderr, which readers would see: {output['text']}")
        if "data" in output:
            output["data"] = _small(output["data"])
            output["metadata"] = {}
    return {**blank, "cells": cells}


def text_of(content: dict[str, Any]) -> str:
    """The content of a notebook's file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cells(script: Path) -> list[Cell]:
    _, *parts = f"\n{script.read_text(encoding='utf-8')}".split("\n# %%")
    cells = []
    for part in parts:
        heading, _, body = part.partition("\n")
        if heading.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(_cell("markdown", "\n".join(lines)))
        else:
            cells.append(_cell("code", body.strip()))
    return cells


def _cell(kind: str, source: str, **metadata: Any) -> Cell:
    cell: Cell = {"cell_type": kind, "id": "", "metadata": metadata, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _small(data: dict[str, Any]) -> dict[str, Any]:
    """The data of an output with its picture as a small JPEG; without widgets, which need a kernel."""
    small = {kind: value for kind, value in data.items() if kind not in (WIDGET, "image/png")}
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        picture.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=QUALITY, optimize=True)
        small["image/jpeg"] = base64.b64encode(buffer.getvalue()).decode()
    return small


def main(names: list[str]) -> None:
    """Makes the notebooks of these scripts, or of all."""
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    for script in [EXAMPLES / f"{name}.py" for name in names] or sorted(EXAMPLES.glob("*.py")):
        begin = time.perf_counter()
        content = text_of(execute(notebook(script))).encode()
        if len(content) > LARGEST:
            raise SystemExit(f"{script.stem}.ipynb would have {len(content):,} bytes, more than {LARGEST:,}.")
        write_together({script.with_suffix(".ipynb"): content})
        print(f"{script.stem}.ipynb: {len(content) // 1000} kB in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
