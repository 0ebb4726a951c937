"""What people would use instead: time, memory and results of other libraries beside vitrail's, with the same weights.

Run: python benchmarks/peers.py [--only captum,LXT] [--model photo] [--checkpoint FILE] [--device cpu] [--out FILE.csv]
Needs benchmarks/requirements-peers.txt, in an environment of its own; a library that is not installed is named and left
out.

The two sides of a line take turns in one process, after a call each to warm up, whose results are compared: by the
largest difference, in shares of the largest value, or, where that says that they are not equal, by rank correlation.
What is random is drawn alike on both sides. The shortest of ``--times`` calls counts. Memory is what a call adds at
most to what the process holds (on CUDA: to its tensors; elsewhere it takes Linux to tell). Other libraries are called
as their documentation recommends, in batches of 32 where they take a batch size.

The model is an embedded one or a ViT of timm, with random weights where there is no checkpoint. LXT, which changes the
classes of torchvision's ViT, gets the same weights in these.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scaling import measured
from torch import Tensor, nn

import vitrail
from vitrail.calls import split_list
from vitrail.engine.maps import min_max, upsampled
from vitrail.engine.noise import noise
from vitrail.methods.registry import build_method
from vitrail.methods.surrogate import coalitions
from vitrail.metrics import measure
from vitrail.metrics.statistics import rank_correlation
from vitrail.models import embedded
from vitrail.models.plain import VisionTransformer
from vitrail.models.view import View
from vitrail.samples import SAMPLES, open_sample

PACKAGES = {"captum": "captum", "pytorch-grad-cam": "grad-cam", "Quantus": "quantus", "LXT": "lxt"}
IMAGES = 4
CHUNK = 32  # images of a forward pass, for libraries that ask
EQUAL = 1e-3  # a difference, in shares of the largest value, that rounding explains
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
READING = SimpleNamespace(data_config={"input_size": (3, 32, 32)})  # how the small network takes images


@dataclass(frozen=True)
class Subject:
    """A model, images and their predicted classes."""

    view: View
    images: Tensor
    targets: list[int]

    @property
    def module(self) -> nn.Module:
        return self.view.module

    @property
    def patch(self) -> int:
        """Pixels of a side."""
        return self.view.size[0] // self.view.grid[0]

    @property
    def patches(self) -> Tensor:
        """(H, W): the number of the patch of each pixel."""
        numbers = torch.arange(math.prod(self.view.grid), device=self.images.device).view(self.view.grid)
        return numbers.repeat_interleave(self.patch, 0).repeat_interleave(self.patch, 1)

    @property
    def order(self) -> Tensor:
        """(B, H, W): maps for metrics, one value per patch, no two alike."""
        draw = torch.Generator().manual_seed(0)
        values = [torch.randperm(math.prod(self.view.grid), generator=draw) for _ in self.images]
        return torch.stack(values).to(self.images)[:, self.patches]

    @cached_property
    def in_torchvision(self) -> nn.Module:
        return in_torchvision(self.module).to(self.images.device)

    def first(self, count: int) -> Subject:
        return replace(self, images=self.images[:count], targets=self.targets[:count])

    def probabilities(self, images: Tensor) -> Tensor:
        return self.module(images).softmax(-1)

    def explained(self, name: str, **params: Any) -> Tensor:
        return build_method(name, self.view, **params).attribute(self.images, target=self.targets)


Call = Callable[[Subject], Any]  # → what can be compared


@dataclass(frozen=True)
class Case:
    """A call of another library and the same of vitrail."""

    library: str
    what: str
    theirs: Call
    ours: Call
    images: int = IMAGES


@dataclass(frozen=True)
class Line:
    """A line of the table; the fields are the columns of the CSV file."""

    library: str
    version: str
    what: str
    images: int
    theirs_seconds: float
    ours_seconds: float
    theirs_mebibytes: float
    ours_mebibytes: float
    difference: float
    correlation: float

    def __str__(self) -> str:
        faster = self.theirs_seconds / self.ours_seconds
        equal = f"equal, ± {self.difference:.0e}" if self.difference < EQUAL else f"ranks {self.correlation:.4f}"
        return (
            f"| {self.library} {self.version} | {self.what} | {self.images} "
            f"| {self.theirs_seconds:.3g} s | {self.ours_seconds:.3g} s | {faster:.1f} "
            f"| {self.theirs_mebibytes:,.0f} MiB | {self.ours_mebibytes:,.0f} MiB | {equal} |"
        )


def ours(name: str, **params: Any) -> Call:
    return lambda subject: subject.explained(name, **params)


# --- captum ---------------------------------------------------------------------------------------------------------


def captum_integrated_gradients(subject: Subject) -> Tensor:
    from captum.attr import IntegratedGradients

    method = IntegratedGradients(subject.module)
    maps = method.attribute(subject.images, target=subject.targets, n_steps=50, internal_batch_size=CHUNK)
    return maps.sum(1)


def captum_smooth_grad(subject: Subject) -> Tensor:
    """On a CPU, the seed draws the noise that ours has; elsewhere captum draws on the device."""
    from captum.attr import NoiseTunnel, Saliency

    torch.manual_seed(0)
    tunnel = NoiseTunnel(Saliency(subject.module))
    options = {"nt_samples": 50, "nt_samples_batch_size": CHUNK, "stdevs": 1.0}
    return tunnel.attribute(subject.images, target=subject.targets, **options).sum(1)


def captum_occlusion(subject: Subject) -> Tensor:
    from captum.attr import Occlusion

    window = (3, subject.patch, subject.patch)
    options = {"sliding_window_shapes": window, "strides": window, "perturbations_per_eval": CHUNK}
    with torch.no_grad():
        return Occlusion(subject.probabilities).attribute(subject.images, target=subject.targets, **options)[:, 0]


def our_occlusion(subject: Subject) -> Tensor:
    return subject.explained("occlusion", window=subject.patch)


def captum_kernel_shap(subject: Subject, samples: int = 1000) -> Tensor:
    from captum.attr import KernelShap

    class Drawn(KernelShap):
        """With our coalitions, which takes no less time than drawing others."""

        def kernel_shap_perturb_generator(self, original_inp: Any, **kwargs: Any) -> Iterator[Tensor]:
            players = math.prod(subject.view.grid)
            both = torch.tensor([[True], [False]]).expand(-1, players)
            yield from torch.cat([both, coalitions(samples, players, seed=0)]).long().to(original_inp.device).split(1)

    options = {"n_samples": samples + 2, "perturbations_per_eval": CHUNK, "feature_mask": subject.patches[None, None]}
    with torch.no_grad():
        maps = Drawn(subject.probabilities).attribute(subject.images, target=subject.targets, **options)
    return maps[:, 0, :: subject.patch, :: subject.patch]


def shifts(subject: Subject) -> Tensor:
    """(10, 3, H, W): what max-sensitivity adds to an image."""
    return (2 * noise("uniform", subject.images.shape[1:], range(10), 0, subject.images.device) - 1) * 0.02


def captum_sensitivity(subject: Subject) -> Tensor:
    from captum.metrics import sensitivity_max

    method, waiting = build_method("gen_att", subject.view), [*shifts(subject)]

    def moved(images: Tensor) -> Tensor:
        """As many shifts of each image as there are copies of it."""
        drawn = [waiting.pop() for _ in range(len(images) // len(subject.images))]
        return images + torch.stack(drawn).repeat(len(subject.images), 1, 1, 1)

    options = {"perturb_func": moved, "n_perturb_samples": len(waiting), "max_examples_per_batch": CHUNK}
    return sensitivity_max(method.attribute, subject.images, target=subject.targets, **options)


def our_sensitivity(subject: Subject) -> list[float]:
    method = build_method("gen_att", subject.view)
    maps = method.attribute(subject.images, target=subject.targets)
    scores = measure("max_sensitivity", subject.view, subject.images, maps, subject.targets, method=method)
    return [score.value for score in scores]


# --- pytorch-grad-cam -----------------------------------------------------------------------------------------------


def published_cam(name: str) -> Call:
    def call(subject: Subject) -> np.ndarray:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        def on_grid(tokens: Tensor) -> Tensor:
            return tokens[:, subject.view.num_prefix :].unflatten(1, subject.view.grid).permute(0, 3, 1, 2)

        layers = [subject.module.blocks[-1].norm1]
        targets = [ClassifierOutputTarget(index) for index in subject.targets]
        with getattr(pytorch_grad_cam, name)(subject.module, layers, reshape_transform=on_grid) as cam:
            cam.batch_size = CHUNK
            maps = cam(subject.images, targets)
        subject.module.zero_grad()  # it leaves gradients of the weights
        return maps

    return call


def our_cam(name: str, **params: Any) -> Call:
    def call(subject: Subject) -> Tensor:
        maps = upsampled(subject.explained(name, **params), subject.view.size)
        return torch.stack([min_max(values) for values in maps])

    return call


# --- Quantus --------------------------------------------------------------------------------------------------------


def quantus_scores(metric: Any, subject: Subject, **options: Any) -> np.ndarray:
    images, targets = subject.images.cpu().numpy(), np.array(subject.targets)
    return np.array(metric(subject.module, images, targets, device=str(subject.images.device), **options))


def quantus_pixel_flipping(subject: Subject) -> np.ndarray:
    """(B, patches): the probability after each patch.

    For Quantus a colour of a pixel is a feature; yet a step must divide the number of pixels: a patch takes three.
    """
    import quantus

    options = {"features_in_step": subject.patch**2, "perturb_baseline": 0.0, "normalise": False}
    metric = quantus.PixelFlipping(**options, disable_warnings=True)
    return quantus_scores(metric, subject, a_batch=subject.order[:, None].cpu().numpy(), softmax=True)[:, 2::3]


def our_pixel_flipping(subject: Subject) -> list[list[float]]:
    options = {"protocol": "tis", "baseline": "black", "steps": math.prod(subject.view.grid)}
    scores = measure("deletion", subject.view, subject.images, subject.order, subject.targets, **options)
    return [score.curve for score in scores]


def quantus_sensitivity(subject: Subject) -> np.ndarray:
    import quantus

    from vitrail.integrations.quantus import explain

    waiting = [*shifts(subject).flatten(1).cpu().numpy()]
    options = {"nr_samples": len(waiting), "perturb_func": lambda arr, **_: arr + waiting.pop()}
    metric = quantus.MaxSensitivity(**options, normalise=False, disable_warnings=True)
    return quantus_scores(metric, subject, explain_func=explain, explain_func_kwargs={"method": "gen_att"})


# --- LXT ------------------------------------------------------------------------------------------------------------

# What timm calls the parts of a ViT, and what torchvision calls them.
NAMES = {
    "cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj": "conv_proj",
    "blocks.": "encoder.layers.encoder_layer_", "norm1": "ln_1", "norm2": "ln_2", "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3", "attn.qkv.": "self_attention.in_proj_", "attn.proj": "self_attention.out_proj",
    "norm.": "encoder.ln.", "head.": "heads.head.",
}  # fmt: skip


def in_torchvision(module: Any) -> nn.Module:
    """The same network in the classes of torchvision."""
    from torchvision.models import VisionTransformer

    state = module.state_dict()
    for ours, theirs in NAMES.items():
        state = {name.replace(ours, theirs): values for name, values in state.items()}
    block = module.blocks[0]
    twin = VisionTransformer(
        image_size=module.patch_embed.img_size[0],
        patch_size=module.patch_embed.proj.kernel_size[0],
        num_layers=len(module.blocks),
        num_heads=block.attn.num_heads,
        hidden_dim=block.mlp.fc1.in_features,
        mlp_dim=block.mlp.fc1.out_features,
        num_classes=module.head.out_features,
    )
    twin.load_state_dict(state)
    return twin.eval().requires_grad_(False)


@contextmanager
def patched() -> Iterator[None]:
    """LXT changes the classes of torch; here they become what they were."""
    from lxt.efficient import monkey_patch
    from lxt.efficient.models.vit_torch import cp_LRP
    from torchvision.models import vision_transformer

    before = {kind: kind.forward for kind in cp_LRP}
    monkey_patch(vision_transformer, cp_LRP)
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward


def lxt_relevance(subject: Subject) -> Tensor:
    """Input × gradient of the tokens that enter the first block, under LXT's rules."""
    entering: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        entering.append(inputs[0].detach().requires_grad_())
        return (entering[0],)

    handle = subject.in_torchvision.encoder.layers.register_forward_pre_hook(keep)
    try:
        with patched():
            logits = subject.in_torchvision(subject.images)
            logits[range(len(logits)), subject.targets].sum().backward()
    finally:
        handle.remove()
    return (entering[0] * entering[0].grad).sum(-1).detach()[:, 1:]


def our_relevance(subject: Subject) -> Tensor:
    return subject.explained("input_x_gradient", rule="frozen").flatten(1)


# --- the table ------------------------------------------------------------------------------------------------------

CASES = [
    Case("captum", "IntegratedGradients, 50 steps", captum_integrated_gradients, ours("integrated_gradients")),
    Case(
        "captum",
        "NoiseTunnel(Saliency), 50 samples",
        captum_smooth_grad,
        ours("smooth_grad", protocol="tis"),
        images=1,
    ),
    Case("captum", "Occlusion of each patch", captum_occlusion, our_occlusion, images=1),
    Case("captum", "KernelShap, 1,000 samples", captum_kernel_shap, ours("kernel_shap"), images=1),
    Case("captum", "sensitivity_max, 10 samples", captum_sensitivity, our_sensitivity),
    Case("pytorch-grad-cam", "GradCAM", published_cam("GradCAM"), our_cam("grad_cam")),
    Case("pytorch-grad-cam", "ScoreCAM", published_cam("ScoreCAM"), our_cam("score_cam", variant="library"), images=1),
    Case("Quantus", "PixelFlipping of each patch", quantus_pixel_flipping, our_pixel_flipping),
    Case("Quantus", "MaxSensitivity, 10 samples", quantus_sensitivity, our_sensitivity),
    Case("LXT", "CP-LRP of the patches", lxt_relevance, our_relevance),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PACKAGES), help="libraries, comma-separated")
    parser.add_argument("--model", default="photo", help="an embedded model of vitrail or a ViT of timm")
    parser.add_argument("--checkpoint", type=Path, help="weights of the ViT of timm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=5, help="turns, of which the shortest counts")
    parser.add_argument("--full", action="store_true", help="no half precision")
    parser.add_argument("--small", action="store_true", help="a tiny network, to see that everything runs")
    parser.add_argument("--out", type=Path, help="a CSV file")
    options = parser.parse_args()
    unknown = {*split_list(options.only)} - {*PACKAGES}
    if unknown:
        parser.error(f"unknown libraries: {', '.join(sorted(unknown))}; expected some of {', '.join(PACKAGES)}")
    warnings.simplefilter("ignore")  # random weights, and what other libraries warn of
    if options.full:
        os.environ["VITRAIL_PRECISION"] = "full"
    subject = prepared(options)
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{subject.view.name}, {name}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| library | what | images | theirs | ours | × faster | memory, theirs | ours | results |")
    print("|---|---|---|---|---|---|---|---|---|")
    lines = []
    for case in CASES:
        if case.library not in split_list(options.only):
            continue
        if installed(case.library) is None:
            print(f"| {case.library} | {case.what} | not installed |", flush=True)
            continue
        lines.append(compared(case, subject.first(case.images), options))
        print(lines[-1], flush=True)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [column.name for column in fields(Line)], lineterminator="\n")
            table.writeheader()
            table.writerows(map(asdict, lines))


def prepared(options: argparse.Namespace) -> Subject:
    """The model, and the pictures that come with vitrail."""
    torch.manual_seed(0)
    if options.small:
        view = vitrail.wrap(VisionTransformer(**SMALL).eval().to(options.device), processor=READING)
    elif options.model in embedded.names():
        view = vitrail.load(options.model, device=options.device)
    else:
        view = vitrail.load(options.model, pretrained=False, checkpoint=options.checkpoint, device=options.device)
    view.module.requires_grad_()  # as other libraries find it; pytorch-grad-cam asks for it
    images = torch.stack([view.preprocess(open_sample(file)) for file in SAMPLES[:IMAGES]]).to(options.device)
    return Subject(view, images, view.logits(images).argmax(1).tolist())


def installed(library: str) -> str | None:
    """The version of a library, if there is one."""
    try:
        return version(PACKAGES[library])
    except PackageNotFoundError:
        return None


def compared(case: Case, subject: Subject, options: argparse.Namespace) -> Line:
    """Both sides once, to warm up and to compare their results, and then in turn."""
    calls = (lambda: case.theirs(subject)), (lambda: case.ours(subject))
    with quiet():
        theirs, ours = (as_tensor(call()) for call in calls)
        turns = [[measured(call, options.device) for call in calls] for _ in range(options.times)]
    seconds, mebibytes = np.array(turns).min(0).T.tolist()
    return Line(
        case.library,
        installed(case.library) or "",
        case.what,
        len(subject.images),
        *seconds,
        *mebibytes,
        float((theirs - ours).abs().max() / theirs.abs().max()),
        float(np.mean([rank_correlation(*pair) for pair in zip(theirs, ours, strict=True)])),
    )


def as_tensor(values: Any) -> Tensor:
    """In double precision on the CPU; numbers become one row."""
    values = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    return values.detach().double().cpu().reshape(1 if values.ndim == 1 else len(values), -1)


@contextmanager
def quiet() -> Iterator[None]:
    """Other libraries' progress bars would stand in the table."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


if __name__ == "__main__":
    main()
