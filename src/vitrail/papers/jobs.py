"""From a paper's table and what the user brings to plans: which models, which data, which cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, load_model
from vitrail.calls import join_call, split_call
from vitrail.data.base import DataSet, read_indices
from vitrail.data.names import open_data
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.papers.catalogue import LAYER, PaperData, PaperModel, Target, requirements
from vitrail.papers.cells import Wanted

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A target as the user wants it: its own models and data, or others in their place."""

    target: Target
    data: Mapping[str, str]
    models: Mapping[str, ModelSpec]
    swapped: Sequence[str] = ()  # keys of models that are not the paper's
    images: int | None = None
    quick: bool = False


@dataclass(frozen=True)
class Job:
    """A plan and the cells that its rows make."""

    name: str
    plan: Plan
    model: PaperModel
    data: PaperData
    wanted: Sequence[Wanted]
    refused: Mapping[tuple[str, str], str]  # row and column → why the method cannot explain the model


def ask(
    target: Target,
    data: Mapping[str, str],
    model: str | Sequence[str] | None = None,
    images: int | None = None,
    only: Sequence[str] = (),
    quick: bool = False,
) -> Asked:
    """What the user wants, with words that mean nothing refused."""
    allowed = [one.name for one in target.needs()]
    unknown = [name for name in data if name not in allowed]
    if unknown:
        raise VitrailError(f"{target.name} needs no data {unknown[0]!r}; it takes {', '.join(allowed)}.")
    strange = [key for key in only if key not in target.models and key not in target.data]
    if strange:
        known = ", ".join(dict.fromkeys([*target.models, *target.data]))
        raise VitrailError(f"{target.name} has no model or data {strange[0]!r}: expected {known}.")
    swapped = swapped_models(target, [model] if isinstance(model, str) else model or [])
    kept = _kept(target, only, swapped)
    if not kept.columns:
        raise VitrailError(f"{target.name} has no column for {' and '.join(only)} together.")
    models, others = dict[str, ModelSpec](), list[str]()
    for key, one in kept.models.items():
        own, other = one.spec(data), swapped.get(key)
        if other is not None and other.name == own.name:  # the paper's model with weights from a file, say
            own = replace(own, options=own.options | other.options)
        elif other is not None:
            own = other
            others.append(key)
        models[key] = own
    return Asked(kept, dict(data), models, others, images, quick)


def swapped_models(target: Target, given: Sequence[str]) -> dict[str, ModelSpec]:
    """Key → the model that takes its place; a name without a key takes the first place, and the others go."""
    found: dict[str, ModelSpec] = {}
    for text in given:
        key, equals, rest = text.partition("=")
        if equals and key.isidentifier():
            if key not in target.models:
                raise VitrailError(f"{target.name} has no model {key!r}: expected {', '.join(target.models)}.")
            found[key] = read_model(rest)
        else:
            found |= {"": read_model(text), next(iter(target.models)): read_model(text)}
    return found


def read_model(text: str) -> ModelSpec:
    """NAME?checkpoint=FILE&num_classes=10."""
    name, _, query = text.partition("?")
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in ("checkpoint", "labels", "num_classes", "img_size") or not (equals and value):
            raise VitrailError(f"{text!r} has {part!r}: expected checkpoint, labels, num_classes or img_size = value.")
        options[key] = int(value) if key in ("num_classes", "img_size") and value.isdecimal() else value
    return ModelSpec(name, options)


def _kept(target: Target, only: Sequence[str], swapped: Mapping[str, ModelSpec]) -> Target:
    """The target with the columns that are asked for; published numbers stay in their places."""
    models = [next(iter(target.models))] if "" in swapped else [key for key in target.models if key in only]
    data = [key for key in target.data if key in only and key not in target.models]  # a model brings its own
    places = [
        i
        for i, column in enumerate(target.columns)
        if (not models or column.model in models) and (not data or column.data in data)
    ]
    columns = [target.columns[i] for i in places]
    return replace(
        target,
        columns=columns,
        models={column.model: target.models[column.model] for column in columns},
        data={column.data: target.data[column.data] for column in columns},
        published={row: [own[i] if i < len(own) else None for i in places] for row, own in target.published.items()},
    )


@dataclass(frozen=True)
class Prepared:
    """Models and pictures, by their keys."""

    views: Mapping[str, View]
    pictures: Mapping[str, DataSet]


def prepare(asked: Asked, load: Loader) -> Prepared:
    """Opens everything; one error lists all that is missing, with how to get it, before any work is done."""
    target, known = asked.target, requirements()
    lacking = [name for one in target.data.values() for name in one.missing(asked.data)]
    unweighted = [
        key
        for key, one in target.models.items()
        if one.weights and key not in asked.swapped and "checkpoint" not in asked.models[key].options
    ]
    lacking += [target.models[key].weights or "" for key in unweighted]
    problems = [f"{known[n].what}: give --data {n}=PATH. Get it: {known[n].get}." for n in dict.fromkeys(lacking)]
    whole = [(key, one) for key, one in target.data.items() if not one.missing(asked.data)]
    pictures = {key: _tried(problems, open_pictures, asked, one) for key, one in whole}
    views: dict[str, View | None] = {}
    if not problems:
        views = {key: _tried(problems, load, spec) for key, spec in asked.models.items()}
    elif load is load_model:
        problems += [line for key, spec in asked.models.items() if key not in unweighted for line in _absent(key, spec)]
    if problems:
        lines = "\n".join(f"- {line}" for line in problems)
        raise VitrailError(f"{target.name} cannot start:\n{lines}")
    return Prepared(
        {key: one for key, one in views.items() if one is not None},
        {key: one for key, one in pictures.items() if one is not None},
    )


def open_pictures(asked: Asked, data: PaperData) -> DataSet:
    """The pictures of a data set: those of a list of positions, or a draw; the first ones where fewer are asked for."""
    from vitrail.papers.animals import ZebraElephant

    whole = open_data(data.filled(asked.data))
    if data.pictures == "zebra_elephant":
        whole = ZebraElephant(whole)
    if not len(whole):
        raise VitrailError(f"{whole.name} is empty: expected at least one image.")
    if data.indices and "indices" in asked.data:
        return whole.subset(indices=read_indices(asked.data["indices"])[: asked.images])
    count = asked.images or data.images
    return whole if count is None or count >= len(whole) else whole.subset(count, data.seed)


def _tried(problems: list[str], attempt: Callable[..., T], *given: Any) -> T | None:
    """What an attempt gives; its error is noted, and None given."""
    try:
        return attempt(*given)
    except VitrailError as error:
        problems.append(str(error))
        return None


def _absent(key: str, spec: ModelSpec) -> list[str]:
    """Weights that are not on this machine yet; looked up only, since fetching them takes time."""
    import timm

    from vitrail.models import embedded

    if "checkpoint" in spec.options or ":" in spec.name or spec.name in embedded.names():
        return []
    config = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    with suppress(Exception):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(try_to_load_from_cache(config.hf_hub_id, "model.safetensors"), str):
            return []
    return [
        f"weights of {spec.name}: not on this machine. They are fetched when the run starts; without a network give "
        f"--model {key}={spec.name}?checkpoint=FILE."
    ]


def make_jobs(asked: Asked, views: Mapping[str, View]) -> list[Job]:
    """One plan for each model, data set and explained class."""
    groups = dict.fromkeys((one.model, one.data, one.explained) for one in asked.target.columns)
    return [_job(asked, views[group[0]], *group) for group in groups]


def _job(asked: Asked, view: View, model_key: str, data_key: str, explained: str) -> Job:
    target, model, data = asked.target, asked.target.models[model_key], asked.target.data[data_key]
    columns = [c for c in target.columns if (c.model, c.data, c.explained) == (model_key, data_key, explained)]
    model = replace(model, parameters={}) if model_key in asked.swapped else model
    wanted: list[Wanted] = []
    refused: dict[tuple[str, str], str] = {}
    for row, call in rows_on(target, model, view):
        reason = unsupported(call, view)
        for column in columns:
            if not column.applies(row):
                continue
            calls = (hurried(call), hurried(column.metric)) if asked.quick else (call, column.metric)
            wanted.append(Wanted(row, column, *calls))
            if reason:
                refused[row, column.label] = reason
    able = [one for one in wanted if (one.row, one.column.label) not in refused]
    if not able:
        raise VitrailError(f"no method of {target.name} can explain {view.name}: {next(iter(refused.values()))}.")
    plan = Plan(
        models=[asked.models[model_key]],
        data=data.filled(asked.data),
        methods=list(dict.fromkeys(one.method for one in able)),
        metrics=list(dict.fromkeys(one.metric for one in able)),
        images=data.images if asked.images is None else asked.images,
        seed=data.seed,
        indices=asked.data.get("indices") if data.indices else None,
        target=explained,
        maps=target.maps,
    )
    return Job(f"{model_key}-{data_key}-{explained}", plan, model, data, wanted, refused)


def rows_on(target: Target, model: PaperModel, view: View) -> list[tuple[str, str]]:
    """Row → method call; a row about layers becomes one for each layer of the model."""
    found = []
    for row, call in target.methods.items():
        layers = range(view.num_layers if isinstance(view, ViT) else 0) if LAYER in call else [None]
        found += [(row.replace(LAYER, str(layer)), target.call(row, model, layer)) for layer in layers]
    return found


def unsupported(call: str, view: View) -> str | None:
    from vitrail.methods.registry import get_method

    return get_method(split_call(call)[0]).unsupported(view)


def hurried(call: str) -> str:
    """A method or metric with few masks, steps and samples; those that were few stay."""
    from vitrail.methods.registry import get_method
    from vitrail.metrics.base import list_metrics

    name, params = split_call(call)
    known = list_metrics()[name].params if name in list_metrics() else get_method(name).parameters()
    for key, parts in (("masks", 64), ("steps", 32), ("samples", 32)):
        if key in known:
            usual = params.get(key, known[key]) or 4096
            params[key] = min(usual, max(2, usual // parts))
    return join_call(name, params)
