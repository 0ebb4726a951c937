"""FiftyOne, the real one: heatmaps on samples, and its data sets explained and audited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.common import LABELS
from tests.integrations.training import image_files
from typer.testing import CliRunner

import vitrail
from vitrail import VitrailError
from vitrail.audit import audit_images
from vitrail.cli.program import app
from vitrail.data import open_data
from vitrail.data.names import data_name
from vitrail.integrations import add_to_fiftyone
from vitrail.integrations.fiftyone import heatmap_label
from vitrail.models.view import View
from vitrail.show.heatmap import fit_to_image

METHOD = "input_x_gradient"


def test_a_name_is_no_path() -> None:
    assert data_name("fiftyone:photos?label=truth") == "fiftyone:photos?label=truth"


@pytest.mark.full
@pytest.mark.usefixtures("fiftyone_library")
def test_a_heatmap_covers_the_image(model: View, photo: Any) -> None:
    ex = vitrail.explain(model, photo, METHOD)
    label = heatmap_label(ex)
    assert label.map.shape == (40, 64)
    expected = fit_to_image(ex.map, ex.box, (64, 40), outside=0.0).numpy()
    assert np.array_equal(label.map, expected)
    assert label.range[1] == -label.range[0]
    ex.signed, ex.image = False, ex.image.resize((3200, 2000))
    ex.box = (600.0, 0.0, 2600.0, 2000.0)
    label = heatmap_label(ex)
    assert label.map.shape == (200, 320)
    assert label.map.min() == label.map[0, 0] == pytest.approx(label.range[0])


@pytest.mark.full
def test_explanations_become_fields_of_samples(data_set: Any, fiftyone: Any, model: View, tmp_path: Path) -> None:
    paths = image_files(tmp_path, 3)
    data_set.add_samples([fiftyone.Sample(filepath=str(path)) for path in paths[:2]])
    link = tmp_path / "link.png"
    link.symlink_to(paths[1])
    explanations = vitrail.explain(model, [paths[0], link, paths[2]], METHOD)
    explanations[0].trust()
    explanations[0].score("insertion(steps=4)")
    add_to_fiftyone(data_set, explanations)
    assert len(data_set) == 3  # the third was added, the link is the second
    for path, ex in zip(paths, explanations, strict=True):
        sample = data_set[str(path)]
        assert np.array_equal(sample.vitrail.map, heatmap_label(ex).map)
        assert (sample.vitrail_class.label, sample.vitrail_class.confidence) == (ex.label, ex.probability)
        assert sample.vitrail_method == METHOD
    first = data_set[str(paths[0])]
    assert (first.vitrail_trust, first.vitrail_insertion) == (
        explanations[0].trust_score, explanations[0].scores["insertion(steps=4)"],
    )  # fmt: skip
    assert len(data_set.exists("vitrail_trust")) == 1
    with pytest.raises(VitrailError, match=r"the view has no sample of 2.png"):
        add_to_fiftyone(data_set.limit(2), explanations[2])
    with pytest.raises(VitrailError, match=r"an image in memory was explained"):
        add_to_fiftyone(data_set, vitrail.explain(model, explanations[0].image))


@pytest.mark.full
def test_export_makes_a_data_set_that_is_kept(fiftyone: Any, model: View, tmp_path: Path) -> None:
    explanations = vitrail.explain(model, image_files(tmp_path))
    assert vitrail.export(explanations, "fiftyone:vitrail-exported") == []
    vitrail.export(explanations, "fiftyone:vitrail-exported")
    made = fiftyone.load_dataset("vitrail-exported")
    try:
        assert (len(made), made.persistent) == (2, True)
    finally:
        made.delete()


@pytest.fixture
def labelled(data_set: Any, fiftyone: Any, tmp_path: Path) -> Any:
    """Six images with classes; the first with boxes."""
    samples = []
    for place, path in enumerate(image_files(tmp_path, 6)):
        sample = fiftyone.Sample(filepath=str(path))
        if place < 5:
            sample["ground_truth"] = fiftyone.Classification(label=LABELS[place])
        samples.append(sample)
    samples[0]["things"] = fiftyone.Detections(
        detections=[
            fiftyone.Detection(label="bee", bounding_box=[0.25, 0.5, 0.5, 0.25]),
            fiftyone.Detection(label="yak", bounding_box=[0.75, 0.75, 0.5, 0.5]),
        ]
    )
    data_set.add_samples(samples)
    return data_set


@pytest.mark.full
def test_a_data_set_is_read(labelled: Any, fiftyone: Any) -> None:
    data = open_data(labelled, boxes="things")
    assert data.ids == [f"{number}.png" for number in range(6)]
    assert data.labels == tuple(LABELS)
    assert [example.label for example in data] == [0, 1, 2, 3, 4, None]
    first = data[0]
    assert [(each.label, each.box) for each in first.objects] == [(1, (8, 16, 24, 24)), (None, (24, 24, 32, 32))]
    assert data[1].objects == ()
    by_name = open_data(f"fiftyone:{labelled.name}?boxes=things&n=2")
    assert len(by_name) == 2
    assert open_data(labelled.match(fiftyone.ViewField("ground_truth.label") == "cat")).ids == ["2.png"]
    assert open_data(labelled.limit(3), label="ground_truth").labels == tuple(LABELS[:3])
    with pytest.raises(VitrailError, match=r"has no field 'truth' of Classification for label=; it has: ground_truth"):
        open_data(labelled, label="truth")
    with pytest.raises(VitrailError, match=r"there is no FiftyOne data set 'no-such'; it has: .*vitrail-"):
        open_data("fiftyone:no-such")


@pytest.mark.full
def test_predictions_are_not_taken_for_true_classes(data_set: Any, model: View, tmp_path: Path) -> None:
    add_to_fiftyone(data_set, vitrail.explain(model, image_files(tmp_path)))
    assert open_data(data_set).labels is None
    assert open_data(data_set, label="vitrail_class").labels is not None


@pytest.mark.full
def test_a_data_set_is_audited_and_evaluated(labelled: Any, model: View, tmp_path: Path) -> None:
    audit = audit_images(model, labelled, tmp_path / "report", trust=False)
    assert sorted(audit.summary.frame["image"]) == [f"{number}.png" for number in range(6)]
    assert audit.summary.totals.accuracy is not None
    assert audit.report.is_file()
    rows = vitrail.evaluate(model, labelled, ["gradient"], ["sparseness"])
    assert len(rows) == 6


@pytest.mark.full
def test_the_command_line_audits_and_exports(data_set: Any, fiftyone: Any, tmp_path: Path) -> None:
    paths = image_files(tmp_path)
    for path, name in zip(paths, vitrail.load("scenes").labels or (), strict=False):
        data_set.add_sample(fiftyone.Sample(filepath=str(path), truth=fiftyone.Classification(label=name)))
    spec = f"fiftyone:{data_set.name}?label=truth"
    report = tmp_path / "report"
    result = CliRunner().invoke(app, ["audit", spec, "--model", "scenes", "--no-trust", "--out", str(report)])
    assert result.exit_code == 0, result.output or result.exception
    assert "Accuracy" in result.output
    assert (report / "report.html").is_file()
    words = ["--model", "scenes", "--no-trust", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["explain", str(paths[0]), *words, "--export", f"fiftyone:{data_set.name}"])
    assert result.exit_code == 0, result.output or result.exception
    data_set.reload()
    assert data_set[str(paths[0])].vitrail.map is not None
    assert data_set[str(paths[1])].vitrail is None
