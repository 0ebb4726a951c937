"""Running metrics inside torchmetrics: collections, clones, trackers, pickles and process groups."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.metrics.common import Bench, bench
from torch import Tensor
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.classification import MulticlassAccuracy

from vitrail.metrics import Running, measure

TARGET = 1

# One of two processes, which has images or has none, and prints what both have computed.
PROCESS = """
import json, sys, torch
from tests.metrics.common import bench
from tests.metrics.test_collections import objects, pixel_maps
from vitrail.metrics import Running

meeting, rank, has_images = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
of = bench("timm_vit")
for metric in ("energy_pointing_game", "mean_iou"):
    running = Running(metric, of.view)
    if has_images:
        running.update(of.images, pixel_maps(of), masks=objects(of))
    print(json.dumps(running.compute()))
torch.distributed.destroy_process_group()
"""


def objects(of: Bench) -> Tensor:
    """In each image the left quarter."""
    masks = torch.zeros(2, *of.size, dtype=torch.bool)
    masks[:, :, : of.size[1] // 4] = True
    return masks


def pixel_maps(of: Bench) -> Tensor:
    """The first lies in the object, the second only by its maximum and a third of its sum."""
    maps = torch.zeros(2, *of.size, dtype=torch.float64)
    maps[:, 0, 0] = 1.0
    maps[1, 0, -4:] = 0.5
    return maps


def collection(of: Bench) -> MetricCollection:
    names = {"peak": "pointing_game", "energy": "energy_pointing_game", "sparse": "sparseness"}
    return MetricCollection({key: Running(name, of.view) for key, name in names.items()})


def means(of: Bench) -> dict[str, float]:
    scores = {
        key: measure(name, of.view, of.images, pixel_maps(of), TARGET, masks=objects(of))
        for key, name in (("peak", "pointing_game"), ("energy", "energy_pointing_game"), ("sparse", "sparseness"))
    }
    return {f"{key}_mean": sum(score.value for score in scored) / 2 for key, scored in scores.items()}


def update(metrics: MetricCollection, of: Bench, part: slice) -> None:
    metrics.update(of.images[part], pixel_maps(of)[part], TARGET, masks=objects(of)[part])


def test_a_collection_updates_every_metric_although_two_are_equal_at_first() -> None:
    of = bench("timm_vit")
    metrics = collection(of)
    update(metrics, of, slice(0, 1))
    first = metrics.compute()
    assert first["peak_mean"] == first["energy_mean"] == 1.0
    update(metrics, of, slice(1, 2))
    both = metrics.compute()
    assert both["peak_mean"] == 1.0
    assert both["energy_mean"] == pytest.approx((1 + 1 / 3) / 2)
    assert {key: both[key] for key in means(of)} == pytest.approx(means(of))
    assert {both[f"{key}_n"] for key in metrics} == {2}
    metrics.reset()
    update(metrics, of, slice(0, 1))
    assert metrics.compute() == first


def test_calling_a_collection_gives_the_values_of_the_batch() -> None:
    of = bench("timm_vit")
    metrics = collection(of)
    for i, energy in enumerate((1, 1 / 3)):
        part = slice(i, i + 1)
        batch = metrics(of.images[part], pixel_maps(of)[part], TARGET, masks=objects(of)[part])
        assert (batch["energy_mean"], batch["energy_n"]) == (pytest.approx(energy), 1)
    assert {key: metrics.compute()[key] for key in means(of)} == pytest.approx(means(of))


def test_metrics_of_predictions_and_of_maps_share_a_collection() -> None:
    of = bench("timm_vit")
    metrics = MetricCollection({"accuracy": MulticlassAccuracy(5, average="micro"), **collection(of)})
    classes = torch.tensor([1, 2])
    predictions = torch.eye(5)[[1, 3]]
    metrics.update(
        preds=predictions, target=classes, images=of.images, maps=pixel_maps(of), masks=objects(of), label=classes
    )
    values = metrics.compute()
    assert values["accuracy"] == 0.5
    assert values["energy_mean"] == pytest.approx(2 / 3)


def test_clones_have_values_of_their_own_and_the_same_model() -> None:
    of = bench("timm_vit")
    metrics = collection(of)
    update(metrics, of, slice(0, 1))
    clone = metrics.clone(prefix="validation_")
    update(metrics, of, slice(1, 2))
    assert clone.compute()["validation_energy_mean"] == 1.0
    assert metrics.compute()["energy_mean"] == pytest.approx(2 / 3)
    assert all(metric.view is of.view for metric in clone.values())
    update(clone, of, slice(1, 2))
    assert clone.compute()["validation_energy_mean"] == pytest.approx(2 / 3)


def test_a_tracker_knows_which_direction_is_better() -> None:
    of = bench("timm_vit")
    tracker = MetricTracker(MetricCollection([Running("sparseness", of.view)]))
    assert tracker.maximize == [True]
    assert MetricTracker(Running("deletion", of.view)).maximize is False
    for i in range(2):
        tracker.increment()
        tracker.update(of.images[i], pixel_maps(of)[i])
    epochs = [epoch["mean"] for epoch in tracker.compute_all()]
    assert epochs == [score.value for score in measure("sparseness", of.view, of.images, pixel_maps(of))]


def test_a_pickled_metric_goes_on_where_it_was() -> None:
    of = bench("timm_vit")
    metrics = collection(of)
    update(metrics, of, slice(0, 1))
    copy = pickle.loads(pickle.dumps(metrics))
    for each in (metrics, copy):
        update(each, of, slice(1, 2))
    assert copy.compute() == metrics.compute()


def test_states_are_on_the_device_of_the_metric() -> None:
    of = bench("timm_vit")
    running = Running("mean_iou", of.view).to("meta")
    running.update(of.images, pixel_maps(of), masks=objects(of))
    assert {state.device.type for state in [*running.values, *running.parts, running.identity]} == {"meta"}
    assert of.view.device.type == "cpu"


def test_states_are_loaded_into_another_metric() -> None:
    of = bench("timm_vit")
    running, other = Running("mean_iou", of.view), Running("mean_iou", of.view)
    for metric in (running, other):
        metric.persistent(True)
    running.update(of.images, pixel_maps(of), masks=objects(of))
    other.load_state_dict(running.state_dict())
    assert Running.compute(other) == running.compute()


def sent(running: Running) -> list[tuple[torch.dtype, int]]:
    """Precision and number of dimensions of what a process sends to the others."""
    kinds = []

    def gathered(state: Tensor, group: object) -> list[Tensor]:
        kinds.append((state.dtype, state.ndim))
        return [state, state]

    running.sync(dist_sync_fn=gathered, distributed_available=lambda: True)
    running.unsync()
    return kinds


def test_a_process_without_images_sends_states_like_those_of_the_others() -> None:
    """All processes must send tensors of one precision and number of dimensions."""
    of = bench("timm_vit")
    for metric in ("energy_pointing_game", "mean_iou"):
        busy, idle = Running(metric, of.view), Running(metric, of.view)
        busy.update(of.images, pixel_maps(of), masks=objects(of))
        kinds = [sent(running) for running in (busy, idle)]
        assert kinds[0] == kinds[1]
        assert Running.compute(idle)["n"] == 0


@pytest.mark.full
def test_processes_compute_together_although_one_has_no_images(tmp_path: Path) -> None:
    of = bench("timm_vit")
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "meeting"), str(rank), str(has_images)],
            cwd=root, stdout=subprocess.PIPE, text=True,
        )
        for rank, has_images in enumerate((1, 0))
    ]  # fmt: skip
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    for metric, line in zip(("energy_pointing_game", "mean_iou"), outputs[0].splitlines(), strict=True):
        running = Running(metric, of.view)
        running.update(of.images, pixel_maps(of), masks=objects(of))
        assert json.loads(line) == pytest.approx(running.compute())
