"""What a method is: a class with captum's verb, registered under a name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.engine.modes import memory_for, own_modes
from vitrail.engine.sharing import Wish
from vitrail.errors import VitrailError
from vitrail.methods.parameters import check_parameters
from vitrail.models.view import View, at_least, check_floats
from vitrail.models.vit import ViT, unchanged

Targets = int | str | Sequence[int | str] | Tensor | None


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
    signed: bool | None = None  # whether maps tell for from against; None = as the values are


@dataclass(frozen=True)
class Attribution:
    """What a method found: the map (B, h, w), and what it measured on the way, one value per image."""

    map: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


def _drop_in(attribute: Callable[..., Tensor]) -> Callable[..., Any]:
    """captum hands tuples over and expects them back; it also reads ``__wrapped__``."""

    @functools.wraps(attribute)
    def wrapped(self: Method, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, tuple):
            if len(inputs) != 1:
                raise VitrailError(f"a method takes one tensor of images, but got a tuple of {len(inputs)}.")
            return (attribute(self, inputs[0], *args, **kwargs),)
        return attribute(self, inputs, *args, **kwargs)

    return wrapped


@dataclass
class Method:
    """Base of all methods. The fields after ``model`` are the method's parameters.

    ``attribute`` gives a signed map per image on the inputs' device, (B, rows, columns) or, for pixel-level methods,
    (B, H, W). With ``shape="input"`` it has the inputs' shape, spread evenly over pixels and channels, total unchanged.
    """

    model: View
    _: KW_ONLY
    shape: Literal["map", "input"] = "map"

    info: ClassVar[MethodInfo]
    version: ClassVar[int] = 1  # raised when its maps change: stored results of an older one are computed again
    multiplies_by_inputs: ClassVar[bool] = True  # captum's contract

    def __post_init__(self) -> None:
        reason = self.unsupported(self.model)
        if reason:
            from vitrail.methods.registry import supported_methods

            able = ", ".join(supported_methods(self.model)) or "none"
            raise VitrailError(
                f"{self.info.name} cannot explain {self.model.name}: {reason}. Methods that can: {able}."
            )
        check_parameters(type(self), {name: getattr(self, name) for name in [*self.parameters(), "shape"]})

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        """Why this method cannot explain that model; None if it can."""
        return None

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        """The map of each image of a checked batch; ``target`` (B,)."""
        raise NotImplementedError

    def wish(self) -> Wish | None:
        """The trace that this method will ask for, so that methods of one kind can share one; None = none to share."""
        return None

    def passes(self) -> tuple[float, float]:
        """Forward and backward passes per image with these parameters; the info has those of the defaults."""
        scale = 1.0
        for name in ("masks", "samples", "steps"):
            given, usual = getattr(self, name, None), self.info.params.get(name)
            if isinstance(given, int) and given != usual:
                scale = given / (usual or self.info.cost[0])
        return self.info.cost[0] * scale, self.info.cost[1] * scale

    @property
    def forward_func(self) -> Callable[[Tensor], Tensor]:
        """captum's contract: the function that is explained."""
        return self.model.logits

    def has_convergence_delta(self) -> bool:
        """captum's contract."""
        return False

    @_drop_in
    def attribute(self, inputs: Tensor, target: Targets = None, against: Targets = None) -> Tensor:
        """Explains a batch (B, 3, H, W); ``target``: a class, one per image, or None for the predicted one."""
        found = self.explain(inputs, target, against).map.to(inputs.device)
        return found if self.shape == "map" else spread(found, inputs)

    def explain(self, inputs: Tensor, target: Targets = None, against: Targets = None) -> Attribution:
        """As ``attribute``, with what was measured on the way."""
        if against is not None and not self.info.class_specific:
            raise VitrailError(f"{self.info.name} is the same for every class: against= has no meaning for it.")
        check_floats(inputs)
        with own_modes(self.model.device), unchanged(), memory_for(len(inputs) if inputs.ndim > 3 else 1):
            given = inputs.detach().clone()
            with at_least(torch.float32):  # half precision is too coarse for the sums and differences to come
                images = self.model.check_images(given[None] if given.ndim == 3 else given)
            count = len(images)
            classes = predicted(self.model, images) if target is None else pick(self.model, target, count, "target")
            rival = None if against is None else pick(self.model, against, count, "against").to(images.device)
            with at_least(torch.float32):
                found = self.run(images, classes.to(images.device), rival)
        self._check_found(found, count)
        if not found.map.isfinite().all():
            raise VitrailError(f"{self.info.name} gave NaN or infinite values on {self.model.name}; try dtype=float64.")
        maps = found.map.detach().to(torch.promote_types(images.dtype, torch.float32))
        return Attribution(maps, {k: _at_least_single(v) for k, v in found.extras.items()})

    def _check_found(self, found: Attribution, count: int) -> None:
        """A method of one's own may give anything."""
        maps = found.map if isinstance(found, Attribution) else found
        if not isinstance(found, Attribution) or not isinstance(maps, Tensor):
            raise VitrailError(
                f"{self.info.name} returned {type(maps).__name__}: expected maps as a torch tensor ({count}, rows, "
                "columns), which a class puts in an Attribution."
            )
        # cams on hierarchical models have the grid of their features
        grid = self.model.grid if isinstance(self, TokenMethod) and isinstance(self.model, ViT) else None
        if maps.ndim != 3 or len(maps) != count or not maps.numel():
            expected = f"({count}, rows, columns)"
        elif grid and self.info.level == "token" and tuple(maps.shape[1:]) != grid:
            expected = f"{(count, *grid)}, one value per patch of {self.model.name}"
        else:
            return
        raise VitrailError(
            f"{self.info.name} gave maps of shape {tuple(maps.shape)} for {count} images: expected {expected}."
        )

    def given(self) -> dict[str, Any]:
        """The parameters that are not at their default."""
        return {name: getattr(self, name) for name, usual in self.parameters().items() if getattr(self, name) != usual}

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The parameters and their defaults."""
        return {f.name: f.default for f in fields(cls) if f.name not in ("model", "shape", "base")}


class TokenMethod(Method):
    """A method that looks inside: it needs tokens and blocks."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        return None if isinstance(model, ViT) else "it has no fixed tokens (hierarchical)"

    @property
    def vit(self) -> ViT:
        assert isinstance(self.model, ViT)
        return self.model

    def on_grid(self, scores: Tensor) -> Tensor:
        """Scores of all tokens (B, P + N) → patches on their grid (B, rows, columns)."""
        return scores[:, self.vit.num_prefix :].unflatten(1, self.vit.grid)


def _at_least_single(values: Tensor) -> Tensor:
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def spread(maps: Tensor, inputs: Tensor) -> Tensor:
    """Maps (B, h, w) in the shape of the inputs (B, C, H, W), evenly over pixels and channels, total unchanged."""
    channels, height, width = inputs.shape[-3:]
    cells = (height * width * channels) / (maps.shape[-2] * maps.shape[-1])
    up = torch.nn.functional.interpolate(maps[:, None], size=(height, width), mode="nearest-exact")
    return (up / cells).expand(-1, channels, -1, -1).contiguous()


def predicted(model: View, images: Tensor) -> Tensor:
    """(B,): the class each image gets."""
    with torch.no_grad():
        logits = model.logits(images)
    if not logits.isfinite().all():
        raise VitrailError(f"the logits of {model.name} are NaN or infinite: check its weights, or use dtype=float32.")
    return model.class_scores(logits).argmax(1)


def pick(model: View, target: Targets, count: int, what: str) -> Tensor:
    """Classes as given, (B,): one for all images, or as many as there are images."""
    if isinstance(target, Tensor | np.ndarray):
        target = target.tolist()
        if isinstance(target, list) and len(target) == 1:  # captum's contract: a tensor of one number is for all
            target = target[0]
    if isinstance(target, Sequence) and not isinstance(target, str):
        indices = [model.class_index(value) for value in target]
    else:
        indices = [model.class_index(target)] * count  # type: ignore[arg-type]
    if len(indices) != count:
        raise VitrailError(f"{what} names {len(indices)} classes for {count} images: give one, or one per image.")
    return torch.tensor(indices)
