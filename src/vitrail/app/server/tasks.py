"""The work itself: functions from a model, a request and a progress callback to an answer in JSON or PNG."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.api import add_pairs, explain_each, see
from vitrail.app.server.cache import ByteCache
from vitrail.app.server.responses import to_json
from vitrail.calls import split_call
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import check_finite
from vitrail.engine.scheduler import Scheduler
from vitrail.errors import VitrailError
from vitrail.evaluation import default_method
from vitrail.explanation import Explanation
from vitrail.methods.base import Method
from vitrail.methods.decomposition import DecompX
from vitrail.methods.registry import build_method, get_method, recommended_methods
from vitrail.metrics.base import Case, trapezoid
from vitrail.metrics.curves import PROBABILITY, even_counts, ranks, token_curve
from vitrail.metrics.measuring import measure
from vitrail.metrics.trust import Trust
from vitrail.models.detection import Detector
from vitrail.models.questions import segmenting
from vitrail.models.segments import find_segments
from vitrail.models.view import View
from vitrail.progress import watched
from vitrail.targets import Box, ClassSpec, Group, Region, Similarity, pose

Answer = dict[str, Any]
Report = Callable[[str, Answer], None]  # "progress" or "partial", and its data

MAX_SIDE = 224  # rows and columns of a map in an answer
TILE_SIDE = 64  # the same in a comparison
PATCH_SIZE = 16  # pixels, for models without patch tokens
BLANK = Image.new("RGB", (1, 1))
LEAST_SURE, MOST_PLACES = 0.05, 100  # of boxes and segments in an answer
OVERHEAD = 4096  # bytes of a cached result besides its numbers
WORDS = ("call", "title", "score_line", "storage_line", "trust_line")  # what an explanation says about itself


@dataclass(frozen=True)
class Inference:
    """A picture as the model sees it, and the prediction."""

    pixels: Tensor  # (1, 3, H, W)
    tokens: Tensor | None  # (1, P + N, d)
    logits: Tensor  # (1, C)
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Posed:
    """A view that answers a question, and the classes there that the question is about."""

    view: View
    target: ClassSpec
    against: ClassSpec


Result = Inference | Explanation | Trust | Posed | Answer


def result_size(result: Result) -> int:
    """Approximate memory of a cached result, in bytes."""
    if isinstance(result, dict):  # scores
        return OVERHEAD + 64 * (sum(map(len, result["ranks"])) + len(result["curves"]["insertion"]))
    if isinstance(result, Trust | Posed):  # a view shares the weights of its model
        return OVERHEAD
    if isinstance(result, Explanation):
        tensors = [result.map, result.pairs]
    else:
        tensors = [result.pixels, result.tokens, result.logits]
    return OVERHEAD + sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class OtherPicture:
    """What a picture is compared with."""

    id: str
    image: Image.Image


@dataclass(frozen=True)
class Request:
    """A question about a picture. ``cache`` keeps maps and tokens for the next request about it.

    ``seconds`` limits each method of a comparison. ``question``: what is asked of ``model_view``, the model itself,
    where that is not one of its classes.
    """

    model: str
    picture: str
    image: Image.Image
    fields: Answer = field(default_factory=dict)
    cache: ByteCache[Hashable, Any] = field(default_factory=lambda: ByteCache(64 * 2**20, result_size))
    seconds: float = math.inf
    other: OtherPicture | None = None
    question: Hashable = None
    model_view: View | None = None


def run(kind: str, view: View, request: Request, report: Report) -> tuple[str, bytes]:
    """Media type and body of the answer to a request of this kind."""
    start = perf_counter()
    answer = KINDS[kind](*posed(view, request), report)
    if isinstance(answer, bytes):
        return "image/png", answer
    other = {} if request.other is None else {"other": request.other.id}
    return "application/json", to_json({"seconds": perf_counter() - start} | other | answer)


def posed(view: View, request: Request) -> tuple[View, Request]:
    """The view that answers a request, from the cache if possible, and the request about classes of that view."""
    fields, other = request.fields, request.other
    names = ("target", "against", "group", "against_group", "measure", "box")
    region = None if fields.get("region") is None else tuple(fields["region"])
    question = ("question", request.model, *map(fields.get, names), region, None if other is None else other.id)
    answer: Posed | None = request.cache.get(question)
    if answer is None:
        target, against = (
            fields.get(name) if fields.get(group) is None else Group(fields[group])
            for name, group in (("target", "group"), ("against", "against_group"))
        )
        if other is not None:
            target = Similarity(other.image, fields.get("measure", "cosine"))
        elif fields.get("box") is not None:
            target = Box(fields["box"], fields.get("target"))
        elif region is not None:
            target = Region(mask_of(view, region), fields.get("target"))
        with own_modes():
            answer = Posed(*pose(view, target, against, lambda source: see(view, source).pixels, list))
        if answer.view is view:
            return view, request
        request.cache[question] = answer
    classes = {"target": answer.target, "against": answer.against}
    fields = {name: value for name, value in (fields | classes).items() if value is not None}
    return answer.view, replace(request, fields=fields, question=question, model_view=view)


def mask_of(view: View, cells: Sequence[int]) -> Tensor:
    """(H, W): the part of the model input that cells of the class map cover."""
    _, grid = segmenting(view)
    wrong = [cell for cell in cells if not 0 <= cell < math.prod(grid)]
    if wrong:
        raise VitrailError(f"there is no cell {wrong[0]}: expected indices from 0 to {math.prod(grid) - 1}.")
    inside = torch.zeros(math.prod(grid))
    inside[list(cells)] = 1
    return F.interpolate(inside.view(1, 1, *grid), size=view.size, mode="nearest-exact")[0, 0] > 0


def predict(view: View, request: Request, report: Report) -> Answer:
    """The most probable classes, and those asked about."""
    inference = find_inference(view, request)
    named = [request.fields[name] for name in ("target", "against") if request.fields.get(name) is not None]
    return {
        "picture": request.picture,
        "model": request.model,
        "measure": view.measure,
        "size": list(request.image.size),
        "box": list(inference.box),
        "grid": list(grid_of(view)),
        "classes": top_classes(view, inference.logits, request.fields.get("top", 5)),
        "asked": class_rows(view, inference.logits, [view.class_index(name) for name in named]),
        **places(request.model_view or view, request, inference),
    }


def places(view: View, request: Request, inference: Inference) -> Answer:
    """The boxes of a detector, or the segments of a segmentation model."""
    if isinstance(view, Detector):
        boxes = [detection._asdict() for detection in view.boxes(request.image, LEAST_SURE)]
        return {"boxes": boxes[:MOST_PLACES]}
    if view.has_tokens and view.architecture().head.pool in ("patches", "queries"):
        segments = [segment._asdict() for segment in find_segments(view, inference.pixels[0])]
        return {"cells": list(segmenting(view)[1]), "segments": segments[:MOST_PLACES]}
    return {}


def explain(view: View, request: Request, report: Report) -> Answer:
    """The JSON of ``vitrail explain --json``, with the map as rows of numbers."""
    return explanation_answer(view, request, find_trusted(view, request, report), MAX_SIDE)


def trust(view: View, request: Request, report: Report) -> Answer:
    """How far to trust the map."""
    explanation = find_trusted(view, request, report)
    assert explanation.trusted is not None
    trusted = {"trust": asdict(explanation.trusted), "trust_line": explanation.trust_line}
    return {**_about(request, explanation), **trusted}


def score(view: View, request: Request, report: Report) -> Answer:
    """Insertion and deletion of the map."""
    explanation = find_explanation(view, request, report)
    return {**_about(request, explanation), **find_scores(view, request, explanation, report)}


def _about(request: Request, explanation: Explanation) -> Answer:
    """What an answer is about."""
    return {"picture": request.picture} | {name: getattr(explanation, name) for name in ("method", "target", "label")}


def mask(view: View, request: Request, report: Report) -> Answer:
    """The probability of a class, or another score, with a subset of the patches."""
    inference, (rows, columns) = find_inference(view, request), grid_of(view)
    keep = kept_patches(request.fields, rows * columns)
    with no_grad():
        logits = masked_logits(view, inference, keep)
    check_finite(view, logits)
    target = request.fields.get("target")
    index = int(view.predicted(inference.logits)) if target is None else view.class_index(target)
    return {
        "picture": request.picture,
        "target": index,
        "label": view.label(index),
        "measure": view.measure,
        "probability": float(view.probabilities(logits)[0, index]),
        "full": float(view.probabilities(inference.logits)[0, index]),
        "classes": top_classes(view, logits, 5),
        "kept": int(keep.numel()),
        "space": "tokens" if view.has_tokens else "pixels",
    }


def picture(view: View, request: Request, report: Report) -> bytes:
    """The labelled figure, as PNG."""
    buffer = io.BytesIO()
    explanation = find_trusted(view, request, report)
    explanation.picture(storage=request.fields.get("storage", "mark")).save(buffer, "PNG")
    return buffer.getvalue()


def compare(view: View, request: Request, report: Report) -> Answer:
    """Many methods on one picture; each result is reported as soon as it is computed."""
    calls = request.fields.get("methods") or recommended_methods(view)
    methods = {call: split_call(call) for call in calls}
    for name, _ in methods.values():
        get_method(name)  # an unknown name is an error before any work
    results = []
    for index, (call, (name, params)) in enumerate(methods.items()):
        state = {"done": index, "total": len(methods), "what": call, "methods": calls}
        report("progress", state)
        method_request = replace(request, fields={**request.fields, "method": name, "params": params})
        progress = MethodProgress(report, state, request.seconds)
        results.append(_compare_method(view, method_request, progress.report) | {"call": call})
        report("partial", results[-1])
    return {"picture": request.picture, "model_id": request.model, "methods": calls, "results": results}


def _compare_method(view: View, request: Request, report: Report) -> Answer:
    """One method of a comparison; its failure or timeout does not affect the others."""
    try:
        explanation = find_trusted(view, request, report)
        scores = find_scores(view, request, explanation, report) if request.fields.get("score", True) else {}
        return explanation_answer(view, request, explanation, TILE_SIDE) | scores
    except MethodTimeout:
        message = f"it took longer than {request.seconds:g} seconds: start vitrail serve with more --job-seconds."
    except VitrailError as error:
        message = str(error)
    except (RuntimeError, ValueError) as error:
        message = type(error).__name__
    return {"method": request.fields["method"], "error": message}


class MethodTimeout(BaseException):  # like Cancelled: no handler in between may catch it
    """The method has exceeded its time limit."""


class MethodProgress:
    """Reports the progress of one method as a part of the whole comparison, which ``state`` describes."""

    def __init__(self, report: Report, state: Answer, seconds: float) -> None:
        self._report, self._state = report, state
        self._deadline = monotonic() + seconds
        self._done = 0.0  # fraction of this method
        self._bar_start = self._bar_length = 0.0  # the part of it that the current bar covers
        self._last = (0, 0)  # done, total

    def report(self, event: str, data: Answer) -> None:
        """Raises MethodTimeout after the deadline."""
        start = monotonic()
        if start > self._deadline:
            raise MethodTimeout
        self._advance(data["done"], data["total"])
        end = f"/{data['total']}" if data["total"] else ""
        text = f"{self._state['what']}: {data['what']} {data['done']}{end}"
        self._report(event, {**self._state, "done": self._state["done"] + self._done, "what": text})
        self._deadline += monotonic() - start  # a quick job may have run in between

    def _advance(self, done: int, total: int) -> None:
        """A method has any number of bars, one after another: each covers half of what is left."""
        if total <= 1:  # the bar over pictures, of which there is one
            return
        if total != self._last[1] or done < self._last[0]:
            self._bar_start, self._bar_length = self._done, (1 - self._done) / 2
        self._last = (done, total)
        self._done = self._bar_start + self._bar_length * min(1.0, done / total)


def find_explanation(view: View, request: Request, report: Report) -> Explanation:
    """The requested explanation, from the cache if possible."""
    fields, pairs = request.fields, request.fields.get("pairs", False)
    name, params = fields.get("method") or ("decompx" if pairs else default_method(view)), fields.get("params") or {}
    if "shape" in params:
        raise VitrailError("the parameter 'shape' is not available here: a map always has its native shape.")
    for parameter in get_method(name).file_parameters:
        if params.get(parameter) is not None:
            raise VitrailError(f"the parameter {parameter!r} is not available here: it names a file of the server.")
    method = build_method(name, view, **params)
    target, against = (None if fields.get(k) is None else view.class_index(fields[k]) for k in ("target", "against"))
    if against is not None and not method.info.class_specific:
        raise VitrailError(f"{name} gives the same map for every class: it cannot contrast two of them.")
    if pairs and (request.other is None or not isinstance(method, DecompX)):
        raise VitrailError(
            f"pairs are the exact shares of a similarity by decompx, but {name} was asked about "
            f"{'a class' if request.other is None else 'one'}: send other, and method=decompx or none."
        )
    values = json.dumps(params, sort_keys=True, default=str)
    key = ("map", *_asked(request), method.info.name, values, target, against, pairs)
    explanation: Explanation | None = request.cache.get(key)
    if explanation is None:
        with reporting(report), torch.inference_mode(False):
            (explanation,) = explain_each(method, [request.image], target, against)
            if pairs:
                add_pairs(explanation, *_sides(request, method))
        request.cache[key] = replace(explanation, image=BLANK)  # the picture is cached elsewhere
    return replace(explanation, image=request.image)


def _sides(request: Request, method: Method) -> tuple[Similarity, View, Tensor, Tensor, int]:
    """What ``add_pairs`` splits: the similarity of two pictures to a model, from a layer."""
    assert request.other is not None
    assert request.model_view is not None
    assert isinstance(method, DecompX)
    view, similarity = request.model_view, Similarity(request.other.image, request.fields.get("measure", "cosine"))
    return (
        similarity,
        view,
        see(view, request.image).pixels,
        see(view, request.other.image).pixels,
        method.start_layer,
    )


def find_trusted(view: View, request: Request, report: Report) -> Explanation:
    """The requested explanation and how far to trust it, unless that is switched off; from the cache if possible."""
    explanation = find_explanation(view, request, report)
    if request.fields.get("trust", True):
        key = ("trust", *_subject(request, explanation))
        explanation.trusted = request.cache.get(key)
        if explanation.trusted is None:
            with reporting(report):
                request.cache[key] = explanation.trust()
    return explanation


def _subject(request: Request, explanation: Explanation) -> tuple[Hashable, ...]:
    """What tells an explanation from all others."""
    params = json.dumps(explanation.params, sort_keys=True, default=str)
    return *_asked(request), explanation.method, params, explanation.target, explanation.against


def _asked(request: Request) -> tuple[Hashable, ...]:
    """What tells the question of a request from all others, except for classes."""
    return request.model, request.picture, request.question


def explanation_answer(view: View, request: Request, explanation: Explanation, max_side: int) -> Answer:
    """The explanation's own JSON and words, with rows of numbers instead of the encoded map."""
    answer = explanation.to_dict()
    del answer["map"]
    values, shares, error = reduce_map(explanation.map, max_side), explanation.shares, explanation.error
    return {
        **answer,
        **{name: getattr(explanation, name) for name in WORDS},
        "picture": request.picture,
        "model_id": request.model,
        "grid": list(grid_of(view)),
        "shape": list(values.shape),
        "reduced": values.shape != explanation.map.shape,
        "values": round_values(values),
        "shares": round_values(reduce_map(shares, max_side)),
        "standard_error": None if error is None else round_values(reduce_map(error, max_side)),
        "tokens": round_values(on_grid(view, explanation.map)),
        "signed": explanation.signed if explanation.signed is not None else bool((shares < 0).any()),
    }


def find_scores(view: View, request: Request, explanation: Explanation, report: Report) -> Answer:
    """Areas under both curves, the curves, and the rank of every patch; from the cache if possible."""
    steps, space = request.fields.get("steps", 32), request.fields.get("space", "pixels")
    key = ("scores", *_subject(request, explanation), steps, space)
    scores: Answer | None = request.cache.get(key)
    if scores is None:
        patch_ranks = ranks(on_grid(view, explanation.map), 0)
        with reporting(report):
            if space == "pixels":
                scores = _pixel_scores(view, request, explanation, steps)
            else:
                scores = _token_scores(view, request, explanation, patch_ranks.argsort(), steps)
        scores |= {"space": space, "ranks": patch_ranks.view(grid_of(view)).tolist()}
        request.cache[key] = scores
    return dict(scores)


def _pixel_scores(view: View, request: Request, explanation: Explanation, steps: int) -> Answer:
    pixels, curves, areas = find_inference(view, request).pixels, {}, {}
    for name in ("insertion", "deletion"):
        (result,) = measure(name, view, pixels, explanation.map[None], explanation.target, steps=steps)
        areas[name], curves[name] = result.value, result.curve
    return {**areas, "curves": curves}


def _token_scores(view: View, request: Request, explanation: Explanation, order: Tensor, steps: int) -> Answer:
    """With token masking: patches are removed from the sequence, not painted over."""
    if not view.has_tokens:
        raise VitrailError(f"{request.model} has no fixed tokens ({view.structure}): use space=pixels.")
    target = explanation.target
    pixels = find_inference(view, request).pixels
    case = Case(view=view, pixels=pixels, map=explanation.map, target=target, predicted=target)
    counts = even_counts(len(order), steps)
    min_kept = 1 if view.pools_patches else 0  # a head that pools patches needs at least one
    subsets = [order[count:] for count in counts] + [order[:count] for count in counts]
    kept = [(subset if len(subset) >= min_kept else order[:1]).sort().values for subset in subsets]
    with no_grad():
        (points,) = Scheduler().run([token_curve(case, kept, "auto", "page")])
    scale, values = None, points[:, PROBABILITY]
    if view.output == "score":
        scale = [float(values[len(counts) - 1]), float(values[0])]  # of no patch and of all
        values = (values - scale[0]) / (scale[1] - scale[0])
    deletion, insertion = values.split(len(counts))
    return {
        "insertion": trapezoid(insertion),
        "deletion": trapezoid(deletion),
        "curves": {"insertion": insertion.tolist(), "deletion": deletion.tolist()},
        "order": order.tolist(),
        "counts": counts,
        "scale": scale,
    }


def find_inference(view: View, request: Request) -> Inference:
    """The picture as the model sees it and the prediction, from the cache if possible."""
    key = ("inference", *_asked(request))
    inference: Inference | None = request.cache.get(key)
    if inference is None:
        image = see(view, request.image)
        with no_grad():
            pixels = view.check_images(image.pixels[None])
            tokens = view.embed(pixels) if view.has_tokens else None
            logits = view.logits(pixels) if tokens is None else view.encode(tokens)
        check_finite(view, logits)
        inference = request.cache[key] = Inference(pixels, tokens, logits, image.box)
    return inference


def masked_logits(view: View, inference: Inference, keep: Tensor) -> Tensor:
    """The logits (1, C) with only these patches; models without tokens see the mean colour in place of the others."""
    if inference.tokens is not None:
        return view.encode(inference.tokens, keep[None].to(inference.tokens.device))
    rows, columns = grid_of(view)
    present = torch.zeros(rows * columns, device=inference.pixels.device)
    present[keep.to(present.device)] = 1
    visible = F.interpolate(present.view(1, 1, rows, columns), size=view.size, mode="nearest-exact").bool()
    return view.logits(torch.where(visible, inference.pixels, inference.pixels.mean((2, 3), keepdim=True)))


def kept_patches(fields: Answer, patches: int) -> Tensor:
    """The indices of the patches that ``kept`` lists or ``removed`` leaves, ascending."""
    keeping = fields.get("kept") is not None
    listed: list[int] = fields["kept"] if keeping else fields.get("removed", [])
    invalid = [index for index in listed if not 0 <= index < patches]
    if invalid:
        raise VitrailError(f"there is no patch {invalid[0]}: expected indices from 0 to {patches - 1}.")
    selected = set(listed)
    return torch.tensor([i for i in range(patches) if (i in selected) == keeping], dtype=torch.long)


def top_classes(view: View, logits: Tensor, count: int) -> list[Answer]:
    if view.is_embedding:
        return []
    ranked = view.probabilities(logits)[0].cpu().argsort(descending=True, stable=True)
    return class_rows(view, logits, ranked[:count].tolist())


def class_rows(view: View, logits: Tensor, indices: list[int]) -> list[Answer]:
    probabilities = view.probabilities(logits)[0].cpu()
    return [{"index": i, "label": view.label(i), "probability": float(probabilities[i])} for i in indices]


def grid_of(view: View) -> tuple[int, int]:
    """(rows, columns) of patches."""
    return view.grid if view.has_tokens else (view.size[0] // PATCH_SIZE, view.size[1] // PATCH_SIZE)


def on_grid(view: View, values: Tensor) -> Tensor:
    """The map averaged over each patch."""
    return _average(values, grid_of(view))


def reduce_map(values: Tensor, max_side: int) -> Tensor:
    """The map averaged down to at most ``max_side`` rows and columns."""
    return _average(values, (min(values.shape[0], max_side), min(values.shape[1], max_side)))


def _average(values: Tensor, shape: tuple[int, int]) -> Tensor:
    return values if tuple(values.shape) == shape else F.adaptive_avg_pool2d(values[None, None], shape)[0, 0]


def round_values(values: Tensor) -> list[list[float]]:
    """Rows of numbers with six significant digits."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]


def reporting(report: Report) -> AbstractContextManager[None]:
    """Reports every step; an exception raised by ``report`` ends the work."""
    return watched(lambda what, done, total: report("progress", {"what": what, "done": done, "total": total}))


@contextmanager
def no_grad() -> Iterator[None]:
    """Without gradients, but not in inference mode: cached tensors may take part in a later backward pass."""
    with torch.inference_mode(False), torch.no_grad():
        yield


KINDS: dict[str, Callable[[View, Request, Report], Answer | bytes]] = {
    task.__name__: task for task in (predict, explain, trust, score, mask, compare, picture)
}
