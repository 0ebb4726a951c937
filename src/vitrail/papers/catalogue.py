"""The papers' tables and figures as data: models, data, methods, metrics and published values (``tables/*.toml``)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from vitrail.bench.plan import ModelSpec
from vitrail.calls import join_call, split_call
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.evaluation import Explained  # imports torch, which `vitrail reproduce --list` does without

FOLDER = Path(__file__).parent / "tables"
REQUIREMENTS = "data"  # the file that is not a paper
LAYER = "{layer}"

Better = Literal["higher", "lower", "none"]


@dataclass(frozen=True)
class Requirement:
    """Data or weights that the user provides: ``--data NAME=PATH``."""

    name: str
    what: str
    get: str
    optional: bool = False


@dataclass(frozen=True)
class PaperModel:
    """A model as in the paper. ``parameters`` are passed to every method that has them."""

    key: str
    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None  # the requirement that provides them
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
    """Images as selected by the paper. ``spec`` is a format string over the paths of requirements."""

    key: str
    spec: str
    images: int | None = None
    seed: int = 0
    indices: bool = False  # whether the user may provide a list of positions
    sha256: str | None = None  # of the paper's list of positions, joined by spaces
    pictures: str | None = None  # "zebra_elephant": a special selection
    note: str = ""

    @property
    def needs(self) -> list[str]:
        return [name for _, name, _, _ in Formatter().parse(self.spec) if name]

    def replaced(self, data: Mapping[str, str]) -> str | None:
        """A complete specification ("scenes:100") that replaces the first path."""
        from vitrail.data.names import DATA_NAMES

        first = data.get(self.needs[0], "")
        kind = first.partition("?")[0].partition(":")[0]
        return first if kind in DATA_NAMES and not Path(first).exists() else None

    def missing(self, data: Mapping[str, str]) -> list[str]:
        """The requirements that were not provided."""
        return [] if self.replaced(data) else [name for name in self.needs if name not in data]

    def filled(self, data: Mapping[str, str]) -> str:
        """The specification for ``open_data``."""
        return self.replaced(data) or self.spec.format(**data)


@dataclass(frozen=True)
class PaperColumn:
    """A column of a table: a metric for one model, data set and explained class, and how its rows are aggregated.

    ``image``: only images whose id starts with this. ``where="wrong"``: only misclassified images. ``rows`` and
    ``without``: the rows that have a cell in this column.
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
    better: Better | None = None  # None = as for the metric

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
    """A statement of the paper and its test; with ``columns`` (globs) one test per matching column."""

    text: str
    test: str
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Doubt:
    """A published row, or some of its cells, with implausible values."""

    row: str
    note: str
    mark: str = "†"
    columns: Sequence[str] = ("*",)

    def covers(self, row: str, column: str) -> bool:
        return row == self.row and any(fnmatchcase(column, pattern) for pattern in self.columns)


@dataclass(frozen=True)
class PaperTarget:
    """One table or figure."""

    name: str
    title: str
    paper: str
    columns: Sequence[PaperColumn]
    methods: Mapping[str, str]  # row → method call; {layer} stands for every layer of the model
    models: Mapping[str, PaperModel]
    data: Mapping[str, PaperData]
    published: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    doubts: Sequence[Doubt] = ()
    notes: Sequence[str] = ()
    maps: bool = False  # whether to store maps and pictures
    figure: str | None = None  # kind of figure: "radar"

    def value(self, row: str, column: str) -> float | None:
        """The published value; None if there is none."""
        place = [item.label for item in self.columns].index(column)
        values = self.published.get(row, ())
        value = values[place] if place < len(values) else None
        return None if value is None else float(value)

    def doubt(self, row: str, column: str) -> Doubt | None:
        return next((doubt for doubt in self.doubts if doubt.covers(row, column)), None)

    def needs(self) -> list[Requirement]:
        """What the user must or may provide."""
        known = requirements()
        names = [name for data in self.data.values() for name in data.needs]
        names += [model.weights for model in self.models.values() if model.weights]
        names += ["indices"] if any(data.indices for data in self.data.values()) else []
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
def targets() -> dict[str, PaperTarget]:
    """Every table and figure, paper by paper."""
    names = ["tis", "vit_cx", "vtranm", "skipplus", "libragrad"]
    return {target.name: target for name in names for target in _targets(_read(name))}


def find_target(name: str) -> PaperTarget:
    """A table or figure by its name."""
    key = name.strip().lower()
    if key not in targets():
        close = difflib.get_close_matches(key, [*targets()], n=4, cutoff=0.4)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise VitrailError(f"there is no target {name!r}.{hint} `vitrail reproduce --list` lists them.")
    return targets()[key]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _targets(paper: Mapping[str, Any]) -> list[PaperTarget]:
    models = {key: PaperModel(key, **about) for key, about in paper["models"].items()}
    data = {key: PaperData(key, **about) for key, about in paper["data"].items()}
    return [_target(about, paper, models, data) for about in paper["targets"]]


def _target(
    about: Mapping[str, Any], paper: Mapping[str, Any], models: dict[str, PaperModel], data: dict[str, PaperData]
) -> PaperTarget:
    unknown = about.keys() - {item.name for item in fields(PaperTarget)} - {"model", "explained"}
    if unknown:
        raise VitrailError(f"{paper['name']}-{about['name']} has unknown keys: {', '.join(sorted(unknown))}.")
    methods, tables = (
        paper[kind][about[kind]] if isinstance(about[kind], str) else about[kind] for kind in ("methods", "columns")
    )
    defaults = {key: about[key] for key in ("model", "data", "explained") if key in about}
    columns = [PaperColumn(**{**defaults, **table}) for table in tables]
    return PaperTarget(
        name=f"{paper['name']}-{about['name']}",
        title=about["title"],
        paper=paper["title"],
        columns=columns,
        methods=methods,
        models={column.model: models[column.model] for column in columns},
        data={column.data: data[column.data] for column in columns},
        published=about.get("published", {}),
        claims=[Claim(**claim) for claim in about.get("claims", [])],
        doubts=[Doubt(**doubt) for doubt in about.get("doubts", [])],
        notes=[*about.get("notes", []), *paper["notes"]],
        maps=about.get("maps", False),
        figure=about.get("figure"),
    )
