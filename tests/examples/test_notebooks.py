"""The notebooks are those of the scripts, small and without errors; the scripts run as they are, offline."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@cache
def notebooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(script: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    return content


def test_there_are_six_and_each_has_its_script() -> None:
    assert len(SCRIPTS) == 6
    assert sorted((ROOT / "examples").glob("*.ipynb")) == [script.with_suffix(".ipynb") for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_notebook_is_that_of_the_script(script: Path) -> None:
    executed = committed(script)
    assert notebooks().without_outputs(executed) == notebooks().notebook(script), "run make notebooks"
    badge, install, *cells = executed["cells"]
    assert f"/examples/{script.stem}.ipynb)" in "".join(badge["source"])
    assert install["metadata"]["tags"] == ["skip-execution"]
    assert install["execution_count"] is None
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run in order, by a new kernel"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert any("image/jpeg" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_is_small_and_names_no_folder_of_its_maker(script: Path) -> None:
    file = script.with_suffix(".ipynb")
    assert file.stat().st_size < notebooks().LARGEST
    assert str(Path.home()) not in file.read_text(encoding="utf-8")


def test_a_changed_script_is_noticed(tmp_path: Path) -> None:
    changed = tmp_path / SCRIPTS[0].name
    changed.write_text(SCRIPTS[0].read_text(encoding="utf-8") + "\n# %%\nprint(1)\n", encoding="utf-8")
    assert notebooks().without_outputs(committed(SCRIPTS[0])) != notebooks().notebook(changed)


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_offline(script: Path, tmp_path: Path) -> None:
    if ".widget()" in script.read_text(encoding="utf-8"):
        pytest.importorskip("ipywidgets")
    offline = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", script],
        cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.full
def test_execution_shrinks_pictures_and_leaves_widgets_to_them(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    script = tmp_path / "short.py"
    script.write_text(
        "# %% [markdown]\n# # Short\n#\n# Two lines.\n\n"
        "# %%\nimport vitrail\nfrom vitrail.samples import open_sample\n\n"
        'ex = vitrail.explain("scenes", open_sample("star-and-heart.png"))\nprint(ex.label)\nex.widget()\n',
        encoding="utf-8",
    )
    executed = notebooks().execute(notebooks().notebook(script))
    assert executed["cells"][2]["source"] == ["# Short\n", "\n", "Two lines."]
    printed, shown = executed["cells"][3]["outputs"]
    assert printed["text"] == "star\n"
    assert set(shown["data"]) == {"text/plain", "image/jpeg"}
    assert len(notebooks().text_of(executed)) < 60_000
