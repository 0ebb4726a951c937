"""The plan of a benchmark run, stored as TOML beside its results."""

from __future__ import annotations

import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from vitrail.calls import join_call, split_call
from vitrail.errors import VitrailError
from vitrail.files import save_atomically

METHODS = ["decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "att_cat(rule=frozen)", "gen_att", "trans_att",
           "vtranm", "rollout", "raw_attention", "grad_cam", "tis", "vit_cx", "rise", "random"]  # fmt: skip
METRICS = ["insertion", "deletion", "positive_auc", "negative_auc", "aopc", "log_odds", "token_deletion_accuracy",
           "token_insertion_accuracy", "pointing_game", "energy_pointing_game", "mean_iou", "segmentation_ap",
           "sparseness", "max_sensitivity"]  # fmt: skip

# The defaults of the preset "quick".
QUICK: dict[str, dict[str, Any]] = {
    "insertion": {"steps": 32},
    "deletion": {"steps": 32},
    "insertion_minus_deletion": {"steps": 32},
    "positive_auc": {"steps": 10},
    "negative_auc": {"steps": 10},
    "aopc": {"steps": 10},
    "log_odds": {"steps": 10},
    "tis": {"masks": 256},
    "rise": {"masks": 256},
    "max_sensitivity": {"samples": 3},
}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {"full": {}, "quick": QUICK}


@dataclass(frozen=True)
class ModelSpec:
    """A model by name, with options for ``vitrail.load``; ``preprocessing`` overrides parts of the model's own."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Everything that determines the rows of a run.

    ``cheap_only`` names metrics that are measured on methods with few passes only, because they re-explain images;
    ``limits`` holds metrics that are measured on the first so many images only.
    """

    models: Sequence[ModelSpec]
    data: str
    methods: Sequence[str] = tuple(METHODS)
    metrics: Sequence[str] = tuple(METRICS)
    images: int | None = None
    seed: int = 0
    indices: str | None = None  # a file of positions instead of a random sample
    target: str | None = None
    protocol: str | None = None
    batch_size: int | None = None
    deterministic: bool = False
    maps: bool = True
    cheap_only: Sequence[str] = ()
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(vars(self), EXPECTED, "the plan")
        for name in ("models", "methods", "metrics", "cheap_only"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.models or not self.methods or not self.metrics:
            raise VitrailError("a plan needs at least one model, one method and one metric.")
        object.__setattr__(self, "limits", dict(self.limits))
        for name in ("methods", "metrics"):
            calls = list(getattr(self, name))
            if len(set(calls)) != len(calls):
                raise VitrailError(f"{name} of the plan contain a duplicate: {', '.join(calls)}.")

    def with_preset(self, preset: str) -> Plan:
        """The plan with a preset's parameters as defaults; "quick" does not re-explain with costly methods."""
        if preset not in PRESETS:
            raise VitrailError(f"there is no preset {preset!r}: expected {', '.join(PRESETS)}.")
        defaults = PRESETS[preset]
        methods, metrics = (
            [_with_defaults(call, defaults) for call in calls] for calls in (self.methods, self.metrics)
        )
        cheap_only = ("max_sensitivity", "model_randomization") if preset == "quick" else self.cheap_only
        return replace(self, methods=methods, metrics=metrics, cheap_only=cheap_only)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Reads a TOML file; unknown keys are an error."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise VitrailError(f"cannot read the plan {path}: {error.strerror or error}.") from None
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, name: str = "the plan") -> Plan:
        """Reads the content of a TOML file of this name."""
        try:
            table = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or of what is nested too deeply
            raise VitrailError(f"the plan {name} is not valid TOML: {error}.") from None
        return cls.from_dict(table, name)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], name: str = "the plan") -> Plan:
        known = {item.name for item in fields(cls)}
        required = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}
        problems = {"unknown": sorted(content.keys() - known), "missing": sorted(required - content.keys())}
        if any(problems.values()):
            listed = "; ".join(f"{problem}: {', '.join(keys)}" for problem, keys in problems.items() if keys)
            raise VitrailError(f"{name} has wrong keys ({listed}): expected {', '.join(sorted(known))}.")
        if not isinstance(content["models"], list):
            raise _wrong(name, "models", content["models"], EXPECTED["models"].what)
        models = [ModelSpec(model) if isinstance(model, str) else _model(model, name) for model in content["models"]]
        values = {**content, "models": models}
        _check(values, EXPECTED, name)
        return cls(**values)

    def write(self, path: str | Path) -> Path:
        """Writes the plan as TOML."""
        return save_atomically(path, lambda file: file.write(self.content()))

    def content(self) -> bytes:
        """The plan as TOML."""
        return tomli_w.dumps(_plain(asdict(self))).encode()


@dataclass(frozen=True)
class Expected:
    """The type that a value of a plan must have."""

    what: str
    matches: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    """Whether a value is text that can be encoded; a path with bytes that are not UTF-8 cannot."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any, matches: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(matches, value))


TEXT = Expected("text in UTF-8", _is_text)
CALLS = Expected('a list of strings, as ["tis", "rise(masks=256)"]', lambda value: _is_list(value, _is_text))
COUNT = Expected("an integer ≥ 1", lambda value: _is_integer(value, 1))
COLOUR = Expected("three numbers, one per colour", lambda value: _is_list(value, _is_number))
FLAG = Expected("true or false", lambda value: isinstance(value, bool))
TABLE = Expected("a table of names and values", lambda value: isinstance(value, Mapping))
EXPECTED = {
    "models": Expected(
        "a list of names, or [[models]] tables", lambda value: _is_list(value, lambda item: isinstance(item, ModelSpec))
    ),
    "data": Expected('text in UTF-8, as "scenes:100" or the path of a folder', _is_text),
    "methods": CALLS,
    "metrics": CALLS,
    "images": COUNT,
    "seed": Expected("an integer ≥ 0", lambda value: _is_integer(value, 0)),
    "indices": TEXT,
    "target": TEXT,
    "protocol": TEXT,
    "batch_size": COUNT,
    "deterministic": FLAG,
    "maps": FLAG,
    "cheap_only": CALLS,
    "limits": Expected(
        "a table of metrics and numbers of images, as {road = 32}",
        lambda value: (
            isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(COUNT.matches, value.values()))
        ),
    ),
}
EXPECTED_MODEL = {"name": TEXT, "options": TABLE, "preprocessing": TABLE}
EXPECTED_OPTIONS = {  # others go to the library that builds the model
    "checkpoint": TEXT,
    "head": TEXT,
    "pool": TEXT,
    "labels": Expected("a file, or a list of names", lambda value: _is_text(value) or _is_list(value, _is_text)),
    "prompts": Expected("a list of texts, or a table of them", lambda value: isinstance(value, list | dict)),
    "pretrained": FLAG,
    "num_classes": COUNT,
    "img_size": Expected(
        "an integer ≥ 1, or [height, width]",
        lambda value: COUNT.matches(value) or (_is_list(value, COUNT.matches) and len(value) == 2),
    ),
    "output": TEXT,
    "fit": TEXT,
    "mean": COLOUR,
    "std": COLOUR,
    "crop_pct": Expected("a number", _is_number),
    "interpolation": TEXT,
    "device": TEXT,
    "dtype": TEXT,
}


def _check(values: Mapping[str, Any], expected: Mapping[str, Expected], name: str) -> None:
    """Refuses the first value of the wrong type; None stands for the default."""
    for key, value in values.items():
        if value is not None and key in expected and not expected[key].matches(value):
            raise _wrong(name, key, value, expected[key].what)


def _wrong(name: str, key: str, value: Any, expected: str) -> VitrailError:
    return VitrailError(f"{name} has {key} = {reprlib.repr(value)}, expected {expected}.")


def _model(table: Any, name: str) -> ModelSpec:
    if not isinstance(table, Mapping):
        raise _wrong(name, "models", [table], EXPECTED["models"].what)
    if "name" not in table or table.keys() - EXPECTED_MODEL.keys():
        raise VitrailError(
            f"a model of {name} has the keys {', '.join(table) or '(none)'}, expected name, options and preprocessing."
        )
    _check(table, EXPECTED_MODEL, f"a model of {name}")
    options = dict(table.get("options", {}))
    _check(options, EXPECTED_OPTIONS, f"the model {table['name']} of {name}")
    return ModelSpec(table["name"], options, dict(table.get("preprocessing", {})))


def _with_defaults(call: str, defaults: Mapping[str, Mapping[str, Any]]) -> str:
    name, params = split_call(call)
    return join_call(name, {**defaults.get(name, {}), **params})


def _plain(value: Any) -> Any:
    """Values that TOML has; None, which it lacks, is left out, and a path becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float) else str(value)
