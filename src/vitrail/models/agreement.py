"""Checks that a view agrees with its module: usable tensors, and the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vitrail.errors import VitrailError
from vitrail.models.black_box import BlackBox
from vitrail.models.clone import evaluation_clone
from vitrail.models.translation import LIBRARIES, class_name, is_of_library, is_packed, unpacked
from vitrail.models.view import View

GATHER = (
    "gather the weights into a plain module, with torch.distributed.checkpoint.state_dict.get_model_state_dict and "
    "StateDictOptions(full_state_dict=True), and give that one."
)
# Tolerance of the logits, relative to the largest or to 1: 10 to 100 times the rounding error of ViT-B and ViT-L.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def check_tensors(module: nn.Module, of_any_kind: bool = False) -> None:
    """Refuses, by name, parameters and buffers that are not plain dense tensors with values.

    A black box may hold tensors ``of_any_kind``, sparse or quantised, as long as it can be run.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise VitrailError(f"{name} has no shape yet (a lazy layer): run the model once before wrap().")
        if tensor.is_meta:
            raise VitrailError(f"{name} is on the meta device, without any values: load the weights before wrap().")
        if tensor.is_inference():
            raise VitrailError(
                f"{name} was created under torch.inference_mode(), which forbids gradients: build the model outside "
                f"it, or give copy.deepcopy(module)."
            )
        if tensor.layout != torch.strided and not of_any_kind:
            raise VitrailError(f"{name} is a sparse tensor: make it dense (tensor.to_dense()) before wrap().")
    for name, parameter in module.named_parameters():
        if of_any_kind or (parameter.is_floating_point() and _has_numbers(parameter)):
            continue
        kind = class_name(parameter) if is_packed(parameter) else str(parameter.dtype).removeprefix("torch.")
        if kind.endswith("DTensor"):
            raise VitrailError(f"{name} is sharded ({kind}): {GATHER}")
        raise VitrailError(
            f"{name} is not a plain floating-point tensor but quantised or distributed ({kind}): give the "
            f"model before that conversion, or explain it by its logits alone: wrap(module, black_box=True)."
        )
    devices = {str(parameter.device) for parameter in module.parameters()}
    if len(devices) > 1:
        raise VitrailError(f"the parameters are on several devices ({', '.join(sorted(devices))}): move them to one.")


def _has_numbers(parameter: Tensor) -> bool:
    """Whether a parameter holds its numbers, or says them."""
    try:
        return type(unpacked(parameter)).__torch_dispatch__ is Tensor.__torch_dispatch__
    except (NotImplementedError, RuntimeError, AttributeError):
        return False


def check_logits(view: View, module_logits: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Compares the view with its module, in evaluation mode, on a random input.

    Args:
        view: the view.
        module_logits: what the library computes from a module and images (1, 3, H, W).
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, *view.preprocessing.library_size, generator=generator).to(view.device, view.dtype)
    pair: Tensor | None = None
    with (
        torch.random.fork_rng([view.device] if view.device.type == "cuda" else []),  # a module may draw numbers
        torch.no_grad(),
        torch.autocast(view.device.type, enabled=False),
    ):
        expected = _tried(view, view.name, lambda: module_logits(evaluation_clone(view.module), images))
        logits = _tried(view, f"vitrail's view of {view.name}", lambda: view.logits(images))
        if isinstance(view, BlackBox):
            pair = _tried(view, view.name, lambda: view.logits(torch.cat([images.flip(2), images])))
    if logits.shape != expected.shape:
        raise _differ(view, f"the module's have the shape {tuple(expected.shape)}, the view's {tuple(logits.shape)}")
    size = max(1.0, float(expected.abs().nan_to_num(0.0, 0.0).max()))
    tolerance = size * _tolerance(view)
    if not _are_close(logits, expected, tolerance):
        if isinstance(view, BlackBox):
            raise _no_classifier(view, "two passes over one image differ: it draws random numbers, or has a memory")
        gap = float((logits.double() - expected.double()).abs().max())
        raise _differ(view, f"by {gap:.3g} where the largest is {size:.3g}")
    if pair is not None and not _are_close(pair[1:], expected, tolerance):
        raise _no_classifier(view, "the logits of an image change with the other images of its batch")


def _are_close(logits: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(logits.double(), expected.double(), rtol=0.0, atol=tolerance, equal_nan=True)


def _no_classifier(view: View, why: str) -> VitrailError:
    return VitrailError(
        f"{view.name} cannot be explained: {why}; expected one row of logits per image, always the same."
    )


def _tolerance(view: View) -> float:
    dtypes = {p.dtype for p in view.module.parameters()} & TOLERANCES.keys()
    if torch.float32 in dtypes and _rounds_products(view.device):
        dtypes.add(torch.float16)  # as many mantissa bits as TF32
    return max((TOLERANCES[dtype] for dtype in dtypes), default=0.0)


def _rounds_products(device: torch.device) -> bool:
    """Whether float32 products may use fewer bits, as convolutions on CUDA do by default."""
    try:
        return device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set backend by backend
        return True


def _tried(view: View, what: str, compute: Callable[[], Tensor]) -> Tensor:
    try:
        logits = compute()
        if not isinstance(logits, Tensor):
            raise TypeError(f"it returns a {type(logits).__name__}")
        return logits
    except VitrailError:
        raise
    except Exception as error:  # a module runs any code
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in view.module.parameters()})
        mixed = f" Its parameters are {' and '.join(dtypes)}: convert it to one." if len(dtypes) > 1 else ""
        reason = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
        height, width = view.preprocessing.library_size
        raise VitrailError(
            f"{what} fails on a random image of {height}×{width} ({type(error).__name__}: {reason})."
            f"{mixed}{_suspects(view.module)}"
        ) from error


def _differ(view: View, how: str) -> VitrailError:
    suspects = _suspects(view.module) or " Something in it computes what the view does not."
    return VitrailError(
        f"the logits of {view.name} and of vitrail's view of it differ on a random image ({how}), so its explanations "
        f"would be those of another model.{suspects} By its logits alone: wrap(module, black_box=True)."
    )


def _suspects(module: nn.Module) -> str:
    """Likely reasons in the module's structure, as a sentence."""
    changes = list(islice(_changes(module), 4))
    if not changes:
        return ""
    mode = " It is in training mode, and functions that hold parts of it run these so: try module.eval() first."
    return f" A likely reason: {'; '.join(changes)}.{mode if module.training else ''}"


def _changes(module: nn.Module) -> Iterator[str]:
    """What was added to or replaced in a network of a library."""
    for path, part in module.named_modules():
        name, kind = path or type(module).__name__, type(part)
        if not is_of_library(part):
            yield f"{name} is a {class_name(part)}"
        elif getattr(kind.forward, "__module__", "").partition(".")[0] not in LIBRARIES:
            yield f"{kind.__name__}.forward was replaced"
        for hooks, what in ((part._forward_pre_hooks, "pre-hook"), (part._forward_hooks, "hook")):
            for hook in hooks.values():
                yield f"{name} has a forward {what} ({getattr(hook, '__qualname__', class_name(hook))})"
        for attribute, tensor in part.named_parameters(recurse=False):
            if is_packed(tensor):
                yield f"{name}.{attribute} is quantised ({class_name(tensor)})"
        for attribute, value in vars(part).items():
            if attribute != "extra_repr" and callable(value) and callable(getattr(kind, attribute, None)):
                yield f"{name}.{attribute} was replaced"
