"""Weights from a file: safetensors, or a torch file read without unpickling code."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")  # averaged first, as timm does
KEYS = tuple(sorted(WRAPPERS, key=lambda name: name == "model"))  # "model" last: it may hold a name
PREFIXES = ("module.", "_orig_mod.", "model.")
HEAD = re.compile(r"(?P<place>head|heads|classifier|fc)\.(?:\w+\.)?(?P<kind>weight|bias)")  # of one linear layer
FOREIGN = re.compile(r"(?<=GLOBAL )[\w.]+|(?<=class )[\w.]+")  # in torch's refusal: the class the file would import


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name; common wrappers and prefixes are taken off."""
    path = Path(path)
    if not path.is_file():
        raise VitrailError(f"there is no checkpoint file {path}.")
    values = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    wrapped = [key for key in WRAPPERS if _holds_tensors(values.get(key))]
    if wrapped:
        values = dict(values[wrapped[0]])
    if len(wrapped) > 1:
        warnings.warn(
            f"the checkpoint {path} holds {', '.join(wrapped)}: {wrapped[0]} is taken, as timm does.", stacklevel=6
        )
    state = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    if not state:
        raise VitrailError(f"the checkpoint {path} holds no tensors; its keys are {sorted(map(str, values))[:8]}.")
    while shared := [prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in state)]:
        state = {name.removeprefix(shared[0]): value for name, value in state.items()}
    return state


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, Tensor) for entry in value.values())


def head_of(names: Iterable[str]) -> dict[tuple[str, str], str]:
    """(place, "weight" or "bias") → the name, of a head that is one linear layer, however it is nested there."""
    matches = [match for match in map(HEAD.fullmatch, names) if match]
    layer = {(match["place"], match["kind"]): match[0] for match in matches}
    return layer if len(layer) == len(matches) else {}


def linear_head(path: str | Path) -> nn.Linear:
    """The linear layer, or the convolution of single patches, that a file holds the weights of."""
    state = read_state(path)
    kinds = {name.rpartition(".")[2]: value for name, value in state.items()}
    weight, bias = kinds.get("weight"), kinds.get("bias")
    if weight is not None and weight.ndim == 4 and weight.shape[2:] == (1, 1):
        weight = weight.flatten(1)
    if len(state) != len(kinds) or not kinds.keys() <= {"weight", "bias"} or weight is None or weight.ndim != 2:
        shapes = [f"{name} {tuple(value.shape)}" for name, value in state.items()]
        raise VitrailError(
            f"{path} does not hold a linear head, weight (classes, width) and bias, but {_some(shapes)}: build the "
            "head with torch and give it to vitrail.wrap(backbone, head=…, pool=…)."
        )
    head = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=bias is not None)
    load_state(head, {"weight": weight} | ({} if bias is None else {"bias": bias}), str(path))
    return head.requires_grad_(False)


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copies every tensor into the module, or lists what does not match and changes nothing."""
    expected, loaded = module.state_dict(), head_of(state)
    renamed = {loaded[part]: name for part, name in head_of(expected).items() if part in loaded}
    state = {renamed.get(name, name): value for name, value in state.items()}
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    wrong = [f"{name} {tuple(state[name].shape)}, expected {tuple(expected[name].shape)}" for name in expected
             if name in state and state[name].shape != expected[name].shape]  # fmt: skip
    if missing or unexpected or wrong:
        lists = [("missing", missing), ("not in the model", unexpected), ("of another shape", wrong)]
        mismatches = "; ".join(f"{len(names)} {what} ({_some(names)})" for what, names in lists if names)
        raise VitrailError(f"the checkpoint {source} does not match {type(module).__name__}: {mismatches}.")
    quantised = [f"{name} {value.dtype}" for name, value in state.items()
                 if expected[name].is_floating_point() and not value.is_floating_point()]  # fmt: skip
    if quantised:
        raise VitrailError(
            f"the checkpoint {source} holds other than floating point numbers in {_some(quantised)}: give the weights "
            f"before quantisation."
        )
    empty = [name for name, value in state.items() if value.is_meta or value.layout != torch.strided]
    if empty:
        raise VitrailError(f"the checkpoint {source} holds tensors that are sparse or without values: {_some(empty)}.")
    broken = [name for name, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise VitrailError(f"the checkpoint {source} holds NaN or infinite values in {_some(broken)}.")
    module.load_state_dict(state)


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise VitrailError(f"{path} is not a readable safetensors file: {error}.") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, pickle.UnpicklingError | KeyError | EOFError) or not text or "legacy" in text:
        return "it is damaged or not a torch file"
    return text.splitlines()[0].rstrip(".")


def _is_pickled(path: Path) -> bool:
    """Whether it starts with the magic bytes of torch's files; the unpickler would parse plain text as opcodes."""
    with path.open("rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))


def _conversion(path: Path) -> str:
    """Code that keeps the weights alone, whether the file holds them bare, under a common key or in a pickled model."""
    return (
        f"  held = torch.load({str(path)!r}, weights_only=False)\n"
        f"  if isinstance(held, dict): held = next((held[key] for key in {KEYS} if key in held), held)\n"
        f"  torch.save(held.state_dict() if hasattr(held, 'state_dict') else held, 'weights.pth')"
    )


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch comments on the pickle protocol of files it then refuses
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make the unpickler raise almost anything
        foreign = (
            FOREIGN.search(str(error)) if isinstance(error, pickle.UnpicklingError) and _is_pickled(path) else None
        )
        if foreign:
            raise VitrailError(
                f"{path} holds pickled Python objects besides its tensors ({foreign[0]}), which vitrail does not run. "
                f"If you trust it, convert it once and give the new file:\n{_conversion(path)}"
            ) from None
        raise VitrailError(f"{path} is not a readable torch checkpoint: {_reason(error)}.") from None
    if isinstance(values, Mapping):
        return dict(values)
    raise VitrailError(
        f"{path} holds a {type(values).__name__}: expected a mapping of names to tensors (a state_dict)."
    )
