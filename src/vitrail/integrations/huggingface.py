"""Hugging Face's Trainer: a callback that logs explained images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError
from vitrail.integrations.panels import PanelLog

try:
    from transformers import TrainerCallback
except ImportError:
    raise VitrailError("TrainerExplanations needs transformers: pip install 'vitrail[hf]'.") from None

TRACKERS = ("tensorboard", "wandb", "mlflow")


class TrainerExplanations(PanelLog, TrainerCallback):  # type: ignore[misc]
    """Logs a panel of explained images before training and every few epochs; for the arguments see ``PanelLog``.

    The panels go to those of TensorBoard, Weights & Biases and MLflow that ``report_to`` of the ``TrainingArguments``
    names. The image processor that the ``Trainer`` knows as ``processing_class`` makes the inputs.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        self._log(args, state, **trained)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        if round(state.epoch) % self.every == 0:
            self._log(args, state, **trained)

    def _log(self, args: Any, state: Any, model: Any = None, processing_class: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.to is None:
            self.to = [self._destination(tracker, args) for tracker in args.report_to if tracker in TRACKERS]
        if not self.to:
            raise VitrailError(
                f"the Trainer reports to {', '.join(args.report_to) or 'nothing'}: give its TrainingArguments "
                f"report_to= one of {', '.join(TRACKERS)}, or TrainerExplanations(to=…)."
            )
        processor = {"processor": processing_class} if hasattr(processing_class, "image_mean") else {}
        self.record(model, self.to, state.global_step, **processor)

    def _destination(self, tracker: str, args: Any) -> Any:
        """What the Trainer reports to; of TensorBoard a writer of its own, since the Trainer shows its to nobody."""
        if tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir, "runs", self.name)
            return SummaryWriter(str(folder))
        if tracker == "wandb":
            import wandb

            return wandb.run
        import mlflow

        return mlflow.active_run()
