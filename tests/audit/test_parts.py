"""The parts of an audit by themselves: recurring content, clusters, statistics, removal."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from tests.audit import stickers
from tests.common import noise

from vitrail.audit import without_region
from vitrail.audit.annotations import WithObjects
from vitrail.audit.clusters import cluster
from vitrail.audit.measures import border_of, cells_in, corners_of
from vitrail.audit.patterns import SIDE, Search
from vitrail.audit.records import Records, share_in_box
from vitrail.audit.removal import parse_region
from vitrail.audit.summary import calibration, confusions_of, totals_of, wilson
from vitrail.data.memory import InMemory
from vitrail.errors import VitrailError

WIDE, HIGH = 44, 36
TAG = noise(WIDE, HIGH, 99)


def records(places: dict[int, tuple[int, int]], count: int = 60, rows: int = 14) -> Records:
    """Noise of two classes in turn; some images have a tag at (left, top), and the evidence lies on it."""
    jpegs, maps, grid = [], torch.zeros(count, rows, rows), torch.arange(rows)
    for i in range(count):
        image = noise(SIDE, SIDE, i)
        x, y = places.get(i, (8 * (i % 9), 8 * (i % 7)))
        if i in places:
            image.paste(TAG, (x, y))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        jpegs.append(buffer.getvalue())
        row, column = (y + HIGH / 2) * rows / SIDE - 0.5, (x + WIDE / 2) * rows / SIDE - 0.5
        distances = (grid[:, None] - row).square() + (grid - column).square()
        maps[i] = torch.exp(-distances / 2)
    frame = pd.DataFrame({"class": [i % 2 for i in range(count)]})
    return Records(frame, maps, [[] for _ in range(count)], jpegs)


def test_a_tag_at_varying_places_is_found_in_its_class_and_to_its_full_extent() -> None:
    places = {i: (4 + (7 * i) % 60, 4 + (5 * i) % 70) for i in range(1, 60, 4)}
    search = Search(records(places))
    (pattern,) = search.patterns(search.appearance(1), 1)
    assert sorted(match.image for match in pattern.matches) == sorted(places)
    assert pattern.inside == 0.5
    assert pattern.outside == 0
    for match in pattern.matches:
        x, y = places[match.image]
        assert np.abs(np.array(match.box) * SIDE - (x, y, x + WIDE, y + HIGH)).max() <= 6
        assert match.share > 0.6
    assert list(search.patterns(search.appearance(0), 0)) == []


def test_a_tag_in_all_classes_and_noise_are_no_finding() -> None:
    everywhere = Search(records(dict.fromkeys(range(60), (60, 60))))
    assert list(everywhere.patterns(everywhere.appearance(1), 1)) == []
    nowhere = Search(records({}))
    assert [list(nowhere.patterns(nowhere.appearance(k), k)) for k in (0, 1)] == [[], []]


def test_images_without_content_match_nothing() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (90, 90, 200)).save(buffer, "JPEG")
    flat = Records(
        pd.DataFrame({"class": [0] * 8 + [1] * 8}), torch.ones(16, 4, 4), [[]] * 16, [buffer.getvalue()] * 16
    )
    search = Search(flat)
    assert list(search.patterns(search.appearance(0), 0)) == []


def test_clusters_are_as_many_as_there_are_groups() -> None:
    generator = np.random.default_rng(0)
    centres = 8 * np.eye(3, 20)
    groups = zip(centres, (20, 15, 12), strict=True)
    features = np.concatenate([generator.normal(centre, 0.5, (size, 20)) for centre, size in groups])
    clusters = cluster(features)
    assert clusters.count == 3
    assert [len(set(clusters.labels[part])) for part in (slice(20), slice(20, 35), slice(35, None))] == [1, 1, 1]
    assert (np.bincount(clusters.labels) == [20, 15, 12]).all(), "the largest first"
    assert cluster(generator.normal(0, 1, (30, 20))).count == 1
    assert cluster(features[:5]).count == 1
    assert cluster(np.concatenate([features[:20], np.full((1, 20), 4.0)])).distances.argmax() == 20
    assert cluster(np.zeros((12, 3))).count == 1, "equal images"


def test_accuracy_calibration_and_confusions() -> None:
    frame = pd.DataFrame(
        {
            "image": list("abcd"),
            "label": [0, 0, 1, -1],
            "true": ["ant", "ant", "bee", None],
            "predicted": ["ant", "bee", "bee", "ant"],
            "correct": [True, False, True, None],
            "probability": [0.95, 0.91, 0.55, 0.2],
        }
    )
    totals = totals_of(frame)
    assert (totals.images, totals.labelled, totals.errors) == (4, 3, 1)
    assert totals.accuracy == pytest.approx(2 / 3)
    bins = calibration(frame)
    assert [(entry.count, entry.accuracy) for entry in bins] == [(1, 1.0), (2, 0.5)]
    assert totals.calibration_error == pytest.approx((1 * 0.45 + 2 * (0.93 - 0.5)) / 3)
    assert confusions_of(frame)[["true", "predicted", "images"]].to_numpy().tolist() == [["ant", "bee", 1]]
    reference = binomtest(37, 50).proportion_ci(0.95, "wilson")
    assert wilson(37, 50) == pytest.approx((reference.low, reference.high), abs=1e-4)


def test_border_and_corners() -> None:
    assert float(border_of((100, 50)).float().mean()) == pytest.approx(1 - 0.8 * 0.8)
    corners = corners_of((100, 50))
    assert float(corners.float().mean()) == pytest.approx(4 * 0.2 * 0.2)
    assert [bool(corners[place]) for place in ((19, 9), (80, 40), (20, 9), (50, 0))] == [True, True, False, False]
    evidence = torch.zeros(2, 4, 4, dtype=torch.float64)
    evidence[0, 0, 3] = evidence[1, 3, 3] = 1
    assert share_in_box(evidence, (0.5, 0.0, 1.0, 0.5)).tolist() == [1.0, 0.0]


def test_a_region_is_removed_as_its_patches() -> None:
    view, image = stickers.model(True), stickers.picture(0, 7, True)
    box = (44 / 64, 4 / 64, 60 / 64, 18 / 64)
    removed = cells_in(view, box)
    assert removed.nonzero().tolist() == [[0, 6], [1, 5], [1, 6], [1, 7]], "those that it covers by half or more"
    box = (40 / 64, 0, 1, 24 / 64)
    removed = cells_in(view, box)
    removal = without_region(view, image, box)
    assert removal.predicted == stickers.NAMES[stickers.TARGET]
    assert removal.changed
    pixels = view.preprocess(image)[None]
    keep = (~removed).flatten().nonzero()[:, 0][None]
    with torch.no_grad():
        logits = view.encode(view.embed(pixels), keep)
    assert removal.probability_without == pytest.approx(float(view.probabilities(logits)[0, stickers.TARGET]), abs=1e-5)
    assert removal.predicted_without in removal.words()
    with pytest.raises(VitrailError, match="the whole image"):
        without_region(view, image, (0, 0, 1, 1))


@pytest.mark.parametrize("text", ["0,0,1", "a,b,c,d", "0.5,0,0.2,1", "0,0,1,64"])
def test_a_wrong_region_is_an_error(text: str) -> None:
    with pytest.raises(VitrailError, match=r"region|box"):
        parse_region(text)


def test_masks_and_boxes_from_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        noise(40, 40, 1).save(tmp_path / f"{name}.png")
    (tmp_path / "masks").mkdir()
    mask = np.zeros((40, 40), np.uint8)
    mask[10:20, 5:15] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    (tmp_path / "boxes.csv").write_text('file,boxes\nb.png,"1,2,30,99"\n')
    data = InMemory([tmp_path / "a.png", tmp_path / "b.png"])
    annotated = WithObjects(data, tmp_path / "masks", tmp_path / "boxes.csv")
    assert annotated[0].objects[0].box == (5, 10, 15, 20)
    assert annotated[0].objects[0].mask is not None
    assert [item.box for item in annotated[1].objects] == [(1, 2, 30, 40)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitrailError, match="no mask in"):
        WithObjects(data, tmp_path / "empty")
    (tmp_path / "boxes.csv").write_text('file,boxes\nc.png,"1,2,30,99"\n')
    with pytest.raises(VitrailError, match="no boxes for the images"):
        WithObjects(data, boxes=tmp_path / "boxes.csv")
