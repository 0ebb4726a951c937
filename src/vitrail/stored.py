"""The JSON file of an explanation: parsed and checked, so that whatever opens can be drawn."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.files import parse_json

Check = Callable[[Any], bool]


def read_stored(path: Path) -> dict[str, Any]:
    """The values of an explanation; its map, errors and pairs as tensors."""
    try:
        saved = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise VitrailError(f"cannot read the explanation {path}: {error.strerror or error}.") from None
    except ValueError:
        raise VitrailError(f"{path} is not valid JSON: expected the file that Explanation.save wrote.") from None
    if not isinstance(saved, dict) or "vitrail" not in saved:
        raise VitrailError(f"{path} is not a vitrail explanation: expected the file that Explanation.save wrote.")
    try:
        _check(saved)
        return saved | {name: _unpack(saved[name]) for name in PACKED if saved.get(name) is not None}
    except (KeyError, TypeError, ValueError) as error:
        raise VitrailError(f"{path} is not a complete vitrail explanation ({type(error).__name__}: {error}).") from None


def pack(values: Tensor) -> dict[str, Any]:
    """A tensor as JSON can hold it."""
    array = np.ascontiguousarray(values.numpy(), dtype="<f4")
    return {"shape": list(array.shape), "dtype": "float32", "base64": base64.b64encode(array.tobytes()).decode()}


def _unpack(packed: Mapping[str, Any]) -> Tensor:
    array = np.frombuffer(base64.b64decode(packed["base64"]), dtype="<f4").reshape(packed["shape"])
    return torch.from_numpy(array.astype(np.float32))


def _check(saved: Mapping[str, Any]) -> None:
    """Refuses values that no explanation has; keys that older versions did not write may be missing."""
    missing = REQUIRED - saved.keys()
    if missing:
        raise KeyError(min(missing))
    for name, is_valid in VALUES.items():
        if name in saved and not is_valid(saved[name]):
            raise ValueError(f"unexpected {name}")
    extras, grid, storage = saved["extras"], saved.get("grid"), saved.get("storage", [])
    for part, others in COMPANIONS.items():
        if part in extras and not extras.keys() >= others:
            raise ValueError(f"{part} without {' and '.join(sorted(others))}")
    if extras.get("score_layers", 1) < 1:
        raise ValueError("a score of no layers")
    if saved.get("standard_error") is not None and saved["standard_error"]["shape"] != saved["map"]["shape"]:
        raise ValueError("standard_error has not the shape of the map")
    if storage and (grid is None or max(storage) >= grid[0] * grid[1]):
        raise ValueError("storage names patches that the grid does not have")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _optional(is_valid: Check) -> Check:
    return lambda value: value is None or is_valid(value)


def _list_of(is_valid: Check, length: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(is_valid, value))


def _by_name(is_valid: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _table(checks: Mapping[str, Check]) -> Check:
    """A mapping with these keys and perhaps others."""
    return lambda value: isinstance(value, dict) and all(is_valid(value.get(key)) for key, is_valid in checks.items())


def _is_box(value: Any) -> bool:
    """Whether it is (left, top, right, bottom) with something inside."""
    return _list_of(_is_finite, 4)(value) and bool(value[0] < value[2] and value[1] < value[3])


def _is_map(value: Any) -> bool:
    """Whether it is a packed tensor of two dimensions that holds finite values."""
    if not _table({"shape": _list_of(_is_edge, 2), "base64": _is_text})(value):
        return False
    return bool(_unpack(value).isfinite().all())


def _is_edge(value: Any) -> bool:
    return _is_integer(value) and value > 0


def _is_index(value: Any) -> bool:
    return _is_integer(value) and value >= 0


PACKED = ("map", "standard_error", "pairs")
REQUIRED = frozenset("model image method params target label probability against against_label seconds extras signed "
                     "box top map".split())  # fmt: skip
COMPANIONS = {"score_patches": {"score"}, "score_prefix": {"score_biases", "score_layers"}}
_FALLS = dict.fromkeys(("score", "drop", "random_drop", "agreement", "probability"), _is_number)
VALUES: dict[str, Check] = {
    "model": _table({"name": _is_text, **dict.fromkeys(("load", "preprocessing", "question"), _optional(_is_mapping))}),
    "image": _table({"path": _optional(_is_text), "sha256": _is_text, "tensor_sha256": _optional(_is_text)}),
    "method": _is_text,
    "params": _is_mapping,
    "target": _is_index,
    "label": _is_text,
    "probability": _is_finite,
    "against": _optional(_is_index),
    "against_label": _optional(_is_text),
    "against_probability": _optional(_is_finite),
    "true_label": _optional(_is_text),
    "top": _list_of(_table({"class": _is_index, "label": _is_text, "probability": _is_finite})),
    "seconds": _is_finite,
    "extras": _by_name(_is_number),
    "storage": _list_of(_is_index),
    "grid": _optional(_list_of(_is_edge, 2)),
    "trust": _optional(_table({**_FALLS, "interval": _list_of(_is_number, 2), "patch_share": _optional(_is_number)})),
    "signed": _optional(lambda value: isinstance(value, bool)),
    "scores": _by_name(_is_number),
    "curves": _by_name(_list_of(_is_number)),
    "scale": _by_name(_list_of(_is_number, 2)),
    "box": _is_box,
    "map": _is_map,
    "standard_error": _optional(_is_map),
    "measure": _is_text,
    "pairs": _optional(_is_map),
}
