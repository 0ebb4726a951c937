"""Nothing that vitrail reads can run code, and what it depends on is listed with its licence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import licences

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitrail"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

# Modules that turn bytes into any object, and what of `pickle` is allowed: its exception, and the base class of the
# unpickler of CIFAR files, which looks no name up.
UNPICKLING = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
ALLOWED = {"pickle.UnpicklingError"}
PLAIN_UNPICKLER = ("data/cifar.py", "_PlainUnpickler", "pickle.Unpickler")
RUNNING = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}


def dangers(tree: ast.AST, file: str = "") -> Iterator[str]:
    """What of a file could run code that data bring along, or that a shell understands."""
    for node in ast.walk(tree):
        line = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module in UNPICKLING:
            yield f"{line} from {node.module} import"
        elif isinstance(node, ast.Import):
            yield from (f"{line} import {name.name}" for name in node.names if name.name in UNPICKLING - {"pickle"})
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("pickle.") and name not in ALLOWED and not _is_plain_unpickler(tree, file, node):
                yield f"{line} {name}"
            if node.attr in ("read_pickle", "to_pickle"):
                yield f"{line} {name}"
        elif isinstance(node, ast.Call):
            yield from (f"{line} {danger}" for danger in _dangers_of_call(node))


def _dangers_of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    if name in RUNNING:
        yield name
    if name.endswith("torch.load") and options.get("weights_only") != "True":
        yield f"{name} without weights_only=True"
    for option in ("shell", "allow_pickle", "trust_remote_code"):
        if options.get(option, "False") != "False":
            yield f"{name}({option}={options[option]})"


def _is_plain_unpickler(tree: ast.AST, file: str, node: ast.Attribute) -> bool:
    classes = [item for item in ast.walk(tree) if isinstance(item, ast.ClassDef) and node in item.bases]
    return [(file, item.name, ast.unparse(node)) for item in classes] == [PLAIN_UNPICKLER]


@pytest.mark.parametrize("file", FILES)
def test_nothing_that_is_read_can_run(file: str) -> None:
    assert list(dangers(ast.parse((SOURCE / file).read_text("utf-8")), file)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle; pickle.load(file)",
        "from pickle import loads",
        "import joblib",
        "class Mine(pickle.Unpickler): ...",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(command, shell=True)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "yaml.load(text)",
        "Auto.from_pretrained(name, trust_remote_code=trusted)",
        "os.system(command)",
    ],
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert list(dangers(ast.parse(code)))


def test_every_dependency_is_listed_with_its_licence() -> None:
    page = licences.TARGET.read_text(encoding="utf-8")
    own, further = page.split("\n## ")[1:]
    rows = re.findall(r"^\| (\S+) \| (\S*) ?\| (.+) \|$", own, re.MULTILINE)[1:]
    assert [(extra, name) for name, extra, _ in rows] == list(licences.declared())
    assert all(licence != "see its files" for _, _, licence in rows)
    assert {"click", "huggingface-hub", "torchvision"} <= set(re.findall(r"^\| (\S+) \|", further, re.MULTILINE))
