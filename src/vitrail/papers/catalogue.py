"""The papers' tables and figures as data: what was compared, how, and what came out (``papers/*.toml``)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from vitrail.bench.plan import ModelSpec
from vitrail.calls import join_call, split_call
from vitrail.errors import VitrailError

FOLDER = Path(__file__).parent / "tables"
REQUIREMENTS = "data"  # the file that is no paper
LAYER = "{layer}"

Explained = Literal["predicted", "label"]
Better = Literal["higher", "lower", "none"]


@dataclass(frozen=True)
class Requirement:
    """Something that the user brings: ``--data NAME=PATH``."""

    name: str
    what: str
    get: str
    optional: bool = False


@dataclass(frozen=True)
class PaperModel:
    """A model as the paper used it. ``parameters`` are given to every method that has them."""

    key: str
    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None  # the requirement that brings them
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def spec(self, data: Mapping[str, str]) -> ModelSpec:
        options = dict(self.options)
        if self.weights is not None and self.weights in data:
            options["checkpoint"] = data[self.weights]
        return ModelSpec(self.name, options, dict(self.preprocessing))


@dataclass(frozen=True)
class PaperData:
    """Pictures as the paper chose them. In ``spec`` the names of requirements stand for their paths."""

    key: str
    spec: str
    images: int | None = None
    seed: int = 0
    indices: bool = False  # whether the user may bring a list of positions
    sha256: str | None = None  # of the paper's own list: its numbers with spaces between them
    pictures: str | None = None  # a special choice of pictures, see reproduce.PICTURES
    note: str = ""

    @property
    def needs(self) -> list[str]:
        return [name for _, name, _, _ in Formatter().parse(self.spec) if name]

    def replaced(self, data: Mapping[str, str]) -> str | None:
        """A complete specification ("scenes:100") that the user gives in place of the first path."""
        from vitrail.data.names import DATA_NAMES

        first = data.get(self.needs[0], "")
        kind = first.partition("?")[0].partition(":")[0]
        return first if kind in DATA_NAMES and not Path(first).exists() else None

    def missing(self, data: Mapping[str, str]) -> list[str]:
        """The requirements that are not there."""
        return [] if self.replaced(data) else [name for name in self.needs if name not in data]

    def filled(self, data: Mapping[str, str]) -> str:
        """As ``open_data`` takes it."""
        return self.replaced(data) or self.spec.format(**data)


@dataclass(frozen=True)
class Column:
    """A column of a table: a metric of one model on some data, explained for one class, and how it is read.

    ``image``: only pictures whose id begins so. ``where="wrong"``: only pictures that the model gets wrong. ``rows``
    and ``without``: the rows that have a cell here.
    """

    label: str
    metric: str
    model: str
    data: str
    explained: Explained
    reading: str = "mean"
    scale: float = 1.0
    digits: int = 3
    image: str = ""
    where: Literal["", "wrong"] = ""
    rows: Sequence[str] | None = None
    without: Sequence[str] = ()
    better: Better | None = None  # None = as the metric says

    def applies(self, row: str) -> bool:
        return row not in self.without and (self.rows is None or row in self.rows)

    def direction(self) -> int:
        """1 where higher is better, −1 where lower is, 0 where neither is."""
        from vitrail.metrics.base import build_metric

        if self.better is not None:
            return {"higher": 1, "lower": -1, "none": 0}[self.better]
        name, params = split_call(self.metric)
        return 1 if build_metric(name, **params).higher_is_better else -1


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and its test; with ``columns`` (globs) one test for each column that fits."""

    text: str
    test: str
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Doubt:
    """A published row, or some of its cells, that cannot be right."""

    row: str
    note: str
    mark: str = "†"
    columns: Sequence[str] = ("*",)

    def covers(self, row: str, column: str) -> bool:
        return row == self.row and any(fnmatchcase(column, one) for one in self.columns)


@dataclass(frozen=True)
class Target:
    """One table or figure."""

    name: str
    title: str
    paper: str
    columns: Sequence[Column]
    methods: Mapping[str, str]  # row → method call; {layer} stands for every layer of the model
    models: Mapping[str, PaperModel]
    data: Mapping[str, PaperData]
    published: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    doubts: Sequence[Doubt] = ()
    notes: Sequence[str] = ()
    maps: bool = False  # whether maps and pictures are kept, for a figure that shows some
    figure: str | None = None  # how the paper draws it: "radar"

    def value(self, row: str, column: str) -> float | None:
        """What the paper prints; None where it prints nothing."""
        place = [one.label for one in self.columns].index(column)
        own = self.published.get(row, ())
        found = own[place] if place < len(own) else None
        return None if found is None else float(found)

    def doubt(self, row: str, column: str) -> Doubt | None:
        return next((one for one in self.doubts if one.covers(row, column)), None)

    def needs(self) -> list[Requirement]:
        """What the user must bring, and may bring."""
        known = requirements()
        names = [name for one in self.data.values() for name in one.needs]
        names += [one.weights for one in self.models.values() if one.weights]
        names += ["indices"] if any(one.indices for one in self.data.values()) else []
        return [known[name] for name in dict.fromkeys(names)]

    def call(self, row: str, model: PaperModel, layer: int | None = None) -> str:
        """The method of a row on a model."""
        from vitrail.methods.registry import get_method

        name, params = split_call(self.methods[row].replace(LAYER, str(layer)))
        known = get_method(name).parameters()
        return join_call(name, params | {k: v for k, v in model.parameters.items() if k in known and k not in params})


@lru_cache(maxsize=1)
def requirements() -> dict[str, Requirement]:
    return {name: Requirement(name, **about) for name, about in _read(REQUIREMENTS).items()}


@lru_cache(maxsize=1)
def targets() -> dict[str, Target]:
    """Every table and figure, paper by paper."""
    names = ["tis", "vit_cx", "vtranm", "skipplus", "libragrad"]
    return {one.name: one for name in names for one in _targets(_read(name))}


def find_target(name: str) -> Target:
    """A table or figure by its name."""
    wanted = name.strip().lower()
    if wanted not in targets():
        close = difflib.get_close_matches(wanted, [*targets()], n=4, cutoff=0.4)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise VitrailError(f"there is no target {name!r}.{hint} `vitrail reproduce --list` lists them.")
    return targets()[wanted]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _targets(paper: Mapping[str, Any]) -> list[Target]:
    models = {key: PaperModel(key, **about) for key, about in paper["models"].items()}
    data = {key: PaperData(key, **about) for key, about in paper["data"].items()}
    return [_target(one, paper, models, data) for one in paper["targets"]]


def _target(
    found: Mapping[str, Any], paper: Mapping[str, Any], models: dict[str, PaperModel], data: dict[str, PaperData]
) -> Target:
    unknown = found.keys() - {own.name for own in fields(Target)} - {"model", "explained"}
    if unknown:
        raise VitrailError(f"{paper['name']}-{found['name']} has unknown keys: {', '.join(sorted(unknown))}.")
    methods, columns = found["methods"], found["columns"]
    methods = paper["methods"][methods] if isinstance(methods, str) else methods
    columns = paper["columns"][columns] if isinstance(columns, str) else columns
    usual = {key: found[key] for key in ("model", "data", "explained") if key in found}
    own = [Column(**{**usual, **one}) for one in columns]
    return Target(
        name=f"{paper['name']}-{found['name']}",
        title=found["title"],
        paper=paper["title"],
        columns=own,
        methods=methods,
        models={one.model: models[one.model] for one in own},
        data={one.data: data[one.data] for one in own},
        published=found.get("published", {}),
        claims=[Claim(**one) for one in found.get("claims", [])],
        doubts=[Doubt(**one) for one in found.get("doubts", [])],
        notes=[*found.get("notes", []), *paper["notes"]],
        maps=found.get("maps", False),
        figure=found.get("figure"),
    )
