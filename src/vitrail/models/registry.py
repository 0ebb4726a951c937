"""Models of users by name: ``load("name")`` and ``load("name:PLACE")``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from vitrail.errors import VitrailError
from vitrail.models import embedded
from vitrail.models.view import View
from vitrail.registry import Registry

# (what follows the colon of the name, **options) → a module that ``wrap`` knows how to read, or a view.
Builder: TypeAlias = Callable[..., nn.Module | View]
B = TypeVar("B", bound=Builder)


def is_built_in(name: str) -> bool:
    """Whether ``load`` has a model, or a prefix of models, of this name."""
    if name in ("hf", "torchvision", *embedded.names()):
        return True
    import timm  # takes longer than what most commands do

    return timm.is_model(name)


MODELS: Registry[Builder] = Registry("model", listing="vitrail models", group="vitrail.models", reserved=is_built_in)


def is_registered(name: str) -> bool:
    """Whether a name, ``mine`` or ``mine:large``, is that of a registered model; built-in ones come first."""
    kind = name.partition(":")[0]
    return kind.isidentifier() and not is_built_in(kind) and MODELS.get(kind) is not None


def model(name: str) -> Callable[[B], B]:
    """Registers a model of your own: a function that returns a module or, as ``wrap`` makes it, a view.

    ``load("name:PLACE", option=value)`` calls it with the place, a string that may be empty, and the options;
    ``pretrained``, ``num_classes`` and ``img_size`` only if they are set. A module is then treated like one of timm:
    ``checkpoint``, ``labels`` and the other arguments of ``load`` apply. A view is complete.
    """

    def register(builder: B) -> B:
        if not inspect.signature(builder).parameters:
            raise VitrailError(f"the model {name!r} takes no arguments: its first must be what follows the colon.")
        MODELS.add(name, builder, builder.__module__)
        return builder

    return register


def build(name: str, options: Mapping[str, Any]) -> nn.Module | View:
    """The model of a name with a place, ``mine:large``, as its function makes it."""
    kind, _, place = name.partition(":")
    builder = MODELS[kind]
    first, *others = inspect.signature(builder).parameters.values()
    if not place and first.default is inspect.Parameter.empty:
        raise VitrailError(f"the model {kind} needs more than its name: write {kind}:PLACE.")
    known = [option.name for option in others if option.kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = [option for option in options if option not in known]
    if unknown and len(known) == len(others):
        raise VitrailError(f"the model {kind} has no option {unknown[0]!r}; its options: {', '.join(known) or 'none'}.")
    with torch.random.fork_rng():  # first weights are drawn from the global state, which is the user's
        try:
            made = builder(*([place] if place else []), **options)
        except VitrailError:
            raise
        except Exception as error:
            raise VitrailError(f"the model {name} cannot be built: {type(error).__name__}: {error}.") from error
    if not isinstance(made, nn.Module | View):
        raise VitrailError(
            f"the function of the model {kind} returned {type(made).__name__}, expected a module or view."
        )
    return made
