"""The documentation is true: its code runs, its commands parse, its tables, messages and file names are current."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import safetensors.torch
import timm
import torch
import typer
from PIL import Image
from tests import families
from tests.app.serving import Served
from tests.test_layers import BASE, ROOMS
from typer.testing import CliRunner

import vitrail
from vitrail.bench.plan import Plan
from vitrail.cli.program import app
from vitrail.methods.registry import METHODS
from vitrail.metrics.base import METRICS
from vitrail.metrics.perturbation import PixelCurve
from vitrail.models import embedded
from vitrail.models.embedded import load_embedded
from vitrail.models.view import View

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WEB = DOCS / "web.md"
RECIPES = DOCS / "integrations.md"  # for libraries that need not be installed
PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")  # the one in the pages' pictures
FENCE = re.compile(r"^( *)```(\{[^}\n]*\}|\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "sh", "toml", "csv", "text", "theirs"}
SMALL = {"embed_dim": 48, "num_heads": 3}  # stands in for any ViT larger than "tiny"
BLOCKS = 4  # of the embedded models, where a page does not depend on what they recognise
RECOGNISING = {"docs/quickstart.md", "docs/methods/masks.md"}  # the explainer of scenes is that of the whole model
STEPS = 4  # at most, of a curve
PEERS = ("quantus", "pytorch_grad_cam", "shapiq")  # of the extra `peers`, which `make test-all` installs
# Commands with these are parsed, not run.
EXPENSIVE = (
    "--score",
    "--curves",
    "bench",
    "audit",
    "report",
    "serve",
    "--data",
    "--pairs",
    "explainer=mine.safetensors",
    "fiftyone:photos",
)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    code: str


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    fences = []
    for fence in FENCE.finditer(text):
        language = "theirs" if ".theirs" in fence[2] else fence[2]
        code = re.sub(rf"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
        fences.append(Block(page, text[: fence.start()].count("\n") + 1, language, code))
    return tuple(fences)


def having(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_known_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page))


# Code


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that the pages name."""
    root = tmp_path_factory.mktemp("files")
    with Image.open(PHOTO) as photo:
        photo.resize((photo.width // 2, photo.height // 2)).save(root / "photo.jpg")
        mask = Image.new("L", (photo.width // 2, photo.height // 2))
        mask.paste(255, (90, 60, 170, 180))
        mask.save(root / "mask.png")
    safetensors.torch.save_file({"weight": torch.randn(21, SMALL["embed_dim"])}, root / "head.safetensors")
    shutil.copy(DOCS / "pictures" / "cat_and_cup.jpg", root)
    shutil.copy(DOCS / "pictures" / "cat_and_cup.jpg", root / "other.jpg")
    (root / "groups.txt").write_text("cats: tabby, Persian cat\n", encoding="utf-8")
    Image.fromarray(vitrail.data.CaptionedScenes(1)[0].image).save(root / "scene.png")
    (root / "photos").mkdir()
    for number in (1, 2):
        shutil.copy(root / "photo.jpg", root / "photos" / f"{number}.jpg")
    (root / "labels.txt").write_text("".join(f"thing {i}\n" for i in range(10)), encoding="utf-8")
    module = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    safetensors.torch.save_file(module.state_dict(), root / "w.safetensors")
    return root


def copy_or_link(source: str, target: str) -> None:
    """Weights are large, and no page changes them."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)


@pytest.fixture
def folder(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The working directory of a reader: the files that the pages name, and hubs that answer without a network."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True, copy_function=copy_or_link)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    page = parameters.get("page")
    text = parameters.get("command", "") if page is None else page.read_text(encoding="utf-8")
    answer_for_timm(monkeypatch)
    if "hf:" in text or "transformers" in text:
        answer_for_hugging_face(monkeypatch)
    answer_for_torchvision(monkeypatch)
    if page is None or name_of(page) not in RECOGNISING:
        shorten_embedded_models(monkeypatch)
    shorten_curves(monkeypatch)
    return tmp_path


def shorten_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves have few steps, whatever a page asks for; a number of steps that is refused still is."""
    check = PixelCurve.__post_init__

    def shortened(metric: PixelCurve) -> None:
        check(metric)
        metric.steps = min(metric.steps, STEPS)

    monkeypatch.setattr(PixelCurve, "__post_init__", shortened)


@cache
def short_model(name: str) -> View:
    view = load_embedded(name)
    if view.reads_texts:
        return view
    view.module.blocks = view.module.blocks[:BLOCKS]
    short = vitrail.wrap(view.module, labels=view.labels, output=view.output, name=name)
    short.preprocessing, short.note = view.preprocessing, view.note
    return short


def shorten_embedded_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded classifiers without most of their blocks, and read from disk once."""

    def load(name: str | None, prompts: Any = None) -> View:
        return load_embedded(name, prompts) if prompts else copy.deepcopy(short_model(name or embedded.DEFAULT))

    monkeypatch.setattr(embedded, "load_embedded", load)


def answer_for_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names on the hub give small networks of the same family with random weights."""
    build = timm.create_model

    def create_model(name: str, pretrained: bool = False, **arguments: Any) -> torch.nn.Module:
        small = SMALL if name.startswith(("vit_", "deit")) and "tiny" not in name else {}
        return build(name, pretrained=False, **{**small, **arguments})

    monkeypatch.setattr(timm, "create_model", create_model)


def answer_for_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def model(source: str, output_loading_info: bool = False, **_: Any) -> Any:
        names = {i: f"thing {i}" for i in range(1000)}
        config = transformers.ViTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, id2label=names,
            label2id={name: i for i, name in names.items()},
        )  # fmt: skip
        module = transformers.ViTForImageClassification(config).eval()
        return (module, {"missing_keys": [], "mismatched_keys": []}) if output_loading_info else module

    def zero_shot(source: str, output_loading_info: bool = False, **_: Any) -> Any:
        module = families.build("hf_clip_text")
        return (module, {"missing_keys": [], "mismatched_keys": []}) if output_loading_info else module

    def config(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
        kinds = {"yolos": "YolosForObjectDetection", "eomt": "EomtForUniversalSegmentation"}
        kind = next((kind for name, kind in kinds.items() if name in source), "ViTForImageClassification")
        return {"architectures": [kind], "model_type": "clip" if "clip" in source else "vit"}, {}

    def detector(source: str, output_loading_info: bool, **_: Any) -> Any:
        return families.yolos(dtype=torch.float32), {"missing_keys": [], "mismatched_keys": []}

    def segmenter(source: str, output_loading_info: bool, **_: Any) -> Any:
        names = {i: ["sofa", "bed", "cup", "car", "cow"][i] for i in range(5)}
        return families.eomt(dtype=torch.float32, id2label=names), {"missing_keys": [], "mismatched_keys": []}

    def processor(source: str, **_: Any) -> Any:
        if "eomt" in source:
            return transformers.EomtImageProcessor(do_split_image=True)
        if "yolos" in source:
            return transformers.YolosImageProcessor()
        if "clip" not in source:
            return transformers.ViTImageProcessor()
        return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", config)
    monkeypatch.setattr(transformers.AutoModelForObjectDetection, "from_pretrained", detector)
    monkeypatch.setattr(transformers.AutoModelForUniversalSegmentation, "from_pretrained", segmenter)
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", model)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", zero_shot)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda source, **_: families.tokenizer())
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", processor)


def answer_for_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import models

    build = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, weights=None, **arguments: build(name, **arguments))


@pytest.fixture
def registered() -> Iterator[None]:
    """Methods and metrics that a page registers are removed after it."""
    with METHODS.scope(), METRICS.scope():
        yield


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module that the code of a page runs in: dataclasses look it up by name."""
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    return page


def run(block: Block, module: types.ModuleType) -> None:
    code = "\n" * block.line + block.code  # a traceback shows the line of the page
    exec(compile(code, str(block.page), "exec"), module.__dict__)


def imports_peers(block: Block) -> bool:
    return re.search(rf"^(?:import|from) (?:{'|'.join(PEERS)})\b", block.code, re.MULTILINE) is not None


@pytest.mark.parametrize("page", [page for page in having("python") if page not in (WEB, RECIPES)], ids=name_of)
@pytest.mark.usefixtures("folder", "registered", "as_served")
@pytest.mark.filterwarnings("ignore")
def test_python_runs(page: Path, module: types.ModuleType) -> None:
    for block in blocks(page):
        if block.language == "python" and not imports_peers(block):
            run(block, module)


def sections(page: Path) -> dict[str, list[Block]]:
    """The Python of a page by its headings."""
    lines = page.read_text(encoding="utf-8").splitlines()
    parts: dict[str, list[Block]] = {}
    for block in blocks(page):
        heading = next(line for line in reversed(lines[: block.line]) if re.match("##+ ", line))
        if block.language == "python":
            parts.setdefault(heading.lstrip("# "), []).append(block)
    return parts


def imported(block: Block) -> set[str]:
    """The packages that a block imports."""
    nodes = list(ast.walk(ast.parse(block.code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} | ({"tensorboard"} if "tensorboard" in block.code else set())


@pytest.mark.full
@pytest.mark.parametrize("page", [RECIPES], ids=name_of)
@pytest.mark.parametrize("section", sections(RECIPES))
@pytest.mark.usefixtures("folder", "registered")
@pytest.mark.filterwarnings("ignore")
def test_recipes_run(page: Path, section: str, module: types.ModuleType, request: pytest.FixtureRequest) -> None:
    parts = sections(page)
    chosen = [*parts["Files for other tools"], *parts[section]] if section == "COCO" else parts[section]
    for package in sorted(set().union(*map(imported, chosen))):
        request.getfixturevalue("fiftyone") if package == "fiftyone" else pytest.importorskip(package)
    for block in chosen:
        run(block, module)


@pytest.mark.full
@pytest.mark.parametrize("page", [DOCS / "coming_from.md"], ids=name_of)
@pytest.mark.usefixtures("folder", "registered")
@pytest.mark.filterwarnings("ignore")
def test_python_runs_inside_other_libraries(page: Path, module: types.ModuleType) -> None:
    for peer in PEERS:
        pytest.importorskip(peer)
    python = [block for block in blocks(page) if block.language == "python"]
    assert sum(map(imports_peers, python)) == len(PEERS)
    for block in python:
        run(block, module)


def test_only_one_page_needs_other_libraries() -> None:
    assert [page.name for page in PAGES if any(map(imports_peers, blocks(page)))] == ["coming_from.md"]


@pytest.mark.usefixtures("folder")
def test_clients_talk_to_the_server(served: Served, module: types.ModuleType) -> None:
    """The clients of the server page, in Python and curl, against a running server."""
    for block in blocks(WEB):
        block = replace(block, code=block.code.replace("http://127.0.0.1:8000", served.url))
        if block.language == "python":
            run(block, module)
        for line in block.code.splitlines():
            if line.startswith("curl ") and shutil.which("curl"):
                answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
                assert '"error"' not in answer.stdout


# The command line


def commands(page: Path) -> list[list[str]]:
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.code.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["vitrail"]]


@pytest.mark.parametrize("page", having("sh"), ids=name_of)
def test_commands_parse(page: Path) -> None:
    root = typer.main.get_command(app)
    for name, *words in commands(page):
        command = root.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words, parent=typer.Context(root))


def is_cheap(words: list[str]) -> bool:
    if words[:2] == ["reproduce", "--list"]:
        return True
    everything = words[0] == "compare" and "--all" in words
    return not everything and not any(word in EXPENSIVE for word in words) and words[0] != "reproduce"


CHEAP = sorted({shlex.join(words) for page in PAGES for words in commands(page) if is_cheap(words)})


@pytest.mark.parametrize("command", CHEAP, ids=str)
@pytest.mark.usefixtures("folder", "as_served")
@pytest.mark.filterwarnings("ignore")
def test_command_runs(command: str) -> None:
    words = shlex.split(command)
    quick = ["--no-trust"] if words[0] in ("explain", "compare") and "trust" not in words else []
    result = CliRunner().invoke(app, [*words, *quick])
    assert result.exit_code == 0, result.output or result.exception


def test_there_are_commands_to_run() -> None:
    assert {shlex.split(command)[0] for command in CHEAP} >= {"explain", "compare", "models", "methods", "metrics"}


@pytest.mark.parametrize("page", having("toml"), ids=name_of)
def test_plans_are_plans(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            Plan.from_dict(tomllib.loads(block.code))


# Generated tables, and the names of methods, metrics and functions


@cache
def tables() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "tools" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table: " in page.read_text()], ids=name_of)
def test_tables_are_current(page: Path) -> None:
    generated = list(tables().BLOCK.finditer(page.read_text(encoding="utf-8")))
    assert generated
    for block in generated:
        assert block[0] == f"{block[1]}\n{tables().TABLES[block[2]]()}\n{block[3]}", "run python tools/tables.py"


def test_costs_cover_the_leaderboard() -> None:
    from vitrail.report.leaderboard import shipped_costs, shipped_table

    assert set(shipped_table()["method"]) <= set(shipped_costs()["method"]), "run python tools/costs.py"


def test_every_method_of_the_leaderboard_has_a_strip() -> None:
    from vitrail.report.leaderboard import shipped_table, strip_name

    drawn = {path.name for path in (DOCS / "pictures" / "leaderboard").iterdir()}
    assert drawn == {strip_name(method) for method in shipped_table()["method"]}, "run python tools/gallery.py"


@pytest.mark.parametrize("name", [name for name in vitrail.list_methods() if "." not in name])
def test_every_method_is_explained(name: str) -> None:
    """Controls on the page of the metrics, which need them."""
    page = tables().page_of(vitrail.list_methods()[name].family)
    text = (DOCS / "methods" / page if page else DOCS / "metrics.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text or re.search(rf"^## .*\b{name}\b", text, re.MULTILINE)


def test_every_metric_and_data_set_is_explained() -> None:
    from vitrail.data import DATA_NAMES

    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in vitrail.list_metrics() if f"`{name}`" not in text] == []
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    assert [name for name in DATA_NAMES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("package", ["vitrail", "vitrail.metrics", "vitrail.data"])
def test_public_names_are_in_the_reference(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    public = [name for name in names if callable(getattr(module, name)) and not name.startswith("_")]
    page = DOCS / "reference" / f"{package.rpartition('.')[2]}.md"
    listed = page.read_text(encoding="utf-8").split()
    assert [name for name in public if f"{package}.{name}" not in listed] == []


def test_integrations_are_in_the_reference() -> None:
    """By name: their libraries need not be installed."""
    from vitrail import integrations

    listed = (DOCS / "reference" / "integrations.md").read_text(encoding="utf-8").split()
    assert [name for name in integrations.__all__ if f"vitrail.integrations.{name}" not in listed] == []
    assert len(integrations.__all__) == 6


# Error messages


def wording(node: ast.AST, kind: str) -> str | None:
    """A string of the source with … in place of the values filled in; ``kind``: what registries hold."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else kind if "self.kind" in ast.unparse(part) else "…"
            for part in node.values
        )
    return None


@cache
def texts() -> tuple[str, ...]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))]
    kinds = ("method", "metric", "data set")
    return tuple(text for tree in trees for node in ast.walk(tree) for kind in kinds if (text := wording(node, kind)))


def quoted() -> list[str]:
    """The error messages on the troubleshooting page: its headings, and the reasons in its table."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.+)`$", text, re.MULTILINE) + re.findall(r"^\| `([^`]{12,})` \|", text, re.MULTILINE)


def occurs(message: str) -> bool:
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    return any(re.search(".*".join(parts), text, re.DOTALL) for text in texts())


@pytest.mark.parametrize("message", quoted())
def test_messages_still_occur(message: str) -> None:
    assert occurs(message)


def test_an_unknown_message_does_not_occur() -> None:
    assert len(quoted()) > 50
    assert not occurs("the model … has gone fishing")


# Files, links and the site as a whole


def named_files(page: Path) -> list[str]:
    """The files of the source tree that a page names in code."""
    return re.findall(
        r"[\w./-]+\.(?:py|js|html|css)\b", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))
    )


def test_architecture_names_files_that_exist() -> None:
    source = ROOT / "src" / "vitrail"
    files = named_files(DOCS / "architecture.md")
    assert len(files) > 30
    assert [file for file in files if not (source / file).is_file() and not (ROOT / file).is_file()] == []


def test_architecture_lists_the_packages_in_their_order() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w/.]+`(?:, )?)+) \|", text, re.MULTILINE)
    packages = [name.rstrip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert packages == [*BASE, *ROOMS]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"\b(?:tools|benchmarks|training)/\w+\.py", text)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    near = [link.partition("#")[0] for link in links if not re.match(r"https?:|#", link)]
    assert [link for link in near if not (page.parent / link).exists()] == []


def test_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an announcement of the theme
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    fetched = re.compile(r"""<(?:script|img|iframe|link(?! rel="canonical"))[^>]+(?:src|href)="?(https?:[^"\s>]+)""")
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    assert len(pages) > 30
    assert {address for page in pages for address in fetched.findall(page)} == set()
    assert all("arithmatex" not in page for page in pages)  # every formula was rendered
