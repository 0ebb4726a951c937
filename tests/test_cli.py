"""The command line: pictures, tables, JSON, and one line where something is wrong."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests import families

import vitrail
from vitrail.cli import main

LABELS = ["ant", "bee", "cat [/]", "dog", "elk"]
OVERVIEW = {"contact-sheet.png", "explanations.csv"}


class Said(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``vitrail …`` in this process: exit code, standard output and standard error."""

    def run(*arguments: Any) -> Said:
        monkeypatch.setattr(sys, "argv", ["vitrail", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        assert code is None or isinstance(code, int)
        return Said(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("hf_vit", "hf_swin"):
        module = families.build(name)
        module.config.id2label = dict(enumerate(LABELS))
        module.save_pretrained(folder / name)
    return folder


@pytest.fixture
def tiny(models: Path) -> list[str]:
    return ["--model", f"hf:{models / 'hf_vit'}"]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


@pytest.fixture
def photo(place: Path) -> Path:
    noise(0).save(place / "photo.png")
    return place / "photo.png"


@pytest.fixture
def album(place: Path) -> Path:
    """Two pictures of the same name, one with brackets, one corrupt, and something that is no picture."""
    folder = place / "album"
    (folder / "more").mkdir(parents=True)
    noise(1).save(folder / "a.png")
    noise(2).save(folder / "more" / "a.png")
    noise(3).save(folder / "b [red] [b].png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:1000])
    (folder / "notes.txt").write_text("no picture")
    return folder


def left(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def written(place: Path) -> set[str]:
    return {path.name for path in (place / "vitrail-out").rglob("*")}


def one_line(said: Said) -> str:
    """The error, if it is told as it should be."""
    assert said.code == 1
    assert said.err.startswith("Error: ")
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1
    return said.err


# explain


def test_one_picture(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    said = vit("explain", photo, *tiny)
    assert (said.code, said.err) == (0, "")
    found = vitrail.open(place / "vitrail-out" / "photo.decompx.skipplus.png")
    assert written(place) == {"photo.decompx.skipplus.png", "photo.decompx.skipplus.json"}
    assert "5 classes, 32×32 pixels" in said.out
    for _, label, probability in found.top:  # the five likeliest classes
        assert f"{label}" in said.out
        assert f"{probability:.1%}" in said.out
    assert f"{found.title} → vitrail-out/photo.decompx.skipplus.png" in said.out
    assert "completeness gap" in said.out


def test_target_against_method_and_parameters(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    options = ["--target", "dog", "--against", "0", "--method", "input_x_gradient", "-p", "start_layer=1"]
    said = vit("explain", photo, *tiny, *options, "--param", "rule=frozen", "--out", place / "deep" / "out")
    assert said.code == 0
    found = vitrail.open(place / "deep" / "out" / "photo.input_x_gradient.json")
    assert (found.label, found.against_label, found.method) == ("dog", "ant", "input_x_gradient")
    assert (found.params["start_layer"], found.params["rule"]) == (1, "frozen")
    assert "dog, not ant (" in said.out


def test_the_likeliest_classes_side_by_side(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    assert vit("explain", photo, *tiny, "--top", 3).code == 0
    stem = "photo.decompx.skipplus"
    assert written(place) == {f"{stem}.top3.png"} | {f"{stem}.{k}.{s}" for k in (1, 2, 3) for s in ("png", "json")}
    found = [vitrail.open(place / "vitrail-out" / f"{stem}.{k}.json") for k in (1, 2, 3)]
    assert [e.target for e in found] == [index for index, _, _ in found[0].top[:3]]
    sheet, single = (Image.open(place / "vitrail-out" / f"{stem}.{name}.png") for name in ("top3", "1"))
    assert sheet.width > 3 * single.width


def test_top_leaves_out_the_class_that_it_is_against(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    first = json.loads(vit("explain", photo, *tiny, "--json").out)[0]["top"][0]
    said = vit("explain", photo, *tiny, "--top", 9, "--against", first["class"], "--json")
    found = json.loads(said.out)
    assert len(found) == 4
    assert first["class"] not in [e["target"] for e in found]
    assert {e["against"] for e in found} == {first["class"]}


def test_a_folder_gives_an_overview_and_goes_on_after_a_bad_picture(
    vit: Run, tiny: list[str], album: Path, place: Path
) -> None:
    said = vit("explain", album, *tiny)
    assert said.code == 1
    assert "broken.png: " in said.out
    assert "1 picture could not be explained" in said.out
    assert "Traceback" not in said.err
    stems = ("a", "a-2", "b [red] [b]")
    pictures = {f"{stem}.decompx.skipplus.{suffix}" for stem in stems for suffix in ("png", "json")}
    assert written(place) == pictures | OVERVIEW
    assert all(str(place / "vitrail-out" / f"{stem}.decompx").removeprefix(f"{place}/") in said.out for stem in stems)
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b [red] [b].png", "broken.png", "a.png"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, False]
    for row in rows:
        if not row["error"]:
            found = vitrail.open(row["picture"])
            assert found.image_path == row["image"] or Path(found.image_path or "") == Path(row["image"]).resolve()
            assert (str(found.target), found.label) == (row["class"], row["label"])
            assert float(row["probability"]) == pytest.approx(found.probability, abs=1e-6)
    assert Image.open(place / "vitrail-out" / "contact-sheet.png").width > 600


def test_a_second_run_does_not_explain_its_own_results(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    for _ in range(2):
        said = vit("explain", ".", *tiny, "--json")
        assert said.code == 0
        assert [Path(e["image"]["path"]) for e in json.loads(said.out)] == [photo]
    photo.unlink()
    assert "besides earlier results" in one_line(vit("explain", ".", *tiny))


def test_names_never_collide(vit: Run, tiny: list[str], place: Path) -> None:
    for name in ("x/cat.png", "y/cat.png", "z/cat-2.png"):
        (place / "in" / name).parent.mkdir(parents=True)
        noise(len(name)).save(place / "in" / name)
    found = json.loads(vit("explain", "in", *tiny, "--json").out)
    assert len({e["picture"] for e in found}) == 3
    for e in found:
        assert vitrail.open(e["picture"]).image_path == e["image"]["path"]


def test_json_is_all_that_is_printed(vit: Run, tiny: list[str], album: Path) -> None:
    said = vit("explain", album, *tiny, "--json")
    found = json.loads(said.out)
    assert said.code == 1
    assert [("error" in e) for e in found] == [False, False, True, False]
    assert {"picture", "label", "probability", "map", "seconds"} <= found[0].keys()
    assert "Overview" in said.err


def test_a_checkpoint_with_labels(vit: Run, photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    families.randomize(made, 0)
    save_file(made.state_dict(), place / "w.safetensors")
    (place / "l.txt").write_text("yes\nno\nperhaps\n")
    options = ["--model", "vit_tiny_patch16_224", "--checkpoint", "w.safetensors", "--labels", "l.txt"]
    said = vit("explain", photo, *options, "--img-size", 32, "--target", "perh", "--dtype", "bfloat16", "--json")
    assert said.code == 0
    (found,) = json.loads(said.out)
    assert found["label"] == "perhaps"
    monkeypatch.chdir("/")  # what was relative is found again from anywhere
    again = vitrail.open(place / found["picture"])
    assert again.model is not None
    assert (again.model.dtype, again.model.size) == (torch.bfloat16, (32, 32))


def test_a_long_run_says_how_long(vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about" not in vit("explain", photo, *tiny).out
    monkeypatch.setattr("vitrail.commands.explain.LONG", 0.0)
    assert "1 × decompx.skipplus: about 0 s" in vit("explain", photo, *tiny).out


# What is wrong is told in one line, and nothing is left behind


WRONG: dict[str, tuple[list[str], str]] = {
    "no image": (["nowhere.png"], "nowhere.png' was not found"),
    "empty folder": (["empty"], "No image found"),
    "not an image": (["notes.txt"], "is not an image"),
    "corrupt": (["corrupt.png"], "truncated or corrupt"),
    "class": (["photo.png", "--target", "dgo"], "Did you mean 'dog'"),
    "class number": (["photo.png", "--target", "5"], "0…4"),
    "negative class": (["photo.png", "--target=-1"], "0…4"),
    "against": (["photo.png", "--against", "nobody"], "has no class 'nobody'"),
    "same classes": (["photo.png", "--target", "3", "--against", "dog"], "nothing is left to explain"),
    "against agnostic": (["photo.png", "--against", "1", "--method", "rollout"], "--against has no meaning"),
    "top agnostic": (["photo.png", "--top", "2", "--method", "rollout"], "--top has no meaning"),
    "top and target": (["photo.png", "--top", "2", "--target", "1"], "only one of the two"),
    "method": (["photo.png", "--method", "decompxx"], "Did you mean decompx"),
    "parameter": (["photo.png", "-p", "speed=3"], "no parameter speed"),
    "parameter form": (["photo.png", "-p", "speed"], "name=value"),
    "layer": (["photo.png", "-p", "start_layer=77"], "layer 77 does not fit"),
    "device": (["photo.png", "--device", "quantum"], "device 'quantum'"),
    "dtype": (["photo.png", "--dtype", "int4"], "unknown dtype"),
    "out is a file": (["photo.png", "--out", "notes.txt"], "not a folder"),
    "out below a file": (["photo.png", "--out", "notes.txt/out"], "not a folder"),
    "out is the folder": ([".", "--out", "."], "choose another"),
    "labels": (["photo.png", "--labels", "notes.txt"], "1 names, but the model has 5"),
    "hf checkpoint": (["photo.png", "--checkpoint", "notes.txt"], "own weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request(case: str, vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    arguments, message = WRONG[case]
    (place / "empty").mkdir()
    (place / "notes.txt").write_text("not a picture")
    (place / "corrupt.png").write_bytes(photo.read_bytes()[:1000])
    before = left(place)
    said = vit("explain", *arguments, *tiny)
    assert message in one_line(said)
    assert left(place) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit_base_patch16_244"], "Did you mean vit_base_patch16_224"),
        (["--model", "vit_small_patch14_dinov2"], "have no classes"),
        (["--model", "hf:./nothing"], "no config.json"),
        (["--model", "vit_tiny_patch16_224", "--checkpoint", "w.pth"], "no checkpoint file"),
        (["--model", "vit_tiny_patch16_224", "--num-classes", "0"], "at least 1"),
    ],
)
def test_a_wrong_model(arguments: list[str], message: str, vit: Run, photo: Path, place: Path) -> None:
    assert message in one_line(vit("explain", photo, *arguments))
    assert left(place) == {"photo.png"}


def test_broken_weights(vit: Run, photo: Path, place: Path) -> None:
    module = families.build("hf_vit")
    with torch.no_grad():
        module.classifier.bias[0] = torch.nan
    module.save_pretrained(place / "broken")
    before = left(place)
    for options in ([], ["--top", "2"]):
        assert "weights are broken (classifier.bias)" in one_line(
            vit("explain", photo, "--model", "hf:./broken", *options)
        )
    assert left(place) == before


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("room", range(3))
def test_a_full_disk(
    room: int, top: int, vit: Run, tiny: list[str], photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > min(room, 2 * top - 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in one_line(vit("explain", photo, *tiny, "--top", top))
    assert left(place) == {"photo.png"}


@pytest.mark.parametrize("arguments", [["--top", "0"], ["--top", "x"], ["--nonsense"], []])
def test_wrong_usage(arguments: list[str], vit: Run) -> None:
    said = vit("explain", *arguments)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_bug_is_told_without_a_traceback(
    vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr("vitrail.commands.explain.introduce", broken)
    assert "ZeroDivisionError: oh no" in one_line(vit("explain", photo, *tiny))
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["vitrail", "explain", str(photo), *tiny])
    with pytest.raises(ZeroDivisionError):
        main()


# Lists


def test_models(vit: Run) -> None:
    listed = json.loads(vit("models", "deit*", "--json").out)
    assert {"name", "tag", "classes", "input", "view"} == listed[0].keys()
    assert {"deit_tiny_patch16_224", "deit_base_distilled_patch16_384"} <= {m["name"] for m in listed}
    said = vit("models", "[dx]eit*")
    assert all(m["name"] in said.out for m in listed if m["name"].startswith("deit_"))
    assert "[dx]eit*" in said.out
    names = {m["name"]: m for m in json.loads(vit("models", "--json").out)}
    assert names["swin_tiny_patch4_window7_224"]["view"] == "features only"
    assert names["vit_small_patch14_dinov2"]["classes"] == 0
    assert not {"vit_base_patch16_xp_224", "vit_pwee_patch16_reg1_gap_256", "resnet50"} & names.keys()
    assert "no model fits 'xyz'" in one_line(vit("models", "xyz"))


def test_methods(vit: Run) -> None:
    listed = {m["name"]: m for m in json.loads(vit("methods", "--json").out)}
    assert listed.keys() == vitrail.list_methods().keys()
    assert listed["decompx.skipplus"]["parameters"] == {"start_layer": None}
    assert "supported" not in listed["decompx"]
    said = vit("methods", "*.plus")
    assert "decompx.plus" in said.out
    assert "rollout" not in said.out
    assert "no method fits 'x*z'" in one_line(vit("methods", "x*z"))


@pytest.mark.parametrize("named", ["swin_tiny_patch4_window7_224", "hf_swin", "torchvision:swin_t"])
def test_methods_of_a_model_and_why_not(named: str, vit: Run, models: Path) -> None:
    model = f"hf:{models / named}" if named.startswith("hf") else named
    rows = json.loads(vit("methods", "--model", model, "--json").out)
    listed = {m["name"]: m["supported"] for m in rows}
    assert listed["random"] == "yes"
    assert "hierarchical" in listed["decompx.skipplus"]
    assert "hierarchical" in vit("methods", "decompx", "--model", model).out


@pytest.mark.parametrize("model", ["vit_giant_patch14_dinov2", "deit_tiny_patch16_224"])
def test_methods_of_a_model_need_no_weights(model: str, vit: Run) -> None:
    listed = json.loads(vit("methods", "--model", model, "--json").out)
    assert {m["supported"] for m in listed if m["family"] == "decomposition"} == {"yes"}
    assert "Did you mean" in one_line(vit("methods", "--model", model + "0"))


def test_a_method_that_swin_does_not_support(vit: Run, models: Path, photo: Path, place: Path) -> None:
    said = vit("explain", photo, "--model", f"hf:{models / 'hf_swin'}", "--method", "decompx")
    assert re.search("decompx cannot explain .*Methods that can: .*random", one_line(said))
    assert left(place) == {"photo.png"}
    assert vit("explain", photo, "--model", f"hf:{models / 'hf_swin'}", "--method", "random").code == 0


# Help


def test_help_is_true(vit: Run) -> None:
    from vitrail.explaining import default_method

    said = vit("explain", "--help")
    assert said.code == 0
    told = " ".join(said.out.replace("│", " ").split())
    for option in ("--model", "--method", "--target", "--against", "--top", "--out", "--json", "--device", "--dtype"):
        assert option in told
    assert f"default: {default_method(vitrail.load('scenes'))}" in told
    assert "[default: vitrail-out]" in told
    assert "[default: auto]" in told
    commands = vit("--help").out
    assert all(f"{name} " in commands for name in ("explain", "models", "methods"))


def test_version(vit: Run) -> None:
    assert vit("--version") == (0, f"vitrail {vitrail.__version__}\n", "")


# As a program


def program(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from vitrail.cli import main; main()", *map(str, arguments)]


HEAVY = "{'torch', 'timm', 'numpy', 'PIL', 'matplotlib', 'pandas', 'transformers', 'scipy'}"


@pytest.mark.parametrize("start", ["import vitrail", "vitrail.cli.main()"])
def test_starting_is_quick(start: str) -> None:
    code = f"import sys, atexit\natexit.register(lambda: print('heavy:', sorted({HEAVY} & set(sys.modules))))\n"
    code += "sys.argv = ['vitrail', '--help']\nimport vitrail.cli\n" if "cli" in start else ""
    done = subprocess.run([sys.executable, "-c", code + start], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_console_script_ends_with_one_line_and_code_one(place: Path) -> None:
    script = Path(sys.executable).with_name("vitrail")
    done = subprocess.run([script, "explain", "nowhere.png"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: Image 'nowhere.png' was not found: check the path.\n"
    assert left(place) == set()


def test_ctrl_c_keeps_what_is_done(tiny: list[str], place: Path) -> None:
    folder = place / "many"
    folder.mkdir()
    for number in range(80):
        noise(number).save(folder / f"{number:03}.png")
    run = subprocess.Popen(
        program("explain", folder, *tiny), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert run.stdout is not None
    assert any("→" in line for line in run.stdout)  # the first picture is there
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "everything written so far is complete" in err
    assert "Traceback" not in err
    names = written(place)
    pictures = {name for name in names if name.endswith("skipplus.png")}
    assert 0 < len(pictures) < 80
    assert names == pictures | {name.replace(".png", ".json") for name in pictures} | OVERVIEW
    for name in pictures:
        assert vitrail.open(place / "vitrail-out" / name, check=False).map.shape == (4, 4)
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = {Path(row["picture"]).name for row in csv.DictReader(file)}
    assert rows <= pictures
    assert len(pictures - rows) <= 1  # stopped right between a picture and its row


def test_output_in_an_old_encoding(tiny: list[str], photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["vitrail", "explain", str(photo), *tiny])
    with pytest.raises(SystemExit) as stop:
        main()
    out.flush()
    assert not stop.value.code
    assert b"? vitrail-out/photo" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_closed_pipe_is_no_error() -> None:
    there, here = os.pipe()
    os.close(there)
    run = subprocess.run(program("methods"), stdout=here, stderr=subprocess.PIPE, text=True, check=False)
    os.close(here)
    assert run.stderr == ""
