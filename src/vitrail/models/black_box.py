"""The view of any image classifier: its logits, and the feature maps of layers that are found or named."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models.clone import evaluation_clone, widened
from vitrail.models.view import View
from vitrail.progress import passed

SHUFFLED = ("Hiera", "HieraForImageClassification")  # their tokens are not in the order of the rows


@dataclass(eq=False, repr=False)
class BlackBox(View):
    """Whatever maps images to logits; ``stage_names`` are the paths of modules whose outputs are feature maps.

    Every forward pass runs on a clone of the module in evaluation mode that shares its weights, so the view uses the
    current weights, never changes the module and is thread-safe.
    """

    stage_names: tuple[str, ...] | None = field(default=None, kw_only=True)  # None = the last feature map, if any
    outputs: int = field(default=0, init=False)

    structure: ClassVar[str] = "a black box"

    def __post_init__(self) -> None:
        """Refuses an unsupported network now, not at the first call."""
        images = torch.zeros(1, 3, *self.size, device=self.device, dtype=self.dtype)
        module, seen = evaluation_clone(self.module), _Outputs()
        for name, part in module.named_modules() if self.stage_names is None else self.watched(module).items():
            seen.watch(part, name)
        with (
            torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),  # a module may draw numbers
            torch.inference_mode(False),
            torch.enable_grad(),
            _full_precision(self.device),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of torch about operations that have no gradient
            logits = self.tried(lambda: as_logits(module(images.requires_grad_())))
            if logits.ndim != 2 or len(logits) != 1 or not logits.shape[1]:
                raise self.refuse(
                    f"for a batch of 1 its output has shape {tuple(logits.shape)}; expected one row of logits per image"
                )
            if self.stage_names is None:
                self.stage_names = seen.last_map(logits, images)
            self.outputs, self.differentiable = logits.shape[1], self.tried(lambda: _has_gradient(logits, images))
        for name in self.stage_names:
            out = seen.outputs.get(name)
            if out is None or layout(out, 1, self.size) is None or type(self.module).__name__ in SHUFFLED:
                what = "not called" if out is None else f"of shape {tuple(out.shape)}"
                raise self.refuse(
                    f"the output of {name} is no feature map, but {what}; expected (B, channels, rows, columns), "
                    "(B, rows, columns, channels) or (B, rows · columns, channels) in the order of the rows"
                )

    @property
    def num_outputs(self) -> int:
        return self.outputs

    @property
    def has_features(self) -> bool:
        return self.num_stages > 0

    @property
    def num_stages(self) -> int:
        return len(self.stage_names or ())

    @property
    def default_stage(self) -> int:
        return self.num_stages - 1

    @property
    def num_tokens(self) -> int:
        """As of patches of eight pixels, so that chunks of variants have the size of those of a ViT."""
        return max(self.size[0] * self.size[1] // 64, 1)

    def layers(self) -> list[list[Tensor]]:
        """The weights of each module that has some, in the order in which they were made."""
        owners = [list(part.parameters(recurse=False)) for part in self.module.modules()]
        return [[parameter.detach() for parameter in parameters] for parameters in owners if parameters]

    def logits(self, images: Tensor) -> Tensor:
        return self.staged(self.check_images(images), ())[0]

    def features(self, images: Tensor, stage: int | None = None) -> Tensor:
        """Feature map of a stage, (B, C, h, w); None = the default stage."""
        stage = self.default_stage if stage is None else stage
        return self.as_map(self.staged(self.check_images(images), [stage])[1][0])

    def staged(self, images: Tensor, stages: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        wrong = [stage for stage in stages if not -self.num_stages <= stage < self.num_stages]
        if wrong:
            raise VitrailError(f"{self.name} has {self.num_stages} stages; there is no stage {wrong[0]}.")
        module, seen = evaluation_clone(self.module), _Outputs()
        watched = list(self.watched(module).values())
        for stage in stages:
            seen.watch(watched[stage], stage)
        result = self.called(module, images)
        logits = as_logits(result)
        if tuple(logits.shape) != (len(images), self.num_outputs):
            raise self.refuse(
                f"for a batch of {len(images)} its output has shape {tuple(logits.shape)}; expected one row of "
                f"{self.num_outputs} logits per image"
            )
        if len(seen.outputs) < len(stages):
            raise self.refuse("its forward method was replaced by a function that does not call its stages")
        passed(len(images))
        return logits, [seen.outputs[stage] for stage in stages]

    def watched(self, module: Any) -> dict[str, nn.Module]:
        """The modules of the clone whose outputs are the features of the stages, by path."""
        modules = dict(module.named_modules())
        for name in self.stage_names or ():
            if name not in modules:
                known = ", ".join(path for path, _ in module.named_children()) or "none"
                raise self.refuse(f"it has no layer {name!r} for features=; at the top it has {known}")
        return {name: modules[name] for name in self.stage_names or ()}

    def called(self, module: nn.Module, images: Tensor) -> Any:
        """The output of the clone, in the precision of the images: where its head is, nobody knows."""
        with _full_precision(images.device):
            return module(images) if images.dtype == self.dtype else widened(module, images)

    def as_map(self, out: Tensor) -> Tensor:
        order = layout(out, len(out), self.size)
        if order is None:
            raise self.refuse(f"an output of shape {tuple(out.shape)} is no feature map")
        if order == "tokens":
            out = out.unflatten(1, (rows_of(out.shape[1], self.size), -1))
        return out if order == "channels first" else out.permute(0, 3, 1, 2)

    def tried(self, compute: Any) -> Any:
        """What a first pass gives; any failure becomes one clear error."""
        try:
            return compute()
        except VitrailError:
            raise
        except Exception as error:  # a module runs any code
            self.check_channels()
            why = " ".join(str(error).split())[:300] or type(error).__name__
            height, width = self.size
            raise self.refuse(f"its forward pass fails on an image of {height}×{width} pixels ({why})") from error

    def check_channels(self) -> None:
        stem = next((m for m in self.module.modules() if isinstance(m, nn.Conv2d)), None)
        if stem is not None and stem.in_channels != 3:
            raise self.refuse(
                f"it takes {stem.in_channels} colour channels, but only RGB models can be explained; put a module that "
                f"makes these of RGB before it, nn.Sequential(channels, model), and give img_size=, mean= and std="
            )

    def refuse(self, why: str) -> VitrailError:
        return VitrailError(f"{type(self.module).__name__} cannot be explained: {why}.")


class _Outputs:
    """Records what modules of a clone return."""

    def __init__(self) -> None:
        self.outputs: dict[Any, Tensor] = {}

    def watch(self, part: nn.Module, key: Any) -> None:
        """Records the output of a module under a key, the last where it is called several times."""

        def record(_: nn.Module, __: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if isinstance(out, Tensor):
                self.outputs.pop(key, None)  # the order is that of the calls
                self.outputs[key] = out

        part.register_forward_hook(record)

    def last_map(self, logits: Tensor, images: Tensor) -> tuple[str, ...]:
        """The path of the module that returns the last feature map; empty where there is none.

        All that the logits know of the images passes through it, and most of the network comes before it: embedded
        patches are none.
        """
        height, width = images.shape[2:]
        for name, out in list(self.outputs.items())[len(self.outputs) // 2 :][::-1]:
            # several cells, and in one of the two layouts of maps: tokens need not be in the order of the rows
            is_map = out.ndim == 4 and min(out.shape[1:]) > 1 and layout(out, 1, (height, width)) is not None
            if is_map and _all_passes(out, logits, images):
                return (name,)
        return ()


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, nothing is computed in lower precision; the meta device knows no autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _has_gradient(logits: Tensor, images: Tensor) -> bool:
    return logits.requires_grad and torch.autograd.grad(logits.sum(), images, allow_unused=True)[0] is not None


def _all_passes(out: Tensor, logits: Tensor, images: Tensor) -> bool:
    """Whether every path from the images to the logits leads through a tensor."""
    if out.grad_fn is None or logits.grad_fn is None:
        return False
    waiting, visited = [logits.grad_fn], {logits.grad_fn}
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) is images:
            return False
        sources = {source for source, _ in node.next_functions if source is not None} if node is not out.grad_fn else ()
        waiting += (new := set(sources) - visited)
        visited |= new
    return out.grad_fn in visited


def as_logits(result: Any) -> Tensor:
    """The logits in what a classifier returns: a tensor, or an object or mapping with ``logits``."""
    if isinstance(result, Tensor):
        return result
    logits = result.get("logits") if isinstance(result, dict) else getattr(result, "logits", None)
    if not isinstance(logits, Tensor):
        raise VitrailError(
            f"the module returns a {type(result).__name__}, but a classifier returns a tensor of logits (B, classes), "
            "or an object with such a tensor as logits: wrap() a module that returns this."
        )
    return logits


def layout(out: Tensor, batch: int, size: tuple[int, int]) -> str | None:
    """Where the channels of a feature map are: "channels first", "channels last" or "tokens"; None = it is none.

    The rows and columns of a map have the proportions of the image, give or take a cell.
    """
    if len(out) != batch:
        return None
    if out.ndim == 3:
        rows = rows_of(out.shape[1], size)
        return "tokens" if out.shape[1] % rows == 0 and _fits(rows, out.shape[1] // rows, size, max(size)) else None
    if out.ndim != 4:
        return None
    _, first, second, third = out.shape
    for slack in (0, max(size)):  # a grid of these very proportions before one that is a cell off
        is_first, is_last = _fits(second, third, size, slack), _fits(first, second, size, slack)
        if is_first or is_last:
            return None if is_first == is_last else "channels first" if is_first else "channels last"
    return None


def rows_of(tokens: int, size: tuple[int, int]) -> int:
    """The number of rows of so many tokens on a grid with the proportions of the image."""
    return max(round((tokens * size[0] / size[1]) ** 0.5), 1)


def _fits(rows: int, columns: int, size: tuple[int, int], slack: int) -> bool:
    return abs(rows * size[1] - columns * size[0]) <= slack
