"""Lists and help."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.common import Run, error_line, files_in
from tests.packages import Install

import vitrail


def test_models(vit: Run) -> None:
    listed = json.loads(vit("models", "deit*", "--json").out)
    assert {"name", "tag", "classes", "input", "view"} == listed[0].keys()
    assert {"deit_tiny_patch16_224", "deit_base_distilled_patch16_384"} <= {m["name"] for m in listed}
    result = vit("models", "[dx]eit*")
    assert all(m["name"] in result.out for m in listed if m["name"].startswith("deit_"))
    assert "[dx]eit*" in result.out
    names = {m["name"]: m for m in json.loads(vit("models", "--json").out)}
    assert names["swin_tiny_patch4_window7_224"]["view"] == "features only"
    assert names["vit_small_patch14_dinov2"]["classes"] == 0
    assert names["vit_small_patch16_36x1_224"]["tag"] is None
    assert "0 classes: no head; tag –: no weights" in result.out
    assert names["vit_base_patch16_xp_224"]["view"] == "tokens"
    assert names["resnet50"]["view"] == "features only"
    assert names["xcit_nano_12_p8_224"]["view"] == "logits only"
    assert "qwen3_vit_88m_enc" not in names, "it has no classifier"
    assert "no model matches 'xyz'" in error_line(vit("models", "xyz"))


def test_methods(vit: Run) -> None:
    listed = {m["name"]: m for m in json.loads(vit("methods", "--json").out)}
    assert listed.keys() == vitrail.list_methods().keys()
    assert listed["decompx.skipplus"]["parameters"] == {"start_layer": None, "precision": "auto"}
    assert "supported" not in listed["decompx"]
    result = vit("methods", "*.plus")
    assert "decompx.plus" in result.out
    assert "rollout" not in result.out
    assert "no method matches 'x*z'" in error_line(vit("methods", "x*z"))


@pytest.mark.parametrize("named", ["swin_tiny_patch4_window7_224", "hf_swin", "torchvision:swin_t"])
def test_methods_of_a_model_and_why_not(named: str, vit: Run, models: Path) -> None:
    model = f"hf:{models / named}" if named.startswith("hf") else named
    rows = json.loads(vit("methods", "--model", model, "--json").out)
    listed = {m["name"]: m["supported"] for m in rows}
    assert listed["random"] == "yes"
    assert "hierarchical" in listed["decompx.skipplus"]
    assert "hierarchical" in vit("methods", "decompx", "--model", model).out


def test_methods_of_a_black_box(vit: Run) -> None:
    listed = {m["name"]: m["supported"] for m in json.loads(vit("methods", "--model", "resnet10t", "--json").out)}
    assert listed["grad_cam"] == listed["rise"] == listed["integrated_gradients"] == "yes"
    assert "(a black box)" in listed["decompx.skipplus"]


@pytest.mark.parametrize("model", ["vit_giant_patch14_dinov2", "deit_tiny_patch16_224"])
def test_methods_of_a_model_need_no_weights(model: str, vit: Run) -> None:
    listed = json.loads(vit("methods", "--model", model, "--json").out)
    assert {m["supported"] for m in listed if m["family"] == "decomposition"} == {"yes"}
    assert "Did you mean" in error_line(vit("methods", "--model", model + "0"))


def test_a_method_that_swin_does_not_support(vit: Run, models: Path, photo: Path, place: Path) -> None:
    result = vit("explain", photo, "--model", f"hf:{models / 'hf_swin'}", "--method", "decompx")
    assert re.search("decompx cannot explain .*Methods that can: .*random", error_line(result))
    assert files_in(place) == {"photo.png"}
    assert vit("explain", photo, "--model", f"hf:{models / 'hf_swin'}", "--method", "random").code == 0


def test_help_is_true(vit: Run) -> None:
    from vitrail.api import default_method

    result = vit("explain", "--help")
    assert result.code == 0
    text = " ".join(result.out.replace("│", " ").split())
    for option in ("--model", "--method", "--target", "--against", "--top", "--out", "--json", "--device", "--dtype"):
        assert option in text
    assert f"default: {default_method(vitrail.load('scenes'))}" in text
    assert "[default: vitrail-out]" in text
    assert "[default: auto]" in text
    commands = vit("--help").out
    assert all(f"{name} " in commands for name in ("explain", "models", "methods"))
    assert "default: no model" in " ".join(vit("methods", "--help").out.replace("│", " ").split())


def test_version(vit: Run) -> None:
    assert vit("--version") == (0, f"vitrail {vitrail.__version__}\n", "")


def test_methods_and_metrics_of_a_plugin(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    (place / "mine.py").write_text(
        "import vitrail\n"
        '@vitrail.method("brightest", needs="logits", cost=(0, 0))\n'
        "def brightest(model, images, target):\n"
        "    return images.mean(1)\n"
    )
    plugin = ["--plugin", place / "mine.py"]
    assert "no method matches 'brightest'" in error_line(vit("methods", "brightest"))
    assert "1 method matching 'brightest'" in vit("methods", "brightest", *plugin).out
    assert vit("explain", photo, *tiny, "--method", "brightest", *plugin).code == 0
    assert vit("compare", photo, *tiny, "--methods", "brightest", *plugin).code == 0
    run = vit("bench", "--data", photo, *tiny, "--methods", "brightest", "--metrics", "sparseness", *plugin)
    assert (run.code, run.err) == (0, "")
    assert "1 image measured, 0 known before: 1 row in" in run.out
    assert "is not a Python file" in error_line(vit("serve", "--plugin", "missing.py"))


def test_an_installed_package_is_listed_and_used(vit: Run, photo: Path, example: str) -> None:
    assert "local_contrast" in vit("methods").out
    assert "border_share" in vit("metrics").out
    assert json.loads(vit("data", "stripes", "--json").out)[0]["options"] == {"size": 64}
    assert json.loads(vit("models", "stripes", "--json").out)[0]["tag"] == "plugin"
    assert vit("explain", photo, "--model", "stripes:32", "--method", "local_contrast", "--no-trust").code == 0
    run = vit("bench", "--data", "stripes:2", "--model", "stripes", "--methods", "random", "--metrics", "border_share")
    assert (run.code, run.err) == (0, "")


@pytest.mark.filterwarnings("default")
def test_a_broken_package_is_one_warning_and_no_failure(vit: Run, install: Install) -> None:
    install("their-methods", {"vitrail.methods": {"theirs": "cli_plugin"}}, {"cli_plugin": "import nothing_there"})
    result = vit("methods", "random", "--json")
    assert (result.code, json.loads(result.out)[0]["name"]) == (0, "random")
    assert result.err.startswith("Warning: the package their-methods 1.0 is left out: importing its plugin cli_plugin")
    assert result.err.count("\n") == 1
    assert vit("metrics", "sparseness").err == ""


@pytest.mark.parametrize("command", ["explain", "compare", "bench", "report", "reproduce", "serve", "methods"])
def test_help_names_values_not_python_types(command: str, vit: Run) -> None:
    _, options = vit(command, "--help").out.split(" Options ")
    assert "list[" not in options
