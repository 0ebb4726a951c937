"""The scheduler: chunks, images together, shared traces, failures kept apart, reduced precision, forward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from tests.helpers import DOUBLE, batch, close, relative, viewed
from torch import Tensor

import vitrail
from vitrail.calls import split_call
from vitrail.core.precision import HALF
from vitrail.engine import scheduler as scheduling
from vitrail.engine.requests import Asking, Batch, Logits, Pictures, Traced, concurrently
from vitrail.engine.scheduler import Job, Scheduler, merged
from vitrail.engine.trace import TraceSpec
from vitrail.methods.registry import build_method, get_method, supported_methods
from vitrail.models.view import View
from vitrail.progress import watched
from vitrail.targets import ClassScore, Target

TARGET = 1


def asking(request: Any) -> Asking[Any]:
    return (yield request)


def answered(request: Any, scheduler: Scheduler | None = None) -> Any:
    return (scheduler or Scheduler()).run([asking(request)])[0]


def pictures(view: View, count: int, make: Any, **options: Any) -> Pictures:
    options = {"reading": ClassScore(), "about": (0,), **options}
    return Pictures(view=view, count=count, length=view.num_tokens, make=make, **options)


def explained(name: str, method: str, **params: Any) -> Tensor:
    return build_method(method, viewed(name)[2], **params).attribute(batch(name, 1), TARGET)[0]


def test_chunks_do_not_change_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, params in (("tis", {"masks": 20}), ("vit_cx", {}), ("rise", {"masks": 20}), ("atman", {})):
        whole = explained("timm_vit", method, **params)
        monkeypatch.setattr("vitrail.engine.scheduler.CPU_CHUNK", 3)
        assert relative(explained("timm_vit", method, **params), whole) < 1e-9
        monkeypatch.undo()


def test_running_out_of_memory_halves_the_chunk_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    view = viewed("timm_vit")[2]
    asked: list[int] = []

    def make(part: slice) -> Tensor:
        asked.append(part.stop - part.start)
        if asked[-1] > 5:
            raise torch.OutOfMemoryError
        return torch.stack([torch.full((3, *view.size), float(i), dtype=DOUBLE) for i in range(part.start, part.stop)])

    scheduler = Scheduler()
    scores = answered(pictures(view, 40, make), scheduler)
    assert max(asked) > 5 >= (scheduler.smallest_chunk or 0) > 0
    assert len(scores) == 40
    monkeypatch.setattr("vitrail.engine.scheduler.CPU_CHUNK", 1)
    assert relative(scores, answered(pictures(view, 40, make))) < 1e-9


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_a_trace_that_does_not_fit_is_made_of_halves(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 3)
    whole = {name: build_method(name, view).attribute(images) for name in ("gen_att", "decompx.skipplus", "full_grad")}
    sizes: list[int] = []
    make = scheduling.make_traces

    def cramped(view: View, parts: Any, images: Tensor, *args: Any) -> Any:
        sizes.append(len(images))
        if len(images) > 1:
            raise error
        return make(view, parts, images, *args)

    monkeypatch.setattr(scheduling, "make_traces", cramped)
    for name, maps in whole.items():
        assert close(build_method(name, view).attribute(images), maps, 1e-9)
    assert sizes[:4] == [3, 1, 2, 1]


def test_one_image_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(scheduling, "make_traces", full)
    with pytest.raises(vitrail.VitrailError, match="one image at a time does not fit in memory"):
        build_method("gen_att", viewed("timm_vit")[2]).attribute(batch("timm_vit", 2))


PLAIN_KIND = TraceSpec(frozenset()).kind
QUICK = {"tis": {"masks": 40}, "vit_cx": {}, "rise": {"masks": 60}, "score_cam": {}, "lime": {"samples": 60},
         "hsic": {"samples": 60}, "kernel_shap": {"samples": 60}, "atman": {}, "pami": {},
         "posterior": {"masks": 40}, "shapley": {"permutations": 4}}  # fmt: skip


@pytest.mark.parametrize("method", QUICK)
def test_images_explained_together_are_those_explained_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that straddle images, and images that ask for different numbers of variants."""
    monkeypatch.setattr("vitrail.engine.scheduler.CPU_CHUNK", 7)
    chosen = build_method(method, viewed("timm_vit")[2], **QUICK[method])
    images, targets = batch("timm_vit"), torch.tensor([0, 3, 1])
    whole = chosen.explain(images, targets)
    for i in range(3):
        alone = chosen.explain(images[i : i + 1], targets[i : i + 1])
        assert relative(whole.map[i], alone.map[0]) < 1e-9
        assert all(torch.allclose(whole.extras[n][i], alone.extras[n][0], atol=1e-9) for n in alone.extras)


@pytest.mark.parametrize("name", ["timm_vit", "timm_swin", "torchvision_swin", "hf_swin"])
def test_reduced_precision_keeps_head_and_logits_full(name: str) -> None:
    view, image = viewed(name, torch.float32)[2], batch(name, 4, torch.float32)
    request = Pictures(view=view, count=4, length=9, about=(0,), products=HALF, make=lambda part: image[part])
    exact, rounded = answered(replace(request, products=None)), answered(request)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, rounded.half().float()), "logits must not be rounded to half precision"
    assert 0 < relative(rounded, exact) < 0.05
    assert not torch.equal(rounded, exact), "half precision was not used"


@pytest.mark.parametrize(
    "method",
    [
        name
        if name in ("tis", "rise", "posterior")
        else pytest.param(name, marks=pytest.mark.full)  # fp16 is slow on a CPU
        for name in QUICK
        if "precision" in get_method(name).parameters()
    ],
)
def test_ranks_bear_reduced_precision(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = vitrail.load("scenes"), vitrail.data.Scenes(1, seed=5)[0].image
    pixels = view.preprocess(Image.fromarray(image))[None]
    params = {**QUICK[method], **({"masks": 96} if "masks" in QUICK[method] else {})}
    params |= {"shifts": (4,)} if method == "pami" else {}
    full = build_method(method, view, precision="full", **params).attribute(pixels)
    exact = build_method(method, view, **params).attribute(pixels)
    assert torch.equal(full, exact), "VITRAIL_PRECISION=full"
    monkeypatch.setattr(View, "gains_from_half", True)
    rounded = build_method(method, view, **params).attribute(pixels)
    assert not torch.equal(rounded, exact)
    assert spearmanr(rounded.flatten(), exact.flatten()).statistic > 0.999


@pytest.mark.parametrize("method", ["trans_att", "partial_lrp", "lrp", "grad_cam_pp.skipplus"])
def test_sums_that_all_but_cancel_are_never_rounded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = viewed("timm_vit", torch.float32)[2], batch("timm_vit", 1, torch.float32)
    assert "precision" not in build_method(method, view).params
    computed = build_method(method, view).attribute(image, TARGET)
    monkeypatch.setattr(View, "gains_from_half", True)
    assert torch.equal(computed, build_method(method, view).attribute(image, TARGET))


@pytest.mark.parametrize(("method", "params", "asked"), [
    ("kernel_shap", {"samples": 30}, 32), ("lime", {"samples": 30}, 30), ("hsic", {"samples": 30}, 30),
    ("rise", {"masks": 30}, 30), ("occlusion", {}, 16), ("tis", {"masks": 15, "ratio": (0.5, 0.25)}, 30),
])  # fmt: skip
def test_one_bar_covers_subsets_of_all_sizes(method: str, params: dict[str, Any], asked: int) -> None:
    steps: list[tuple[str, int, int]] = []
    with watched(lambda *step: steps.append(step)):
        explained("timm_vit", method, space="tokens", **params)
    assert {(name, total) for name, _, total in steps} == {(method, asked)}
    done = [step for _, step, _ in steps]
    assert done == sorted(done)
    assert (done.count(0), done[-1]) == (1, asked)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[TraceSpec]:
    """The specifications of all traces that are made."""
    specs: list[TraceSpec] = []
    make = scheduling.make_traces

    def spy(view: View, parts: Any, images: Tensor, target: Target, spec: TraceSpec) -> Any:
        specs.append(spec)
        return make(view, parts, images, target, spec)

    monkeypatch.setattr(scheduling, "make_traces", spy)
    return specs


WHITE_BOX = ("gen_att", "raw_attention", "rollout", "decompx", "decompx.skipplus", "vtranm", "attn_lrp", "grad_cam",
             "partial_lrp", "alti", "full_grad_plus", "gradient.plus", "att_cat", "gen_att.rollout")  # fmt: skip


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("method", WHITE_BOX)
def test_a_white_box_explanation_is_one_forward_pass(
    method: str, half: bool, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predicted class and its probability come from it too."""
    view = vitrail.load("scenes")
    monkeypatch.setattr(View, "gains_from_half", half)
    forwards.clear()  # loading compares the view with its module
    vitrail.explain(view, vitrail.data.open_data("scenes:1")[0].image, method)
    assert forwards == [1]


@pytest.mark.parametrize("half", [False, True])
def test_relevance_of_pixels_takes_one_forward_pass_more(
    half: bool, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = vitrail.load("scenes")
    monkeypatch.setattr(View, "gains_from_half", half)
    forwards.clear()
    vitrail.explain(view, vitrail.data.open_data("scenes:1")[0].image, "epsilon_lrp")
    assert forwards == [1, 1]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("method", "masks"),
    [("tis(masks=24)", 24), ("vit_cx", None), ("rise(masks=20)", 20), ("rise(masks=20, space=tokens)", 20),
     ("lime(samples=20)", 20), ("kernel_shap(samples=20, space=tokens)", 22), ("score_cam", None), ("atman", 65),
     ("occlusion(space=tokens)", 64), ("hsic(samples=16)", 16), ("posterior(masks=24)", 24),
     ("posterior(masks=24, space=tokens)", 24)],
)  # fmt: skip
def test_mask_methods_make_one_forward_pass_besides_their_masks(
    method: str, masks: int | None, half: bool, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = vitrail.load("scenes")
    monkeypatch.setattr(View, "gains_from_half", half)
    forwards.clear()
    name, params = split_call(method)
    ex = vitrail.explain(view, vitrail.data.open_data("scenes:1")[0].image, name, **params)
    if name == "vit_cx":
        masks = 2 * int(ex.extras["masks"])
    expected = 128 if name == "score_cam" else masks
    again = half and name == "occlusion"  # the whole image, in the precision of the masked ones
    assert sum(forwards) == (expected or 0) + 1 + again


def test_logits_in_full_precision_are_not_those_of_a_trace_in_half(forwards: list[int]) -> None:
    view, images = viewed("timm_vit", torch.float32)[2], batch("timm_vit", 2, torch.float32)
    shared, target = Batch(view, images), Target(torch.tensor([1, 0]))
    spec = TraceSpec.of({"x", "gx"}, [0, 1], reduced=True)
    expected = answered(Logits(Batch(view, images)))
    forwards.clear()
    requests = [Traced(shared, target, spec), Logits(shared, reduced=True), Logits(shared)]
    trace, reduced, full = Scheduler().run([asking(request) for request in requests])
    assert torch.equal(reduced, trace.logits)
    assert torch.equal(full, expected)
    assert 0 < relative(reduced, full) < 0.01
    assert forwards == [2, 2]
    assert torch.equal(answered(Logits(shared, reduced=True)), full), "the better where both are known"


def test_methods_that_keep_different_things_share_one_trace_of_a_kind(traced: list[TraceSpec]) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    names = [n for n in supported_methods(view) if (m := build_method(n, view)).needs() and sum(m.passes()) < 20]
    methods = [build_method(name, view) for name in names]
    target = torch.tensor([1, 0])
    alone = [method.attribute(images, target) for method in methods]
    traced.clear()
    shared, together = Batch(view, view.check_images(images)), Target(target)
    results = Scheduler().run([method.explained(shared, together) for method in methods])
    for name, result, maps in zip(names, results, alone, strict=True):
        assert close(result.map, maps, 1e-8), name
    kinds = [spec.kind for spec in traced if spec.backward]
    assert len(kinds) == len(set(kinds)), "one trace of each kind"
    assert PLAIN_KIND in kinds


def test_forward_values_join_whatever_trace_is_made(traced: list[TraceSpec]) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    shared, target = Batch(view, view.check_images(images)), Target()
    jobs = [build_method(name, view).explained(shared, target) for name in ("raw_attention", "decompx")]
    Scheduler().run([*jobs, asking(Logits(shared))])
    assert len(traced) == 1
    assert traced[0].rule == "frozen"


@pytest.mark.parametrize("change", ["batch", "target", "against", "rule", "output", "precise"])
def test_traces_that_differ_are_not_shared(change: str, traced: list[TraceSpec]) -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    first = Batch(view, view.check_images(images))
    target = Target(torch.tensor([1, 0]))
    spec = TraceSpec.of({"x", "gx"}, [0, 1])
    options: dict[str, Any] = {"rule": "frozen", "output": "probability", "precise": True}
    other = Traced(
        Batch(view, first.images) if change == "batch" else first,
        Target(torch.tensor([1, 0]), torch.tensor([2, 2]) if change == "against" else None)
        if change in ("target", "against")
        else target,
        TraceSpec.of({"x", "gx"}, [1], **({change: options[change]} if change in options else {})),
    )
    trace, another = Scheduler().run([asking(Traced(first, target, spec)), asking(other)])
    assert trace is not another
    assert len(traced) == (1 if change in ("target", "against") else 2), "targets share the forward pass"
    traced.clear()
    trace, another = Scheduler().run(
        [asking(Traced(first, target, spec)), asking(Traced(first, target, TraceSpec.of({"A"}, [2])))]
    )
    assert trace is another
    assert len(traced) == 1


def test_what_is_planned_is_kept_whoever_asks(traced: list[TraceSpec]) -> None:
    """A run that goes on makes the same traces, although some methods are done."""
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)
    plan = [spec for name in ("gen_att", "gradient", "decompx") for spec in build_method(name, view).needs()]
    shared = Batch(view, view.check_images(images))
    Scheduler(plan=plan).run([build_method("gradient", view).explained(shared, Target())])
    assert traced[0].keep == merged(plan)[PLAIN_KIND].keep
    assert {"A", "G", "gx"} <= traced[0].names


def test_a_failure_is_kept_apart() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)

    def broken(part: slice) -> Tensor:
        raise ValueError("broken")

    def fails_before_asking() -> Asking[None]:
        raise KeyError("early")
        yield []

    jobs = [
        Job(asking(pictures(view, 3, lambda part: images.expand(3, -1, -1, -1)[part]))),
        Job(asking(pictures(view, 3, broken))),
        Job(fails_before_asking()),
        Job(build_method("gen_att", view).explained(Batch(view, images), Target())),
    ]
    Scheduler().run_jobs(jobs)
    assert [type(job.error) for job in jobs] == [type(None), ValueError, KeyError, type(None)]
    assert jobs[0].result.shape == (3,)
    assert jobs[3].result.map.isfinite().all()
    assert all(job.seconds > 0 for job in (jobs[0], jobs[3]))
    with pytest.raises(ValueError, match="broken"):
        Scheduler().run([asking(pictures(view, 3, broken))])
    with pytest.raises(ValueError, match="broken"):
        _ = jobs[1].result


def test_requests_with_the_same_answer_are_computed_once() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)
    produced: list[int] = []

    def make(part: slice) -> Tensor:
        produced.append(part.stop - part.start)
        return images.expand(4, -1, -1, -1)[part]

    requests = [pictures(view, 4, make, same="curve") for _ in range(3)]
    answers = Scheduler().run([concurrently([asking(request) for request in requests])])[0]
    assert sum(produced) == 4
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_a_fixed_chunk_size_is_kept() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)
    sizes: list[int] = []

    def make(part: slice) -> Tensor:
        sizes.append(part.stop - part.start)
        return images.expand(10, -1, -1, -1)[part]

    answered(pictures(view, 10, make), Scheduler(chunk_size=4))
    assert sizes == [4, 4, 2]


def test_an_asker_may_ask_for_nothing() -> None:
    def silent() -> Asking[str]:
        assert (yield []) == []
        return "done"

    assert Scheduler().run([silent(), silent()]) == ["done", "done"]


def test_finished_jobs_do_not_wait_for_others() -> None:
    """Traces are shared; variants and what an asker does on its own come job by job, in chunks of that job only."""
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)
    shared, events = Batch(view, images), list[str]()

    def noted(name: str) -> Callable[[slice], Tensor]:
        def make(part: slice) -> Tensor:
            events.append(f"{name}: {part.stop - part.start}")
            return images.expand(5, -1, -1, -1)[part]

        return make

    def alone() -> Asking[str]:
        yield []
        events.append("alone")
        return "done"

    names = {
        Job(asking(pictures(view, 5, noted("first")))): "first ended",
        Job(alone()): "alone ended",
        Job(asking(pictures(view, 5, noted("second")))): "second ended",
        Job(build_method("gen_att", view).explained(shared, Target())): "gen_att ended",
        Job(asking(Logits(shared))): "logits ended",
    }
    for job in Scheduler(chunk_size=3).finished([*names]):
        events.append(names[job])
    ended = ["gen_att ended", "logits ended", "first: 3", "first: 2", "first ended", "alone", "alone ended"]
    assert events == [*ended, "second: 3", "second: 2", "second ended"]
