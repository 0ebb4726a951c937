"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow; directly, or as loggers of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.integrations.panels import Panel

Writer: TypeAlias = Callable[[Any, "Panel", int, str], None]


def log_panel(panel: Panel, destination: Any, step: int, name: str = "explanations") -> None:
    """Logs a panel: its picture as ``name/panel``, its numbers as ``name/trust`` and the like.

    Args:
        panel: from ``explained_panel``.
        destination: a ``SummaryWriter`` of TensorBoard, a run of Weights & Biases or of MLflow, or a logger of
            Lightning for one of them.
        step: of the training.
        name: with which the names of everything logged begin.
    """
    writer_of(destination)(destination, panel, step, name)


def is_destination(destination: Any) -> bool:
    """Whether a panel can be logged there."""
    return any(kind in WRITERS for kind in _kinds(destination))


def writer_of(destination: Any) -> Writer:
    """What writes a panel to a destination."""
    for kind in _kinds(destination):
        if kind in WRITERS:
            return WRITERS[kind]
    raise VitrailError(
        f"a panel cannot be logged to {type(destination).__name__}: expected a SummaryWriter of TensorBoard, a run of "
        "Weights & Biases or of MLflow, or a TensorBoardLogger, WandbLogger or MLFlowLogger."
    )


def _kinds(destination: Any) -> list[tuple[str, str]]:
    """The classes of an object: package and name of each."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(destination).__mro__]


def _to_tensorboard(writer: Any, panel: Panel, step: int, name: str) -> None:
    writer.add_image(f"{name}/panel", np.asarray(panel.picture), step, dataformats="HWC")
    for key, value in panel.numbers.items():
        writer.add_scalar(f"{name}/{key}", value, step)
    writer.flush()


def _to_wandb(run: Any, panel: Panel, step: int, name: str) -> None:
    import wandb

    # The step of the run is left to whoever else logs: it must never decrease.
    run.define_metric(f"{name}/*", step_metric=f"{name}/step")
    numbers = {f"{name}/{key}": value for key, value in panel.numbers.items()}
    run.log({f"{name}/panel": wandb.Image(panel.picture), **numbers, f"{name}/step": step})


def _to_mlflow(client: Any, run_id: str, panel: Panel, step: int, name: str) -> None:
    client.log_image(run_id, panel.picture, key=f"{name}/panel", step=step, synchronous=True)
    for key, value in panel.numbers.items():
        client.log_metric(run_id, f"{name}/{key}", value, step=step)


def _to_mlflow_run(run: Any, panel: Panel, step: int, name: str) -> None:
    from mlflow import MlflowClient

    _to_mlflow(MlflowClient(), run.info.run_id, panel, step, name)


def _to_mlflow_logger(logger: Any, panel: Panel, step: int, name: str) -> None:
    _to_mlflow(logger.experiment, logger.run_id, panel, step, name)


def _of_experiment(write: Writer) -> Writer:
    """The writer for a logger of Lightning, which holds what is written to."""

    def write_experiment(logger: Any, panel: Panel, step: int, name: str) -> None:
        write(logger.experiment, panel, step, name)

    return write_experiment


WRITERS: dict[tuple[str, str], Writer] = {
    ("torch", "SummaryWriter"): _to_tensorboard,
    ("tensorboardX", "SummaryWriter"): _to_tensorboard,
    ("wandb", "Run"): _to_wandb,
    ("mlflow", "Run"): _to_mlflow_run,
}
for _package in ("lightning", "pytorch_lightning"):
    WRITERS |= {
        (_package, "TensorBoardLogger"): _of_experiment(_to_tensorboard),
        (_package, "WandbLogger"): _of_experiment(_to_wandb),
        (_package, "MLFlowLogger"): _to_mlflow_logger,
    }
