"""A view has its module's logits, or there is no view: what the structure does not show, a random image does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.helpers import assert_same_state, state_of
from tests.models.tiny import NAME, TINY
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError


def _tiny(**options: Any) -> Any:
    made = timm.create_model(NAME, num_classes=7, **TINY, **options)
    families.randomize(made, seed=3)
    return made.eval()


# What changes the logits


def _double(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs, **options: 2 * function(*inputs, **options)


def _with_hook(module: Any) -> None:
    module.blocks[0].attn.register_forward_hook(lambda _, __, out: 2 * out)


def _with_pre_hook(module: Any) -> None:
    module.blocks[1].mlp.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))


def _with_forward(module: Any) -> None:
    module.forward = _double(module.forward)


def _with_forward_head(module: Any) -> None:
    module.forward_head = _double(module.forward_head)


def _with_attention_forward(module: Any) -> None:
    module.blocks[1].attn.forward = _double(module.blocks[1].attn.forward)


CHANGES = {
    "blocks.0.attn has a forward hook": _with_hook,
    "blocks.1.mlp has a forward pre-hook": _with_pre_hook,
    "VisionTransformer.forward was replaced": _with_forward,
    "VisionTransformer.forward_head was replaced": _with_forward_head,
    "blocks.1.attn.forward was replaced": _with_attention_forward,
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("reason", CHANGES)
def test_what_changes_the_logits_is_refused_with_its_name(reason: str, mode: bool) -> None:
    module = _tiny().train(mode)
    CHANGES[reason](module)
    before = state_of(module)
    with pytest.raises(
        VitrailError, match=r"logits of .* differ on a random image \(by .* where the largest"
    ) as caught:
        vitrail.wrap(module)
    assert reason in str(caught.value)
    assert_same_state(before, state_of(module))


def test_a_forward_replaced_in_the_class_is_refused_by_wrap_and_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _tiny()
    monkeypatch.setattr(type(module.blocks[0].mlp), "forward", lambda self, x: self.fc2(self.fc1(x)))
    with pytest.raises(VitrailError, match=r"differ on a random image.*Mlp.forward was replaced"):
        vitrail.wrap(module)
    with pytest.warns(UserWarning, match="random weights"), pytest.raises(VitrailError, match=r"Mlp.forward was"):
        vitrail.load(NAME, pretrained=False, num_classes=7, **TINY)


@pytest.mark.parametrize("name", ["hf_vit", "torchvision_vit"])
def test_hooks_of_every_library_are_run(name: str) -> None:
    module = families.build(name)
    norm = next(part for part in module.modules() if isinstance(part, nn.LayerNorm))
    hook = norm.register_forward_hook(lambda _, __, out: out + 1)
    with pytest.raises(VitrailError, match=r"differ on a random image.*has a forward hook"):
        vitrail.wrap(module)
    hook.remove()
    vitrail.wrap(module)


@pytest.mark.parametrize("name", ["timm_headless_token", "timm_headless_avg", "hf_dinov3_avg", "hf_dinov3_token"])
def test_a_backbone_with_a_head_of_ones_own_is_compared_too(name: str) -> None:
    family = families.find(name)
    module = family.build()
    options = family.wrap(module)
    vitrail.wrap(module, **options)
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    norms[1].register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match="differ on a random image"):
        vitrail.wrap(module, **options)


def test_a_compiled_module_with_hooks_around_it_is_refused() -> None:
    compiled = torch.compile(_tiny())
    vitrail.wrap(compiled)
    compiled.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match="_orig_mod"):
        vitrail.wrap(compiled)


def test_a_module_that_fails_is_one_error_and_stays_as_it_was() -> None:
    module = _tiny().train()
    module.blocks[1].eval()
    module.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    before = state_of(module)
    with pytest.raises(
        VitrailError, match=r"fails on a random image of 32×32 \(ZeroDivisionError.*blocks.0 has a forw"
    ):
        vitrail.wrap(module)
    assert_same_state(before, state_of(module))


def test_a_module_that_gives_no_logits_is_refused() -> None:
    module = _tiny()
    module.register_forward_hook(lambda _, __, out: (out, out))
    with pytest.raises(VitrailError, match=r"TypeError: it returns a tuple.*VisionTransformer has a forward hook"):
        vitrail.wrap(module)


# What does not change them


def test_observers_are_welcome() -> None:
    module = _tiny(drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=0.5).train()
    seen: list[bool] = []
    module.blocks[0].attn.register_forward_hook(lambda part, _, out: seen.append(part.training))
    block = module.blocks[1]
    block.forward = MethodType(lambda self, x, **options: type(self).forward(self, x, **options), block)
    before = state_of(module)
    view = vitrail.wrap(module)
    assert seen == [False], "run once, in evaluation mode"
    assert_same_state(before, state_of(module))
    assert view.module is module


def test_modes_do_not_change_while_the_module_is_run() -> None:
    module = _tiny(drop_rate=0.5).train()
    modes: list[bool] = []
    inside, done = threading.Event(), threading.Event()

    def watch() -> None:
        inside.wait(20)
        modes.extend(part.training for part in module.modules())
        done.set()

    def wait(*_: object) -> None:
        inside.set()
        done.wait(20)

    module.blocks[0].register_forward_hook(wait)
    watcher = threading.Thread(target=watch)
    watcher.start()
    vitrail.wrap(module)
    watcher.join()
    assert modes
    assert all(modes)


@pytest.mark.parametrize("fused", [True, False])
def test_a_changed_scale_is_followed_as_the_module_does(fused: bool) -> None:
    module, images = _tiny(), torch.randn(2, 3, 32, 32)
    module.blocks[0].attn.fused_attn = fused
    module.blocks[0].attn.scale *= 3
    view = vitrail.wrap(module)
    assert torch.allclose(view.logits(images), module(images), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    assert vitrail.wrap(_tiny().to(dtype)).dtype == dtype


def test_autocast_and_inference_mode_around_make_no_difference() -> None:
    module = _tiny()
    with torch.autocast("cpu"), torch.inference_mode():
        view = vitrail.wrap(module)
    assert vitrail.explain(view, torch.randn(3, 32, 32), "gradient").map.isfinite().all()


# What the structure shows


SLOTS = [
    "blocks.0.drop_path1", "blocks.1.drop_path2", "blocks.0.attn.attn_drop", "blocks.0.attn.proj_drop",
    "blocks.0.mlp.drop1", "blocks.0.mlp.drop2", "patch_drop", "pos_drop", "head_drop",
]  # fmt: skip


@pytest.mark.parametrize("place", SLOTS)
def test_only_dropout_stands_where_the_library_has_dropout(place: str) -> None:
    module = _tiny()
    width = 64 if place.endswith("drop1") else 16
    adapter = nn.Linear(width, width)
    nn.init.eye_(adapter.weight)  # as adapters begin: without an effect that a comparison could find
    nn.init.zeros_(adapter.bias)
    module.set_submodule(place, adapter)
    with pytest.raises(VitrailError, match=rf"Linear is not supported: it stands in .*{place.rpartition('.')[2]}"):
        vitrail.wrap(module)
    module.set_submodule(place, nn.Dropout(0.5))
    vitrail.wrap(module)


@pytest.mark.parametrize(
    ("name", "place"),
    [("hf_vit", "vit.embeddings.dropout"), ("hf_dinov2", "dinov2.encoder.layer.1.drop_path"),
     ("torchvision_vit", "encoder.dropout"), ("torchvision_vit", "encoder.layers.encoder_layer_1.mlp.2")],
)  # fmt: skip
def test_dropout_of_other_libraries(name: str, place: str) -> None:
    module = families.build(name)
    module.set_submodule(place, nn.ReLU())
    with pytest.raises(VitrailError, match=r"is not supported.*dropout"):
        vitrail.wrap(module)


class DoubledNorm(nn.LayerNorm):
    """Another LayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledConvolution(nn.Conv2d):
    """Another convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adapted(nn.Linear):
    """As loralib's: a low-rank update beside the weights, or merged into them."""

    merged = False

    def __init__(self, old: nn.Linear):
        super().__init__(old.in_features, old.out_features)
        self.load_state_dict(old.state_dict())
        self.down, self.up = nn.Linear(old.in_features, 2), nn.Linear(2, old.out_features)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.merged else out + self.up(self.down(x))


class Merged(Adapted):
    merged = True


def _norm(old: Any) -> nn.Module:
    new = DoubledNorm(16, eps=old.eps)
    new.load_state_dict(old.state_dict())
    return new


def _convolution(old: Any) -> nn.Module:
    new = DoubledConvolution(3, 16, 8, 8)
    new.load_state_dict(old.state_dict())
    return new


def _quantisation_aware(old: Any) -> nn.Module:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import get_default_qat_qconfig

    old.qconfig = get_default_qat_qconfig("fbgemm")
    new: nn.Module = Linear.from_float(old)
    return new


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        ("blocks.0.norm1", _norm, "DoubledNorm is not supported"),
        ("patch_embed.proj", _convolution, "DoubledConvolution is not supported"),
        ("patch_embed.proj", lambda _: nn.Conv2d(3, 16, 8, 4), "Conv2d is not supported.*overlap"),
        ("blocks.0.attn.qkv", Adapted, "Adapted is not supported.*merge adapters"),
        ("head", Adapted, "Adapted is not supported.*merge adapters"),
        ("blocks.1.mlp.fc1", _quantisation_aware, r"torch.ao.nn.qat.modules.linear.Linear is not supported"),
        ("blocks.1.ls1", lambda _: nn.Linear(16, 16), "Linear is not supported: a LayerScale"),
        ("norm", lambda _: None, "has no attribute|not supported|fails on a random image"),
    ],
)
def test_layers_that_compute_something_else_are_refused(
    place: str, new: Callable[[Any], nn.Module], message: str
) -> None:
    module = _tiny()
    owner = module.get_submodule(place.rpartition(".")[0])
    setattr(owner, place.rpartition(".")[2], new(module.get_submodule(place)))
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(module)


def test_an_adapter_merged_into_the_weights_is_a_linear_layer() -> None:
    module = _tiny()
    module.blocks[0].attn.qkv = Merged(module.blocks[0].attn.qkv)
    view = vitrail.wrap(module)
    module.blocks[0].attn.qkv.merged = False
    with pytest.raises(VitrailError, match="merge adapters"):
        view.logits(torch.randn(1, 3, 32, 32))


# Tensors that cannot be computed with


def test_modules_without_values_are_refused() -> None:
    with torch.device("meta"):
        module = timm.create_model(NAME, num_classes=7, **TINY)
    with pytest.raises(VitrailError, match="cls_token is on the meta device"):
        vitrail.wrap(module)
    with pytest.warns(UserWarning, match="random weights"):
        view = vitrail.load(NAME, pretrained=False, num_classes=7, device="meta", **TINY)
    assert view.num_classes == 7
    with pytest.raises(VitrailError, match=r"has no weights.*meta"):
        vitrail.explain(view, torch.randn(3, 32, 32), "gradient")
    module = _tiny()
    module.head = nn.LazyLinear(3)
    with pytest.raises(VitrailError, match=r"head.weight has no shape yet"):
        vitrail.wrap(module)


def test_modules_made_in_inference_mode_are_refused() -> None:
    import copy

    with torch.inference_mode():
        module = _tiny()
    with pytest.raises(VitrailError, match=r"cls_token was created under torch.inference_mode\(\).*deepcopy"):
        vitrail.wrap(module)
    view = vitrail.wrap(copy.deepcopy(module))  # as the message says
    assert vitrail.explain(view, torch.randn(3, 32, 32), "gradient").map.isfinite().all()


@pytest.mark.parametrize("dense", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_weights_are_refused(dense: Callable[[Tensor], Tensor]) -> None:
    module = _tiny()
    module.blocks[0].mlp.fc1.weight = nn.Parameter(dense(module.blocks[0].mlp.fc1.weight.detach()))
    with pytest.raises(VitrailError, match=r"blocks.0.mlp.fc1.weight is a sparse tensor"):
        vitrail.wrap(module)


class Int8Params(nn.Parameter):
    """As bitsandbytes keeps its weights."""


class Int8Tensor(Tensor):
    """As torchao's weights: a tensor that says it is float32, and holds something else."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Int8Tensor:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError("unpacking is not written")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda old: Int8Params(old.detach().char(), requires_grad=False), r"quantised or distributed \(int8\)"),
        (lambda old: nn.Parameter(Int8Tensor(old.detach()), requires_grad=False), r"distributed \(Int8Tensor\)"),
    ],
)
def test_quantised_weights_are_refused(weight: Callable[[Tensor], nn.Parameter], message: str) -> None:
    module = _tiny()
    layer = module.blocks[0].mlp.fc1
    del layer.weight
    layer.register_parameter("weight", weight(_tiny().blocks[0].mlp.fc1.weight))
    with pytest.raises(VitrailError, match=rf"blocks.0.mlp.fc1.weight is not a plain floating-point tensor.*{message}"):
        vitrail.wrap(module)


def test_several_precisions_work_where_the_module_does() -> None:
    module = _tiny()
    module.blocks.bfloat16()
    with pytest.raises(VitrailError, match=r"fails on a random image.*Its parameters are bfloat16 and float32"):
        vitrail.wrap(module)
    module = _tiny().bfloat16()
    for block in module.blocks:  # torch has norms in float32 of bfloat16
        block.norm1.float()
    assert vitrail.explain(vitrail.wrap(module), torch.randn(3, 32, 32), "decompx").map.isfinite().all()


def test_head_and_backbone_have_one_precision() -> None:
    backbone = families.build("timm_headless_token")
    with pytest.raises(VitrailError, match=r"head= has torch.float64 on cpu.*head.to\('cpu', torch.float32\)"):
        vitrail.wrap(backbone, head=nn.Linear(families.WIDTH, 3).double(), pool="token")
