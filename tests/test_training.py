"""Training of explainers: the objective, interruptions, what it leaves alone, errors."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from tests.common import noise
from tests.families import FAMILIES, Family, randomize
from tests.helpers import assert_same_state, relative, state_of, viewed
from tests.oracles import shapley, tis
from torch import Tensor, nn

import vitrail
from vitrail import training
from vitrail.core.parts import tensors_of
from vitrail.data.base import Example, Listed
from vitrail.errors import VitrailError
from vitrail.methods.registry import build_method
from vitrail.methods.vit_shapley import Explainer
from vitrail.models.view import View
from vitrail.training import Game, Settings, Trainable, Training, shapley_sizes, shuffled, train_explainer

SMALL = Settings(steps=6, batch=4, subsets=16, hidden=16, blocks=1)


class Pictures(Listed):
    """Random pictures."""

    name = "pictures"

    def __init__(self, count: int = 12, broken: int | None = None) -> None:
        self._ids, self.broken = [str(i) for i in range(count)], broken

    def load(self, position: int) -> Example:
        if position == self.broken:
            raise VitrailError(f"cannot read picture {position}.")
        return Example(self._ids[position], noise(32, 32, position))


def tiny(dtype: torch.dtype = torch.float32, **options: Any) -> View:
    return vitrail.wrap(FAMILIES["timm_vit"].build(dtype), **options)


def train(view: View, out: Path, settings: Settings = SMALL, count: int = 12, **options: Any) -> training.Report:
    return train_explainer(view, Pictures(count), out, settings, **options)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "explainer.safetensors"


# The objective


class Table(nn.Module):
    """An explainer whose values (B, N, K) are its parameters."""

    def __init__(self, empty: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.card = SimpleNamespace(layers=(0,))
        self.values, self.empty = nn.Parameter(torch.zeros(shape)), empty.float()

    def forward(self, *_: Any) -> Tensor:
        return self.values


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_minimum_of_the_objective_are_the_shapley_values(
    pool: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five patches, with all subsets: each size as often as the kernel has it, its subsets equally often."""
    options = {"img_size": (8, 40), "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    make = functools.partial(timm.create_model, "vit_base_patch16_224", global_pool=pool, **options)
    family = Family("five", make, (8, 40), (1, 5), 1, "timm")
    module = family.build()
    view, image = vitrail.wrap(module), torch.randn(1, 3, 8, 40, generator=torch.Generator().manual_seed(1))
    every = torch.tensor(list(itertools.permutations(range(5))))
    monkeypatch.setattr(training, "GROUP", len(every))
    monkeypatch.setattr(training, "shapley_sizes", lambda *_: [1, 1, 1, 2, 2, 3, 3, 4, 4, 4])  # 1 / (k (5 − k))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: every[:, None].float())
    run = Training(view, Pictures(), out, SMALL, workers=0, watch=lambda *_: None)
    game = Game(view)
    run.explainer = Table(view.probabilities(game.nothing())[0], (1, 5, 3))  # type: ignore[assignment]
    optimizer = torch.optim.LBFGS(run.explainer.parameters(), max_iter=6, line_search_fn="strong_wolfe")

    def error() -> Tensor:
        optimizer.zero_grad()
        loss = run.errors(game, image, torch.Generator())[0]
        loss.backward()
        return loss

    optimizer.step(error)
    full = view.probabilities(view.logits(image))[0] - run.explainer.empty
    for target in range(3):
        exact = shapley.exact(
            lambda present, target=target: float(
                tis.scores(family, module, image, present[None], target, "probability")
            ),
            5,
        )
        learned = run.explainer.values[0, :, target].detach()
        learned = learned + (full[target] - learned.sum()) / 5
        assert relative(learned, exact) < 1e-4
        assert float(exact.std()) > 1e-3


def test_sizes_follow_the_shapley_kernel() -> None:
    patches = 7
    sizes = torch.tensor(shapley_sizes(patches, 40_000, torch.Generator().manual_seed(0)))
    shares = torch.bincount(sizes, minlength=patches)[1:] / len(sizes)
    # all subsets of a size together
    kernel = [shapley.shapley_kernel(patches, k) * len(subsets_of(patches, k)) for k in range(1, patches)]
    expected = torch.tensor(kernel) / sum(kernel)
    assert (shares - expected).abs().max() < 0.01
    assert shapley_sizes(2, 3, torch.Generator()) == [1, 1, 1]


def subsets_of(patches: int, size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(patches), size))


def test_every_epoch_has_all_images_in_another_order() -> None:
    epochs = [
        list(itertools.chain.from_iterable(itertools.islice(shuffled(range(5, 12), 3, 1), a, a + 3))) for a in (0, 3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(5, 12))
    assert epochs[0] != epochs[1]


# Training


def test_training_lowers_the_error(out: Path) -> None:
    view, r2 = tiny(), []
    settings = Settings(steps=60, batch=8, subsets=16, hidden=32, blocks=1, rate=3e-3)
    report = train(view, out, settings, count=16, watch=lambda _, value: r2.append(value))
    assert len(r2) == 20
    assert report.r2 == r2[-1] > max(0.02, r2[0])
    card = Explainer.read(out).card
    assert (card.model, card.grid, card.training["steps"]) == (view.name, view.grid, 60)
    assert card.training["r2"] == report.r2
    assert card.training["data"] == "pictures (16 images)"
    assert not Path(f"{out}.state").exists()
    result = build_method("vit_shapley", view, explainer=str(out)).explain(torch.randn(1, 3, 32, 32), 2)
    torch.testing.assert_close(result.map.sum((1, 2)), result.extras["score"] - result.extras["score_baseline"])


@pytest.mark.parametrize("surrogate_steps", [0, 3])
def test_an_interrupted_training_is_resumed_bit_for_bit(surrogate_steps: int, out: Path, tmp_path: Path) -> None:
    settings = Settings(**{**vars(SMALL), "surrogate_steps": surrogate_steps})
    whole = tmp_path / "whole.safetensors"
    report = train(tiny(), whole, settings)

    def interrupt(last: int, step: int, _: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    for last in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), out, settings, watch=functools.partial(interrupt, last))
        assert Path(f"{out}.state").exists()
        assert not out.exists()
    steps: list[int] = []
    assert train(tiny(), out, settings, watch=lambda step, _: steps.append(step)) == report
    assert steps == [6]
    resumed, undisturbed = Explainer.read(out), Explainer.read(whole)
    assert resumed.card == undisturbed.card
    assert resumed.checksum() == undisturbed.checksum()


def test_an_interrupt_within_a_step_saves_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), out)
    assert not Path(f"{out}.state").exists()


@pytest.mark.parametrize("surrogate_steps", [0, 2])
def test_nothing_else_is_changed(surrogate_steps: int, out: Path) -> None:
    view = tiny()
    view.module.train()
    before = state_of(view.module)
    with torch.no_grad():  # the caller's modes do not matter
        train(view, out, Settings(**{**vars(SMALL), "surrogate_steps": surrogate_steps}))
    assert_same_state(before, state_of(view.module))


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_gap", "timm_headless_token", "timm_siglip", "timm_dinov3"])
def test_the_surrogate_learns_and_is_a_copy(name: str, out: Path) -> None:
    view = viewed(name, torch.float32)[2]
    before = {key: tensor.clone() for key, tensor in view.module.state_dict().items()}
    settings = Settings(**{**vars(SMALL), "surrogate_steps": 3, "surrogate_rate": 1e-3})
    run = Training(view, Pictures(), out, settings, workers=0, watch=lambda *_: None)
    surrogate = run.fit_surrogate()
    trained, start = ([*tensors_of(parts)] for parts in (surrogate.architecture(), Trainable(view).parts))
    assert not any(weight.requires_grad for weight in trained)
    pairs = [pair for pair in zip(start, trained, strict=True) if pair[0].numel()]
    assert not any(torch.equal(*pair) for pair in pairs), "gradients reach all weights of the copy"
    assert all(torch.equal(tensor, before[key]) for key, tensor in view.module.state_dict().items())
    assert all(parameter.grad is None for parameter in view.module.parameters())
    image = torch.randn(1, 3, *view.size)
    assert not torch.allclose(surrogate.logits(image), view.logits(image))


def test_the_surrogate_predicts_better_from_some_of_the_patches(out: Path) -> None:
    view = tiny()
    settings = Settings(**{**vars(SMALL), "batch": 8, "surrogate_steps": 40, "surrogate_rate": 1e-3})
    run = Training(view, Pictures(), out, settings, workers=0, watch=lambda *_: None)
    surrogate = run.fit_surrogate()
    (images,) = run.load([run.training])
    keep = torch.rand(len(images), 16, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :6]
    with torch.no_grad():
        expected = view.probabilities(view.logits(images))
        errors = [
            float(-(expected * view.log_probabilities(network.encode(network.embed(images), keep))).sum(1).mean())
            for network in (view, surrogate)
        ]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("case", ["double", "half", "one output", "sigmoid"])
def test_other_precisions_and_heads(case: str, out: Path) -> None:
    if case == "one output":
        module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=1)
        randomize(module, 0)
        view = vitrail.wrap(module)
    elif case == "sigmoid":
        view = tiny(output="sigmoid")
    else:
        view = tiny(torch.float64 if case == "double" else torch.bfloat16)
    train(view, out, Settings(**{**vars(SMALL), "steps": 2, "surrogate_steps": 2}))
    assert build_method("vit_shapley", view, explainer=str(out)).attribute(torch.randn(1, 3, 32, 32)).isfinite().all()


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, but got 0"),
        ({"batch": -1}, "batch must be at least 1, but got -1"),
        ({"subsets": 20}, "subsets must be a multiple of 16, but got 20"),
        ({"hidden": 40}, "hidden must be at most 32 or a multiple of it, but got 40"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"surrogate_steps": -1}, "surrogate_steps must not be negative, but got -1"),
        ({"rate": 0.0}, "rate must be a positive number, but got 0.0"),
        ({"rate": float("nan")}, "rate must be a positive number, but got nan"),
        ({"surrogate_rate": float("inf")}, "surrogate_rate must be a positive number"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        Settings(**settings)


def test_what_cannot_be_trained(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    swin = vitrail.wrap(copy.deepcopy(viewed("timm_swin", torch.float32)[1]))
    single = vitrail.wrap(timm.create_model("vit_tiny_patch16_224", img_size=16, depth=1, num_classes=5))
    for call, message in (
        (lambda: train(swin, out), "no fixed tokens"),
        (lambda: train(single, out), "has a single patch"),
        (lambda: train(tiny(), out, count=1), "pictures has 1 images: training needs at least two"),
        (lambda: train(tiny(), tmp_path), "cannot write the explainer to .*: expected a file name"),
        (lambda: train(tiny(), tmp_path / "file" / "x.safetensors"), "cannot write the explainer to"),
        (lambda: train(tiny(), out, Settings(**{**vars(SMALL), "rate": 1e30})), "has diverged after .* smaller rate"),
    ):
        with pytest.raises(VitrailError, match=message):
            call()
    assert not out.exists()
    assert not Path(f"{out}.state").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_one_sentence(workers: int, out: Path) -> None:
    with pytest.raises(VitrailError, match=r"^cannot read picture 3\.$"):
        train_explainer(tiny(), Pictures(broken=3), out, SMALL, workers=workers)


def test_running_out_of_memory_is_one_sentence(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Game, "encode", full)
    with pytest.raises(VitrailError, match="a training step does not fit in memory"):
        train(tiny(), out)


def test_states_of_other_trainings(out: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), out, watch=interrupt)
    state = Path(f"{out}.state")
    other = vitrail.wrap(FAMILIES["timm_vit"].build(seed=1))
    for call in (
        lambda: train(tiny(), out, Settings(**{**vars(SMALL), "seed": 1})),
        lambda: train(tiny(), out, count=13),
        lambda: train(other, out),
    ):
        with pytest.raises(
            VitrailError, match="belongs to a training with another model, other data or other settings"
        ):
            call()
    content = torch.load(state, weights_only=True)
    for damaged in ({**content, "explainer": {"step": 1}}, {**content, "explainer": 3}, [1]):
        torch.save(damaged, state)
        with pytest.raises(VitrailError, match=r"\.state is damaged: delete it to train from the start"):
            train(tiny(), out)
    state.write_bytes(b"nothing of use")
    with pytest.raises(VitrailError, match=r"\.state is damaged: delete it to train from the start"):
        train(tiny(), out)
