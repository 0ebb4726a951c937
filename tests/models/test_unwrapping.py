"""Networks as they come out of training: compiled, parallel, with adapters, behind a normalisation, in a class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.helpers import assert_same_state, state_of
from tests.models.tiny import NAME, TINY, picture
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchvision import transforms
from torchvision.transforms import v2

import vitrail
from vitrail import VitrailError
from vitrail.engine.trace import trace
from vitrail.metrics.sanity import randomised
from vitrail.models import chain, translation
from vitrail.models.black_box import BlackBox
from vitrail.models.translation import OpaqueError
from vitrail.models.vit import ViT

HALF = (0.5, 0.5, 0.5)
INPUT: dict[str, Any] = {"img_size": 32, "mean": HALF, "std": HALF}


def tiny(**options: Any) -> Any:
    made = timm.create_model(NAME, num_classes=7, **{**TINY, **options})
    families.randomize(made, seed=3)
    return made.eval()


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "parallel": nn.DataParallel,
    "compiled parallel": lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
    "parallel compiled": lambda module: nn.DataParallel(torch.compile(module, backend="eager")),
    "distributed": nn.parallel.DistributedDataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "moving average": timm.utils.ModelEmaV3,
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("around", AROUND)
def test_what_training_puts_around_a_network_is_taken_off(around: str, group: None) -> None:
    module = tiny()
    view = vitrail.wrap(AROUND[around](module))
    assert isinstance(view, ViT)
    assert view.module is module or "average" in around  # of a copy
    assert torch.equal(view.logits(picture()), vitrail.wrap(module).logits(picture()))


@pytest.mark.parametrize("put", [lambda block: torch.compile(block, backend="eager"), checkpoint_wrapper])
def test_what_training_puts_around_blocks_is_looked_through(put: Callable[[nn.Module], nn.Module]) -> None:
    module, expected = tiny(), vitrail.wrap(tiny()).logits(picture())
    for number, block in enumerate(module.blocks):
        module.blocks[number] = put(block)
    view = vitrail.wrap(module)
    assert isinstance(view, ViT)
    assert torch.equal(view.logits(picture()), expected)


@pytest.mark.filterwarnings("ignore")
def test_sharded_networks_say_how_to_gather_them(group: None) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    blocks, whole = tiny(), tiny()
    blocks.blocks[0] = FullyShardedDataParallel(blocks.blocks[0], device_id=torch.device("cpu"))
    for sharded in (
        FullyShardedDataParallel(tiny(), device_id=torch.device("cpu")),
        blocks,
        fully_shard(whole, mesh=mesh),
    ):
        with pytest.raises(
            VitrailError, match=r"is sharded \((FSDP|.*DTensor)\): gather the weights .*full_state_dict"
        ):
            vitrail.wrap(sharded)
    options = StateDictOptions(full_state_dict=True)  # as the message says
    plain = tiny()
    plain.load_state_dict(get_model_state_dict(whole, options=options))
    assert torch.equal(vitrail.wrap(plain).logits(picture()), vitrail.wrap(tiny()).logits(picture()))


@pytest.mark.filterwarnings("ignore")
def test_programs_are_refused() -> None:
    for program in (torch.jit.trace(tiny(), picture()), torch.export.export(tiny(), (picture(),)).module()):
        with pytest.raises(VitrailError, match="traced or exported program: give the module it was made from"):
            vitrail.wrap(program, **INPUT)


def test_hooks_around_are_refused() -> None:
    parallel = nn.DataParallel(tiny())
    parallel.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match=r"the DataParallel around the network has hooks.*inner module \(module\)"):
        vitrail.wrap(parallel)


@pytest.mark.parametrize("kind", [transforms.Normalize, v2.Normalize])
def test_a_normalisation_before_the_network_becomes_preprocessing(kind: Any) -> None:
    module, mean, std = tiny(), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    whole = nn.Sequential(kind(mean, std), module)
    view = vitrail.wrap(whole)
    assert isinstance(view, ViT)
    assert (view.preprocessing.mean, view.preprocessing.std) == (tuple(mean), tuple(std))
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    normalised = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(view.logits(normalised), whole(pixels).detach())
    with pytest.raises(VitrailError, match="normalises its inputs itself"):
        vitrail.wrap(whole, mean=HALF, std=HALF)


class Classifier(nn.Module):
    """As Lightning modules and training scripts have it: the network is one of its parts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.clamp(-3, 3))


def test_a_class_around_a_vit_is_a_black_box_that_names_it() -> None:
    module = Classifier(tiny())
    view = vitrail.wrap(module, **INPUT)
    assert isinstance(view, BlackBox)
    advice = r"Its part network is a VisionTransformer: give that to wrap\(\)"
    assert re.search(advice, view.note)
    assert torch.equal(view.logits(picture()), module(picture()))
    with pytest.raises(VitrailError, match=advice):
        vitrail.wrap(module)


class Grey(nn.Module):
    """RGB → one channel."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(1, keepdim=True)


class Normalise(nn.Module):
    """A normalisation of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3])[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / 0.4


class WithDepth(nn.Module):
    """RGB → four channels."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, images.square().mean(1, keepdim=True)], dim=1)


def mixing() -> nn.Conv2d:
    """RGB → four mixtures of the colours."""
    made = nn.Conv2d(3, 4, 1)
    families.randomize(made, seed=3)
    return made


CHAINS: dict[str, tuple[list[nn.Module], int]] = {
    "normalisation": ([Normalise()], 3),
    "grey": ([Grey()], 1),
    "torchvision's": ([transforms.Grayscale(), transforms.Normalize([0.4], [0.2])], 1),
    "four channels": ([Normalise(), WithDepth()], 4),
    "mixtures": ([mixing()], 4),
    "per image": ([nn.InstanceNorm2d(3)], 3),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_vit_behind_layers_of_ones_own_is_seen_through(kind: str) -> None:
    front, channels = CHAINS[kind]
    module = nn.Sequential(*front, tiny(in_chans=channels)).double()
    images = picture().double()
    view = vitrail.wrap(module, **INPUT)
    assert isinstance(view, ViT)
    torch.testing.assert_close(view.logits(images), module(images).detach())
    result = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = result.y - (result["x"][0] * result["gx"][0]).sum((1, 2)) - result.bias_from(0)
    assert gap.abs().max() < 1e-12
    assert vitrail.explain(view, images[0], "integrated_gradients", target=1, steps=2).map.std() > 0
    with pytest.raises(VitrailError, match="it has layers before its patches"):
        vitrail.explain(view, images[0], "epsilon_lrp")
    module.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match="the Sequential has hooks: register them on its parts"):
        vitrail.wrap(module, **INPUT)


def test_layers_that_change_the_size_make_a_black_box() -> None:
    for front in (transforms.Resize((32, 32)), nn.AvgPool2d(2)):
        view = vitrail.wrap(nn.Sequential(front, tiny()), img_size=64, mean=HALF, std=HALF)
        assert isinstance(view, BlackBox)
        assert view.size == (64, 64)
        assert "its first parts change the size of images of 64×64 pixels" in view.note
        assert "Its part 1 is a VisionTransformer" in view.note
    view = vitrail.wrap(nn.Sequential(transforms.Resize((32, 32)), tiny()), mean=HALF, std=HALF, img_size=32)
    assert isinstance(view, ViT), "nothing is resized"


class Changed(nn.Module):
    """Images changed by a function."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: Tensor) -> Any:
        return self.change(images)


MOVES: dict[str, list[nn.Module]] = {
    "crop and resize": [transforms.CenterCrop(24), transforms.Resize((32, 32))],
    "flip": [transforms.RandomHorizontalFlip(p=1.0)],
    "upside down": [v2.RandomVerticalFlip(p=1.0)],
    "turn": [Changed(lambda images: images.mT)],
    "one patch further": [Changed(lambda images: images.roll(8, dims=-1))],
    "mirror image on top": [Changed(lambda images: images + images.flip(-1))],
    "nothing left": [Changed(torch.zeros_like)],
}


@pytest.mark.parametrize("kind", MOVES)
def test_layers_that_move_patches_make_a_black_box(kind: str) -> None:
    module, random = nn.Sequential(*MOVES[kind], tiny()), torch.get_rng_state()
    view = vitrail.wrap(module, **INPUT)
    assert isinstance(view, BlackBox)
    assert torch.equal(torch.get_rng_state(), random)
    assert "cannot be seen through: its first parts move the patches of images of 32×32 pixels." in view.note
    torch.testing.assert_close(view.logits(picture()), module(picture()).detach())


def test_first_layers_that_fail_are_one_error() -> None:
    module = nn.Sequential(Changed(lambda images: 1 / 0), tiny())
    with pytest.raises(VitrailError, match=r"fails on an image of 32×32 pixels \(division by zero\)"):
        vitrail.wrap(module, **INPUT)
    with pytest.raises(OpaqueError, match=r"its first parts fail on images of 32×32 pixels \(division by zero\)"):
        chain.check_front(module, (32, 32), (8, 8))


def test_first_layers_that_draw_numbers_leave_no_trace() -> None:
    module = nn.Sequential(Changed(lambda images: images + 0 * torch.rand(())), tiny())
    random = torch.get_rng_state()
    assert isinstance(vitrail.wrap(module, **INPUT), ViT)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("front", [Normalise(), transforms.Resize((32, 32))])
def test_a_chain_has_the_classes_of_its_network(front: nn.Module) -> None:
    module = families.build("hf_vit")
    module.config.problem_type = "multi_label_classification"
    module.config.id2label = {i: f"kind {i}" for i in range(module.config.num_labels)}
    options = {**INPUT, "img_size": 32 if isinstance(front, Normalise) else 64}
    view = vitrail.wrap(nn.Sequential(front, module), **options)
    assert isinstance(view, ViT if isinstance(front, Normalise) else BlackBox)
    assert view.output == "sigmoid"
    assert list(view.labels or ()) == [*module.config.id2label.values()]


def test_a_chain_that_ends_in_a_projection_has_an_embedding() -> None:
    tower = timm.create_model("vit_base_patch16_clip_224.openai", num_classes=512, **TINY)
    families.randomize(tower, seed=3)
    view = vitrail.wrap(nn.Sequential(Normalise(), tower.eval()), **INPUT)
    assert isinstance(view, ViT)
    assert (view.is_embedding, view.output, view.labels) == (True, "score", None)


@pytest.mark.parametrize("name", [NAME, "resnet10t"])
def test_other_channels_say_what_to_do_and_that_works(name: str) -> None:
    module = timm.create_model(name, num_classes=3, in_chans=1, **(TINY if name == NAME else {})).eval()
    with pytest.raises(VitrailError, match=r"takes 1 colour channels.*nn.Sequential\(channels, model\)"):
        vitrail.wrap(module, img_size=32 if name != NAME else None)
    whole = nn.Sequential(Grey(), module)
    view = vitrail.wrap(whole, **INPUT)
    assert isinstance(view, ViT if name == NAME else BlackBox)
    torch.testing.assert_close(view.logits(picture()), whole(picture()).detach(), atol=1e-5, rtol=1e-5)


def test_transformers_wrapper_of_timm_models_is_the_timm_model() -> None:
    import transformers

    config = transformers.TimmWrapperConfig(
        architecture=NAME, num_labels=7, model_args={**TINY}, id2label={i: f"kind {i}" for i in range(7)}
    )
    module = transformers.TimmWrapperForImageClassification(config)
    families.randomize(module, seed=3)
    view = vitrail.wrap(module.eval())
    assert isinstance(view, ViT)
    torch.testing.assert_close(view.logits(picture()), module(picture()).logits.detach())
    assert view.label(6) == "kind 6"


def lora(module: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(module, peft.LoraConfig(r=2, lora_alpha=3, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


@pytest.mark.parametrize(
    ("name", "targets", "saved"),
    [
        ("timm_vit", ["qkv", "proj", "fc1", "fc2"], ["head"]),
        ("timm_vit", ["attn.proj"], None),
        ("hf_vit", ["q_proj", "v_proj"], ["classifier"]),
    ],
)
def test_lora_is_seen_merged(name: str, targets: list[str], saved: list[str] | None) -> None:
    module, images = families.build(name), families.images(name, 2)
    before = vitrail.wrap(module).logits(images)
    adapted = lora(module, target_modules=targets, modules_to_save=saved, lora_dropout=0.1)
    state = state_of(adapted)
    view = vitrail.wrap(adapted)
    assert isinstance(view, ViT)
    expected = adapted(images)
    expected = getattr(expected, "logits", expected).detach()
    torch.testing.assert_close(view.logits(images), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-2)
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5
    assert_same_state(state, state_of(adapted))
    with adapted.disable_adapter():
        torch.testing.assert_close(view.logits(images), before)
    adapted.merge_adapter()
    torch.testing.assert_close(view.logits(images), expected, atol=1e-5, rtol=1e-5)


def test_merging_copies_the_weights_of_layers_and_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, copied = lora(tiny(), target_modules=["qkv"]), list[nn.Module]()

    def spy(part: nn.Module) -> nn.Module:
        copied.append(part)
        return deepcopy(part)

    monkeypatch.setattr(translation, "copy", SimpleNamespace(deepcopy=spy))
    view = vitrail.wrap(adapted)
    torch.testing.assert_close(view.logits(picture()), adapted(picture()).detach(), atol=1e-5, rtol=1e-5)
    assert {type(part) for part in copied} == {nn.Linear}


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "rank-stabilised LoRA": ("LoraConfig", {"use_rslora": True, "bias": "all"}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "LoHa": ("LoHaConfig", {}),
    "OFT": ("OFTConfig", {"oft_block_size": 8}),
    "VeRA": ("VeraConfig", {}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_other_adapters_are_seen_merged(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config, options = ADAPTERS[kind]
    adapted = peft.get_peft_model(tiny(), getattr(peft, config)(target_modules=["qkv", "fc1"], **options)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    expected = adapted(picture()).detach()
    assert not torch.allclose(expected, tiny()(picture()), atol=1e-3)
    before = state_of(adapted)
    view = vitrail.wrap(adapted)
    assert isinstance(view, ViT)
    torch.testing.assert_close(view.logits(picture()), expected, atol=1e-5, rtol=1e-5)
    assert_same_state(before, state_of(adapted))


class Packed(Tensor):
    """As torchao's weights for int8: integers with a scale per row, which say that they are float32."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        plain = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def pack(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(Packed.of(part.weight.detach()), requires_grad=False)
    return module


def pack_by_torchao(module: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module


@pytest.mark.parametrize("way", [pack, pack_by_torchao])
@pytest.mark.filterwarnings("ignore")
def test_weights_of_eight_bits_are_seen_unpacked(way: Callable[[nn.Module], nn.Module]) -> None:
    module = way(tiny())
    view = vitrail.wrap(module)
    assert isinstance(view, ViT)
    torch.testing.assert_close(view.logits(picture()), module(picture()).detach(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(view.logits(picture()), tiny()(picture()), atol=1e-5), "it is quantised"
    result = trace(view, picture(), rule="frozen", keep={"x", "gx", "bias"})
    gap = result.y - (result["x"][0] * result["gx"][0]).sum((1, 2)) - result.bias_from(0)
    assert gap.abs().max() < 1e-5
    assert view.fingerprint() == vitrail.wrap(way(tiny())).fingerprint() != vitrail.wrap(tiny()).fingerprint()
    with pytest.raises(VitrailError, match="its weights are quantised, so that none can be drawn anew"):
        next(randomised(view, "cascading", seed=0))
    with pytest.raises(VitrailError, match=r"read layer by layer, as blocks.0.attn.qkv.weight is quantised: give the"):
        view.layers()


HEADS: dict[str, Callable[[int], list[nn.Module]]] = {
    "one hidden layer": lambda width: [nn.Linear(width, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 4)],
    "norm": lambda width: [nn.LayerNorm(width), nn.Linear(width, 4)],
    "norms and layers": lambda width: [
        nn.LayerNorm(width), nn.Linear(width, 12), nn.ReLU(), nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 4)),
    ],
    "batch norms": lambda width: [
        nn.BatchNorm1d(width), nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4),
    ],
    "layers without activation": lambda width: [nn.Linear(width, 12), nn.Linear(12, 4)],
}  # fmt: skip


@pytest.mark.parametrize("layers", HEADS)
def test_heads_of_several_layers(layers: str) -> None:
    module = tiny()
    module.head = nn.Sequential(*HEADS[layers](module.num_features))
    families.randomize(module, seed=3)
    generator = torch.Generator().manual_seed(5)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.copy_(torch.randn(part.num_features, generator=generator))
            part.running_var.copy_(torch.rand(part.num_features, generator=generator) + 0.5)
    module.double().eval()
    images = picture().double()
    view = vitrail.wrap(module)
    torch.testing.assert_close(view.logits(images), module(images).detach())
    result = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = result.y - (result["x"][0] * result["gx"][0]).sum((1, 2)) - result.bias_from(0)
    assert gap.abs().max() < 1e-12
    keep = torch.arange(view.grid[0] * view.grid[1])[None].expand(len(images), -1)
    torch.testing.assert_close(view.encode(view.embed(images), keep), module(images).detach())


@pytest.mark.parametrize(
    "layers",
    [
        [nn.GELU(), nn.Linear(16, 4)],
        [nn.Linear(16, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4)],
        [nn.Linear(16, 12), nn.ReLU(), nn.GELU(), nn.Linear(12, 4)],
    ],
)
def test_an_activation_in_an_odd_place_is_named(layers: list[nn.Module]) -> None:
    module = tiny()
    module.head = nn.Sequential(*layers).eval()
    with pytest.raises(VitrailError, match="GELU is not supported: in a head, an activation must follow a linear"):
        vitrail.wrap(module)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (nn.Softmax(1), "Softmax is not supported: the logits are explained: give the head without it"),
        (nn.ReLU(), "a head must end in a linear layer"),
        (nn.LayerNorm(4), "a head must end in a linear layer"),
        (nn.BatchNorm1d(4, track_running_stats=False), "it keeps no statistics"),
    ],
)
def test_heads_that_end_in_something_else_say_what_to_do(last: nn.Module, message: str) -> None:
    module = tiny()
    module.head = nn.Sequential(nn.Linear(module.num_features, 4), last).eval()
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(module)
