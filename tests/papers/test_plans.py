"""What a user may ask of a target, what is said when something is missing, and what is printed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from tests.cli.test_scripts import KEYS
from tests.helpers import batch, features, viewed
from tests.papers.miniatures import make_data, stand_in
from typer.testing import CliRunner

import vitrail
from vitrail.bench.plan import ModelSpec
from vitrail.cli.program import app
from vitrail.cli.reproduce import as_text, list_targets, parse_data, show_result, show_targets
from vitrail.data import open_data
from vitrail.data.imagenet import imagenet_classes
from vitrail.engine.maps import upsampled
from vitrail.errors import VitrailError
from vitrail.methods.registry import build_method
from vitrail.metrics import list_metrics, measure
from vitrail.papers.catalogue import targets
from vitrail.papers.cells import PaperCell, aggregate, identity
from vitrail.papers.metrics import BINS, PAPER_METRICS, paper_metrics
from vitrail.papers.plans import parse_model, reduced, select
from vitrail.papers.reproduction import reproduce
from vitrail.papers.zebra_elephant import ZebraElephant


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def own_metrics() -> Iterator[None]:
    with paper_metrics():
        yield


# --- before anything runs -------------------------------------------------------------------------------------------


def test_all_that_is_missing_is_told_at_once(data: dict[str, str], tmp_path: Path) -> None:
    wrong = {"imagenet_s": str(tmp_path / "nowhere")}
    with pytest.raises(VitrailError) as caught:
        reproduce("skipplus-figure3", wrong, out=tmp_path / "out")
    told = str(caught.value)
    assert told.startswith("skipplus-figure3 cannot start:")
    for word in ("--data imagenet=", "--data mura=", "--data mura_weights=", "image-net.org", "'validation' was not"):
        assert word in told
    assert "indices" not in told, "what is optional is not missing"
    assert "--model eva=eva_large_patch14_196.in22k_ft_in22k_in1k?checkpoint=FILE" in told
    assert not (tmp_path / "out").exists()
    with pytest.raises(VitrailError) as caught:
        reproduce("tis-table1", {}, "scenes", out=tmp_path / "out")
    assert "--data imagenet=" in str(caught.value)
    assert "weights" not in str(caught.value), "an embedded model is there"


def test_models_that_cannot_be_loaded_are_all_named(data: dict[str, str], tmp_path: Path) -> None:
    def load(spec: ModelSpec) -> None:
        raise VitrailError(f"no weights for {spec.name}")

    with pytest.raises(VitrailError, match=r"deit_base_patch16_224\.fb_in1k\n- no weights for vit_base_patch16_224\."):
        reproduce("tis-table4", {"imagenet": data["imagenet"]}, out=tmp_path, load=load)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": {"coco": "x"}}, "needs no data 'coco'; it takes imagenet, boxes, indices"),
        ({"only": ["swin"]}, "no model or data 'swin': expected deit, vit, boxes"),
        ({"model": "swin=x"}, "no model 'swin': expected deit, vit"),
        ({"model": "vit=x?tag=y"}, "has 'tag=y': expected checkpoint, labels, num_classes or img_size"),
        ({"model": "x", "only": ["vit"]}, None),
    ],
)
def test_words_that_mean_nothing_are_refused(options: dict[str, object], message: str | None) -> None:
    target = targets()["tis-table3"]
    if message is None:
        assert [*select(target, **{"data": {}, **options}).models] == ["deit"]  # type: ignore[arg-type]
        return
    with pytest.raises(VitrailError, match=message):
        select(target, **{"data": {}, **options})  # type: ignore[arg-type]


def test_only_leaves_out_the_columns_of_others() -> None:
    target = targets()["skipplus-figure4"]
    asked = select(target, {}, only=["vit8", "mura", "imagenet"])
    assert {(one.model, one.data) for one in asked.target.columns} == {("vit8", "imagenet")}
    table = select(targets()["vit_cx-table1"], {}, only=["swin"])
    assert table.target.value("RISE", "Swin-B Ins") == 0.727, "published numbers keep their columns"
    assert table.target.value("Rollout", "Swin-B Ins") is None
    with pytest.raises(VitrailError, match="no column for mura and imagenet together"):
        select(target, {}, only=["mura", "imagenet"])


def test_models_are_swapped_by_key_and_keep_the_papers_ways_where_they_are_the_papers() -> None:
    target = targets()["vtranm-table1"]
    own = "deit_cifar10=deit_base_patch16_224?checkpoint=a.pt"
    asked = select(target, {"cifar100_weights": "b.pt"}, [own, "deit_cifar100=hf:org/deit"])
    assert asked.models["deit_cifar10"].options == {"num_classes": 10, "checkpoint": "a.pt"}
    assert asked.models["deit_cifar10"].preprocessing["mean"] == [0.5, 0.5, 0.5]
    assert asked.models["deit_cifar100"] == ModelSpec("hf:org/deit")
    assert asked.replaced == ["deit_cifar100"]
    assert select(target, {"cifar10_weights": "b.pt"}).models["deit_cifar10"].options["checkpoint"] == "b.pt"
    assert parse_model("a?num_classes=3&labels=x.txt") == ModelSpec("a", {"num_classes": 3, "labels": "x.txt"})


def test_a_list_of_positions_takes_the_place_of_a_draw(data: dict[str, str], tmp_path: Path) -> None:
    given = {name: data[name] for name in ("imagenet", "boxes", "indices")}
    result = reproduce("tis-figure4", given, images=2, out=tmp_path, quick=True, load=stand_in)
    rows = pd.read_parquet(next(tmp_path.rglob("part-*.parquet")))
    ids = open_data(f"imagenet:{data['imagenet']}").ids
    assert set(rows["image"]) == {ids[3], ids[0]}, "the first two of the list 3 0 2"
    assert "The list of positions is not the paper’s." in result.notes
    digest = hashlib.sha256(b"3 0 2").hexdigest()
    target = targets()["tis-figure4"]
    known = replace(target, data={"boxes": replace(target.data["boxes"], sha256=digest)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.papers.catalogue.targets", lambda: {"tis-figure4": known})
        again = reproduce("tis-figure4", given, images=2, out=tmp_path, quick=True, load=stand_in)
    assert "The list of positions is the paper’s own." in again.notes


def test_quick_makes_few_of_many(own_metrics: None) -> None:
    assert reduced("tis(protocol=tis)") == "tis(protocol=tis, masks=16)"
    assert reduced("tis(masks=128, ratio=0.1)") == "tis(masks=2, ratio=0.1)"
    assert reduced("rise(protocol=tis)") == "rise(protocol=tis, masks=64)"
    assert reduced("insertion(protocol=tis, steps=1)") == "insertion(protocol=tis, steps=1)"
    assert reduced("deletion") == "deletion(steps=7)"
    assert reduced("decompx.skipplus") == "decompx.skipplus"


# --- from rows to cells ---------------------------------------------------------------------------------------------


def frame(values: list[float], **columns: object) -> pd.DataFrame:
    empty = [None] * len(values)
    return pd.DataFrame({"value": values, "metric": "x", "parts": empty, "curve": empty, "seconds": 1.0, **columns})


def test_readings() -> None:
    assert aggregate(frame([1.0, 2.0, math.nan]), "mean")[0] == 1.5
    assert aggregate(frame([1.0, 2.0, math.nan]), "mean")[3] == 2
    assert aggregate(frame([1.0, 3.0]), "deviation")[0] == pytest.approx(math.sqrt(2))
    assert aggregate(frame([0.0, 0.0], seconds=[1.0, 3.0]), "seconds")[0] == 2
    curves = [list(np.arange(1, 225) / 224), list(np.arange(1, 225) / 224)]
    assert aggregate(frame([0.0, 0.0], curve=curves), "point:50/224")[0] == pytest.approx(50 / 224), "after 50 steps"
    assert aggregate(frame([0.0, 0.0], curve=curves), "point:last")[0] == 1
    histogram = [[0.0] * 18 + [0.25, 0.75]]
    assert aggregate(frame([0.0], curve=histogram), "tail:0.9")[0] == 1
    assert aggregate(frame([0.0], curve=histogram), "tail:0.95")[0] == 0.75
    scores = frame([0.95, 0.5, 0.91], parts=[[0.95, 0.02, 3], [0.5, 0.3, 3], [0.91, 0.04, 3]])
    assert aggregate(scores, "share_above:0.9")[0] == pytest.approx(2 / 3)
    assert aggregate(scores, "variance_above:0.9")[:1] == (pytest.approx(0.03),)
    assert aggregate(scores, "variance_above:0.99")[3] == 0
    assert math.isnan(aggregate(frame([math.nan]), "mean")[0])
    assert aggregate(frame([0.1, 0.9], metric="mean_iou", parts=[[1, 2, 3, 4], [0, 2, 1, 4]]), "mean")[0] == 0.375
    with pytest.raises(VitrailError, match="no reading 'median'"):
        aggregate(frame([1.0]), "median")


def test_rows_are_found_by_the_parameters_that_are_not_usual() -> None:
    assert identity("cat") == ("input_x_gradient.plus", "{}")
    assert identity("tis(masks=1024, protocol=tis)") == ("tis", '{"protocol": "tis"}')
    assert identity("tis(ratio=(0.25, 0.5))") == ("tis", '{"ratio": [0.25, 0.5]}')


# --- measurements of one paper --------------------------------------------------------------------------------------


def test_papers_metrics_are_known_only_while_they_are_needed() -> None:
    before = [*list_metrics()]
    with paper_metrics():
        assert {*list_metrics()} == {*before, *PAPER_METRICS}
    assert [*list_metrics()] == before


def test_redundancy_is_the_mean_over_pairs_of_masks(own_metrics: None) -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit", 1)
    (found,) = measure("mask_redundancy", view, images, torch.rand(1, *view.grid))  # type: ignore[attr-defined]
    masks = upsampled(features(view, images, "norm1"), view.size).flatten(1)
    low, high = masks.amin(1, keepdim=True), masks.amax(1, keepdim=True)
    unit = torch.nn.functional.normalize((masks - low) / (high - low), dim=1)
    pairs = (unit @ unit.T)[*torch.triu_indices(len(unit), len(unit), 1)]
    assert found.value == pytest.approx(float(pairs.mean()), rel=1e-5)
    assert found.curve is not None
    assert len(found.curve) == BINS
    assert sum(found.curve) == pytest.approx(1)
    assert sum(found.curve[18:]) == pytest.approx(float((pairs >= 0.9).double().mean()), abs=1e-6)


def test_impact_scores_are_those_of_the_method(own_metrics: None) -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit", 2)
    method = build_method("vit_cx", view, protocol="authors")
    extras = method.explain(images).extras
    found = measure("impact_scores", view, images, method.attribute(images), method=method)
    assert [one.value for one in found] == pytest.approx(extras["mean_score"].tolist())
    assert [one.parts[2] for one in found if one.parts] == extras["masks"].tolist()
    assert all(one.parts is not None and one.parts[1] > 0 for one in found)
    other = build_method("random", view)
    with pytest.raises(VitrailError, match="requires the method vit_cx"):
        measure("impact_scores", view, images, other.attribute(images), method=other)


def test_the_object_is_removed_as_far_as_the_map_points_at_it(own_metrics: None) -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit", 1)
    mask = torch.zeros(1, *view.size, dtype=torch.bool)
    mask[:, : view.size[0] // 4] = True
    for sign, gone in ((1.0, 50 / 224 * 4), (-1.0, 0.0)):
        (found,) = measure("object_removed", view, images, sign * mask.double(), masks=mask)
        assert found.value == pytest.approx(gone, abs=0.01)


def test_agreement_looks_at_the_prediction_and_not_at_the_label(own_metrics: None) -> None:
    _, _, view = viewed("timm_vit")
    images, maps = batch("timm_vit", 1), torch.rand(1, *view.grid)  # type: ignore[attr-defined]
    (found,) = measure("token_deletion_agreement", view, images, maps, label=3)
    (unlabelled,) = measure("token_deletion_accuracy", view, images, maps)
    assert found.curve == unlabelled.curve
    assert found.curve is not None
    assert found.curve[0] == 1


def test_zebras_and_elephants(data: dict[str, str]) -> None:
    found = ZebraElephant(open_data(f"coco:{data['coco']}?split=train2017"))
    names = imagenet_classes()[1]
    assert found.ids == [f"{animal}/{n:012}.jpg" for n in (1, 3) for animal in ("zebra", "African elephant")]
    for example in found:
        assert names[example.label or 0].startswith(example.id.split("/")[0])
        assert {names[one.label or 0].split(",")[0] for one in example.objects} == {"zebra", "African elephant"}
    with pytest.raises(VitrailError, match="are part of COCO, but the data set is scenes"):
        ZebraElephant(open_data("scenes:1"))


# --- what is printed ------------------------------------------------------------------------------------------------


def test_the_list_tells_what_each_target_is_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list_targets()
    assert len(rows) == len(targets())
    assert rows[2]["data"] == "imagenet, boxes, [indices]"
    assert rows[2]["models"] == "DeiT-B; ViT-B"
    assert len(list_targets("vtranm*")) == 4
    show_targets(rows)
    printed = capsys.readouterr().out
    assert all(name in printed for name in targets())
    show_targets(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows


def test_cells_are_printed_beside_the_published_ones() -> None:
    cell = PaperCell("TIS", "a", "m", "d", "label", "tis", "x", 0.534, 0.5, 0.6, 3, 0.52, "†", "why")
    assert as_text(cell, 2) == "0.53 / 0.52† +0.01"
    assert as_text(replace(cell, published=None), 2) == "0.53"
    assert as_text(replace(cell, measured=math.nan), 2) == "– / 0.52†"
    assert cell.difference == pytest.approx(0.014)


@pytest.mark.parametrize("width", [60, 200])
def test_a_result_is_printed_whole_at_any_width(data: dict[str, str], tmp_path: Path, width: int) -> None:
    given = {"imagenet": data["imagenet"], "boxes": data["boxes"]}
    result = reproduce("tis-table3", given, images=2, out=tmp_path, quick=True, load=stand_in)
    with Console(width=width, file=(tmp_path / "out.txt").open("w", encoding="utf-8"), highlight=False) as told:
        show_result(result, told)
    printed = (tmp_path / "out.txt").read_text(encoding="utf-8")
    for word in (*result.rows(), "0.823", "0.700†", "table.csv", "Quick", *(one.claim.text for one in result.verdicts)):
        assert word in printed


def test_the_command_runs_and_counts_what_failed(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ["--images", "2", "--quick", "--out", str(tmp_path)]
    locations = [f"--data=imagenet={data['imagenet']}", f"--data=boxes={data['boxes']}"]
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.bench.run.load_model", stand_in)
        result = CliRunner().invoke(app, ["reproduce", "tis-figure4", *locations, *shared, "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert set(printed) == KEYS["reproduce"]
    assert printed["target"] == "tis-figure4"
    assert len(printed["cells"]) == 4
    words = ["reproduce", "tis-table3", "--data", "imagenet=scenes:2", "--model", "scenes", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, *shared])
    assert result.exit_code == 0
    assert vitrail.load("scenes").name in result.stdout
    for wrong in ("imagenet", "=x", "imagenet="):
        with pytest.raises(VitrailError, match="NAME=PATH"):
            parse_data([wrong])
