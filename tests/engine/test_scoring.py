"""The scoring engine: chunks, images together, reduced precision, noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from scipy.stats import kstest, spearmanr
from tests.helpers import DOUBLE, batch, relative, viewed
from torch import Tensor

import vitrail
from vitrail.engine.noise import noise
from vitrail.engine.scoring import Pictures, Scorer, score
from vitrail.methods.registry import build_method, get_method
from vitrail.progress import watched

TARGET = 1


def explained(name: str, method: str, **params: Any) -> Tensor:
    return build_method(method, viewed(name)[2], **params).attribute(batch(name, 1), TARGET)[0]


def test_chunks_do_not_change_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, params in (("tis", {"masks": 20}), ("vit_cx", {}), ("rise", {"masks": 20}), ("atman", {})):
        whole = explained("timm_vit", method, **params)
        monkeypatch.setattr("vitrail.engine.scoring.CPU_CHUNK", 3)
        assert relative(explained("timm_vit", method, **params), whole) < 1e-9
        monkeypatch.undo()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 9 bytes."),
        MemoryError(),
    ],
)
def test_running_out_of_memory_halves_the_chunk_and_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    view = viewed("timm_vit")[2]
    asked: list[int] = []

    def make(part: slice) -> Tensor:
        asked.append(part.stop - part.start)
        if asked[-1] > 5:
            raise error
        return torch.stack([torch.full((3, *view.size), float(i), dtype=DOUBLE) for i in range(part.start, part.stop)])

    request, chunks = Scorer(view=view, target=0).images(40, make), []
    (found,) = score([request], chunks)
    assert max(asked) > 5 >= max(chunks)
    assert len(found) == 40
    monkeypatch.setattr("vitrail.engine.scoring.CPU_CHUNK", 1)
    assert relative(found, score([request])[0]) < 1e-9


QUICK = {"tis": {"masks": 40}, "vit_cx": {}, "rise": {"masks": 60}, "score_cam": {}, "lime": {"samples": 60},
         "hsic": {"samples": 60}, "kernel_shap": {"samples": 60}, "atman": {}, "pami": {}}  # fmt: skip


@pytest.mark.parametrize("method", QUICK)
def test_images_explained_together_are_those_explained_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that straddle images, and images that ask for different numbers of variants."""
    monkeypatch.setattr("vitrail.engine.scoring.CPU_CHUNK", 7)
    chosen = build_method(method, viewed("timm_vit")[2], **QUICK[method])
    images, targets = batch("timm_vit"), torch.tensor([0, 3, 1])
    whole = chosen.explain(images, targets)
    for i in range(3):
        alone = chosen.explain(images[i : i + 1], targets[i : i + 1])
        assert relative(whole.map[i], alone.map[0]) < 1e-9
        assert all(torch.allclose(whole.extras[n][i], alone.extras[n][0], atol=1e-9) for n in alone.extras)


@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "torchvision_swin", "hf_swin"])
def test_reduced_precision_keeps_head_and_logits_full(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = viewed(name, torch.float32)[2], batch(name, 4, torch.float32)
    request = Pictures(view=view, count=4, length=9, about=(0,), reduced=True, make=lambda part: image[part])
    exact = score([request])[0]
    monkeypatch.setattr("vitrail.engine.scoring.gains", lambda view: True)
    rounded = score([request])[0]
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, rounded.bfloat16().float()), "logits must not be rounded to bf16"
    assert 0 < relative(rounded, exact) < 0.05
    assert not torch.equal(rounded, exact), "bf16 was not used"


@pytest.mark.parametrize("method", [name for name in QUICK if "precision" in get_method(name).parameters()])
def test_ranks_bear_reduced_precision(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = vitrail.load("scenes"), vitrail.data.Scenes(1, seed=5)[0].image
    pixels = view.preprocess(Image.fromarray(image))[None]
    params = {**QUICK[method], **({"masks": 256} if "masks" in QUICK[method] else {})}
    full = build_method(method, view, precision="full", **params).attribute(pixels)
    exact = build_method(method, view, **params).attribute(pixels)
    assert torch.equal(full, exact), "a CPU always scores in full precision"
    monkeypatch.setattr("vitrail.engine.scoring.gains", lambda view: True)
    rounded = build_method(method, view, **params).attribute(pixels)
    assert not torch.equal(rounded, exact)
    assert spearmanr(rounded.flatten(), exact.flatten()).statistic > 0.999


def test_small_differences_are_never_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.engine.scoring.gains", lambda view: True)
    view, image = viewed("timm_vit", torch.float32)[2], batch("timm_vit", 1, torch.float32)
    for method in ("occlusion", "kernel_shap", "atman", "hsic"):
        found = build_method(method, view).attribute(image, TARGET)
        monkeypatch.undo()
        assert torch.equal(found, build_method(method, view).attribute(image, TARGET))
        monkeypatch.setattr("vitrail.engine.scoring.gains", lambda view: True)


@pytest.mark.parametrize(("method", "params", "asked"), [
    ("kernel_shap", {"samples": 30}, 32), ("lime", {"samples": 30}, 30), ("hsic", {"samples": 30}, 30),
    ("rise", {"masks": 30}, 30), ("occlusion", {}, 17), ("tis", {"masks": 15, "ratio": (0.5, 0.25)}, 30),
])  # fmt: skip
def test_one_bar_covers_subsets_of_all_sizes(method: str, params: dict[str, Any], asked: int) -> None:
    told: list[tuple[str, int, int]] = []
    with watched(lambda *step: told.append(step)):
        explained("timm_vit", method, space="tokens", **params)
    assert {(name, total) for name, _, total in told} == {(method, asked)}
    done = [step for _, step, _ in told]
    assert done == sorted(done)
    assert (done.count(0), done[-1]) == (1, asked)


def test_noise_is_noise_and_depends_on_seed_and_number_alone() -> None:
    cpu = torch.device("cpu")
    normal = noise("normal", (3, 101, 7), range(40), 0, cpu)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.var()) - 1) < 0.02
    assert kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    uniform = noise("uniform", (5000,), range(20), 3, cpu)
    assert kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    assert 0 <= uniform.min() <= uniform.max() < 1
    correlation = torch.corrcoef(uniform) - torch.eye(20)
    assert correlation.abs().max() < 5 / 5000**0.5
    shifted_by_one = torch.corrcoef(torch.stack([uniform[0, :-1], uniform[0, 1:], uniform[1, 1:]]))
    assert (shifted_by_one - torch.eye(3)).abs().max() < 5 / 5000**0.5
    assert torch.equal(noise("uniform", (5000,), range(7, 9), 3, cpu), uniform[7:9])
    assert not torch.equal(noise("uniform", (5000,), range(7, 9), 4, cpu), uniform[7:9])
