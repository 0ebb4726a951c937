"""A network in evaluation mode, beside the user's own, which is never touched."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from torch import nn

Network = TypeVar("Network", bound=nn.Module)

# What torch or a library may write to during a forward pass, or where a hook is kept.
REGISTRIES = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


def evaluation_copy(module: Network) -> Network:
    """The same network in evaluation mode: new modules, which share every parameter, buffer and hook with the old ones.

    A copy is cheap (no tensor is copied) and made for one forward pass, so that it is always the present network. What
    is done to a copy, such as adding a hook, is seen neither by the module nor by other threads.
    """
    return _copied(module, {})


def _copied(module: Any, copies: dict[int, Any]) -> Any:
    module = module._modules.get("_orig_mod", module)  # a torch.compile'd part is read through
    if id(module) in copies:
        return copies[id(module)]
    copied = copies[id(module)] = module.__new__(type(module))
    state = vars(copied)
    state.update(vars(module))
    state.pop("_compiled_call_impl", None)  # Module.compile: would call the original
    for name in REGISTRIES:
        state[name] = state[name].copy()
    children = state["_modules"].items()
    state["_modules"] = {name: child if child is None else _copied(child, copies) for name, child in children}
    for name, value in state.items():
        if isinstance(value, MethodType) and value.__self__ is module:  # a forward method that the user replaced
            state[name] = MethodType(value.__func__, copied)
    state["training"] = False
    return copied
