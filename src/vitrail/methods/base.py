"""What a method is: it asks for what it needs of the network and makes a map of the answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

import torch
from torch import Tensor

from vitrail.calls import Named, check_parameters
from vitrail.core.precision import HALF
from vitrail.engine.maps import spread
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Logits, Traced, check_finite, resolved
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.models.view import View, check_floats
from vitrail.progress import passes_counted
from vitrail.targets import ClassSpec, Target, at_least_single, on_device


@dataclass(frozen=True)
class MethodInfo:
    """What is known of a method before it runs."""

    name: str
    family: str
    class_specific: bool
    level: Literal["token", "pixel"]
    needs: Literal["tokens", "features", "logits"]
    cost: tuple[float, float]  # forward and backward passes per image
    protocols: tuple[str, ...]
    params: dict[str, Any]
    paper: str
    summary: str
    signed: bool | None = None  # whether maps tell evidence for from evidence against; None = by the sign of the values


@dataclass(frozen=True)
class Attribution:
    """The result of a method: the maps (B, h, w), and what it measured on the way, one value per image.

    ``error``: the standard deviations of the maps, if the method knows them.
    """

    map: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    error: Tensor | None = None


class MethodFactory(Protocol):
    """What a name of the registry stands for: a method class, an aggregation of one, or a function."""

    info: MethodInfo
    version: int
    file_parameters: tuple[str, ...]

    def parameters(self) -> dict[str, Any]:
        """The parameters and their defaults."""

    def parameter_types(self) -> dict[str, Any]:
        """The parameters and their types."""

    def unsupported(self, model: View) -> str | None:
        """Why the method cannot explain that model; None if it can."""

    def __call__(self, model: View, **params: Any) -> Method: ...


def _drop_in(attribute: Callable[..., Tensor]) -> Callable[..., Any]:
    """captum passes tuples and expects them back; it also reads ``__wrapped__``."""

    @functools.wraps(attribute)
    def wrapped(self: Method, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, tuple):
            if len(inputs) != 1:
                raise VitrailError(f"a method takes one tensor of images, but got a tuple of {len(inputs)}.")
            return (attribute(self, inputs[0], *args, **kwargs),)
        return attribute(self, inputs, *args, **kwargs)

    return wrapped


@dataclass
class Method(Named):
    """Base of all methods. The fields after ``model`` are the method's parameters.

    ``attribute`` returns a signed map per image on the inputs' device, (B, rows, columns) or, for pixel-level methods,
    (B, H, W). With ``shape="input"`` it has the inputs' shape, spread evenly over pixels and channels, total unchanged.
    ``precision``, a parameter of the methods that bear it: with "auto" a GPU, and for some methods a CPU with bf16,
    computes matrix products in half precision; "full" keeps the model's own throughout.
    """

    model: View
    _: KW_ONLY
    shape: Literal["map", "input"] = "map"
    precision: Literal["auto", "full"] = "auto"

    info: ClassVar[MethodInfo]
    version: ClassVar[int] = 1  # raised when its maps change: stored results of an older one are computed again
    multiplies_by_inputs: ClassVar[bool] = True  # captum's contract
    bears_half: ClassVar[bool] = False  # whether its maps keep their ranks where products are in half precision
    trained: ClassVar[bool] = False  # for the weights of a model: it cannot explain a copy with other weights
    file_parameters: ClassVar[tuple[str, ...]] = ()  # parameters that name files, which a server takes from no visitor
    aggregations: ClassVar[tuple[str, ...]] = ()
    no_aggregation: ClassVar[str] = "it has no scores of layers, which a subclass of Layerwise has"

    def __post_init__(self) -> None:
        refuse_unsupported(self.info.name, self.unsupported(self.model), self.model)
        check_parameters(type(self), {**self.params, "shape": self.shape})

    @property
    def reduced(self) -> bool:
        """Whether it asks for half precision."""
        return self.bears_half and self.precision == "auto" and self.model.gains_from_half

    @property
    def products(self) -> torch.dtype | None:
        """The half precision in which it asks for scores, if any."""
        return HALF if self.reduced else None

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        """Why this method cannot explain that model; None if it can."""
        return lacks(cls.info, model) or lacks_gradients(cls.info, model)

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The parameters and their defaults."""
        own = {f.name: f.default for f in fields(cls) if f.name not in ("model", "shape", "precision")}
        return own | {"precision": cls.precision} if cls.bears_half else own

    @classmethod
    def parameter_types(cls) -> dict[str, Any]:
        """The parameters and their types."""
        hints = get_type_hints(cls)
        return {name: hints[name] for name in cls.parameters()}

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        """Explains a batch; yields what it needs of the network. By default ``run`` is called."""
        target = yield from resolved(batch, target, self.reduced)
        yield []  # others may take what they share first
        target = on_device(target, batch.images.device)
        assert target.index is not None
        with passes_counted(round(self.passes()[0] * len(batch)), self.info.name):
            return self.run(batch.images, target.index, target.against)

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        """For methods that call the model themselves: the maps of a checked batch; ``target`` (B,)."""
        raise NotImplementedError

    def needs(self) -> Sequence[TraceSpec]:
        """The traces that this method asks for, so that they can be made together with those of others."""
        return ()

    def explained(self, batch: Batch, target: Target) -> Asking[Attribution]:
        """``ask``, with the result checked: finite maps of the right shape in at least single precision."""
        if target.against is not None and not self.info.class_specific:
            raise VitrailError(f"{self.info.name} is the same for every class: against= has no meaning for it.")
        attribution = yield from self.ask(batch, target)
        self._check(attribution, len(batch))
        if not attribution.map.isfinite().all():
            check_finite(self.model, (yield Logits(batch)))
            raise VitrailError(f"{self.info.name} gave NaN or infinite values on {self.model.name}; try dtype=float64.")
        dtype, error = torch.promote_types(batch.images.dtype, torch.float32), attribution.error
        return Attribution(
            attribution.map.detach().to(dtype),
            {name: at_least_single(values.detach()) for name, values in attribution.extras.items()},
            None if error is None else error.detach().to(dtype),
        )

    def passes(self) -> tuple[float, float]:
        """Forward and backward passes per image with these parameters; the info has those of the defaults."""
        scale = 1.0
        for name in ("masks", "samples", "steps", "permutations"):
            value, default = self.params.get(name), self.info.params.get(name)
            if isinstance(value, int) and value != default:
                scale = value / (default or self.info.cost[0])
        return self.info.cost[0] * scale, self.info.cost[1] * scale

    @property
    def forward_func(self) -> Callable[[Tensor], Tensor]:
        """captum's contract: the function that is explained."""
        return self.model.logits

    def has_convergence_delta(self) -> bool:
        """captum's contract."""
        return False

    @_drop_in
    def attribute(self, inputs: Tensor, target: ClassSpec = None, against: ClassSpec = None) -> Tensor:
        """Explains a batch (B, 3, H, W); ``target``: a class, one per image, or None for the predicted one."""
        maps = self.explain(inputs, target, against).map.to(inputs.device)
        return maps if self.shape == "map" else spread(maps, inputs)

    def explain(self, inputs: Tensor, target: ClassSpec = None, against: ClassSpec = None) -> Attribution:
        """As ``attribute``, with what was measured on the way."""
        check_floats(inputs)
        with own_modes():
            images = inputs.detach().clone()
            images = self.model.check_images(images[None] if images.ndim == 3 else images, self.model.precision)
            batch = Batch(self.model, images)
            asker = self.explained(batch, Target.of(self.model, target, against, len(batch)))
            return Scheduler().run([asker])[0]

    def _check(self, attribution: Attribution, count: int) -> None:
        """A user's method may return anything."""
        maps = attribution.map if isinstance(attribution, Attribution) else attribution
        name = self.info.name
        if not isinstance(attribution, Attribution) or not isinstance(maps, Tensor):
            raise VitrailError(
                f"{name} returned {type(maps).__name__}: expected maps as a torch tensor ({count}, rows, columns), "
                "which a class puts in an Attribution."
            )
        # CAMs on hierarchical models have the grid of their features
        grid = self.model.grid if self.info.needs == "tokens" and self.model.has_tokens else None
        expected = None
        if maps.ndim != 3 or len(maps) != count or not maps.numel():
            expected = f"({count}, rows, columns)"
        elif grid and self.info.level == "token" and tuple(maps.shape[1:]) != grid:
            expected = f"{(count, *grid)}, one value per patch of {self.model.name}"
        if expected is not None:
            raise VitrailError(
                f"{name} gave maps of shape {tuple(maps.shape)} for a batch of {count}: expected {expected}."
            )


class TokenMethod(Method):
    """A method that looks inside: it needs tokens and blocks."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        return None if model.has_tokens else f"it has no fixed tokens ({model.structure})"

    def on_grid(self, scores: Tensor) -> Tensor:
        """Scores of all tokens (B, P + N) → patches on their grid (B, rows, columns)."""
        return scores[:, self.model.num_prefix :].unflatten(1, self.model.grid)


class TraceMethod(TokenMethod):
    """A white-box method: the traces it ``needs``, and how it ``read``s a map off them."""

    def read(self, *traces: Trace) -> Attribution:
        """The map, from one trace for each of ``needs``."""
        raise NotImplementedError

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        traces = yield [Traced(batch, target, spec) for spec in self.needs()]
        return self.read(*traces)


def lacks(info: MethodInfo, model: View) -> str | None:
    """Why a model does not have what a method is registered to need; None if it has."""
    if info.needs == "tokens" and not model.has_tokens:
        return (
            f"it has no fixed tokens ({model.structure}), which this method asks for; without, register it with "
            'needs="logits"'
        )
    if info.needs == "features" and not model.has_features:
        return "it has no layer whose output is a feature map: name one, wrap(module, features=…)"
    return None


def lacks_gradients(info: MethodInfo, model: View) -> str | None:
    """Why a method of the package cannot explain a model through which no gradients flow; None if it can."""
    return "no gradient flows through it" if info.cost[1] and not model.differentiable else None


def refuse_unsupported(name: str, reason: str | None, model: View) -> None:
    """Raises an error with the reason and the methods that can explain the model."""
    if reason:
        from vitrail.methods.registry import supported_methods

        able = ", ".join(supported_methods(model)) or "none"
        raise VitrailError(f"{name} cannot explain {model.name}: {reason}. Methods that can: {able}.")
