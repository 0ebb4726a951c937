"""The public functions ``explain`` and ``evaluate``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.calls import split_call
from vitrail.data.annotations import posed_class_map
from vitrail.data.images import ImageSource, read_image
from vitrail.data.places import check_annotated
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Logits, check_finite, concurrently
from vitrail.engine.scheduler import TARGETS_AT_ONCE, Scheduler
from vitrail.errors import VitrailError
from vitrail.evaluation import (
    OF_EACH_IMAGE,
    Called,
    Evaluation,
    Explained,
    Task,
    batches,
    build_methods,
    build_metrics,
    check_places,
    default_method,
    explained_classes,
    map_for,
    open_examples,
    place_kind,
)
from vitrail.explanation import Explanation
from vitrail.methods.base import Attribution, Method
from vitrail.methods.decomposition import DecompX
from vitrail.methods.masking import MaskMethod
from vitrail.methods.pairs import ask_pairs
from vitrail.methods.registry import build_method
from vitrail.methods.storage import ask_storage
from vitrail.metrics.base import Metric
from vitrail.models.loading import as_view
from vitrail.models.questions import embedding
from vitrail.models.view import View, check_floats
from vitrail.pipeline import BATCHES, ahead
from vitrail.progress import counted
from vitrail.targets import (
    ClassSpec,
    Similarity,
    SingleTarget,
    Target,
    TargetSpec,
    are_several,
    one_for_each,
    pose,
)

if TYPE_CHECKING:
    import pandas as pd

BATCH = {"cpu": 4, "cuda": 32}


@overload
def explain(
    model: View | nn.Module | str,
    image: ImageSource | Tensor,
    method: str | None = None,
    target: TargetSpec = None,
    *,
    targets: None = None,
    against: TargetSpec = None,
    batch_size: int | None = None,
    pairs: bool = True,
    **params: Any,
) -> Explanation: ...


@overload
def explain(
    model: View | nn.Module | str,
    image: Sequence[ImageSource | Tensor],
    method: str | None = None,
    target: TargetSpec = None,
    *,
    targets: None = None,
    against: TargetSpec = None,
    batch_size: int | None = None,
    pairs: bool = True,
    **params: Any,
) -> list[Explanation]: ...


@overload
def explain(
    model: View | nn.Module | str,
    image: ImageSource | Tensor,
    method: str | None = None,
    target: None = None,
    *,
    targets: Sequence[TargetSpec] | Literal["all"],
    against: TargetSpec = None,
    batch_size: int | None = None,
    pairs: bool = True,
    **params: Any,
) -> list[Explanation]: ...


@overload
def explain(
    model: View | nn.Module | str,
    image: Sequence[ImageSource | Tensor],
    method: str | None = None,
    target: None = None,
    *,
    targets: Sequence[TargetSpec] | Literal["all"],
    against: TargetSpec = None,
    batch_size: int | None = None,
    pairs: bool = True,
    **params: Any,
) -> list[list[Explanation]]: ...


def explain(
    model: View | nn.Module | str,
    image: ImageSource | Tensor | Sequence[ImageSource | Tensor],
    method: str | None = None,
    target: TargetSpec = None,
    *,
    targets: Sequence[TargetSpec] | Literal["all"] | None = None,
    against: TargetSpec = None,
    batch_size: int | None = None,
    pairs: bool = True,
    **params: Any,
) -> Explanation | list[Explanation] | list[list[Explanation]]:
    """Explains the prediction of a model for an image.

    Args:
        model: a view, a module that ``wrap`` accepts, or a name that ``load`` accepts.
        image: path, PIL image, uint8 array HWC, normalised tensor CHW or BCHW; a list or a batch returns a list.
        method: a name from ``list_methods``, or a call such as "rise(masks=256)"; None = "decompx.skipplus", or
            "vit_cx" for hierarchical models.
        target: the class to explain, by index or name, or a list with one per image; None = the predicted class. For
            models of images and texts, a text that is no class yet becomes one. Or one of ``vitrail.targets``: a group
            of classes, the similarity to another image, a class in a region or of a box, any function.
        targets: explain each image for several targets, or for "all" classes, and return a list for each image. The
            targets share forward passes, which is cheaper than a call for each.
        against: explain the target as opposed to this class or target.
        batch_size: images per batch; None = by device.
        pairs: with "decompx" and a ``Similarity``, also split it into pairs of patches: two backward passes for each
            channel of the embedding.
        params: parameters of the method; they override those of a call.
    """
    if isinstance(method, str) and "(" in method:
        method, called = split_call(method)
        params = called | params
    if "shape" in params:
        raise VitrailError("shape= is a parameter of a method's attribute(): use heatmap() for the map on the image.")
    view = as_view(model)
    several = isinstance(image, list | tuple) or (isinstance(image, Tensor) and image.ndim == 4)
    sources: list[Any] = list(image) if several else [image]  # type: ignore[arg-type]
    if not sources:
        raise VitrailError("no image was given: expected at least one.")
    if targets is None:
        lists = _explain_question(view, sources, method, [target], against, batch_size, pairs, params)
        return [row[0] for row in lists] if several else lists[0][0]
    if target is not None:
        raise VitrailError("target and targets were both given: expected one of them.")
    if isinstance(targets, str) and targets != "all":
        raise VitrailError(f'targets must be a list of targets or "all", but got {targets!r}.')
    wanted: list[TargetSpec] = list(range(view.num_classes)) if isinstance(targets, str) else list(targets)
    if not wanted:
        raise VitrailError('targets is empty: expected at least one target, or "all".')
    lists = _explain_question(view, sources, method, wanted, against, batch_size, pairs, params)
    return lists if several else lists[0]


def _explain_question(
    view: View,
    sources: list[Any],
    method: str | None,
    wanted: list[TargetSpec],
    against: TargetSpec,
    *options: Any,
) -> list[list[Explanation]]:
    """For each image the explanations of its targets, in their order."""
    each = [one_for_each(view, target, against, len(sources)) for target in wanted]
    if all(targets is None for targets in each):
        return _explain_all(view, sources, method, wanted, against, *options)
    rows: list[list[Explanation]] = []
    for i, source in enumerate(sources):
        single = [target if targets is None else targets[i] for target, targets in zip(wanted, each, strict=True)]
        rows += _explain_all(view, [source], method, single, against, *options)
    return rows


def _explain_all(
    view: View,
    pictures: list[Any],
    method: str | None,
    targets: Sequence[TargetSpec],
    against: TargetSpec,
    batch_size: int | None,
    pairs: bool,
    params: dict[str, Any],
) -> list[list[Explanation]]:
    """Explains images that are asked the same questions; those that one view answers share its passes."""

    def look() -> list[Seen]:
        pictures[:] = see_ahead(view, pictures, BATCHES * images_at_once(view, batch_size))
        return pictures

    rows: list[list[Any]] = [[None] * len(targets) for _ in pictures]
    with own_modes():
        posed = [pose(view, target, against, lambda source: see(view, source).pixels, look) for target in targets]
        for answering in {id(answering): answering for answering, _, _ in posed}.values():
            places = [place for place, question in enumerate(posed) if question[0] is answering]
            chosen = build_method(method or default_method(answering), answering, **params)
            with closing(
                explain_classes(chosen, pictures, [posed[place][1:] for place in places], batch_size)
            ) as lists:
                for row, explanations in zip(rows, lists, strict=True):
                    for place, explanation in zip(places, explanations, strict=True):
                        row[place] = explanation
            if not pairs or not isinstance(chosen, DecompX):
                continue
            for place in places:
                if isinstance(target := targets[place], Similarity) and posed[place][2] is None:
                    other = see(view, target.other).pixels
                    for row, picture in zip(rows, pictures, strict=True):
                        add_pairs(row[place], target, view, see(view, picture).pixels, other, chosen.start_layer)
    return rows


def add_pairs(
    explanation: Explanation, target: Similarity, view: View, pixels: Tensor, other: Tensor, layer: int
) -> None:
    """Splits a similarity into the shares of pairs of patches."""
    sides = [
        (embedding(view, target.measure, token), view.check_images(image[None], view.precision))
        for image, token in ((pixels, None), (other, target.token(view)))
    ]
    with counted(sum(side.num_outputs for side, _ in sides), "pairs", "channel") as bar:
        (split,) = Scheduler().run([ask_pairs(sides[0], sides[1], layer, bar)])
    explanation.pairs = split.shares.float().cpu()
    explanation.extras |= {"score_pairs": float(split.shares.sum()), "score_pairs_rest": float(split.rest)}


def explain_each(
    method: Method, sources: Sequence[Any], target: ClassSpec, against: ClassSpec, batch_size: int | None = None
) -> Generator[Explanation, None, None]:
    """Yields explanations, computed batch by batch; a progress bar appears after two seconds."""
    with closing(explain_classes(method, sources, [(target, against)], batch_size)) as lists:
        for (explanation,) in lists:
            yield explanation


def explain_classes(
    method: Method,
    sources: Sequence[Any],
    classes: Sequence[tuple[ClassSpec, ClassSpec]],
    batch_size: int | None = None,
) -> Generator[list[Explanation], None, None]:
    """Yields for each image the explanations of several classes, each perhaps as opposed to another.

    Images are read while those before them are explained.
    """
    view = method.model
    size = images_at_once(view, batch_size)
    targets = [Target.of(view, target, against, len(sources)) for target, against in classes]
    seen = see_ahead(view, sources, BATCHES * size)
    with counted(len(sources), method.info.name, "image") as bar, closing(seen):
        for start in range(0, len(sources), size):
            chunk = slice(start, start + size)
            pictures = list(islice(seen, size))
            yield from _explain_batch(method, pictures, [target.rows(chunk) for target in targets])
            bar.update(len(pictures))


def images_at_once(view: View, batch_size: int | None) -> int:
    """The batch size: ``batch_size``, or the default of the device."""
    if batch_size is None:
        return BATCH.get(view.device.type, 4)
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise VitrailError(f"batch_size must be an integer of at least 1, but got {batch_size!r}.")
    return int(batch_size)


@dataclass(frozen=True)
class Seen:
    """An image and the model input made from it."""

    image: Image.Image
    pixels: Tensor  # (3, H, W), normalised
    box: tuple[float, float, float, float]
    path: str | None
    from_tensor: bool = False


def see(view: View, source: ImageSource | Tensor | Seen) -> Seen:
    """Reads and preprocesses an image; tensors and preprocessed images are used as they are."""
    if isinstance(source, Seen):
        return source
    return _of_tensor(view, source) if isinstance(source, Tensor) else with_warning(view, read_seen(view, source))


def see_ahead(view: View, sources: Sequence[ImageSource | Tensor | Seen], most: int) -> Generator[Seen, None, None]:
    """As ``see`` for each of the images; up to ``most`` files and images are read ahead, in threads."""
    reads = (partial(read_seen, view, source) for source in sources if not isinstance(source, Seen | Tensor))
    with closing(ahead(reads, min(most, len(sources)))) as waiting:
        for source in sources:
            known = isinstance(source, Seen | Tensor)
            yield see(view, source) if known else with_warning(view, next(waiting).result())


def read_seen(view: View, source: ImageSource) -> Seen:
    """Reads and preprocesses an image, in any thread."""
    image = read_image(source)
    path = None if isinstance(source, Image.Image | np.ndarray) else str(Path(source).resolve())
    return Seen(image, view.preprocess(image), view.preprocessing.box(image.size), path)


def with_warning(view: View, seen: Seen) -> Seen:
    """Warns about an image that the model hardly sees: in the thread of the caller, when its turn has come."""
    if doubt := view.preprocessing.doubt(seen.image.size):
        warnings.warn(doubt if seen.path is None else f"{Path(seen.path).name}: {doubt}", stacklevel=2)
    return seen


def _of_tensor(view: View, source: Tensor) -> Seen:
    check_floats(source)
    source = view.preprocessing.trim(source)
    if tuple(source.shape) != (3, *view.size):
        raise VitrailError(
            f"a tensor must be a normalised image of shape (3, {view.size[0]}, {view.size[1]}) for {view.name}, "
            f"but got {tuple(source.shape)}. Use model.preprocess(image)."
        )
    if not source.isfinite().all():
        broken = int((~source.isfinite()).sum())
        raise VitrailError(
            f"a tensor must hold finite floats (a normalised image), but got {broken} NaN or infinite values."
        )
    image = view.preprocessing.denormalise(source.detach().float().cpu())
    return Seen(image, source.detach(), (0.0, 0.0, float(view.size[1]), float(view.size[0])), None, True)


@dataclass(frozen=True)
class Prediction:
    """What is known of a batch and a target after one forward pass and the work of the method."""

    attribution: Attribution
    logits: Tensor  # (B, C)
    target: Target
    storage: Tensor  # (B, N) bool: patches that are used as registers; N = 0 without tokens


def prediction(method: Method, batch: Batch, target: Target) -> Asking[Prediction]:
    """The maps, logits, classes and storage tokens, from the forward pass that the method makes anyway."""
    askers: list[Asking[Any]] = [method.explained(batch, target)]
    if batch.view.has_tokens:
        askers.append(ask_storage(batch, target, method.reduced))
    attribution, *stored = yield from concurrently(askers)
    logits = yield Logits(batch, method.reduced)
    check_finite(batch.view, logits)
    storage = stored[0] if stored else torch.zeros(len(batch), 0, dtype=torch.bool)
    return Prediction(attribution, logits, target.resolved(batch.view, logits), storage.cpu())


def _explain_batch(method: Method, pictures: list[Seen], targets: Sequence[Target]) -> list[list[Explanation]]:
    """For each image the explanations of its targets, made a few targets at a time."""
    view, scheduler = method.model, Scheduler()
    pixels = view.stacked([picture.pixels for picture in pictures])
    batch = Batch(view, view.check_images(pixels, view.precision))
    made: list[list[Explanation]] = [[] for _ in pictures]
    for start in range(0, len(targets), TARGETS_AT_ONCE):
        begin, few = time.perf_counter(), targets[start : start + TARGETS_AT_ONCE]
        predictions = scheduler.run([prediction(method, batch, target) for target in few])
        seconds = (time.perf_counter() - begin) / len(pictures) / len(few)
        for predicted in predictions:
            for explanations, explanation in zip(
                made, _explanations(method, pictures, predicted, seconds, scheduler.smallest_chunk), strict=True
            ):
                explanations.append(explanation)
    return made


def _explanations(
    method: Method, pictures: Sequence[Seen], predicted: Prediction, seconds: float, smallest_chunk: int | None
) -> Iterator[Explanation]:
    """One for each image of a batch."""
    view = method.model
    probabilities, attribution = view.probabilities(predicted.logits), predicted.attribution
    likeliest = probabilities.argsort(descending=True, stable=True)[:, :5].tolist()
    probabilities = probabilities.cpu()
    maps = attribution.map.float().cpu()
    errors = None if attribution.error is None else attribution.error.float().cpu()
    chunk = {"chunk": float(smallest_chunk or 0)} if isinstance(method, MaskMethod) else {}
    # as lists, once for the batch: on CUDA, each number that is read waits for the device
    extras = {name: values.tolist() for name, values in attribution.extras.items()}
    classes = predicted.target.about_each
    for i, (picture, ranked, (index, *rival)) in enumerate(zip(pictures, likeliest, classes, strict=True)):
        yield Explanation(
            map=maps[i].clone(),
            image=picture.image,
            model=view,
            method=method.info.name,
            params=method.params,
            target=index,
            label=view.label(index),
            probability=float(probabilities[i, index]),
            seconds=seconds,
            box=picture.box,
            model_name=view.name,
            against=rival[0] if rival else None,
            against_label=view.label(rival[0]) if rival else None,
            against_probability=float(probabilities[i, rival[0]]) if rival else None,
            top=[(k, view.label(k), float(probabilities[i, k])) for k in ranked],
            extras={name: float(values[i]) for name, values in extras.items()} | chunk,
            image_path=picture.path,
            storage=predicted.storage[i].nonzero()[:, 0].tolist(),
            grid=view.grid if view.has_tokens else None,
            signed=method.info.signed,
            pixels=picture.pixels.cpu().clone() if picture.from_tensor else None,
            error=None if errors is None else errors[i].clone(),
            measure=view.measure,
        )


def _posed_to_all(view: View, target: Any) -> tuple[View, Target]:
    """The view that answers a question about all images, and what is asked of each."""
    if are_several(target):
        raise VitrailError(
            "evaluate asks the same of all images, but got several targets: give a single target, or put a class for "
            'each image into the data, [(image, class), …], and ask for target="label".'
        )
    try:
        with own_modes():
            posed, index, rival = pose(view, target, None, lambda source: see(view, source).pixels, _no_images)
        fixed = Target.of(posed, index)
    except VitrailError as error:
        if not isinstance(target, str):
            raise
        kinds = ", ".join(f'"{kind}"' for kind in OF_EACH_IMAGE)
        raise VitrailError(f"target must be {kinds}, a class or another target: {error}") from None
    if rival is not None:
        raise VitrailError(
            "metrics measure the score of a single target: evaluate that of the Contrast alone, or a Callable that "
            "returns the difference."
        )
    if posed.is_embedding:
        raise VitrailError(
            "metrics need classes or a score, which a channel of an embedding is not: evaluate it as a Callable, "
            f"lambda tokens, pooled, logits: logits[:, {index}]."
        )
    return posed, fixed


def _no_images() -> list[Seen]:
    raise VitrailError(
        'a region or a box belongs to a single image: explain it, or evaluate target="region" or "box", which is that '
        "of the annotated object of each image."
    )


def evaluate(
    model: View | nn.Module | str,
    data: Any,
    methods: Sequence[Called | Method] | str | None = None,
    metrics: Sequence[Called | Metric] | str | None = None,
    *,
    target: SingleTarget = None,
    protocol: str | None = None,
    images: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    curves: bool = False,
    strict: bool = False,
) -> pd.DataFrame:
    """Evaluates methods by metrics on a data set: one row per image, method and metric.

    Args:
        model: a view, a module that ``wrap`` accepts, or a name that ``load`` accepts.
        data: a data set, a name for ``vitrail.data.open_data`` ("scenes:100", "imagenet:DIR", a folder), or images.
        methods: names, names with parameters ("rise(masks=256)" or ("rise", {"masks": 256})), or methods; None = the
            model's default method.
        metrics: likewise; None = insertion and deletion.
        target: the class to explain and score: "predicted" (the default) or "label"; or the annotated object of each
            image, "region" (its class within its mask, of models with an output per patch) or "box" (the detection
            that fits its box). Or the same of all images: a class by index or name, a text for models that read texts,
            or one of ``vitrail.targets``, such as a group of classes or the similarity to an image.
        protocol: use this paper's protocol ("tis", "vit_cx", "vtranm", "skipplus", "rise") for all metrics that have
            it, and its choice of the class; the protocol of a single metric, "insertion(protocol=tis)", does not
            choose the class.
        images: number of images to sample; None = all.
        seed: seed of the sampling.
        batch_size: images per batch; None = by device.
        curves: add a column with the curves.
        strict: raise an error for an unreadable image; otherwise it is skipped with a warning.

    The columns are image, method, params, metric, value (NaN where a metric does not apply), target, explained, seconds
    (of the explanation; a trace that methods share counts for each), ties (the fraction of cells ordered at random),
    parts for metrics whose value over a data set is not a mean of values, and scale for a target with a score in place
    of a probability (of the empty image, where curves have 0, and the full image, where they have 1); ``summarise``
    computes means and intervals. Skipped images (broken, or without such an object), and files of a folder that are
    no images, are in ``attrs["skipped"]``.
    """
    import pandas as pd

    base, rows, skipped = as_view(model), list[dict[str, Any]](), dict[str, str]()
    chosen = open_examples(data, images, seed)
    view, fixed, explained = base, Target(), tuple[Explained, ...](("target",))
    if target is None or (isinstance(target, str) and target in OF_EACH_IMAGE):
        explained = explained_classes(target, protocol)
        remap = map_for(view, chosen, explained)
    else:
        view, fixed = _posed_to_all(base, target)
        remap = posed_class_map(base, view, chosen)
    measures, built = build_metrics(metrics, protocol), build_methods(view, methods)
    check_places(view, explained, built)
    evaluation = Evaluation(view, [Task(method, measures) for method in built], explained, remap, target=fixed)
    place = place_kind(explained)
    with closing(batches(view, chosen, images_at_once(view, batch_size), skipped, strict)) as read:
        for number, batch in enumerate(read):
            if place and number == 0:
                check_annotated(place, chosen, [image.example for image in batch])
            for asked, together in evaluation.asked(batch, skipped):
                rows += [row for finding in asked.measure(together, check=not rows) for row in finding.rows()]
    if not rows:
        broken = f": {len(skipped)} were left out ({next(iter(skipped.values())).rstrip('.')})" if skipped else ""
        raise VitrailError(f"no image of {chosen.name} could be measured{broken}.")
    if skipped:
        first = next(iter(skipped.values()))
        warnings.warn(f"{len(skipped)} of {len(chosen)} images were left out; the first: {first}", stacklevel=2)
    frame = pd.DataFrame(rows)
    empty = [name for name in ("parts", "scale") if not frame[name].notna().any()]
    frame = frame.drop(columns=empty if curves else ["curve", *empty])
    frame.attrs["skipped"] = {**chosen.skipped, **skipped}
    return frame
