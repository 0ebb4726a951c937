"""Lightning: a callback that logs explained images."""

from __future__ import annotations

from typing import Any

from vitrail.errors import VitrailError
from vitrail.integrations.loggers import is_destination
from vitrail.integrations.panels import PanelLog

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise VitrailError("LightningExplanations needs Lightning: pip install lightning.") from None


class LightningExplanations(PanelLog, Callback):  # type: ignore[misc]
    """Logs a panel of explained images before training and every few epochs; for the arguments see ``PanelLog``.

    The panels go to the loggers of the ``Trainer``. The trained module itself must map normalised images to logits, or
    ``model`` names the part of it that does.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if (trainer.current_epoch + 1) % self.every == 0:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        destinations = [logger for logger in trainer.loggers if is_destination(logger)] if self.to is None else self.to
        if not destinations and not trainer.fast_dev_run:  # which takes the loggers away
            raise VitrailError(
                "the Trainer has no logger for pictures: give it a TensorBoardLogger, WandbLogger or MLFlowLogger, or "
                "LightningExplanations(to=…)."
            )
        self.record(pl_module, destinations, trainer.global_step)
