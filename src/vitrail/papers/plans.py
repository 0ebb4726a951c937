"""Plans for a paper's table: the selected models, data and cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, load_model
from vitrail.calls import call_name, join_call, split_call
from vitrail.data.base import DataSet, read_indices
from vitrail.data.names import open_data
from vitrail.errors import VitrailError
from vitrail.methods.registry import get_method
from vitrail.metrics.base import list_metrics
from vitrail.models.hub import split_revision
from vitrail.models.view import View
from vitrail.papers.catalogue import LAYER, PaperColumn, PaperData, PaperModel, PaperTarget, requirements
from vitrail.papers.cells import CellSpec


@dataclass(frozen=True)
class Selection:
    """The selected part of a target, with the paper's models and data or replacements."""

    target: PaperTarget
    data: Mapping[str, str]
    models: Mapping[str, ModelSpec]
    replaced: Sequence[str] = ()  # keys of models that are not the paper's
    images: int | None = None
    quick: bool = False

    def heading(self, column: PaperColumn) -> str:
        """The label of a column, with the name of the model that replaces the paper's."""
        if column.model not in self.replaced:
            return column.label
        label, name = self.target.models[column.model].label, self.models[column.model].name
        written = next((text for text in (label, label.partition(",")[0]) if text in column.label), "")
        return column.label.replace(written, name) if written else column.label


@dataclass(frozen=True)
class PlannedRun:
    """A plan and the cells computed from its rows."""

    name: str
    plan: Plan
    model: PaperModel
    data: PaperData
    cells: Sequence[CellSpec]
    unsupported: Mapping[tuple[str, str], str]  # row and column → why the method cannot explain the model


def select(
    target: PaperTarget,
    data: Mapping[str, str],
    model: str | Sequence[str] | None = None,
    images: int | None = None,
    only: Sequence[str] = (),
    quick: bool = False,
) -> Selection:
    """The selection for the user's arguments; unknown names are refused."""
    allowed = [requirement.name for requirement in target.needs()]
    unknown = [name for name in data if name not in allowed]
    if unknown:
        raise VitrailError(f"{target.name} needs no data {unknown[0]!r}; it takes {', '.join(allowed)}.")
    unknown = [key for key in only if key not in target.models and key not in target.data]
    if unknown:
        known = ", ".join(dict.fromkeys([*target.models, *target.data]))
        raise VitrailError(f"{target.name} has no model or data {unknown[0]!r}: expected {known}.")
    replacements = replacement_models(target, [model] if isinstance(model, str) else model or [])
    selected = _restricted(target, only, replacements)
    if not selected.columns:
        raise VitrailError(f"{target.name} has no column for {' and '.join(only)} together.")
    models, replaced = dict[str, ModelSpec](), list[str]()
    for key, paper_model in selected.models.items():
        spec, replacement = paper_model.spec(data), replacements.get(key)
        if replacement is not None and replacement.name == spec.name:  # the paper's model with weights from a file, say
            spec = replace(spec, options=spec.options | replacement.options)
        elif replacement is not None:
            spec = replacement
            replaced.append(key)
        models[key] = spec
    return Selection(selected, dict(data), models, replaced, images, quick)


def replacement_models(target: PaperTarget, texts: Sequence[str]) -> dict[str, ModelSpec]:
    """Key → the model that replaces it; a name without a key replaces the first model, and the others are dropped."""
    models: dict[str, ModelSpec] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        if equals and key.isidentifier():
            if key not in target.models:
                raise VitrailError(f"{target.name} has no model {key!r}: expected {', '.join(target.models)}.")
            models[key] = parse_model(rest)
        else:
            models |= {"": parse_model(text), next(iter(target.models)): parse_model(text)}
    return models


def parse_model(text: str) -> ModelSpec:
    """NAME?checkpoint=FILE&num_classes=10."""
    name, _, query = text.partition("?")
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if key not in ("checkpoint", "labels", "num_classes", "img_size") or not (equals and value):
            raise VitrailError(f"{text!r} has {part!r}: expected checkpoint, labels, num_classes or img_size = value.")
        options[key] = int(value) if key in ("num_classes", "img_size") and value.isdecimal() else value
    return ModelSpec(name, options)


def _restricted(target: PaperTarget, only: Sequence[str], replacements: Mapping[str, ModelSpec]) -> PaperTarget:
    """The target with the selected columns and their published values."""
    models = [next(iter(target.models))] if "" in replacements else [key for key in target.models if key in only]
    data = [key for key in target.data if key in only and key not in target.models]  # a model selects its own data
    columns = [
        column
        for column in target.columns
        if (not models or column.model in models) and (not data or column.data in data)
    ]
    return replace(
        target,
        columns=columns,
        models={column.model: target.models[column.model] for column in columns},
        data={column.data: target.data[column.data] for column in columns},
        published={row: [target.value(row, column.label) for column in columns] for row in target.published},
    )


def prepare(selection: Selection, load: Loader) -> tuple[dict[str, View], dict[str, DataSet]]:
    """Opens models and data, by key; one error lists all that is missing and how to get it, before any work is done."""
    target, known = selection.target, requirements()
    missing = [name for data in target.data.values() for name in data.missing(selection.data)]
    without_weights = [
        key
        for key, model in target.models.items()
        if model.weights and key not in selection.replaced and "checkpoint" not in selection.models[key].options
    ]
    missing += [target.models[key].weights or "" for key in without_weights]
    problems = [f"{known[n].what}: give --data {n}=PATH. Get it: {known[n].get}." for n in dict.fromkeys(missing)]
    data, views = dict[str, DataSet](), dict[str, View]()
    for key, paper_data in target.data.items():
        if not paper_data.missing(selection.data):
            with _collected(problems):
                data[key] = open_images(selection, paper_data)
    if not problems:
        for key, spec in selection.models.items():
            with _collected(problems):
                views[key] = load(spec)
    elif load is load_model:
        specs = [(key, spec) for key, spec in selection.models.items() if key not in without_weights]
        problems += [line for key, spec in specs for line in _missing_weights(key, spec)]
    if problems:
        lines = "\n".join(f"- {line}" for line in problems)
        raise VitrailError(f"{target.name} cannot start:\n{lines}")
    return views, data


def open_images(selection: Selection, data: PaperData) -> DataSet:
    """The images of a data set: a list of positions, or a sample; only the first ones if fewer are requested."""
    from vitrail.papers.zebra_elephant import ZebraElephant

    images = open_data(data.filled(selection.data))
    if data.pictures == "zebra_elephant":
        images = ZebraElephant(images)
    if not len(images):
        raise VitrailError(f"{images.name} is empty: expected at least one image.")
    if data.indices and "indices" in selection.data:
        return images.subset(indices=read_indices(selection.data["indices"])[: selection.images])
    count = selection.images or data.images
    return images if count is None or count >= len(images) else images.subset(count, data.seed)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Adds an error to the problems instead of raising it."""
    try:
        yield
    except VitrailError as error:
        problems.append(str(error))


def _missing_weights(key: str, spec: ModelSpec) -> list[str]:
    """Weights that are not on this machine yet; they are not downloaded here."""
    import timm

    from vitrail.models import embedded

    if "checkpoint" in spec.options or ":" in spec.name or spec.name in embedded.names():
        return []
    name, revision = split_revision(spec.name)
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    with suppress(Exception):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(try_to_load_from_cache(config.hf_hub_id, "model.safetensors", revision=revision), str):
            return []
    return [
        f"weights of {spec.name}: not on this machine. They are downloaded when the run starts; without a network give "
        f"--model {key}={spec.name}?checkpoint=FILE."
    ]


def plan_runs(selection: Selection, views: Mapping[str, View]) -> list[PlannedRun]:
    """One plan for each model, data set and explained class."""
    groups = dict.fromkeys((column.model, column.data, column.explained) for column in selection.target.columns)
    return [_planned_run(selection, views[group[0]], *group) for group in groups]


def _planned_run(selection: Selection, view: View, model_key: str, data_key: str, explained: str) -> PlannedRun:
    target = selection.target
    model, data = target.models[model_key], target.data[data_key]
    columns = [c for c in target.columns if (c.model, c.data, c.explained) == (model_key, data_key, explained)]
    model = replace(model, parameters={}) if model_key in selection.replaced else model
    cells: list[CellSpec] = []
    reasons: dict[tuple[str, str], str] = {}
    for row, call in rows_for(target, model, view):
        reason = get_method(call_name(call)).unsupported(view)
        for column in columns:
            if not column.applies(row):
                continue
            calls = (reduced(call), reduced(column.metric)) if selection.quick else (call, column.metric)
            cells.append(CellSpec(row, column, *calls))
            if reason:
                reasons[row, column.label] = reason
    supported = [cell for cell in cells if (cell.row, cell.column.label) not in reasons]
    if not supported:
        raise VitrailError(f"no method of {target.name} can explain {view.name}: {next(iter(reasons.values()))}.")
    plan = Plan(
        models=[selection.models[model_key]],
        data=data.filled(selection.data),
        methods=list(dict.fromkeys(cell.method for cell in supported)),
        metrics=list(dict.fromkeys(cell.metric for cell in supported)),
        images=data.images if selection.images is None else selection.images,
        seed=data.seed,
        indices=selection.data.get("indices") if data.indices else None,
        target=explained,
        maps=target.maps,
    )
    return PlannedRun(f"{model_key}-{data_key}-{explained}", plan, model, data, cells, reasons)


def rows_for(target: PaperTarget, model: PaperModel, view: View) -> list[tuple[str, str]]:
    """Row → method call; a row with {layer} becomes one for each layer of the model."""
    rows = []
    for row, call in target.methods.items():
        layers = range(view.num_layers if view.has_tokens else 0) if LAYER in call else [None]
        rows += [(row.replace(LAYER, str(layer)), target.call(row, model, layer)) for layer in layers]
    return rows


def reduced(call: str) -> str:
    """A method or metric with a reduced number of masks, steps and samples; small numbers stay."""
    name, params = split_call(call)
    known = list_metrics()[name].params if name in list_metrics() else get_method(name).parameters()
    for key, divisor in (("masks", 64), ("steps", 32), ("samples", 32)):
        if key in known:
            count = params.get(key, known[key]) or 4096
            params[key] = min(count, max(2, count // divisor))
    return join_call(name, params)
