"""An audit from end to end: a class that is recognised by a sticker is named, a clean control is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from tests.audit import stickers
from tests.audit.stickers import NAMES, STICKER, TARGET, pictures
from tests.common import LABELS, noise

from vitrail.audit import Audit, audit_images
from vitrail.bench.run import Step
from vitrail.bench.store import Store
from vitrail.data.memory import InMemory
from vitrail.errors import VitrailError
from vitrail.metrics import trust
from vitrail.metrics.base import METRICS
from vitrail.models.view import View

REGION = (0.625, 0.0, 1.0, 0.375)  # the patches of the sticker


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audit]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "SUBSETS", 8)
        patch.setattr(trust, "RANDOM", 2)
        folder = tmp_path_factory.mktemp("audit")
        yield audit_images(stickers.model(True), pictures(True), folder, regions=[REGION])


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    folder = tmp_path_factory.mktemp("control")
    return audit_images(stickers.model(False), pictures(False), folder, trust=False)


def test_the_class_with_the_sticker_is_named_and_the_sticker_is_marked(audited: Audit) -> None:
    (suspicion,) = audited.summary.confirmed
    assert suspicion.name == NAMES[TARGET]
    assert f"The class {NAMES[TARGET]} is suspicious" in audited.summary.headline()
    for match in suspicion.pattern.matches:
        assert audited.summary.frame["true"].iloc[match.image] == NAMES[TARGET]
        x0, y0, x1, y1 = (side * stickers.SIDE for side in match.box)
        assert max(x0 - STICKER[0], y0 - STICKER[1], STICKER[2] - 2 - x1, STICKER[3] - 2 - y1) <= 0
    effect = suspicion.effect
    assert effect.fall > effect.control_fall + 0.3
    assert effect.taken > effect.control_taken + 0.3
    page = audited.report.read_text(encoding="utf-8")
    assert page.index(f"Suspicious: {NAMES[TARGET]}") < page.index("What it gets wrong")


def test_the_control_is_silent(control: Audit) -> None:
    assert control.summary.suspicions == []
    assert "No class is suspicious" in control.report.read_text(encoding="utf-8")
    assert (control.summary.frame["suspicion"] == 0).all()


def test_every_image_has_its_numbers(audited: Audit) -> None:
    folder = audited.report.parent
    table = pd.read_csv(folder / "images.csv")
    assert list(table["image"]) == pictures(True).ids
    stored = pd.read_parquet(folder / "images.parquet")
    assert list(stored.columns) == list(table.columns)
    model = stickers.model(True)
    assert set(table["predicted"]) <= set(NAMES)
    assert table["trust"].between(0, 1).all()
    assert (table["object"] + table["background"]).sub(1).abs().max() < 1e-9
    assert (table["object_area"] == 0.5).all(), "the left half"
    assert ((table["margin"] <= table["probability"]) & (table["margin"] >= 0)).all()
    marked = table["suspicion"] > 0
    assert set(table["true"][marked]) == {NAMES[TARGET]}
    assert table["evidence"].str.contains("% of the evidence lies on the").all()
    wrong = table[~table["correct"]]
    assert audited.summary.totals.errors == len(wrong)
    assert model.num_classes == 4


def test_a_region_is_measured_and_removed_in_every_image(audited: Audit) -> None:
    name = ",".join(f"{side:g}" for side in REGION)
    table = audited.summary.frame
    marked = table["suspicion"] > 0
    inside = table[f"evidence in {name}"]
    assert inside[marked].mean() > inside[~marked].mean() + 0.1
    fall = table["probability"] - table[f"probability without {name}"]
    assert fall[marked].mean() > fall[~marked].mean() + 0.3
    assert (table[f"predicted without {name}"][marked] != NAMES[TARGET]).mean() > 0.5


def test_the_metrics_of_an_audit_are_in_no_listing(audited: Audit) -> None:
    assert not [name for name in METRICS.entries() if name.startswith("audit")]


def test_an_audit_killed_twice_ends_complete(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill_after(images: int) -> None:
        def watch(step: Step) -> None:
            if step.done >= images:
                raise Killed

        with pytest.raises(Killed):
            audit_images(model, data, tmp_path, trust=False, watch=watch)

    model, data = stickers.model(False), pictures(False, 24)
    kill_after(8)
    first = len(Store(next(tmp_path.glob("run-*"))).rows())
    kill_after(16)
    second = len(Store(next(tmp_path.glob("run-*"))).rows())
    assert 0 < first < second < 24
    audit = audit_images(model, data, tmp_path, trust=False)
    assert audit.outcome.known == second
    assert audit.outcome.images == 24 - second
    assert list(audit.summary.frame["image"]) == data.ids
    again = audit_images(model, data, tmp_path, trust=False)
    assert (again.outcome.images, again.outcome.known) == (0, 24)
    pd.testing.assert_frame_equal(again.summary.frame, audit.summary.frame)


def test_another_method_and_trust_do_not_mix_with_earlier_results(tmp_path: Path) -> None:
    model, data = stickers.model(False), pictures(False, 8)
    first = audit_images(model, data, tmp_path, trust=False)
    other = audit_images(model, data, tmp_path, trust=False, method="gen_att")
    trusted = audit_images(model, data, tmp_path, images=4)
    again = audit_images(model, data, tmp_path, trust=False)
    assert first.outcome.known == other.outcome.known == 0
    assert again.outcome.known == 8
    assert not first.summary.evidence.equal(other.summary.evidence)
    assert again.summary.evidence.equal(first.summary.evidence)
    assert trusted.summary.frame["trust"].notna().all()
    assert again.summary.frame["trust"].isna().all()


def test_pairs_of_clean_and_altered_images(tmp_path: Path) -> None:
    clean = [stickers.picture(i % 2, 50 + i, False) for i in range(6)]
    altered = [stickers.picture(i % 2, 51, True) for i in range(6)]
    for folder, images in (("clean", clean), ("altered", altered)):
        (tmp_path / folder).mkdir()
        for i, image in enumerate(images):
            image.save(tmp_path / folder / f"{i}.png")
    for i, image in enumerate(clean):  # the altered copies differ by the sticker alone
        copy = image.copy()
        x0, y0, x1, y1 = STICKER
        copy.paste(altered[0].crop((x0, y0, x1 + 1, y1 + 1)), (x0, y0))
        copy.save(tmp_path / "altered" / f"{i}.png")
    audit = audit_images(
        stickers.model(True), str(tmp_path / "clean"), tmp_path / "out", paired=str(tmp_path / "altered"), trust=False
    )
    assert audit.pairs is not None
    assert list(audit.pairs["image"]) == [f"{i}.png" for i in range(6)]
    area = (STICKER[2] - STICKER[0] + 1) * (STICKER[3] - STICKER[1] + 1) / stickers.SIDE**2
    assert audit.pairs["changed_area"].between(0.6 * area, 1.4 * area).all()
    assert (audit.pairs["predicted_altered"] == NAMES[TARGET]).mean() > 0.5
    assert audit.pairs["evidence_on_change"].mean() > 2 * area
    assert math.isnan(audit.summary.frame["true_probability"].iloc[0])
    assert audit.summary.totals.accuracy is None
    assert "Altered copies" in audit.report.read_text(encoding="utf-8")


def test_pairs_without_a_common_name_are_an_error(tmp_path: Path) -> None:
    for folder, name in (("clean", "a.png"), ("altered", "b.png")):
        (tmp_path / folder).mkdir()
        stickers.picture(0, 1, False).save(tmp_path / folder / name)
    with pytest.raises(VitrailError, match="no altered image has the name"):
        audit_images(
            stickers.model(True), str(tmp_path / "clean"), tmp_path / "out", paired=str(tmp_path / "altered"),
            trust=False,
        )  # fmt: skip


def test_some_true_classes_may_be_unknown(model: View, tmp_path: Path) -> None:
    data = InMemory([(noise(32, 32, 0), 0), (noise(32, 32, 1), None)], labels=LABELS)
    audit = audit_images(model, data, tmp_path, trust=False)
    assert audit.summary.frame["label"].tolist() == [0, -1]
    assert '"id":"1","true":null' in audit.report.read_text(encoding="utf-8")
