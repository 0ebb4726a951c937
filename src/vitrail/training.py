"""Trains the explainers of ``vit_shapley`` (Covert et al. 2023): one for each model, without any labels."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from vitrail.core.memory import out_of_memory
from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture, mapped, tensors_of
from vitrail.core.precision import lowered
from vitrail.data.base import DataSet
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Tokens, check_finite
from vitrail.engine.scheduler import Scheduler
from vitrail.engine.trace import read_parts, trace
from vitrail.errors import VitrailError
from vitrail.files import save_atomically
from vitrail.methods.shapley import Shapley
from vitrail.methods.vit_shapley import HEAD, Card, Explainer, efficient, nothing_present
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.progress import counted

SAVE_EVERY = 60.0  # seconds
GROUP = 8  # subsets of one size of each image
VALIDATION = 64  # images that are held out, at most, and at most a tenth
CHECKED, PERMUTATIONS = 8, 16  # images that are compared with sampled Shapley values, at most


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an explainer is trained."""

    steps: int = 5000
    batch: int = 64
    subsets: int = 32  # of the patches of an image in a step, each with its complement
    rate: float = 1e-3
    hidden: int = 160
    blocks: int = 2
    surrogate_steps: int = 0
    surrogate_rate: float = 3e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "subsets", "hidden", "blocks"):
            if getattr(self, name) < 1:
                raise VitrailError(f"{name} must be at least 1, but got {getattr(self, name)}.")
        if self.surrogate_steps < 0:
            raise VitrailError(f"surrogate_steps must not be negative, but got {self.surrogate_steps}.")
        for name in ("rate", "surrogate_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise VitrailError(f"{name} must be a positive number, but got {getattr(self, name)}.")
        if self.subsets % (2 * GROUP):
            raise VitrailError(f"subsets must be a multiple of {2 * GROUP}, but got {self.subsets}.")
        if self.hidden > HEAD and self.hidden % HEAD:
            raise VitrailError(f"hidden must be at most {HEAD} or a multiple of it, but got {self.hidden}.")


class Report(NamedTuple):
    """How good an explainer is, on images that were held out."""

    images: int
    r2: float  # share of the variance of the scores of random subsets that its values predict
    correlation: float  # rank correlation with sampled Shapley values, mean over images
    permutations: int  # of the sampled ones


def train_explainer(
    view: View,
    data: DataSet,
    out: Path,
    settings: Settings | None = None,
    *,
    workers: int = 0,
    watch: Callable[[int, float], None] = lambda step, r2: None,
) -> Report:
    """Trains an explainer and writes it to ``out``; after an interruption, the same call resumes from ``out.state``.

    Args:
        view: the model, which does not change.
        data: images like those to be explained; their labels are not used.
        out: safetensors file to write.
        settings: length of the training, size of the explainer, …
        workers: processes that read images.
        watch: called with the step and the R² on held-out images, now and then.
    """
    settings = settings or Settings()
    if not view.has_tokens:
        raise VitrailError(f"vit_shapley cannot explain {view.name}: it has no fixed tokens ({view.structure}).")
    if math.prod(view.grid) < 2:
        raise VitrailError(f"{view.name} has a single patch: there is nothing to learn.")
    if len(data) < 2:
        raise VitrailError(f"{data.name} has {len(data)} images: training needs at least two, one of them held out.")
    check_writable(out)
    try:
        with own_modes(), torch.enable_grad():
            return Training(view, data, out, settings, workers=workers, watch=watch).run()
    except Exception as error:
        if out_of_memory(error):
            raise VitrailError(
                "a training step does not fit in memory: use a smaller batch or fewer subsets."
            ) from None
        raise


def check_writable(out: Path) -> None:
    """Refuses a file that could not be written after hours of training."""
    folder = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise VitrailError(f"cannot write the explainer to {out}: expected a file name in a writable folder.")


class Training:
    """One training of an explainer, in up to two stages: the surrogate, then the explainer."""

    def __init__(
        self,
        view: View,
        data: DataSet,
        out: Path,
        settings: Settings,
        *,
        workers: int,
        watch: Callable[[int, float], None],
    ):
        self.view, self.out, self.settings, self.workers, self.watch = view, out, settings, workers, watch
        self.data_name = f"{data.name} ({len(data)} images)"
        held_out = max(1, min(VALIDATION, len(data) // 10))
        self.images = Images(data, view.preprocessing)
        self.training, self.held_out = range(len(data) - held_out), range(len(data) - held_out, len(data))
        self.state = State(
            out.with_name(out.name + ".state"), json.dumps([view.fingerprint(), self.data_name, asdict(settings)])
        )
        self.patches = math.prod(view.grid)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(settings.seed)  # torch.manual_seed would seed those of GPUs, too
            card = Card.of(view, hidden=settings.hidden, blocks=settings.blocks)
            self.explainer = Explainer(card, view.num_outputs).to(view.device, torch.float32)
        nn.init.zeros_(self.explainer.head.weight)  # the first values are equal shares
        nn.init.zeros_(self.explainer.head.bias)

    def run(self) -> Report:
        surrogate = self.fit_surrogate() if self.settings.surrogate_steps else None
        game = Game(surrogate or self.view)
        with torch.no_grad():
            self.explainer.probe.copy_(Game(self.view).nothing()[0])
            self.explainer.empty.copy_(self.view.probabilities(game.nothing())[0])
        self.descend(
            "explainer",
            self.explainer,
            lambda images, draw: self.errors(game, images, draw)[0],
            steps=self.settings.steps,
            rate=self.settings.rate,
            check=lambda step: self.watch(step, self.r2(game)),
        )
        report = self.report(game)
        self.explainer.card = replace(
            self.explainer.card, training={"data": self.data_name, **asdict(self.settings), **report._asdict()}
        )
        self.explainer.save(self.out)
        self.state.path.unlink(missing_ok=True)
        return report

    def errors(self, game: Game, images: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """The variance of the errors with which the values predict the scores of subsets, and that of the scores.

        Both are among subsets of one size. The values add up to a fixed total, so the mean error of all subsets of a
        size does not depend on them: the squared error of the paper's objective is this variance and a constant, whose
        estimate would only add noise to the gradients.
        """
        view, explainer = self.view, self.explainer
        with torch.no_grad():
            streams = trace(view, images, keep=("x",), layers=[0, *explainer.card.layers])
            if game.view is view:
                tokens, logits = streams["x"][0], streams.logits
            else:
                tokens = Walk(game.network).embed(images)
                logits = Walk(game.network).encode(tokens)
            full = view.probabilities(logits)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
            values = explainer(view, streams, full)
        values = efficient(values.float(), full.float() - explainer.empty)
        errors, totals = [], []
        for size in shapley_sizes(self.patches, self.settings.subsets // (2 * GROUP), draw):
            order = torch.rand(GROUP, len(images), self.patches, generator=draw, device=draw.device).argsort(2)
            for keep in (order[..., :size], order[..., size:]):
                logits = game.encode(tokens, keep)
                scores = view.probabilities(logits.flatten(0, 1)).float().unflatten(0, keep.shape[:2])  # (G, B, K)
                present = torch.zeros_like(order, dtype=values.dtype).scatter_(2, keep, 1.0)
                predicted = torch.einsum("gbn,bnk->gbk", present, values)
                errors.append((scores - predicted).var(0).sum(1).mean())
                totals.append(scores.var(0).sum(1).mean())
        return torch.stack(errors).mean(), torch.stack(totals).mean()

    @torch.no_grad()
    def r2(self, game: Game) -> float:
        """On the images held out, by the same subsets each time."""
        self.explainer.eval()
        draw = torch.Generator(self.view.device).manual_seed(self.settings.seed)
        batches = [
            self.held_out[i : i + self.settings.batch] for i in range(0, len(self.held_out), self.settings.batch)
        ]
        errors = [self.errors(game, images, draw) for images in self.load(batches)]
        squares, totals = (sum(float(part) for part in parts) for parts in zip(*errors, strict=True))
        return 1 - squares / max(totals, 1e-12)

    def report(self, game: Game) -> Report:
        """Against sampled Shapley values of the predicted class."""
        (images,) = self.load([self.held_out[:CHECKED]])
        classes = self.view.predicted(self.view.logits(images))
        sampled = Shapley(game.view, permutations=PERMUTATIONS).attribute(images, classes)
        with torch.no_grad():
            streams = trace(self.view, images, keep=("x",), layers=[0, *self.explainer.card.layers])
            values = self.explainer(self.view, streams, self.view.probabilities(streams.logits))
        predicted = values.gather(2, classes[:, None, None].expand(-1, self.patches, 1))[..., 0]
        pairs = zip(predicted.cpu(), sampled.flatten(1).cpu(), strict=True)
        correlations = [rank_correlation(*pair) for pair in pairs]
        return Report(images=len(images), r2=self.r2(game), correlation=fmean(correlations), permutations=PERMUTATIONS)

    def fit_surrogate(self) -> View:
        """A copy of the model that was fine-tuned to predict from some of the patches what the model does from all."""
        assert isinstance(self.view, ViT)
        network = Trainable(self.view)
        surrogate = replace(self.view, describe=lambda: network.parts)

        def loss(images: Tensor, draw: torch.Generator) -> Tensor:
            with torch.no_grad():
                expected = self.view.probabilities(self.view.logits(images))
            size = int(torch.randint(1, self.patches + 1, (), generator=draw, device=draw.device))
            keep = torch.rand(len(images), self.patches, generator=draw, device=draw.device).argsort(1)[:, :size]
            tokens = surrogate.present(Walk(network.parts).embed(images), keep)
            logits = Walk(network.parts, keep=keep).encode(tokens)
            if self.view.output == "sigmoid":
                return binary_cross_entropy_with_logits(surrogate.class_scores(logits), expected)
            return -(expected * self.view.log_probabilities(logits)).sum(1).mean()

        self.descend("surrogate", network, loss, steps=self.settings.surrogate_steps, rate=self.settings.surrogate_rate)
        network.requires_grad_(False)
        return surrogate

    def descend(
        self,
        stage: str,
        network: nn.Module,
        loss: Callable[[Tensor, torch.Generator], Tensor],
        *,
        steps: int,
        rate: float,
        check: Callable[[int], None] = lambda step: None,
    ) -> None:
        """AdamW with a warm-up and a cosine, resumed from the state file; what an interrupt ends is saved first."""
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.99))
        step = self.state.resume(stage, network, optimizer)
        seed, saved, between_steps = self.settings.seed, time.monotonic(), True
        batches = list(islice(shuffled(self.training, self.settings.batch, seed), steps))[step:]
        with counted(steps, stage, "step") as bar:
            bar.update(step)
            try:
                for images in self.load(batches):
                    for group in optimizer.param_groups:
                        group["lr"] = rate * schedule(step / steps)
                    network.train(network is self.explainer)
                    draw = torch.Generator(self.view.device).manual_seed(seed * 1_000_003 + step)
                    error = loss(images, draw)
                    optimizer.zero_grad()
                    error.backward()
                    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    between_steps = False
                    optimizer.step()
                    step += 1
                    between_steps = True
                    bar.update()
                    if step % max(1, steps // 20) == 0:
                        check(step)
                    if time.monotonic() - saved > SAVE_EVERY:
                        self.state.save(stage, step, network, optimizer)
                        saved = time.monotonic()
            except KeyboardInterrupt:
                if between_steps:  # otherwise only some of the weights may have made the step
                    self.state.save(stage, step, network, optimizer)
                raise
        network.eval()
        if batches:
            self.state.save(stage, step, network, optimizer)

    def load(self, batches: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """The images at some positions, batch by batch, as the model takes them."""
        loader: DataLoader[Tensor] = DataLoader(
            self.images,
            batch_sampler=batches,  # type: ignore[arg-type]
            num_workers=self.workers,
            pin_memory=self.view.device.type == "cuda",
            generator=torch.Generator(),  # it would draw from the global one
        )
        try:
            for images in loader:
                yield images.to(self.view.device, self.view.precision)
        except VitrailError as error:  # that of a process has its traceback before the message
            raise VitrailError(str(error).rpartition("VitrailError: ")[2].strip()) from None


class Images(torch.utils.data.Dataset[Tensor]):
    """The images of a data set as a model sees them."""

    def __init__(self, data: DataSet, preprocessing: Preprocess):
        self.data, self.preprocessing = data, preprocessing

    def __getitem__(self, position: int) -> Tensor:
        return self.preprocessing(self.data.load(position).image)


class Trainable(nn.Module):
    """A copy of a network with weights that can be trained: those of a view are detached from its module."""

    def __init__(self, view: View):
        super().__init__()
        network = read_parts(view)
        assert network is not None
        # Fused weights of q, k and v would be trained apart from the weights that they share memory with.
        blocks = [replace(block, attention=replace(block.attention, together=None)) for block in network.blocks]
        network = replace(network, blocks=tuple(blocks))
        weights = {id(tensor) for tensor in tensors_of(network) if tensor.is_floating_point()}
        self.parts: Architecture = mapped(
            network, lambda tensor: nn.Parameter(tensor.clone()) if id(tensor) in weights else tensor
        )
        self.weights = nn.ParameterList(tensor for tensor in tensors_of(self.parts) if isinstance(tensor, nn.Parameter))


class Game:
    """The game whose Shapley values are learned: the score of a network with some of the patches present."""

    def __init__(self, view: View):
        self.view, self.reduced = view, view.gains_from_half
        network = read_parts(view)
        assert network is not None
        self.network = network
        self.parts = lowered(network, torch.bfloat16) if self.reduced else network

    @torch.no_grad()
    def encode(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """x_0 (B, P + N, d) and the patches that are present (G, B, k) → logits (G, B, C)."""
        flat = keep.flatten(0, 1)
        present = self.view.present(tokens.repeat(len(keep), 1, 1), flat)
        return Walk(self.parts, keep=flat).encode(present).unflatten(0, keep.shape[:2])

    @torch.no_grad()
    def nothing(self) -> Tensor:
        """The logits (1, C) with no patch present."""
        view = self.view
        blank = torch.zeros(1, 3, *view.size, device=view.device, dtype=view.precision)

        def ask() -> Asking[Tensor]:
            tokens = yield Tokens(Batch(view, blank))
            return (yield nothing_present(view, tokens, blank))

        (logits,) = Scheduler().run([ask()])
        check_finite(view, logits)
        return logits


@dataclass(frozen=True)
class State:
    """The file that an interrupted training resumes from."""

    path: Path
    settings: str  # of the training: another one does not resume from this file

    def save(self, stage: str, step: int, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not all(parameter.isfinite().all() for parameter in network.parameters()):
            raise VitrailError(f"the training of the {stage} has diverged after {step} steps: use a smaller rate.")
        content = {"settings": self.settings, "surrogate": self._read().get("surrogate")}
        content[stage] = {"step": step, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
        save_atomically(self.path, lambda file: torch.save(content, file))

    def resume(self, stage: str, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restores a stage; returns the number of steps it has made, 0 where there is nothing to restore."""
        saved = self._read().get(stage)
        if saved is None:
            return 0
        try:
            network.load_state_dict(saved["network"])
            optimizer.load_state_dict(saved["optimizer"])
            return int(saved["step"])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            raise self._damaged() from None

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            settings = content["settings"]
        except Exception:  # a damaged file makes the unpickler raise almost anything
            raise self._damaged() from None
        if settings != self.settings:
            raise VitrailError(
                f"{self.path} belongs to a training with another model, other data or other settings: repeat that one "
                "to finish it, delete the file, or write to another file."
            )
        return content

    def _damaged(self) -> VitrailError:
        return VitrailError(f"{self.path} is damaged: delete it to train from the start.")


def shapley_sizes(patches: int, count: int, draw: torch.Generator) -> list[int]:
    """Sizes k of subsets by the Shapley kernel, p(k) ∝ 1 / (k (N − k))."""
    sizes = torch.arange(1, patches, device=draw.device, dtype=torch.float32)
    weights = 1 / (sizes * (patches - sizes))
    return (torch.multinomial(weights, count, replacement=True, generator=draw) + 1).tolist()


def shuffled(positions: Sequence[int], batch: int, seed: int) -> Iterator[list[int]]:
    """Batches of all positions in one random order after another."""
    for epoch in count():
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for part in order.split(batch):
            yield [positions[i] for i in part.tolist()]


def schedule(share: float) -> float:
    """Of the learning rate: a twentieth of the way up, then down a cosine."""
    return min(1.0, 20 * share + 0.01) * 0.5 * (1 + math.cos(math.pi * share))
