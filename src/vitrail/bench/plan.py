"""What a benchmark run shall do: a plan, kept as TOML beside its results."""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitrail.calls import join_call, split_call
from vitrail.errors import VitrailError
from vitrail.files import save_atomically

METHODS = ["decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "att_cat(rule=frozen)", "gen_att", "trans_att",
           "vtranm", "rollout", "raw_attention", "grad_cam", "tis", "vit_cx", "rise", "random"]  # fmt: skip
METRICS = ["insertion", "deletion", "positive_auc", "negative_auc", "aopc", "log_odds", "token_deletion_accuracy",
           "token_insertion_accuracy", "pointing_game", "energy_pointing_game", "mean_iou", "segmentation_ap",
           "sparseness", "max_sensitivity"]  # fmt: skip

# What the preset "quick" sets where a call does not say otherwise; dots stand for all compositions.
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
    """A model by name and what else ``vitrail.load`` takes; ``preprocessing`` replaces parts of the model's own."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows of a run.

    ``cheap_only`` names metrics that are measured on methods of few passes only: explaining again is dear.
    """

    models: Sequence[ModelSpec]
    data: str
    methods: Sequence[str] = tuple(METHODS)
    metrics: Sequence[str] = tuple(METRICS)
    images: int | None = None
    seed: int = 0
    indices: str | None = None  # a file of positions instead of a draw
    target: str | None = None
    protocol: str | None = None
    batch_size: int | None = None
    deterministic: bool = False
    maps: bool = True
    cheap_only: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check(vars(self), EXPECTED, "the plan")
        for name in ("models", "methods", "metrics", "cheap_only"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.models or not self.methods or not self.metrics:
            raise VitrailError("a plan needs at least one model, one method and one metric.")
        for name in ("methods", "metrics"):
            words = list(getattr(self, name))
            if len(set(words)) != len(words):
                raise VitrailError(f"{name} of the plan name the same twice: {', '.join(words)}.")

    def with_preset(self, preset: str) -> Plan:
        """The plan with a preset's parameters where its calls give none; "quick" spares the dear methods too."""
        if preset not in PRESETS:
            raise VitrailError(f"there is no preset {preset!r}: expected {', '.join(PRESETS)}.")
        usual = PRESETS[preset]
        methods, metrics = ([_filled(call, usual) for call in calls] for calls in (self.methods, self.metrics))
        spared = ("max_sensitivity", "model_randomization") if preset == "quick" else self.cheap_only
        return replace(self, methods=methods, metrics=metrics, cheap_only=spared)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Reads a TOML file; unknown keys are an error."""
        path = Path(path)
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise VitrailError(f"cannot read the plan {path}: {error.strerror or error}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise VitrailError(f"the plan {path} is not valid TOML: {error}.") from None
        return cls.from_dict(found, str(path))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], name: str = "the plan") -> Plan:
        known = {own.name for own in fields(cls)}
        needed = {own.name for own in fields(cls) if own.default is MISSING and own.default_factory is MISSING}
        unknown, missing = sorted(found.keys() - known), sorted(needed - found.keys())
        if unknown or missing:
            told = [f"{what}: {', '.join(own)}" for what, own in (("unknown", unknown), ("missing", missing)) if own]
            raise VitrailError(f"{name} does not fit ({'; '.join(told)}): expected {', '.join(sorted(known))}.")
        if not isinstance(found["models"], list):
            raise _wrong(name, "models", found["models"], EXPECTED["models"].what)
        models = [ModelSpec(one) if isinstance(one, str) else _model(one, name) for one in found["models"]]
        values = {**found, "models": models}
        _check(values, EXPECTED, name)
        return cls(**values)

    def write(self, path: str | Path) -> Path:
        """Writes the plan as TOML."""
        text = to_toml(asdict(self))
        return save_atomically(path, lambda file: file.write(text.encode()))


@dataclass(frozen=True)
class Expected:
    """What a value of a plan must be."""

    what: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    """Whether it can be written down; a path whose bytes are not UTF-8 cannot."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


TEXT = Expected("text in UTF-8", _is_text)
CALLS = Expected('a list of texts, as ["tis", "rise(masks=256)"]', lambda value: _is_list(value, _is_text))
COUNT = Expected("a whole number from 1 up", lambda value: _is_number(value, 1))
FLAG = Expected("true or false", lambda value: isinstance(value, bool))
TABLE = Expected("a table of names and values", lambda value: isinstance(value, Mapping))
EXPECTED = {
    "models": Expected(
        "a list of names, or [[models]] tables", lambda value: _is_list(value, lambda one: isinstance(one, ModelSpec))
    ),
    "data": Expected('text in UTF-8, as "scenes:100" or the path of a folder', _is_text),
    "methods": CALLS,
    "metrics": CALLS,
    "images": COUNT,
    "seed": Expected("a whole number from 0 up", lambda value: _is_number(value, 0)),
    "indices": TEXT,
    "target": TEXT,
    "protocol": TEXT,
    "batch_size": COUNT,
    "deterministic": FLAG,
    "maps": FLAG,
    "cheap_only": CALLS,
}
EXPECTED_MODEL = {"name": TEXT, "options": TABLE, "preprocessing": TABLE}
EXPECTED_OPTIONS = {  # others go to the library that builds the model
    "checkpoint": TEXT,
    "labels": Expected("a file, or a list of names", lambda value: _is_text(value) or _is_list(value, _is_text)),
    "pretrained": FLAG,
    "num_classes": COUNT,
    "img_size": Expected(
        "a whole number from 1 up, or [height, width]",
        lambda value: COUNT.fits(value) or (_is_list(value, COUNT.fits) and len(value) == 2),
    ),
    "output": TEXT,
    "device": TEXT,
    "dtype": TEXT,
}


def _check(values: Mapping[str, Any], expected: Mapping[str, Expected], name: str) -> None:
    """Refuses the first value that is not what is expected of its key; None is what was not given."""
    for key, value in values.items():
        if value is not None and key in expected and not expected[key].fits(value):
            raise _wrong(name, key, value, expected[key].what)


def _wrong(name: str, key: str, value: Any, expected: str) -> VitrailError:
    return VitrailError(f"{name} has {key} = {reprlib.repr(value)}, expected {expected}.")


def _model(found: Any, name: str) -> ModelSpec:
    if not isinstance(found, Mapping):
        raise _wrong(name, "models", [found], EXPECTED["models"].what)
    if "name" not in found or found.keys() - EXPECTED_MODEL.keys():
        raise VitrailError(
            f"a model of {name} has name, options and preprocessing; got {', '.join(found) or 'nothing'}."
        )
    _check(found, EXPECTED_MODEL, f"a model of {name}")
    options = dict(found.get("options", {}))
    _check(options, EXPECTED_OPTIONS, f"the model {found['name']} of {name}")
    return ModelSpec(found["name"], options, dict(found.get("preprocessing", {})))


def _filled(call: str, usual: Mapping[str, Mapping[str, Any]]) -> str:
    name, params = split_call(call)
    return join_call(name, {**usual.get(name, {}), **params})


def to_toml(values: Mapping[str, Any]) -> str:
    """Plain values, lists, and lists of tables; what is None is left out."""
    lines, tables = [], []
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            tables += [f"\n[[{key}]]\n" + to_toml(one) for one in value]
        else:
            lines.append(f"{key} = {_inline(value)}")
    return "\n".join(lines) + "\n" + "".join(tables)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_inline(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(one) for one in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
