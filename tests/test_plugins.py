"""Plugins: files of users, imported by path, and installed packages, imported when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests import families
from tests.common import LABELS, noise
from tests.packages import Install

import vitrail
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import run
from vitrail.data import open_data
from vitrail.data.names import DATA_SETS
from vitrail.errors import VitrailError
from vitrail.methods.registry import METHODS
from vitrail.metrics.base import METRICS
from vitrail.models.registry import MODELS
from vitrail.models.view import View
from vitrail.plugins import load_plugins, plugin_versions

METHOD = """
import vitrail

@vitrail.method("brightest", needs="logits", cost=(0, 0))
def brightest(model, images, target):
    return images.mean(1)
"""


def test_a_plugin_registers_its_methods_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(METHOD + "\nimport sys\nsys.path.append('imported')\n")
    load_plugins([path, str(path)])
    assert "brightest" in vitrail.list_methods()
    assert sys.path.count("imported") == 1
    sys.path.remove("imported")
    assert plugin_versions()[str(path)].startswith("sha256:")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import vitrail\nx = 1 / 0\n", r"mine\.py', line 2: ZeroDivisionError: division by zero\.$"),
        ("x = (\n", r"mine\.py', line 1: SyntaxError"),
        ('import vitrail\n\nvitrail.method("Not A Name")(print)\n', r"mine\.py', line 3: .*"),
    ],
)
def test_a_plugin_that_fails_says_where(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    for _ in range(2):  # it is not taken for imported
        with pytest.raises(VitrailError, match=message):
            load_plugins([path])


@pytest.mark.parametrize("name", ["missing.py", "folder.py", "notes.txt"])
def test_what_is_no_python_file_is_no_plugin(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(VitrailError, match="is not a Python file: expected"):
        load_plugins([tmp_path / name])


def test_an_installed_package_is_imported_when_a_name_is_unknown(example: str, model: View) -> None:
    vitrail.explain(model, noise(40, 40, 0), "random")
    assert example not in sys.modules
    assert plugin_versions() == {}
    explanation = vitrail.explain(model, noise(40, 40, 0), "local_contrast", window=5)
    assert explanation.method == "local_contrast"
    assert plugin_versions() == {"vitrail-stripes": "0.1.0"}


def test_what_a_package_brings_is_listed(example: str) -> None:
    assert "border_share" in vitrail.list_metrics("*")
    assert example in sys.modules
    assert vitrail.list_methods("local_*")["local_contrast"].params == {"window": 9}
    assert "stripes" in DATA_SETS.every_entry()
    assert "stripes" in MODELS.every_entry()
    assert "local_contrast" not in METHODS.entries(), "the leaderboard does not depend on what is installed"


def test_a_model_a_data_set_a_method_and_a_metric_of_a_package(example: str, tmp_path: Path) -> None:
    view = vitrail.load("stripes:48")
    assert (view.name, view.size) == ("stripes:48", (48, 48))
    assert len(open_data("stripes:3?size=32")) == 3
    rows = vitrail.evaluate("stripes", "stripes:4", "local_contrast", "border_share, pointing_game")
    assert (rows[rows["metric"] == "pointing_game"]["value"] == 1).all()
    assert rows[rows["metric"] == "border_share"]["value"].between(0, 1).all()
    logits = [view.logits(view.preprocess(example.image)[None])[0] for example in open_data("stripes:4")]
    assert [int(row.argmax()) for row in logits] == [0, 1, 0, 1]
    saved = vitrail.explain(view, open_data("stripes:1")[0].image, "local_contrast").save(tmp_path / "why.png")
    assert vitrail.open(saved, image=open_data("stripes:1")[0].image).model_name == "stripes:48"


def test_a_run_names_the_packages_and_files_that_it_used(example: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    load_plugins([tmp_path / "mine.py"])
    plan = Plan([ModelSpec("stripes")], "stripes:1", ["local_contrast", "brightest"], ["border_share"])
    assert run(plan, tmp_path / "run").failed == 0
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["plugins"]
    assert recorded["vitrail-stripes"] == "0.1.0"
    assert recorded[str(tmp_path / "mine.py")].startswith("sha256:")


def test_entries_of_a_package_outlive_a_scope(example: str) -> None:
    with METRICS.scope():
        assert "border_share" in vitrail.list_metrics()
    assert "border_share" in vitrail.list_metrics()


BROKEN = {"vitrail.methods": {"theirs": "broken_plugin"}, "vitrail.data": {"theirs": "broken_plugin"}}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = (", "SyntaxError"),
        ('import vitrail\nvitrail.method("Not A Name")(print)', "a method name consists of"),
    ],
)
def test_a_broken_package_breaks_nothing_else(source: str, reason: str, install: Install, model: View) -> None:
    install("their-methods", BROKEN, {"broken_plugin": source})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vitrail.explain(model, noise(40, 40, 0), "random")
    with pytest.warns(UserWarning, match="the package their-methods 1.0 is left out") as caught:
        assert vitrail.list_methods().keys() == vitrail.list_methods().keys() >= {"gen_att"}
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    for _ in range(2):
        with pytest.raises(VitrailError, match=r"the method 'theirs' of the package their-methods 1.0 cannot be used"):
            vitrail.explain(model, noise(40, 40, 0), "theirs")
    with pytest.raises(VitrailError, match=r"the data set 'theirs' of the package their-methods 1.0 cannot be used"):
        open_data("theirs:3")
    with pytest.raises(VitrailError, match="no method 'unheard_of'"):
        METHODS["unheard_of"]


def test_an_entry_point_that_registers_something_else_is_named(install: Install) -> None:
    install("their-methods", {"vitrail.methods": {"theirs": "other_plugin"}}, {"other_plugin": METHOD})
    with pytest.raises(VitrailError, match=r"their-methods 1.0 has an entry point 'theirs' in vitrail.methods, but"):
        METHODS["theirs"]
    assert METHODS["brightest"].info.name == "brightest"


CLASHING = METHOD.replace('"brightest"', '"{name}"') + METHOD


@pytest.mark.parametrize("name", ["gen_att", "cat"])
def test_a_built_in_name_wins_and_that_is_said(name: str, install: Install, model: View) -> None:
    before = METHODS.get(name), vitrail.list_methods().keys()
    install(
        "theirs", {"vitrail.methods": {name: "clashing_plugin"}}, {"clashing_plugin": CLASHING.replace("{name}", name)}
    )
    message = f"the method '{name}' of the package theirs 1.0 is ignored"
    with pytest.warns(UserWarning, match=message):
        vitrail.explain(model, noise(40, 40, 0), name)
    assert "clashing_plugin" not in sys.modules
    assert vitrail.list_methods().keys() - before[1] == {"brightest"}, "what does not clash is there"
    assert METHODS.entries().get(name) is before[0]


def test_what_this_process_registers_comes_before_packages(install: Install, tmp_path: Path) -> None:
    install("theirs", {"vitrail.methods": {"brightest": "their_plugin"}}, {"their_plugin": METHOD})
    assert METHODS["brightest"].__module__ == "their_plugin"
    (tmp_path / "mine.py").write_text(METHOD)
    load_plugins([tmp_path / "mine.py"])
    assert METHODS["brightest"].__module__.startswith("mine_")
    with pytest.raises(VitrailError, match="already a method 'cat'"):
        vitrail.method("cat")(lambda model, images, target: images)


def test_of_two_packages_the_first_has_the_name(install: Install) -> None:
    install("a-first", {"vitrail.methods": {"brightest": "first_plugin"}}, {"first_plugin": METHOD})
    install("b-second", {"vitrail.methods": {"brightest": "second_plugin"}}, {"second_plugin": METHOD})
    with pytest.warns(UserWarning, match="'brightest' of the package .* 1.0 is ignored: there is another"):
        factory = METHODS["brightest"]
    assert factory.__module__ in ("first_plugin", "second_plugin")


def test_a_registered_model_that_is_a_module_takes_the_options_of_load(tmp_path: Path) -> None:
    @vitrail.model("tests_tiny")
    def tiny(place, num_classes=5):  # type: ignore[no-untyped-def]
        return families.build(place)

    state = torch.random.get_rng_state()
    view = vitrail.load("tests_tiny:timm_vit", labels=LABELS)
    assert torch.equal(torch.random.get_rng_state(), state), "the random state is the user's"
    assert (view.name, list(view.labels or ())) == ("tests_tiny:timm_vit", LABELS)
    assert view.spec == {"name": "tests_tiny:timm_vit", "labels": LABELS}
    weights = {name: torch.zeros_like(value) for name, value in view.module.state_dict().items()}
    torch.save(weights, tmp_path / "zeros.pt")
    zeros = vitrail.load("tests_tiny:timm_vit", checkpoint=tmp_path / "zeros.pt")
    assert not zeros.module.head.weight.any()
    with pytest.raises(VitrailError, match="tests_tiny needs more than its name: write tests_tiny:PLACE"):
        vitrail.load("tests_tiny")
    with pytest.raises(VitrailError, match="tests_tiny has no option 'depth'; its options: num_classes"):
        vitrail.load("tests_tiny:timm_vit", depth=3)
    with pytest.raises(VitrailError, match="tests_tiny:nothing cannot be built: KeyError"):
        vitrail.load("tests_tiny:nothing")


def test_a_registered_model_that_is_a_view_is_complete(model: View) -> None:
    vitrail.model("tests_view")(lambda place="": model)
    assert vitrail.load("tests_view") is model
    with pytest.raises(VitrailError, match="tests_view is a complete view: leave out labels"):
        vitrail.load("tests_view", labels=LABELS)
    vitrail.model("tests_number")(lambda place="": 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(VitrailError, match="tests_number returned int, expected a module or view"):
        vitrail.load("tests_number")


@pytest.mark.parametrize("name", ["photo", "hf", "torchvision", "vit_tiny_patch16_224"])
def test_names_of_models_that_are_taken(name: str) -> None:
    with pytest.raises(VitrailError, match=f"already a model '{name}'"):
        vitrail.model(name)(families.build)


def test_a_model_of_a_package_with_a_built_in_name(install: Install) -> None:
    source = "import vitrail\nvitrail.model('scenes')(lambda place: None)\n"
    install("theirs", {"vitrail.models": {"scenes": "model_plugin"}}, {"model_plugin": source})
    with pytest.warns(UserWarning, match="the model 'scenes' of the package theirs 1.0 is ignored"):
        view = vitrail.load("scenes")
    assert view.num_classes == 10
    assert "scenes" not in MODELS.every_entry()


@pytest.mark.full
def test_a_method_registered_first_does_not_take_a_built_in_name() -> None:
    code = "import vitrail\ntry:\n    vitrail.method('tis')(lambda model, images, target: images)\n"
    code += "except vitrail.VitrailError as error:\n    print(error)\nprint('tis' in vitrail.list_methods())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["there is already a method 'tis': choose another name.", "True"]
