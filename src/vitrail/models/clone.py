"""Clones of modules in evaluation mode that share their weights."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def evaluation_clone(module: Network) -> Network:
    """The same network in evaluation mode: new module objects that share the parameters and buffers.

    Hooks and patched forwards of an instance are rebound to the clone, so calling it does what calling the module in
    evaluation mode does, without ``torch.compile``. Modes, hooks and attributes are independent of the original's. Only
    what a patched function holds in its closure still belongs to the original.
    """
    clones = {id(part): type(part).__new__(type(part)) for part in module.modules()}
    for part in module.modules():
        attributes = {name: _attribute(value, clones) for name, value in vars(part).items()}
        vars(clones[id(part)]).update(attributes, training=False, _compiled_call_impl=None)
    return cast(Network, _bound(module, clones))


def _attribute(value: Any, clones: dict[int, nn.Module]) -> Any:
    """An attribute of the clone: containers (children, parameters, hooks) are copied, so that they are independent."""
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _bound(entry, clones)) for name, entry in value.items())
    if type(value) in (list, tuple):
        return type(value)(_bound(entry, clones) for entry in value)
    return _bound(value, clones)


def _bound(value: Any, clones: dict[int, nn.Module]) -> Any:
    """A module, or what is bound to one, replaced by its clone."""
    if isinstance(value, nn.Module):
        inner = value._modules.get("_orig_mod", value)  # a torch.compile'd part is unwrapped
        return clones.get(id(inner), inner)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _bound(value.__self__, clones))
    if type(value) is partial:
        keywords = {name: _bound(argument, clones) for name, argument in value.keywords.items()}
        return partial(_bound(value.func, clones), *(_bound(argument, clones) for argument in value.args), **keywords)
    return value


def widened(module: nn.Module, images: Tensor) -> Any:
    """The output of a module with its weights in the precision of the images, and outside of any graph."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    wider = {name: tensor.detach().to(images.dtype) for name, tensor in tensors if tensor.is_floating_point()}
    return torch.func.functional_call(module, wider, (images,))
