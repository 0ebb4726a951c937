"""What many tests need: views of the tiny families, and a snapshot of everything a call must not change."""

from __future__ import annotations

import csv
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import families
from tests.families import Family
from torch import Tensor, nn

import vitrail
from vitrail.engine.requests import Asking, Batch, Request, Traced
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.methods.masking import Subject, features_of
from vitrail.methods.vit_cx import VitCx
from vitrail.methods.vit_shapley import Card, Explainer
from vitrail.models.detection import Detector
from vitrail.models.view import View
from vitrail.targets import Target
from vitrail.training import Game

DOUBLE = torch.float64
FOLDER = tempfile.TemporaryDirectory()  # of explainers


@functools.cache
def viewed(name: str, dtype: torch.dtype = DOUBLE) -> tuple[Family, nn.Module, View]:
    """A family, its tiny module and the view of it; shared between tests, which must leave it as it was."""
    family = families.find(name)
    module = family.build(dtype)
    return family, module, wrapped(name, module)


def sure_detector() -> Detector:
    """A detector of images of 32 × 48 pixels, sure of its classes."""
    module = families.yolos(dtype=torch.float32)
    with torch.no_grad():
        module.class_labels_classifier.layers[-1].weight *= 30
    view = vitrail.wrap(module)
    assert isinstance(view, Detector)
    return view


def wrapped(name: str, module: nn.Module) -> View:
    """The view of a module of a family."""
    family = families.find(name)
    options: dict[str, Any] = family.wrap(module)
    if name.startswith("torchvision_swin") or name in families.BLACK_BOXES:  # they take any size
        options["img_size"] = family.image_size
    return vitrail.wrap(module, **options)


def pairwise(pairs: Iterable[tuple[Hashable, Hashable]], each: int = 1) -> set[tuple[Hashable, Hashable]]:
    """Few of all pairs: each first member with ``each`` of its second ones, and each second with one first at least."""
    partners: dict[Hashable, list[Hashable]] = {}
    for first, second in pairs:
        partners.setdefault(first, []).append(second)
    uses: Counter[Hashable] = Counter()
    chosen: dict[tuple[Hashable, Hashable], None] = {}
    for first, seconds in partners.items():
        for second in sorted(seconds, key=lambda item: uses[item])[:each]:
            chosen[first, second] = None
            uses[second] += 1
    for first, seconds in partners.items():
        for second in seconds:
            if not uses[second]:
                chosen[first, second] = None
                uses[second] += 1
    return set(chosen)


def crossed(
    pairs: Iterable[tuple[Any, Any]], each: int = 1, always: Callable[[Any, Any], bool] | None = None
) -> list[Any]:
    """Pairs as parameters of a test: those that ``always`` or `pairwise` keeps, or all for `make test-all`."""
    pairs = list(pairs)
    chosen = pairwise((pair for pair in pairs if always is None or not always(*pair)), each)
    kept = [pair for pair in pairs if families.FULL or pair in chosen or (always and always(*pair))]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in kept]


def in_both_precisions(names: Iterable[str]) -> list[Any]:
    """(family, dtype): all families in double precision; in single precision one of six, or all."""
    names = list(names)
    return [(name, DOUBLE) for name in names] + [(name, torch.float32) for name in families.few(names, 6)]


@functools.lru_cache(maxsize=1)
def refusals() -> dict[tuple[str, str], str]:
    """(method, family) → why the method refuses it; "hierarchical" stands for all such families, "any" for the rest."""
    with (Path(__file__).parent / "methods" / "refusals.csv").open(encoding="utf-8") as file:
        return {(row["method"], row["family"]): row["reason"] for row in csv.DictReader(file)}


def random_explainer(view: View, seed: int = 0, hidden: int = 64, blocks: int = 2) -> Explainer:
    """An explainer of a model, with every parameter drawn."""
    with torch.random.fork_rng(devices=[]):
        explainer = Explainer(Card.of(view, hidden=hidden, blocks=blocks), view.num_outputs).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in explainer.parameters():
            scale = 1 / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        logits = Game(view).nothing()
        explainer.probe.copy_(logits[0])
        explainer.empty.copy_(view.probabilities(logits)[0])
    return explainer


@functools.cache
def required_parameters(method: str, view: View) -> dict[str, str]:
    """The parameters without which a method refuses a model that it can explain."""
    if method != "vit_shapley":
        return {}
    path = Path(FOLDER.name) / f"{id(view)}.safetensors"
    random_explainer(view).save(path)
    return {"explainer": str(path)}


def batch(name: str, size: int = 3, dtype: torch.dtype = DOUBLE) -> Tensor:
    return families.images(name, size, dtype=dtype)


def answered(request: Request) -> Any:
    """What the scheduler answers."""

    def asker() -> Asking[Any]:
        return (yield request)

    return Scheduler().run([asker()])[0]


def traced(method: Any, images: Tensor, target: Any, specs: Sequence[TraceSpec] | None = None) -> Trace:
    """The trace of a white-box method, or of these specifications."""
    shared, asked = (
        Batch(method.model, method.model.check_images(images)),
        Target(torch.as_tensor(target).expand(len(images))),
    )
    traces = [answered(Traced(shared, asked, spec)) for spec in (method.needs() if specs is None else specs)]
    return traces[0]


def subject(method: Any, image: Tensor, target: int = 0) -> Subject:
    """An image as a mask method gets it."""
    trace = traced(method, image, target)
    return Subject(image=image, logits=trace.logits, target=Target(torch.tensor([target])), trace=trace, row=0)


def features(view: View, image: Tensor, layer: str = "norm1") -> Tensor:
    """(D, h, w): the features that mask methods take masks from."""
    return features_of(subject(VitCx(view, layer=layer), image), view, layer)  # type: ignore[arg-type]


def random_keep(family: Family, size: int, kept: int, seed: int = 0) -> Tensor:
    """(B, kept): a different set of patches for each image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(family.patches, generator=generator)[:kept] for _ in range(size)])


# Some maps are exactly zero but for rounding (see docs on what LayerNorm cancels): there only rounding may differ.
ROUNDING = 1e-11


def relative(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((result - expected).abs().max() / expected.abs().max())


def close(result: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no difference is above ``tolerance``, relative to the largest expected value, or above rounding."""
    return float((result - expected).abs().max()) < max(tolerance * float(expected.abs().max()), ROUNDING)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What a caller may have set; none of it may change a result.
MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything about a model and the process that a call must leave alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    simple = (bool, int, float, str, tuple, type(None))
    return {
        "tensors": {n: t.detach().clone() for n, t in [*module.named_parameters(), *module.named_buffers()]},
        "identity": {n: (id(t), t.data_ptr(), t._version) for n, t in module.named_parameters()},
        "requires_grad": {n: p.requires_grad for n, p in module.named_parameters()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
        "hooks": {n: [list(getattr(m, h)) for h in hooks] for n, m in module.named_modules()},
        "flags": {n: {k: v for k, v in vars(m).items() if isinstance(v, simple)} for n, m in module.named_modules()},
        "torch_random": torch.get_rng_state().clone(),
        "numpy_random": np.random.get_state()[1].copy(),
        "python_random": random.getstate(),
        "modes": modes(),
    }


def modes() -> dict[str, Any]:
    """The settings of torch that hold for the thread or the process."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")},
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "tf32": torch.backends.cudnn.allow_tf32,
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
    }


def assert_same_state(before: Any, after: Any, where: str = "state") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same_state(before[key], after[key], f"{where}.{key}")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after), where
    else:
        assert before == after, where
