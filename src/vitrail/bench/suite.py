"""Suites: plans that come with vitrail, several pairs of a model and images measured alike, each a run of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.calls import call_name, join_call, split_call
from vitrail.errors import VitrailError
from vitrail.methods.registry import ALIASES, METHODS, get_method

FOLDER = "{folder}"  # in a suite: the folder that the user names


@dataclass(frozen=True)
class Pair:
    """A model and the images that its explanations are measured on."""

    name: str
    title: str
    about: str  # a sentence about both
    plan: Plan | None = None  # None where something is missing
    missing: str = ""  # the first file or folder that is


@dataclass(frozen=True)
class Suite:
    """Pairs that are measured alike, and the methods to compare others with."""

    pairs: Sequence[Pair]
    reference: Sequence[str]


def open_suite(
    name: str,
    folder: Path | None = None,
    methods: Iterable[str] = (),
    metrics: Iterable[str] = (),
    pairs: Iterable[str] = (),
) -> Suite:
    """A suite by name.

    Args:
        name: of a TOML file in this package.
        folder: a folder with data and weights that do not come with vitrail; None = only what comes with it.
        methods: the methods to measure; empty = all, in the variants of ``every_method``.
        metrics: names or calls of the suite's metrics, those to measure; empty = all.
        pairs: the pairs to measure; empty = all.
    """
    content = tomllib.loads((files("vitrail.bench") / f"{name}.toml").read_text(encoding="utf-8"))
    if folder is not None and not folder.is_dir():
        raise VitrailError(f"--data '{folder}' is not a folder: {name} expects the folder with its data and models.")
    calls = list(methods) or [*every_method(content["parameters"]), *content.get("more", ())]
    chosen, names = list(pairs), [entry["name"] for entry in content["pairs"]]
    _check_known("--pairs", chosen, names)
    wanted = list(metrics)
    _check_known(
        "--metrics", wanted, {key for group in content["metrics"].values() for call in group for key in _keys(call)}
    )
    entries = [entry for entry in content["pairs"] if not chosen or entry["name"] in chosen]
    return Suite([_pair(entry, content, calls, wanted, folder) for entry in entries], content["reference"])


def _keys(call: str) -> tuple[str, str]:
    """What a metric of a suite can be chosen by."""
    return call, call_name(call)


def _check_known(option: str, values: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise VitrailError(f"{option} {', '.join(unknown)} is not in this plan: expected {', '.join(sorted(known))}.")


def every_method(parameters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The calls of every method: bare and SkipPLUS, the sums over layers that have names of their own, and each of
    them under the rule ``frozen`` where it knows rules.
    """
    names = [*METHODS.entries(), *(name for name in dict.fromkeys(ALIASES.values()) if "." in name)]
    names += [
        f"{name}.skipplus"
        for name, made in METHODS.entries().items()
        if "skipplus" in getattr(made, "aggregations", ())
    ]
    calls = []
    for name in names:
        calls.append(join_call(name, parameters.get(name, {})))
        if "rule" in get_method(name).parameters():
            calls.append(join_call(name, {"rule": "frozen"}))
    return calls


def _paths(entry: Mapping[str, Any]) -> list[str]:
    """The files and folders that a pair needs."""
    texts = [*entry["data"].split(" + "), *(value for value in entry["model"].values() if isinstance(value, str))]
    return [FOLDER + text.split(FOLDER, 1)[1] for text in texts if FOLDER in text]


def _pair(
    entry: Mapping[str, Any],
    content: Mapping[str, Any],
    methods: Sequence[str],
    wanted: Sequence[str],
    folder: Path | None,
) -> Pair:
    def placed(value: Any) -> Any:
        return value.replace(FOLDER, str(folder)) if isinstance(value, str) else value

    about = (entry["name"], entry["title"], entry["about"])
    for path in _paths(entry):
        if folder is None or not Path(placed(path)).exists():
            return Pair(*about, missing=path.replace(FOLDER, str(folder or "DIR")))
    model = {name: placed(value) for name, value in entry["model"].items()}
    metrics = [call for group in entry["metrics"] for call in content["metrics"][group]]
    metrics = [call for call in metrics if not wanted or not {*_keys(call)}.isdisjoint(wanted)]
    if not metrics:
        return Pair(*about, missing=f"metric {' or '.join(wanted)} in its plan")
    names = {split_call(call)[0] for call in metrics}
    chosen = [
        call for call in methods if entry["name"] in content.get("only", {}).get(call_name(call), [entry["name"]])
    ]
    if not chosen:
        return Pair(*about, missing=f"a model that {', '.join(methods)} can explain")
    plan = Plan(
        models=[ModelSpec(model.pop("name"), model)],
        data=placed(entry["data"]),
        methods=chosen,
        metrics=metrics,
        images=entry.get("images"),
        target=entry.get("target"),
        cheap_only=[name for name in content["cheap_only"] if name in names],
        limits={name: count for name, count in content["limits"].items() if name in names},
        maps=False,
    )
    return Pair(*about, plan)
