"""``tools/claims.py``: every claim has a stand-in or a reason, and shards on miniatures make one summary."""

from __future__ import annotations

import importlib.util
import json
import types
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data import layouts
from tests.papers.miniatures import stand_in

from vitrail.bench.plan import ModelSpec
from vitrail.models.view import View
from vitrail.papers.catalogue import targets

TOOLS = Path(__file__).parents[2] / "tools"


@cache
def tool(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def tiny(spec: ModelSpec) -> View:
    return stand_in(ModelSpec("vit_base_patch8_224.augreg2_in21k_ft_in1k"))


def make_folder(root: Path) -> Path:
    boxes, pets = root / "data" / "imagenette-boxes", root / "data" / "pets"
    lines = []
    for seed in range(7):
        layouts.picture(boxes / f"{seed}.png", (24, 24), seed)
        lines.append(f"{seed}.png\t{seed % 2}\t{(layouts.TENCH, layouts.PARACHUTE)[seed % 2]}\t2,3,15,17")
    layouts.text(boxes / "labels.tsv", "\n".join(lines))
    breeds = [f"beagle_{n}" for n in range(6)] + ["Abyssinian_1"]
    for seed, name in enumerate(breeds):
        layouts.picture(pets / f"{name}.jpg", (24, 18), seed)
        layouts.values(pets / f"{name}.png", np.tile([1, 2, 3], (18, 8)))
    numbers = [f"{name}.jpg\t{int(name[0] == 'b')}\t{name.rpartition('_')[0]}" for name in breeds]
    layouts.text(pets / "labels.tsv", "\n".join(numbers))
    return root


def values(content: Any) -> list[float]:
    """Every value of a summary, in order."""
    if isinstance(content, dict):
        here = [content["value"]] if "value" in content else []
        return here + [number for item in content.values() for number in values(item)]
    return [number for item in content for number in values(item)] if isinstance(content, list) else []


def test_every_claim_has_a_stand_in_or_a_reason() -> None:
    claims = tool("claims")
    with_claims = {name for name, target in targets().items() if target.claims}
    assert claims.TESTED | claims.WITHOUT.keys() == with_claims
    assert not claims.TESTED & claims.WITHOUT.keys()
    for measured in claims.STAND_INS:
        target = targets()[measured.target]
        columns = [
            column
            for column in target.columns
            if column.model == measured.key and (not measured.data or column.data in measured.data)
        ]
        assert columns
        assert {need for column in columns for need in target.data[column.data].needs} <= {*claims.IMAGES, "boxes"}
        about = [claims.is_about(claim, target, [column.label for column in columns]) for claim in target.claims]
        assert any(about), f"{measured.name} tests nothing"


def test_claims_about_other_models_are_not_tested() -> None:
    claims, target = tool("claims"), targets()["skipplus-figure4"]
    columns = [column.label for column in target.columns if column.model == "vit8"]
    left = [claim.text for claim in target.claims if not claims.is_about(claim, target, columns)]
    assert len(left) == 6
    assert all("EVA-L" in text or text.startswith("There ") for text in left)


def test_shards_and_the_rest_make_one_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, tables = tool("claims"), tool("tables")
    monkeypatch.setattr(claims, "loaded", tiny)
    place, out = make_folder(tmp_path / "folder"), tmp_path / "out"
    command = ["run", f"--data={place}", f"--out={out}", "--only=skipplus-figure9", "--images=6"]
    for shard in ("1/2", "2/2"):
        claims.main([*command, f"--shard={shard}"])
    assert not [*out.rglob("table.csv"), *out.glob("claims.json")], "shards only measure"
    parts = sorted(out.rglob("part-*"))
    claims.main(command)
    assert sorted(out.rglob("part-*")) == parts, "nothing was left to measure"
    written = (out / "claims.json").read_bytes()
    whole = ["run", f"--data={place}", f"--out={tmp_path / 'whole'}", *command[3:]]
    claims.main(whole)
    content = json.loads((tmp_path / "whole" / "claims.json").read_bytes())
    assert values(json.loads(written)) == pytest.approx(values(content), rel=1e-4), "batches of other sizes, no more"

    (entry,) = content["measured"].values()
    assert entry["images"] == {f"ViT-B/8 {name}": 6 for name in
                               ("del. accuracy", "del. AOPC", "ins. accuracy", "ins. AOPC", "AP")}  # fmt: skip
    assert len(entry["claims"]) == len(targets()["skipplus-figure9"].claims)
    assert content["left_out"].keys() == targets().keys() - claims.TESTED
    for claim in entry["claims"]:
        for quantities in claim["quantities"].values():
            (quantity,) = quantities
            assert quantity["kind"] == "difference"
            assert quantity["low"] <= quantity["value"] <= quantity["high"]

    layouts.text(tmp_path / "results" / "claims.json", written.decode())
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    page = tables.claims()
    assert page.count("\n| ") == len(entry["claims"]) + 2  # a header and its line
    assert "GenAtt∘PLUS − GenAtt" in page
    assert "ViT-Ti/16, ImageNet for ViT-B/8, 6 images" in page
    assert f"| **all** | {sum(claim['holds'] is True for claim in entry['claims'])} |" in tables.claims_summary()
    assert "`vtranm-table1` | there is no model of CIFAR" in tables.claims_left_out()


def test_the_dry_run_counts_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = tool("claims")
    monkeypatch.setattr(claims, "loaded", tiny)
    place = make_folder(tmp_path / "folder")
    claims.main(["run", f"--data={place}", f"--out={tmp_path}", "--only=tis-figure4", "--images=3", "--dry-run"])
    # TIS 513 and Integrated Gradients 50 + 2 · 50, each with a curve of 224 points
    assert "tis-figure4-vit: 3 images × 1,111 = 3,333" in capsys.readouterr().out
    assert not [*tmp_path.rglob("plan.toml")]


def test_breeds_have_imagenets_numbers(tmp_path: Path) -> None:
    claims = tool("claims")
    place = make_folder(tmp_path)
    claims.write_breeds(place / "data" / "pets", tmp_path / "breeds.tsv")
    lines = (tmp_path / "breeds.tsv").read_text(encoding="utf-8").splitlines()
    assert lines == ["file\tindex", *(f"beagle_{n}.jpg\t162" for n in range(6))]


def test_an_earlier_summary_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    claims = tool("claims")
    path = layouts.text(tmp_path / "claims.json", json.dumps({"measured": {"x": {"target": "tis-table1"}}}))
    one = replace(claims.STAND_INS[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "summarised", lambda *_: {"target": one.target})
        claims.add(path, one, None)
    assert [*json.loads(path.read_bytes())["measured"]] == ["x", one.name], "in the order of the papers"
