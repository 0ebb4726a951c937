"""vit_shapley: Shapley values of the patches in one forward pass, by a network that was trained to predict them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.calls import check_parameters
from vitrail.engine.requests import Asking, Batch, Pictures, Request, Subsets, Traced, check_finite
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.files import parse_json, save_atomically
from vitrail.methods.base import Attribution, TokenMethod, refuse_unsupported
from vitrail.methods.registry import method
from vitrail.models.embedded import FOLDER, names
from vitrail.models.view import View
from vitrail.targets import Target

FORMAT = "vitrail explainer 1"
HEAD = 32  # channels of an attention head of an explainer
# Logits of the model for which an explainer was trained, relative to the largest: half precision keeps within this.
TOLERANCE = 0.02


@method("vit_shapley", family="mask", signed=True, cost=(1, 0), paper="Covert et al. 2023")
@dataclass(kw_only=True)
class VitShapley(TokenMethod):
    """Shapley values of the patches, predicted by an explainer network from the tokens of the model's layers.

    The values add up to the probability of the class minus that of no patch at all. ``explainer``: the file that
    ``vitrail train-explainer`` wrote for this model; None = the one that comes with an embedded model.
    """

    explainer: str | None = None

    trained: ClassVar[bool] = True
    file_parameters: ClassVar[tuple[str, ...]] = ("explainer",)
    no_aggregation: ClassVar[str] = "its explainer reads several layers at once"
    output: ClassVar[str] = "probability"

    def __post_init__(self) -> None:
        check_parameters(type(self), {**self.params, "shape": self.shape})
        known = untrained(self.model) or super().unsupported(self.model)
        reason = self.unsupported(self.model) if self.explainer is None else known
        refuse_unsupported(self.info.name, reason, self.model)
        path = embedded_explainer(self.model) if self.explainer is None else Path(self.explainer).expanduser()
        assert path is not None
        self.network = Explainer.read(path)
        self.network.card.check(self.classes, path)
        # Another explainer gives other maps: stored results of the one before are computed again.
        self.version = self.network.checksum()  # type: ignore[misc]

    @property
    def classes(self) -> View:
        """The model with the classes that the explainer was trained for."""
        return replace(self.model, groups=(), question=None)

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = untrained(model) or super().unsupported(model)
        if reason or embedded_explainer(model):
            return reason
        return "it needs an explainer of this model, which `vitrail train-explainer` makes: give it with explainer="

    def needs(self) -> Sequence[TraceSpec]:
        return [TraceSpec.of({"x"}, [0, *self.network.card.layers])]

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        (trace,) = yield [Traced(batch, target, spec) for spec in self.needs()]
        check_finite(self.model, trace.logits)
        self.network.check_weights(self.model, (yield nothing_present(self.model, trace["x"][0], batch.images)))
        target = target.resolved(self.model, trace.logits)
        network = self.network.to(trace.logits)
        with torch.no_grad():
            full, empty = self.classes.probabilities(trace.logits), network.empty.expand(len(batch), -1)  # (B, K)
            values = efficient(network(self.classes, trace, full), full - empty)  # (B, N, K)
            full, empty, values = (self.model.sums_of_groups(part) for part in (full, empty, values))
        patches = of_class(values, target)
        extras = {
            "score": of_class(full, target),
            "score_patches": patches.sum(1),
            "score_baseline": of_class(empty, target),
        }
        return Attribution(patches.unflatten(1, self.model.grid), extras)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What an explainer is: the shapes of its model and its own, and how it was trained."""

    model: str
    grid: tuple[int, int]
    classes: int
    width: int  # channels of the model
    directions: int  # channels that its head reads
    layers: tuple[int, ...]  # whose streams it reads: 0 = the embedded tokens; the last one always
    hidden: int  # channels of its own
    blocks: int
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, view: View, *, hidden: int, blocks: int) -> Card:
        """For a model: it reads four layers, the last among them."""
        depth = view.num_layers
        layers = tuple(sorted({round(depth * quarter / 4) for quarter in (1, 2, 3, 4)}))
        return cls(
            model=view.name,
            grid=view.grid,
            classes=view.num_classes,
            width=view.width,
            directions=class_directions(view).shape[1],
            layers=layers,
            hidden=hidden,
            blocks=blocks,
        )

    @classmethod
    def parse(cls, text: str) -> Card:
        """From the metadata of a file."""
        values = parse_json(text)
        grid, layers = tuple(map(int, values["grid"])), tuple(map(int, values["layers"]))
        if len(grid) != 2 or not layers or min(layers) < 0 or min(values["hidden"], values["blocks"]) < 1:
            raise ValueError("impossible shapes")
        return cls(**{**values, "grid": grid, "layers": layers})

    def check(self, view: View, path: Path) -> None:
        """Refuses a model of other shapes."""
        trained = _shapes(self.grid, self.classes, self.width, max(self.layers), self.directions)
        shapes = _shapes(view.grid, view.num_classes, view.width, view.num_layers, class_directions(view).shape[1])
        if trained != shapes:
            raise VitrailError(
                f"the explainer {path} was trained for {self.model} ({trained}), not for {view.name} ({shapes}): train "
                "one with `vitrail train-explainer`."
            )


class Explainer(nn.Module):
    """Streams of some layers of a ViT → Shapley values of all patches and classes: a few Transformer blocks."""

    probe: Tensor  # (C,): the logits of its model with no patch present, by which it recognises the model
    empty: Tensor  # (K,): the probabilities with no patch present, of the network whose values it predicts

    def __init__(self, card: Card, outputs: int):
        super().__init__()
        self.card = card
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(card.width), nn.Linear(card.width, card.hidden)) for _ in card.layers
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                card.hidden,
                max(1, card.hidden // HEAD),
                3 * card.hidden,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(card.blocks)
        )
        self.norm = nn.LayerNorm(card.hidden)
        self.head = nn.Linear(card.hidden, card.directions)
        self.register_buffer("probe", torch.zeros(outputs))
        self.register_buffer("empty", torch.zeros(card.classes))

    def forward(self, view: View, trace: Trace, probabilities: Tensor) -> Tensor:
        """(B, N, K): the value of each patch for each class, before they are made to add up.

        What the blocks make of a patch is compared with the directions of the classes in the model's own head, so that
        what is learned of one class serves all. Classes of small probability have small values.
        """
        streams = [trace["x"][layer].to(self.head.weight.dtype) for layer in self.card.layers]
        x = torch.stack([part(stream) for part, stream in zip(self.inputs, streams, strict=True)]).sum(0)
        for block in self.blocks:
            x = block(x)
        vectors = self.head(self.norm(x[:, trace.num_prefix :]))  # (B, N, d)
        values: Tensor = vectors @ class_directions(view).to(vectors.dtype).T * probabilities.sqrt()[:, None]
        return values / values.shape[1]  # so that the size of what is learned does not depend on the number of patches

    def check_weights(self, view: View, logits: Tensor) -> None:
        """Refuses a model whose logits (1, C) with no patch present are not those it was trained with."""
        probe = self.probe.to(logits)
        tolerance = TOLERANCE * max(1.0, float(probe.abs().max()))
        if probe.shape != logits.shape[1:] or not torch.allclose(logits[0], probe, rtol=0, atol=tolerance):
            raise VitrailError(
                f"the explainer was trained for other weights of {self.card.model} than those of {view.name}: its "
                "values would be wrong. Train one for these weights with `vitrail train-explainer`."
            )

    def checksum(self) -> int:
        """Of its weights and its description; files are no help, as safetensors writes metadata in any order."""
        digest = zlib.crc32(json.dumps(asdict(self.card), sort_keys=True).encode())
        for tensor in self.state_dict().values():
            digest = zlib.crc32(tensor.cpu().numpy().tobytes(), digest)
        return digest

    def save(self, path: Path) -> None:
        """Writes a safetensors file, with the weights in half precision."""
        from safetensors.torch import save

        weights = {name: parameter.detach().half() for name, parameter in self.named_parameters()}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in [*weights.items(), *self.named_buffers()]}
        content = save(tensors, metadata={"format": FORMAT, "card": json.dumps(asdict(self.card))})
        save_atomically(path, lambda file: file.write(content))

    @classmethod
    def read(cls, path: Path) -> Explainer:
        """From a file that ``save`` wrote."""
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise VitrailError(f"there is no explainer {path}: `vitrail train-explainer` makes one.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise VitrailError(f"{path} is not a readable safetensors file: {error}.") from None
        if metadata.get("format") != FORMAT:
            raise VitrailError(f"{path} is no explainer: expected a file that `vitrail train-explainer` wrote.")
        try:
            with torch.device("meta"):
                explainer = cls(Card.parse(metadata["card"]), len(tensors["probe"]))
            explainer.load_state_dict(tensors, assign=True)
        except (KeyError, TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError):
            raise VitrailError(
                f"the explainer {path} is damaged: its tensors are not those that its description promises."
            ) from None
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise VitrailError(f"the explainer {path} holds NaN or infinite values.")
        return explainer.eval().requires_grad_(False)


def untrained(model: View) -> str | None:
    """Why no explainer knows the question that a view is for; it knows classes, and groups whose values are sums."""
    known = model.output == "softmax" or all(len(group) == 1 for group in model.groups)
    return None if known and model.output != "score" else "explainers are trained for the classes of a model alone"


def class_directions(view: View) -> Tensor:
    """(K, d): how the logits of the classes grow with what the head reads, of length 1 each, the mean aside."""
    linears = view.architecture().head.linears
    weight = torch.stack([linear.weight.detach().to(view.precision) for linear in linears]).mean(0)
    weight = torch.cat([-weight, weight]) if len(weight) == 1 else weight - weight.mean(0)
    return nn.functional.normalize(weight, dim=1)


def efficient(values: Tensor, total: Tensor) -> Tensor:
    """The values (B, N, K) nearest to these that add up to ``total`` (B, K): additive efficient normalisation."""
    return values + (total - values.sum(1))[:, None] / values.shape[1]


def of_class(values: Tensor, target: Target) -> Tensor:
    """(B, …, K) → (B, …): the values of the explained class, minus those of the class it is opposed to."""

    def column(classes: Tensor) -> Tensor:
        index = classes.to(values.device).view(-1, *[1] * (values.ndim - 1))
        return values.take_along_dim(index, -1)[..., 0]

    assert target.index is not None
    explained = column(target.index)
    return explained if target.against is None else explained - column(target.against)


def nothing_present(view: View, tokens: Tensor, images: Tensor) -> Request:
    """Asks for the logits (1, C) with no patch: of the prefix tokens or, where patches are pooled, the mean colour."""
    if view.pools_patches:
        blank = torch.zeros_like(images[:1])
        return Pictures(view=view, count=1, length=view.num_tokens, name="", make=lambda _: blank)
    keep = torch.empty(1, 0, dtype=torch.long, device=tokens.device)
    return Subsets(view=view, count=1, length=view.num_prefix, name="", tokens=tokens[:1], keep=keep)


def embedded_explainer(view: View) -> Path | None:
    """The file of the explainer that comes with an embedded model; None where there is none."""
    path = FOLDER / f"{view.name}.explainer.safetensors"
    return path if view.name in names() and path.is_file() else None


def _shapes(grid: tuple[int, int], classes: int, width: int, depth: int, directions: int) -> str:
    rows, columns = grid
    return f"{rows} × {columns} patches, {classes} classes, {width} channels, {depth} blocks, a head of {directions}"
