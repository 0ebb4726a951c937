"""The work itself: plain functions from a model, a request and a listener to an answer that JSON can hold."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.api import explain_each, see
from vitrail.app.server.bounded import Bounded
from vitrail.app.server.comparison import Answer, OutOfTime, Tell, Turn
from vitrail.app.server.encoding import rounded
from vitrail.app.server.errors import Refused
from vitrail.engine.requests import check_finite
from vitrail.engine.scheduler import Scheduler
from vitrail.errors import VitrailError
from vitrail.evaluation import default_method
from vitrail.explanation import Explanation
from vitrail.methods.registry import build_method, get_method, supported_methods
from vitrail.metrics.base import Case, trapezoid
from vitrail.metrics.curves import PROBABILITY, even_counts, ranks, token_curve
from vitrail.metrics.measuring import measure
from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.progress import watched

MOST_VALUES = 224  # rows and columns of a map in an answer
TILE = 64  # the same for one of many maps
CELL = 16  # pixels of what counts as a patch where a model has none
BLANK = Image.new("RGB", (1, 1))

# Quick and different from each other: the default of a comparison.
COMPARED = (
    "decompx.skipplus", "att_ixg.plus", "vtranm", "trans_att", "gen_att", "attn_lrp", "conservative_lrp",
    "input_x_gradient", "grad_cam", "rollout", "raw_attention", "random",
)  # fmt: skip
FEW = 60  # passes that a method of a default comparison may need


@dataclass(frozen=True)
class Request:
    """What is asked about which picture. ``memory`` keeps maps and tokens, so that the next request is quick.

    ``seconds`` is what each method of a comparison may take.
    """

    model: str
    picture: str
    image: Image.Image
    fields: Answer = field(default_factory=dict)
    memory: Bounded[Any] = field(default_factory=lambda: Bounded(64 * 2**20))
    seconds: float = math.inf


@dataclass(frozen=True)
class Look:
    """A picture as the model sees it, and what the model says."""

    pixels: Tensor  # (1, 3, H, W)
    tokens: Tensor | None  # (1, P + N, d)
    logits: Tensor  # (1, C)
    box: tuple[float, float, float, float]


def predict(view: View, request: Request, tell: Tell) -> Answer:
    """The likeliest classes."""
    begin = time.perf_counter()
    look = look_at(view, request)
    return {
        "picture": request.picture,
        "model": request.model,
        "size": list(request.image.size),
        "box": list(look.box),
        "grid": list(grid_of(view)),
        "classes": top_classes(view, look.logits, request.fields.get("top", 5)),
        "seconds": time.perf_counter() - begin,
    }


def explain(view: View, request: Request, tell: Tell) -> Answer:
    """What ``vitrail explain --json`` says, with the map as rows of numbers."""
    return told(view, request, explained(view, request, tell), MOST_VALUES)


def score(view: View, request: Request, tell: Tell) -> Answer:
    """Insertion and deletion of the map."""
    begin = time.perf_counter()
    found = explained(view, request, tell)
    answer = scores(view, request, found, tell)
    shared = {"picture": request.picture, "method": found.method, "target": found.target, "label": found.label}
    return {**shared, **answer, "seconds": time.perf_counter() - begin}


def mask(view: View, request: Request, tell: Tell) -> Answer:
    """The probability of a class with only some patches present."""
    begin = time.perf_counter()
    look, (rows, columns) = look_at(view, request), grid_of(view)
    keep = kept_patches(request.fields, rows * columns)
    with quietly():
        logits = without(view, look, keep)
    check_finite(view, logits)
    target = request.fields.get("target")
    index = int(view.class_scores(look.logits).argmax()) if target is None else view.class_index(target)
    return {
        "picture": request.picture,
        "target": index,
        "label": view.label(index),
        "probability": float(view.probabilities(logits)[0, index]),
        "full": float(view.probabilities(look.logits)[0, index]),
        "classes": top_classes(view, logits, 5),
        "kept": int(keep.numel()),
        "space": "tokens" if isinstance(view, ViT) else "pixels",
        "seconds": time.perf_counter() - begin,
    }


def compare(view: View, request: Request, tell: Tell) -> Answer:
    """One picture, many methods; each is told as soon as it is there."""
    begin = time.perf_counter()
    methods = request.fields.get("methods") or sensible_methods(view)
    for name in methods:
        get_method(name)  # a wrong name is told before any work
    results = []
    for i, name in enumerate(methods):
        state = {"done": i, "total": len(methods), "what": name, "methods": methods}
        tell("progress", state)
        own = replace(request, fields={**request.fields, "method": name})
        results.append(_compared(view, own, Turn(tell, state, request.seconds).tell))
        tell("partial", results[-1])
    shared = {"picture": request.picture, "model_id": request.model, "methods": methods}
    return {**shared, "results": results, "seconds": time.perf_counter() - begin}


def picture(view: View, request: Request, tell: Tell) -> bytes:
    """The labelled picture, as PNG."""
    buffer = io.BytesIO()
    explained(view, request, tell).picture().save(buffer, "PNG")
    return buffer.getvalue()


def _compared(view: View, request: Request, tell: Tell) -> Answer:
    """One method of many; its failure is its own, and so is its time."""
    name = request.fields["method"]
    try:
        found = explained(view, request, tell)
        answer = told(view, request, found, TILE)
        if request.fields.get("score", True):
            answer |= scores(view, request, found, tell)
    except OutOfTime:
        sentence = f"it took longer than {request.seconds:g} seconds: start vitrail serve with more --job-seconds."
        return {"method": name, "error": sentence}
    except Refused:
        raise
    except (VitrailError, RuntimeError, ValueError) as error:
        return {"method": name, "error": str(error) if isinstance(error, VitrailError) else type(error).__name__}
    return answer


def explained(view: View, request: Request, tell: Tell) -> Explanation:
    """The explanation asked for, from memory where it is the same as before."""
    fields = request.fields
    name, params = fields.get("method") or default_method(view), fields.get("params") or {}
    if "shape" in params:
        raise VitrailError("shape is no parameter here: a map always has its own shape.")
    method = build_method(name, view, **params)
    target, against = (None if fields.get(k) is None else view.class_index(fields[k]) for k in ("target", "against"))
    if against is not None and not method.info.class_specific:
        raise VitrailError(f"{name} is the same for every class: it cannot tell two of them apart.")
    key = ("map", request.model, request.picture, method.info.name, json.dumps(params, sort_keys=True), target, against)
    found: Explanation | None = request.memory.get(key)
    if found is None:
        with heard(tell), torch.inference_mode(False):
            (found,) = explain_each(method, [request.image], target, against)
        # without the picture, which is counted elsewhere
        request.memory.put(key, replace(found, image=BLANK), found.map.numel() * 4 + 4096)
    return replace(found, image=request.image)


def told(view: View, request: Request, found: Explanation, most: int) -> Answer:
    """An explanation as an answer: its own JSON, the packed map replaced by rows of numbers."""
    answer = found.to_dict()
    del answer["map"]
    small = reduced(found.map, most)
    return {
        **answer,
        "picture": request.picture,
        "model_id": request.model,
        "grid": list(grid_of(view)),
        "shape": list(small.shape),
        "reduced": small.shape != found.map.shape,
        "values": rounded(small),
        "tokens": rounded(on_grid(view, found.map)),
        "signed": found.signed if found.signed is not None else bool((found.map < 0).any()),
    }


def scores(view: View, request: Request, found: Explanation, tell: Tell) -> Answer:
    """Both areas, both curves, and the order in which patches go."""
    steps, space = request.fields.get("steps", 32), request.fields.get("space", "pixels")
    params = json.dumps(found.params, sort_keys=True, default=str)
    about = (request.model, request.picture, found.method, params, found.target, found.against)
    key = ("scores", *about, steps, space)
    known: Answer | None = request.memory.get(key)
    if known is None:
        place = ranks(on_grid(view, found.map), 0)
        with heard(tell):
            known = _pixel_scores(view, request, found, steps) if space == "pixels" else _token_scores(
                view, request, found, place.argsort(), steps)  # fmt: skip
        known |= {"space": space, "ranks": place.view(grid_of(view)).tolist()}
        request.memory.put(key, known, 64 * (len(place) + steps) + 4096)
    return dict(known)


def _pixel_scores(view: View, request: Request, found: Explanation, steps: int) -> Answer:
    pixels, curves, areas = look_at(view, request).pixels, {}, {}
    for name in ("insertion", "deletion"):
        (scored,) = measure(name, view, pixels, found.map[None], found.target, steps=steps)
        areas[name], curves[name] = scored.value, scored.curve
    return {**areas, "curves": curves}


def _token_scores(view: View, request: Request, found: Explanation, order: Tensor, steps: int) -> Answer:
    """With true token masking: patches are taken out, not painted over."""
    if not view.has_tokens:
        raise VitrailError(f"{request.model} has no fixed tokens (hierarchical): use space=pixels.")
    pixels = look_at(view, request).pixels
    case = Case(view=view, pixels=pixels, map=found.map, target=found.target, predicted=found.target)
    counts = even_counts(len(order), steps)
    least = 1 if view.pools_patches else 0  # a head that pools needs a patch
    gone = [order[count:] for count in counts]
    come = [order[:count] for count in counts]
    sets = [(one if len(one) >= least else order[:1]).sort().values for one in gone + come]
    with quietly():
        (points,) = Scheduler().run([token_curve(case, sets, "auto", "page")])
    deletion, insertion = points[:, PROBABILITY].split(len(counts))
    return {
        "insertion": trapezoid(insertion),
        "deletion": trapezoid(deletion),
        "curves": {"insertion": insertion.tolist(), "deletion": deletion.tolist()},
        "order": order.tolist(),
        "counts": counts,
    }


def look_at(view: View, request: Request) -> Look:
    """What the model sees and says, kept for the next request about the same picture."""
    key = ("look", request.model, request.picture)
    known: Look | None = request.memory.get(key)
    if known is None:
        seen = see(view, request.image)
        with quietly():
            pixels = view.check_images(seen.pixels[None])
            tokens = view.embed(pixels) if view.has_tokens else None
            logits = view.logits(pixels) if tokens is None else view.encode(tokens)
        check_finite(view, logits)
        known = Look(pixels, tokens, logits, seen.box)
        size = sum(t.numel() * t.element_size() for t in (pixels, tokens, logits) if t is not None)
        request.memory.put(key, known, size + 4096)
    return known


def without(view: View, look: Look, keep: Tensor) -> Tensor:
    """The logits (1, C) with only these patches; a model without tokens sees the mean colour instead of the others."""
    if look.tokens is not None:
        return view.encode(look.tokens, keep[None].to(look.tokens.device))
    rows, columns = grid_of(view)
    there = torch.zeros(rows * columns, device=look.pixels.device)
    there[keep.to(there.device)] = 1
    shown = F.interpolate(there.view(1, 1, rows, columns), size=view.size, mode="nearest-exact").bool()
    return view.logits(torch.where(shown, look.pixels, look.pixels.mean((2, 3), keepdim=True)))


def kept_patches(fields: Answer, patches: int) -> Tensor:
    """The patches that stay, as ``kept`` names them or ``removed`` leaves them, in order."""
    wanted = fields.get("kept") is not None
    given: list[int] = fields["kept"] if wanted else fields.get("removed", [])
    outside = [index for index in given if not 0 <= index < patches]
    if outside:
        raise VitrailError(f"there is no patch {outside[0]}: expected numbers from 0 to {patches - 1}.")
    chosen = set(given)
    return torch.tensor([i for i in range(patches) if (i in chosen) == wanted], dtype=torch.long)


def top_classes(view: View, logits: Tensor, count: int) -> list[Answer]:
    probabilities = view.probabilities(logits)[0].cpu()
    ranked = probabilities.argsort(descending=True, stable=True)[:count].tolist()
    return [{"index": i, "label": view.label(i), "probability": float(probabilities[i])} for i in ranked]


def sensible_methods(view: View) -> list[str]:
    """At most a dozen methods that need few passes of this model."""
    able = supported_methods(view)
    chosen = [name for name in COMPARED if name in able]
    if len(chosen) < len(COMPARED) // 2:
        chosen = [name for name in able if "." not in name and sum(get_method(name).info.cost) <= FEW]
    return chosen[: len(COMPARED)]


def grid_of(view: View) -> tuple[int, int]:
    """(rows, columns) of what counts as a patch."""
    return view.grid if isinstance(view, ViT) else (view.size[0] // CELL, view.size[1] // CELL)


def on_grid(view: View, values: Tensor) -> Tensor:
    """A map on the patches, averaged over each."""
    grid = grid_of(view)
    return values if tuple(values.shape) == grid else F.adaptive_avg_pool2d(values[None, None], grid)[0, 0]


def reduced(values: Tensor, most: int) -> Tensor:
    """The map, averaged to at most so many rows and columns."""
    rows, columns = (min(edge, most) for edge in values.shape)
    if (rows, columns) == tuple(values.shape):
        return values
    return F.adaptive_avg_pool2d(values[None, None], (rows, columns))[0, 0]


@contextmanager
def heard(tell: Tell) -> Iterator[None]:
    """Every step of the work is told, and the work ends where telling raises."""
    with watched(lambda what, done, total: tell("progress", {"what": what, "done": done, "total": total})):
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """No gradients; and tensors that may be used later wherever gradients are."""
    with torch.inference_mode(False), torch.no_grad():
        yield


KINDS: dict[str, Callable[[View, Request, Tell], Answer | bytes]] = {
    "predict": predict,
    "explain": explain,
    "score": score,
    "mask": mask,
    "compare": compare,
    "picture": picture,
}
