"""The callback of Lightning, in real training with real loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import families
from tests.common import LABELS
from tests.integrations.training import equal, events, image_files, state_of, wandb_history
from torch.utils.data import DataLoader, TensorDataset

from vitrail import VitrailError

pytestmark = pytest.mark.full
EXACT = {"labels": LABELS, "trust": False}
SEEN = {"img_size": 32, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning")


def classifier(lightning: Any, network: str = "model") -> Any:
    """A module as people write them; it maps images to logits."""

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            setattr(self, network, families.build("timm_vit").train())

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return getattr(self, network)(images)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, classes = batch
            loss = torch.nn.functional.cross_entropy(self(images), classes)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier()


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % 5), batch_size=4, shuffle=True
    )


def fit(lightning: Any, module: Any, folder: Path, callbacks: list[Any], logger: Any, **options: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=logger, callbacks=callbacks, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
        **options,
    )  # fmt: skip
    trainer.fit(module, batches(), batches())
    return trainer


def test_panels_are_logged_before_training_and_every_two_epochs(lightning: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from vitrail.integrations import LightningExplanations

    logger = TensorBoardLogger(tmp_path, name="runs", version="one")
    callback = LightningExplanations(image_files(tmp_path), [0, 3], every=2, model="model", labels=LABELS)
    fit(lightning, classifier(lightning), tmp_path, [callback], logger)
    images, scalars = events(tmp_path / "runs" / "one")
    assert [step for step, _ in images["explanations/panel"]] == [0, 4, 8]
    pictures = [pixels for _, pixels in images["explanations/panel"]]
    assert not np.array_equal(pictures[0], pictures[2])  # the model learnt something
    assert [step for step, _ in scalars["explanations/trust"]] == [0, 4, 8]
    assert {"explanations/probability", "explanations/accuracy", "loss", "val_loss"} <= scalars.keys()


def test_training_is_the_same_with_and_without_panels(lightning: Any, tmp_path: Path) -> None:
    """Weights, the order of batches, hooks, modes and gradients."""
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from vitrail.integrations import LightningExplanations

    states = []
    for number, callbacks in enumerate([[], [LightningExplanations(image_files(tmp_path), **SEEN, **EXACT)]]):
        lightning.seed_everything(0, verbose=False)
        module = classifier(lightning)
        fit(lightning, module, tmp_path, callbacks, TensorBoardLogger(tmp_path, version=str(number)))
        states.append(state_of(module))
    assert equal(*states)


def test_a_module_that_maps_images_to_logits_is_a_black_box(lightning: Any, tmp_path: Path) -> None:
    from vitrail.integrations import LightningExplanations

    callback = LightningExplanations(image_files(tmp_path), **SEEN, **EXACT)
    module = classifier(lightning, "network")
    panel = callback.record(module, [], 0)
    with torch.no_grad():
        (ex, _), view = panel.explanations, panel.explanations[0].model
        assert view is not None
        probabilities = module.eval()(view.preprocess(ex.image)[None]).softmax(1)[0]
    assert ex.probability == pytest.approx(float(probabilities.max()), abs=1e-5)


def test_wandb(lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    from vitrail.integrations import LightningExplanations

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, mode="offline", project="vitrail")
    callback = LightningExplanations(image_files(tmp_path), every=4, model="model", **EXACT)
    fit(lightning, classifier(lightning), tmp_path, [callback], logger)
    wandb.finish()
    rows = [row for row in wandb_history(tmp_path) if "explanations/step" in row]
    assert [row["explanations/step"] for row in rows] == [0, 8]
    assert all(row["explanations/panel"]["_type"] == "image-file" for row in rows)


def test_mlflow(lightning: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    from vitrail.integrations import LightningExplanations

    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    logger = MLFlowLogger("panels", tracking_uri=uri, artifact_location=(tmp_path / "artifacts").as_uri())
    callback = LightningExplanations(image_files(tmp_path), every=4, model="model", **EXACT)
    fit(lightning, classifier(lightning), tmp_path, [callback], logger)
    history = mlflow.MlflowClient(uri).get_metric_history(logger.run_id, "explanations/probability")
    assert [metric.step for metric in history] == [0, 8]
    assert len(list((tmp_path / "artifacts").rglob("*.png"))) == 2


def test_mistakes_show_before_training(lightning: Any, tmp_path: Path) -> None:
    from vitrail.integrations import LightningExplanations

    paths = image_files(tmp_path)
    for options, message in (
        ({"model": "network"}, r"Classifier has no module 'network'; it has: model"),
        ({}, r"Classifier is no model of timm.* img_size=, mean= and std="),
        ({"model": "model", "method": "no_such"}, r"there is no method 'no_such'"),
    ):
        module = classifier(lightning)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(VitrailError, match=message):
            fit(lightning, module, tmp_path, [LightningExplanations(paths, **options)], False, fast_dev_run=True)
        assert equal(weights, module.state_dict())


def test_without_a_logger_for_pictures_there_is_one_sentence(lightning: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from vitrail.integrations import LightningExplanations

    callback = LightningExplanations(image_files(tmp_path), model="model", **EXACT)
    with pytest.raises(VitrailError, match=r"no logger for pictures: give it a TensorBoardLogger"):
        fit(lightning, classifier(lightning), tmp_path, [callback], CSVLogger(tmp_path))
    fit(lightning, classifier(lightning), tmp_path, [callback], CSVLogger(tmp_path), fast_dev_run=True)
