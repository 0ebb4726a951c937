"""Panels: the picture, its numbers, what they leave alone, and how they reach TensorBoard, W&B and MLflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.common import LABELS
from tests.integrations.training import equal, events, image_files, state_of, wandb_history

from vitrail import VitrailError
from vitrail.integrations import Panel, explained_panel, log_panel
from vitrail.integrations.panels import PanelLog
from vitrail.models.view import View


def test_a_panel_has_a_picture_and_the_means_of_its_numbers(model: View, tmp_path: Path) -> None:
    paths = image_files(tmp_path, 3)
    panel = explained_panel(model, paths, ["ant", 1, "cat"])
    first, second, third = panel.explanations
    assert [ex.true_label for ex in panel.explanations] == LABELS[:3]
    assert panel.numbers["probability"] == pytest.approx(sum(ex.probability for ex in panel.explanations) / 3)
    assert panel.numbers["trust"] == pytest.approx(
        sum(ex.trusted.score for ex in (first, second, third) if ex.trusted is not None) / 3
    )
    right = [ex.target == place for place, ex in enumerate(panel.explanations)]
    assert panel.numbers["accuracy"] == pytest.approx(sum(right) / 3)
    assert panel.picture.mode == "RGB"
    assert panel.picture.width > 3 * 96


def test_a_panel_explains_true_classes_on_request(model: View, tmp_path: Path) -> None:
    panel = explained_panel(model, image_files(tmp_path), [4, 2], target="label", trust=False, method="gradient")
    assert [ex.target for ex in panel.explanations] == [4, 2]
    assert [ex.method for ex in panel.explanations] == ["gradient"] * 2
    assert panel.numbers.keys() == {"probability", "accuracy"}


def test_tensors_make_a_panel(model: View, tmp_path: Path) -> None:
    pixels = [model.preprocess(Image.open(path).convert("RGB")) for path in image_files(tmp_path)]
    panel = explained_panel(model, pixels, trust=False)
    assert panel.numbers.keys() == {"probability"}
    assert [ex.image_path for ex in panel.explanations] == [None, None]


def test_what_a_panel_cannot_be_made_of_is_refused(model: View, tmp_path: Path) -> None:
    paths = image_files(tmp_path)
    with pytest.raises(VitrailError, match=r"2 images, but 1 true_classes"):
        explained_panel(model, paths, [0])
    with pytest.raises(VitrailError, match=r"give true_classes="):
        explained_panel(model, paths, target="label")
    with pytest.raises(VitrailError, match=r'target must be "predicted" or "label", but got \'true\''):
        explained_panel(model, paths, [0, 1], target="true")  # type: ignore[arg-type]
    with pytest.raises(VitrailError, match=r"every must be at least 1 epoch, but got 0"):
        PanelLog(paths, every=0)
    with pytest.raises(VitrailError, match=r"VisionTransformer has no module 'network'; it has: patch_embed"):
        PanelLog(paths, model="network").record(families.build("timm_vit"), [], 0)
    panel = Panel(Image.new("RGB", (4, 4)), {}, [])
    with pytest.raises(VitrailError, match=r"a panel cannot be logged to list: expected a SummaryWriter"):
        log_panel(panel, [], 0)


def test_a_module_in_training_is_left_as_it_was(tmp_path: Path) -> None:
    """Also by a panel that is drawn where Lightning validates: in inference mode."""
    module = families.build("timm_vit").train()
    module.blocks[0].eval()
    module(torch.randn(2, 3, 32, 32)).sum().backward()
    module.head.weight.requires_grad_(False)
    paths = image_files(tmp_path)
    for within in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with within():
            before = state_of(module)
            panel = PanelLog(paths, [0, 1], labels=LABELS).record(module, [], 0)
            assert equal(before, state_of(module))
        assert panel.explanations[0].true_label == "ant"


def test_a_part_of_a_module_is_explained(tmp_path: Path) -> None:
    outer = torch.nn.ModuleDict({"inner": torch.nn.Sequential(torch.nn.Identity(), families.build("timm_vit"))})
    panel = PanelLog(image_files(tmp_path), model="inner.1", trust=False).record(outer, [], 0)
    assert panel.explanations[0].method == "decompx.skipplus"  # seen through, no black box


# Trackers


@pytest.fixture
def panel(model: View, tmp_path: Path) -> Panel:
    return explained_panel(model, image_files(tmp_path), [0, 1], trust=False)


@pytest.mark.full
def test_tensorboard(panel: Panel, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs")) as writer:
        for step in (0, 5):
            log_panel(panel, writer, step, "val")
    images, scalars = events(tmp_path / "runs")
    assert [step for step, _ in images["val/panel"]] == [0, 5]
    assert np.array_equal(images["val/panel"][0][1], np.asarray(panel.picture))
    assert scalars["val/accuracy"] == [(0, pytest.approx(panel.numbers["accuracy"]))] + [
        (5, pytest.approx(panel.numbers["accuracy"]))
    ]
    assert scalars.keys() == {"val/accuracy", "val/probability"}


@pytest.mark.full
def test_wandb(panel: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="vitrail") as run:
        log_panel(panel, run, 0)
        log_panel(panel, run, 7)
    history = wandb_history(tmp_path)
    assert [row["explanations/step"] for row in history] == [0, 7]
    assert history[1]["explanations/accuracy"] == panel.numbers["accuracy"]
    logged = history[1]["explanations/panel"]
    assert (logged["_type"], logged["width"]) == ("image-file", panel.picture.width)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    with Image.open(folder / "files" / logged["path"]) as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(panel.picture))


@pytest.mark.full
def test_mlflow(panel: Panel, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    experiment = mlflow.create_experiment("panels", (tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:  # set_experiment would be for the whole process
        log_panel(panel, run, 3)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == {
        f"explanations/{name}": value for name, value in panel.numbers.items()
    }
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "explanations/accuracy")] == [3]
    (path,) = (tmp_path / "artifacts").rglob("*.png")
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(panel.picture))
