"""The callback of Hugging Face's Trainer, in real training with real trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import families
from tests.common import LABELS
from tests.integrations.training import equal, events, image_files, state_of, wandb_history

from vitrail import VitrailError

pytestmark = pytest.mark.full
OPTIONS: dict[str, Any] = {"labels": LABELS, "trust": False, "every": 2}


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(place)
        return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": torch.tensor(place % 5)}


def train(folder: Path, callbacks: list[Any], report_to: str, **trainer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=4, per_device_train_batch_size=4, report_to=report_to, seed=0,
        learning_rate=0.01, logging_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    module = families.build("hf_vit")
    transformers.Trainer(module, arguments, train_dataset=Examples(), callbacks=callbacks, **trainer).train()
    return module


def callback(folder: Path, **options: Any) -> Any:
    pytest.importorskip("transformers")
    from vitrail.integrations import TrainerExplanations

    return TrainerExplanations(image_files(folder), [0, 3], **{**OPTIONS, **options})


def test_panels_are_logged_before_training_and_every_two_epochs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, [callback(tmp_path, trust=True)], "tensorboard")
    images, scalars = events(tmp_path / "runs" / "explanations")
    assert [step for step, _ in images["explanations/panel"]] == [0, 4, 8]
    pictures = [pixels for _, pixels in images["explanations/panel"]]
    assert not np.array_equal(pictures[0], pictures[2])  # the model learnt something
    assert scalars.keys() == {f"explanations/{name}" for name in ("probability", "trust", "accuracy")}


def test_training_is_the_same_with_and_without_panels(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    states = [state_of(train(tmp_path, callbacks, "tensorboard")) for callbacks in ([], [callback(tmp_path)])]
    assert equal(*states)


def test_the_processor_of_the_trainer_makes_the_inputs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    import transformers

    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
    )
    panels: list[Any] = []
    watching = callback(tmp_path)
    record = watching.record
    watching.record = lambda *arguments, **view: panels.append(record(*arguments, **view))
    train(tmp_path, [watching], "tensorboard", processing_class=processor)
    preprocessing = panels[0].explanations[0].model.preprocessing
    assert tuple(preprocessing.mean) == (0.1, 0.2, 0.3)
    assert len(panels) == 3


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="vitrail"):  # which the Trainer goes on with
        train(tmp_path, [callback(tmp_path, every=4)], "wandb")
    rows = [row for row in wandb_history(tmp_path) if "explanations/step" in row]
    assert [row["explanations/step"] for row in rows] == [0, 8]
    assert all(row["explanations/panel"]["_type"] == "image-file" for row in rows)


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    mlflow.set_tracking_uri(uri)
    experiment = mlflow.create_experiment("panels", (tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:  # which the Trainer goes on with
        train(tmp_path, [callback(tmp_path, every=4)], "mlflow")
    history = mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, "explanations/accuracy")
    assert [metric.step for metric in history] == [0, 8]
    assert len(list((tmp_path / "artifacts").rglob("*.png"))) == 2


def test_without_a_tracker_of_pictures_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=r"the Trainer reports to nothing: give its TrainingArguments report_to="):
        train(tmp_path, [callback(tmp_path)], "none")
