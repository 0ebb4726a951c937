"""Guarantees about the project itself."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

import vitrail

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MIB = 2**20


@pytest.mark.parametrize("code", ["import vitrail", "import vitrail.cli.program"])
def test_importing_is_quick(code: str) -> None:
    heavy = "torch timm transformers matplotlib pandas captum numpy scipy pyarrow PIL ray fastapi asyncio".split()
    check = f"{code}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    with pytest.raises(AttributeError):
        _ = vitrail.nonsense


def test_the_demo_explains_a_photograph_that_the_model_recognises() -> None:
    (photo,) = re.findall(r"^PHOTO := (.*)$", MAKEFILE, re.MULTILINE)
    explanation = vitrail.explain(vitrail.load(), ROOT / photo)
    assert (explanation.label, explanation.probability > 0.9) == ("espresso", True)
    assert f"{explanation.label} in $(PHOTO)" in MAKEFILE
    assert f"vitrail-out/{Path(photo).stem}.{explanation.method}.png" in MAKEFILE


# Release


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == vitrail.__version__
    assert [paper["year"] for paper in citation["references"]] == [2023, 2023, 2024, 2024]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall("^## (.*)$", changes, re.MULTILINE)[0] in ("Unreleased", vitrail.__version__)


def test_the_readme_starts_with_a_picture_that_moves() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description, path = re.search(r"!\[([^\]]*)\]\(([^)]+)\)", readme).groups()
    assert len(description) > 100
    assert (ROOT / path).stat().st_size <= 1.5 * MIB
    with Image.open(ROOT / path) as picture:
        assert picture.n_frames > 20


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_every_extra_is_documented(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    if page == "README.md":
        rows = re.search(r"^\| extra \| for \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|", rows[1], re.MULTILINE)))) == extras
    else:
        assert set(re.findall(r'`(?:pip install )?"\.\[(\w+)\]"`', text)) == extras


def test_workflows_run_what_the_makefile_has() -> None:
    steps = [step for path in WORKFLOWS for step in steps_of(path)]
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    commands = [step["run"] for step in steps if "run" in step]
    made = {words[1] for command in commands if (words := command.split())[0] == "make"}
    assert made == {"lint", "docs", "test", "wheel"}
    assert made <= targets
    assert set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()) == targets
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def checkout(folder: Path, mode: int, time: int) -> Path:
    """A copy of what git tracks here, with other permissions and times, written in another order."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for name in reversed(names) if mode & 0o020 else names:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
        copy.chmod(mode)
        os.utime(copy, (time, time))
    return folder


@pytest.mark.full
def test_wheel_and_sdist_are_reproducible_and_complete(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git does not say which files belong to the project")
    folders = [
        checkout(tmp_path / "one", mode=0o644, time=1_600_000_000),
        checkout(tmp_path / "another" / "place", mode=0o664, time=1_700_000_000),
    ]
    built: list[dict[str, str]] = []
    for folder in folders:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        files = sorted((folder / "dist").iterdir())
        built.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    name = f"vitrail-{vitrail.__version__}"
    wheel, sdist = f"{name}-py3-none-any.whl", f"{name}.tar.gz"
    assert list(built[0]) == sorted([wheel, sdist])
    assert built[0] == built[1]
    assert (folders[0] / "dist" / wheel).stat().st_size <= 20 * MIB
    with zipfile.ZipFile(folders[0] / "dist" / wheel) as archive:
        packed = {path for path in archive.namelist() if path.startswith("vitrail/")}
    assert packed == {f"vitrail/{path}" for path in files_under(folders[0] / "src" / "vitrail")}
    with tarfile.open(folders[0] / "dist" / sdist) as archive:
        packed = {path.removeprefix(f"{name}/") for path in archive.getnames()}
    tracked = {path for path in files_under(folders[0]) if not path.startswith(("dist/", ".ci/"))}
    assert packed - {"PKG-INFO"} == tracked


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
