"""Explanations: the map of a prediction; shown, scored, saved and reopened."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitrail.calls import join_call, split_list
from vitrail.data.images import image_hash, read_image
from vitrail.engine.maps import min_max
from vitrail.errors import VitrailError
from vitrail.files import write_together
from vitrail.methods.base import MethodFactory
from vitrail.methods.registry import build_method, get_method
from vitrail.metrics.base import SCALED
from vitrail.metrics.measuring import measure_alone, measure_trust
from vitrail.metrics.trust import Trust
from vitrail.models.loading import as_view, load
from vitrail.models.preprocessing import Preprocess
from vitrail.models.questions import ask
from vitrail.models.view import View
from vitrail.show.colours import Scale
from vitrail.show.figure import PNG_LEVEL, display_size, labelled, marked, overlay, png_bytes
from vitrail.show.heatmap import fit_to_image
from vitrail.show.legend import Legend
from vitrail.show.look import ALPHA, DEFAULT_LOOK, Look, Storage, Style, Uncertain
from vitrail.show.pixels import Mask, strongest
from vitrail.show.plots import curve_picture
from vitrail.show.widget import Choice, Controls, only_strongest
from vitrail.stored import pack, read_stored
from vitrail.version import __version__

# The parts of a score, by the names of their extras.
SPLIT = {
    "patches": "score_patches",
    "prefix tokens": "score_prefix",
    "biases": "score_biases",
    "baseline": "score_baseline",
    "score": "score",
}
# Fields that are stored in the JSON file under their own name.
_STORED_FIELDS = ("method", "params", "target", "label", "probability", "against", "against_label", "seconds",
                      "extras", "signed")  # fmt: skip
_FACTS = ("fingerprint", "precision", "commit", "load", "preprocessing", "question")  # what is stored of a model
_QUANTILE = 1.645  # of the normal distribution, for two-sided 90 % intervals
_UNCERTAIN_OPACITY = 0.35  # relative to values whose sign is certain
_COARSE = 32  # rows and columns of a map of pixels that is outlined
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


@dataclass(eq=False, repr=False)
class Explanation:
    """The explanation of a prediction.

    ``map`` is float32 on the CPU, (rows, columns) of the token grid or (H, W) of the model input: larger = more
    evidence for the target; signed and not rescaled. ``box`` is the part of the image that the model saw.
    """

    map: Tensor
    image: Image.Image
    model: View | None
    method: str
    params: dict[str, Any]
    target: int
    label: str
    probability: float
    seconds: float
    box: tuple[float, float, float, float]
    model_name: str
    against: int | None = None
    against_label: str | None = None
    top: list[tuple[int, str, float]] = field(default_factory=list)
    extras: dict[str, float] = field(default_factory=dict)
    image_path: str | None = None
    signed: bool | None = None  # whether the map is signed; None = if any value is negative
    scores: dict[str, float] = field(default_factory=dict)  # of ``score``
    curves: dict[str, list[float]] = field(default_factory=dict)
    # of metrics that scale a score, which is no probability: the scores of the empty image, 0, and of the full image, 1
    scale: dict[str, list[float]] = field(default_factory=dict)
    pixels: Tensor | None = None  # (3, H, W), normalised: the input, if a tensor was explained; not saved
    pixels_hash: str | None = None  # of one that was opened: the hash of the input, which is saved
    against_probability: float | None = None
    true_label: str | None = None  # the true class of the image, if known
    storage: list[int] = field(default_factory=list)  # patches that the network uses as registers, row by row
    grid: tuple[int, int] | None = None  # (rows, columns) of patches; None without tokens
    trusted: Trust | None = None  # the result of ``trust``
    error: Tensor | None = None  # standard deviation of the map, of its shape; None for methods that have none
    measure: str = "probability"  # what ``probability`` is: of targets that have none, the score
    model_facts: dict[str, Any] | None = None  # of an explanation that was opened without its model: what its file says
    pairs: Tensor | None = None  # (N, N): shares of pairs of patches in a similarity, explained by ``decompx``

    def heatmap(self, outside: float = math.nan, mode: Literal["bilinear", "nearest"] = "bilinear") -> Tensor:
        """The map scaled to [0, 1] at the size of the original image, (H, W); ``outside`` beyond the model's crop."""
        return fit_to_image(min_max(self.map), self.box, self.image.size, mode, outside)

    def overlay(
        self,
        alpha: float = ALPHA,
        mode: Literal["bilinear", "nearest"] = "bilinear",
        *,
        colormap: str | None = None,
        style: Style = "smooth",
        storage: Storage = "mark",
        uncertain: Uncertain = "fade",
    ) -> Image.Image:
        """The map over the faded image; signed maps in diverging colours, parts outside the crop hatched.

        Args:
            alpha: opacity of the strongest evidence, and how much the image is faded: 0 shows only the image.
            mode: "nearest" is the same as ``style="blocks"``.
            colormap: a colormap of matplotlib; None = RdBu_r for signed maps, viridis_r for unsigned ones.
            style: "smooth", "blocks" (a rectangle per value) or "outline" (around half of the evidence for the class).
            storage: "hide" draws patches that the network uses as storage as if they had no evidence.
            uncertain: "show" draws values whose sign is uncertain, which are faded where ``error`` is known, in full.
        """
        return self.draw(Look(colormap, alpha, style, storage, uncertain), mode)

    def draw(self, look: Look = DEFAULT_LOOK, mode: Literal["bilinear", "nearest"] = "bilinear") -> Image.Image:
        """As ``overlay``, with a look."""
        mode = "nearest" if look.style == "blocks" else mode
        values = self._shown(mode, look)
        photo = self.image.resize((values.shape[1], values.shape[0]), Image.Resampling.LANCZOS)
        weights = None
        if self.certain is not None and look.uncertain == "fade":
            weights = self._fitted(torch.where(self.certain, 1.0, _UNCERTAIN_OPACITY), mode)
        drawing = overlay(
            photo, values, self.signed, look.alpha, colormap=look.colormap, style=look.style, weights=weights
        )
        return marked(drawing, [self.patch_box(index) for index in self.storage]) if self.storage else drawing

    def patch_box(self, index: int) -> tuple[float, float, float, float]:
        """The box of a patch, counted row by row, at the display size of the image."""
        assert self.grid is not None
        (row, column), (left, top, right, bottom) = divmod(index, self.grid[1]), self._display_box()
        across, down = (right - left) / self.grid[1], (bottom - top) / self.grid[0]
        return left + column * across, top + row * down, left + (column + 1) * across, top + (row + 1) * down

    def score(self, metrics: Sequence[str] | str = ("insertion", "deletion")) -> dict[str, float]:
        """Scores the map by metrics that need only the model and the image; ``save`` stores the scores, too.

        Where the target has a score in place of a probability, the areas under its curves are relative to the empty
        image, 0, and the full image, 1: ``scale`` holds these two scores for each metric, and is empty otherwise.
        """
        model, pixels = self._model_and_pixels()
        for name in split_list(metrics):
            scored = measure_alone(name, model, pixels, self.map, self.target, self.extras)
            self.scores[name] = scored.value
            if scored.curve is not None:
                self.curves[name] = scored.curve
            if scored.scale is not None:
                self.scale[name] = scored.scale
        return dict(self.scores)

    def trust(self) -> Trust:
        """Asks the model how far to trust the map, with fewer than a hundred forward passes; ``save`` stores it, too.

        Removing the top tenth of the patches is compared with removing a random tenth, and sums of the map over subsets
        of patches with the probabilities that these subsets give.
        """
        self.trusted = measure_trust(*self._model_and_pixels(), self.map, self.target, self.against, self.patch_share)
        return self.trusted

    @property
    def split(self) -> dict[str, float] | None:
        """How the explained score splits into patches, prefix tokens and biases (or a baseline), and the score itself.

        None for methods that are not complete.
        """
        if "score_patches" not in self.extras:
            return None
        return {name: self.extras[key] for name, key in SPLIT.items() if key in self.extras}

    @property
    def patch_share(self) -> float | None:
        """The part of the score, by absolute value, that is on patches; None for methods that are not complete."""
        if self.split is None:
            return None
        parts = {name: abs(value) for name, value in self.split.items() if name != "score"}
        return parts["patches"] / (sum(parts.values()) or 1.0)

    @property
    def shares(self) -> Tensor:
        """The map as it is drawn: where prefix tokens and biases hold a part of the score, it is spread evenly.

        Then the shares add up to the score, in its units, and the order of the patches is that of the map.
        """
        if "score_prefix" not in self.extras:
            return self.map
        rest = self.extras["score_prefix"] + self.extras["score_biases"]
        return self.map / self.extras["score_layers"] + rest / self.map.numel()

    def random_scores(self, metrics: Sequence[str] | str = ("insertion", "deletion")) -> dict[str, float]:
        """The scores of a random map, to compare those of ``score`` with."""
        model, pixels = self._model_and_pixels()
        values = torch.rand(self.map.shape, generator=torch.Generator().manual_seed(0))
        return {name: measure_alone(name, model, pixels, values, self.target, {}).value for name in split_list(metrics)}

    def curve_picture(self) -> Image.Image:
        """A plot of the curves of the scores."""
        if not self.curves:
            raise VitrailError("there are no curves: call score() first.")
        return curve_picture(self.curves, self.scores, f"{self.title}, {self.call}", self.scale_line)

    def _model_and_pixels(self) -> tuple[View, Tensor]:
        """The model and its input: the tensor that was explained, or the preprocessed image."""
        model = self.model
        if model is None:
            raise VitrailError("this explanation was opened without its model: give it as vitrail.open(…, model=).")
        if self.pixels is not None:
            return model, self.pixels
        if self.pixels_hash is not None:
            raise VitrailError(
                "a tensor was explained, which its picture only approximates: to score it, give the tensor as "
                "vitrail.open(…, image=)."
            )
        if self.box != model.preprocessing.box(self.image.size):
            raise VitrailError(
                f"{model.name} sees another part of the image than the one explained: its preprocessing is not that "
                "of this explanation."
            )
        return model, model.preprocess(self.image)

    def picture(
        self,
        *,
        colormap: str | None = None,
        alpha: float = ALPHA,
        style: Style = "smooth",
        storage: Storage = "mark",
        uncertain: Uncertain = "fade",
    ) -> Image.Image:
        """The overlay with a caption: class, probability, method, split of the score, scores, errors, trust, legend."""
        return self._picture(Look(colormap, alpha, style, storage, uncertain))

    def _picture(self, look: Look) -> Image.Image:
        error_line = self.error_line
        if error_line and look.uncertain == "fade" and look.style != "outline":
            error_line += " (the rest is faded)"
        lines = (self.detail, self.score_line, error_line, self.storage_line, self.trust_line)
        return labelled(self.draw(look), self.title, [line for line in lines if line], [self.legend(look)])

    def legend(self, look: Look = DEFAULT_LOOK) -> Legend:
        """What the colours of the map mean."""
        mode: Literal["bilinear", "nearest"] = "nearest" if look.style == "blocks" else "bilinear"
        scale = Scale.of(self._shown(mode, replace(look, style="smooth")), self.signed)
        target = self.label if self.class_specific else ""
        return Legend(scale, look, target, self.against_label)

    def _shown(self, mode: Literal["bilinear", "nearest"] = "bilinear", look: Look = DEFAULT_LOOK) -> Tensor:
        """The shares on the image, (H, W) of its display size; outlines of pixel maps are those of coarser cells."""
        values = self._without_storage() if look.storage == "hide" and self.storage else self.shares
        return self._fitted(_coarse(values) if look.style == "outline" else values, mode)

    def _fitted(self, values: Tensor, mode: Literal["bilinear", "nearest"]) -> Tensor:
        """Values of the map's shape on the image, (H, W) of its display size."""
        return fit_to_image(values, self._display_box(), display_size(self.image.size), mode)

    def _display_box(self) -> tuple[float, float, float, float]:
        """``box`` at the display size of the image."""
        width, height = display_size(self.image.size)
        across, down = width / self.image.width, height / self.image.height
        left, top, right, bottom = self.box
        return left * across, top * down, right * across, bottom * down

    def _without_storage(self) -> Tensor:
        """The shares with no evidence on storage tokens."""
        assert self.grid is not None
        stored = torch.zeros(self.grid[0] * self.grid[1])
        stored[self.storage] = 1
        cells = F.interpolate(stored.view(1, 1, *self.grid), size=self.map.shape, mode="nearest-exact")[0, 0] > 0
        shares = self.shares
        return shares.masked_fill(cells, 0.0 if self._diverges else float(shares[~cells].min()))

    @property
    def _diverges(self) -> bool:
        """Whether the colours of the map diverge from zero."""
        return bool((self.shares < 0).any()) if self.signed is None else self.signed

    def area(self, share: float = 0.5) -> Mask:
        """The smallest area of the image with a share of the evidence for the class, (H, W) of the image, bool.

        With half of the evidence, it is what ``style="outline"`` draws a line around.
        """
        if not 0 < share <= 1:
            raise VitrailError(f"share must be above 0 and at most 1, the whole evidence, but got {share}.")
        values = fit_to_image(_coarse(self.shares), self.box, self.image.size)
        scale = Scale.of(values, self.signed)
        known = values.nan_to_num(0.0 if scale.signed else scale.low)
        return strongest(scale.support(scale.positions(known.numpy())), share)

    @property
    def focus(self) -> tuple[float, float]:
        """Where the map is largest: (x, y) as shares of the width and of the height of the image."""
        row, column = divmod(int(self.map.nan_to_num(-math.inf).argmax()), self.map.shape[1])
        left, top, right, bottom = self.box
        x = left + (column + 0.5) / self.map.shape[1] * (right - left)
        y = top + (row + 0.5) / self.map.shape[0] * (bottom - top)
        return x / self.image.width, y / self.image.height

    @property
    def title(self) -> str:
        """The class and its probability."""
        if self.against is None:
            return f"{self.label} ({self._number(self.probability)})"
        rival = "" if self.against_probability is None else f" {self._number(self.against_probability)}"
        return f"{self.label} {self._number(self.probability)} rather than {self.against_label}{rival}"

    def _number(self, value: float) -> str:
        """A probability or a score, as text."""
        return f"{value:.1%}" if self.measure == "probability" else f"{self.measure} {value:.3f}".replace("-", "−")

    @property
    def score_line(self) -> str | None:
        """How the score splits, in words: ``logit +8.21 = patches +6.02, prefix tokens +1.10, biases +1.09``.

        With ≈ in place of = where the sum is off by more than 1 %.
        """
        if self.split is None:
            return None
        output = self.params.get("output") or getattr(self._method_class(), "output", "logit")
        output = output if self.measure == "probability" else self.measure
        output = f"{output} difference" if self.against is not None else output
        parts = [f"{name} {value:+.2f}" for name, value in self.split.items() if name != "score"]
        equals = "≈" if self.extras.get("completeness_gap", 0.0) > 0.01 else "="
        return f"{output} {self.split['score']:+.2f} {equals} {', '.join(parts)}".replace("-", "−")

    @property
    def scale_line(self) -> str | None:
        """How the scores of the map are scaled, in words; None for those of probabilities."""
        return SCALED if self.scale else None

    @property
    def certain(self) -> Tensor | None:
        """Where the sign of the map is certain: the 90 % interval excludes zero; None where ``error`` is unknown."""
        return None if self.error is None else self.map.abs() > _QUANTILE * self.error

    @property
    def error_line(self) -> str | None:
        """How much of the map has a certain sign, in words."""
        if self.certain is None:
            return None
        return f"90% intervals exclude zero on {self.certain.float().mean():.0%} of the map"

    @property
    def storage_line(self) -> str | None:
        """What the storage tokens are, in words; None if there are none."""
        if not self.storage:
            return None
        count = "1 patch is" if len(self.storage) == 1 else f"{len(self.storage)} patches are"
        return f"{count} used as storage by the network (marked ◇): evidence there is not about what they show"

    @property
    def trust_score(self) -> float | None:
        """The score of ``trust`` in [0, 1]; None before it was called."""
        return None if self.trusted is None else self.trusted.score

    @property
    def trust_line(self) -> str | None:
        """The result of ``trust`` in words."""
        if self.trusted is None:
            return None
        return f"trust: {self.trusted.words(self._question, percent=self.measure == 'probability')}"

    @property
    def _question(self) -> str:
        """The class that ``trust`` is about."""
        return self.label if self.against is None else f"{self.label} against {self.against_label}"

    @property
    def call(self) -> str:
        """The method with its non-default parameters, ``rise(masks=32)``."""
        method = self._method_class()
        defaults = {} if method is None else method.parameters()
        params = {name: tuple(value) if isinstance(value, list) else value for name, value in self.params.items()}
        changed = {name: value for name, value in params.items() if name not in defaults or value != defaults[name]}
        return join_call(self.method, changed)

    @property
    def class_specific(self) -> bool:
        """Whether the map depends on the class."""
        method = self._method_class()
        return method is None or method.info.class_specific

    @property
    def detail(self) -> str:
        """The line below the title: method, parameters, model, scores."""
        scores = [f"{name} {value:.3f}" for name, value in self.scores.items()]
        remarks = [] if self.class_specific else ["the same for every class"]
        if self.top and self.top[0][0] not in (self.target, self.against):
            _, label, probability = self.top[0]
            remarks.append(f"predicted: {label} {self._number(probability)}")
        scores += [self.scale_line] if self.scale_line else []
        return " · ".join([f"{self.call} on {self.model_name}", *remarks, *scores])

    def _method_class(self) -> MethodFactory | None:
        """The class of the method; None for a custom method that is not registered."""
        try:
            return get_method(self.method)
        except VitrailError:
            return None

    def save(
        self,
        path: str | Path,
        *,
        colormap: str | None = None,
        alpha: float = ALPHA,
        style: Style = "smooth",
        storage: Storage = "mark",
        uncertain: Uncertain = "fade",
    ) -> Path:
        """Writes the picture and, beside it, a JSON file for ``vitrail.open``; both or none."""
        path = Path(path)
        path = path if path.suffix or not path.name else path.with_suffix(".png")
        write_together(self.files(path, Look(colormap, alpha, style, storage, uncertain)))
        return path

    def files(self, path: Path, look: Look = DEFAULT_LOOK) -> dict[str | os.PathLike[str], bytes]:
        """The files that ``save`` writes: the picture and its JSON file."""
        if path.suffix.lower() not in FORMATS:
            raise VitrailError(f"cannot save a picture as {path.name!r}: expected one of {', '.join(FORMATS)}.")
        if self.image_path is not None and path.resolve() == Path(self.image_path):
            raise VitrailError(f"{path} is the explained picture itself: save under another name.")
        buffer = io.BytesIO()
        self._picture(look).save(buffer, FORMATS[path.suffix.lower()], compress_level=PNG_LEVEL)  # others ignore it
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, default=str)
        return {path: buffer.getvalue(), path.with_suffix(".json"): text.encode(errors="backslashreplace")}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels, as JSON values."""
        facts = (self.model_facts or dict.fromkeys(_FACTS)) if self.model is None else _facts(self.model)
        return {
            "vitrail": __version__,
            "versions": dict(_versions()),
            "model": {"name": self.model_name, **facts},
            "image": {
                "path": self.image_path,
                "sha256": image_hash(self.image),
                "size": list(self.image.size),
                "tensor_sha256": self.pixels_hash if self.pixels is None else tensor_hash(self.pixels),
            },
            "method": self.method,
            "params": self.params,
            "target": self.target,
            "label": self.label,
            "probability": self.probability,
            "against": self.against,
            "against_label": self.against_label,
            "against_probability": self.against_probability,
            "true_label": self.true_label,
            "top": [{"class": i, "label": name, "probability": p} for i, name, p in self.top],
            "seconds": self.seconds,
            "extras": self.extras,
            "split": self.split,
            "storage": self.storage,
            "grid": None if self.grid is None else list(self.grid),
            "trust": None if self.trusted is None else asdict(self.trusted),
            "signed": self.signed,
            "scores": self.scores,
            "curves": self.curves,
            "scale": self.scale,
            "box": list(self.box),
            "map": pack(self.map),
            "standard_error": None if self.error is None else pack(self.error),
            "measure": self.measure,
            "pairs": None if self.pairs is None else pack(self.pairs),
        }

    def __repr__(self) -> str:
        rows, columns = self.map.shape
        return f"Explanation({self.title}, {self.method}, {rows}×{columns}, {self.model_name}, {self.seconds:.2f} s)"

    def _repr_png_(self) -> bytes:
        return png_bytes(self.picture())

    def widget(self) -> Controls:
        """The picture with controls, for notebooks with ipywidgets: one of the likeliest classes, opacity, share, sign.

        The share is that of the patches with the largest values; another class is explained when it is chosen.
        """
        explained = {self.target: self}

        def draw(choice: Choice) -> bytes:
            if choice.target not in explained:
                explained[choice.target] = self._about(choice.target)
            chosen = explained[choice.target]._reduced(choice.share, choice.signed)
            return png_bytes(chosen.picture(alpha=choice.alpha))

        others = self.top if self.model is not None else []
        classes = {self.target: self.label} | {index: label for index, label, _ in others if index != self.against}
        return Controls(classes, self.target, draw)

    def _about(self, target: int) -> Explanation:
        """The explanation of another of the likeliest classes, by the same method."""
        begin = time.perf_counter()
        model, pixels = self._model_and_pixels()
        method = build_method(self.method, model, **self.params)
        attribution = method.explain(pixels.to(model.device), target, self.against)
        error = attribution.error
        return replace(
            self,
            map=attribution.map[0].float().cpu(),
            error=None if error is None else error[0].float().cpu(),
            extras={name: float(values[0]) for name, values in attribution.extras.items()},
            target=target,
            label=model.label(target),
            probability={index: probability for index, _, probability in self.top}[target],
            seconds=time.perf_counter() - begin,
            scores={},
            curves={},
            trusted=None,
            pairs=None,
        )

    def _reduced(self, share: float, signed: bool) -> Explanation:
        """The explanation with its largest shares alone, or those of their absolute values."""
        if share == 1 and signed:
            return self
        values, diverges = (self.shares, self._diverges) if signed else (self.shares.abs(), False)
        reduced = only_strongest(values, share, 0.0 if diverges else float(values.min()))
        return replace(self, map=reduced, extras={}, signed=diverges)


def open(  # noqa: A001
    path: str | Path, *, model: View | nn.Module | str | None = None, image: Any = None, check: bool = True
) -> Explanation:
    """Opens a saved explanation and checks that its model and its image have not changed.

    Args:
        path: the JSON file, or the picture beside it.
        model: the view, module or name of the explained model; None = load it as it was loaded before.
        image: the explained image or tensor; None = read it from its path.
        check: False skips the check of the model (and does not load it).
    """
    path = Path(path)
    path = path.with_suffix(".json") if path.name else path
    saved = read_stored(path)
    try:
        pixels = _find_pixels(saved, image, path)
        picture = _find_image(
            saved["image"], image if pixels is None else _preprocessing(saved).denormalise(pixels), path
        )
        view = _find_model(saved["model"], model, path, check)
        return Explanation(
            map=saved["map"],
            image=picture,
            model=view,
            model_name=saved["model"]["name"],
            box=tuple(saved["box"]),
            top=[(entry["class"], entry["label"], entry["probability"]) for entry in saved["top"]],
            image_path=saved["image"]["path"],
            pixels=pixels,
            pixels_hash=saved["image"].get("tensor_sha256"),
            true_label=saved.get("true_label"),
            scores=saved.get("scores", {}),
            curves=saved.get("curves", {}),
            scale=saved.get("scale", {}),
            against_probability=saved.get("against_probability"),
            storage=saved.get("storage", []),
            grid=None if saved.get("grid") is None else tuple(saved["grid"]),
            trusted=None if saved.get("trust") is None else Trust.from_dict(saved["trust"]),
            error=saved.get("standard_error"),
            measure=saved.get("measure", "probability"),
            pairs=saved.get("pairs"),
            model_facts=saved["model"],
            **{name: saved[name] for name in _STORED_FIELDS},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VitrailError(f"{path} is not a complete vitrail explanation ({type(error).__name__}: {error}).") from None


@functools.cache
def _versions() -> dict[str, str]:
    """What computed an explanation; reading it takes milliseconds."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "timm", "numpy")}}


def _facts(model: View) -> dict[str, Any]:
    """What a stored explanation says of its model, so that the same one can be found again."""
    precision = str(model.dtype).removeprefix("torch.")
    commit, spec, preprocessing = model.commit, model.spec, model.preprocessing.to_dict()
    values = (model.fingerprint(), precision, commit, spec, preprocessing, model.question)
    return dict(zip(_FACTS, values, strict=True))


def _find_image(saved: Mapping[str, Any], source: Any, path: Path) -> Image.Image:
    if source is None and saved["path"] is None:
        raise VitrailError(f"{path} was made from an image in memory: give it as image=.")
    if source is None and not Path(saved["path"]).exists():
        raise VitrailError(f"the image of {path} is no longer at {saved['path']}: give it as image=.")
    picture = read_image(saved["path"] if source is None else source)
    if image_hash(picture) == saved["sha256"]:
        return picture
    if source is None:
        raise VitrailError(f"the image {saved['path']} is not the one explained in {path}: it has changed.")
    name = f"image {source}" if isinstance(source, str | Path) else "given image"
    raise VitrailError(f"the {name} is not the one explained in {path}: its pixels differ.")


def _find_pixels(saved: Mapping[str, Any], tensor: Any, path: Path) -> Tensor | None:
    """The explained tensor, if ``image=`` is one."""
    if not isinstance(tensor, Tensor):
        return None
    expected = saved["image"].get("tensor_sha256")
    if expected is None:
        raise VitrailError(f"{path} explains an image file or PIL image, but image= is a tensor: give the image.")
    pixels = _preprocessing(saved).trim(tensor.detach().cpu()).clone()
    if tensor_hash(pixels) != expected:
        raise VitrailError(f"the given tensor is not the one explained in {path}: its values differ.")
    return pixels


def _preprocessing(saved: Mapping[str, Any]) -> Preprocess:
    if saved["model"]["preprocessing"] is None:
        raise VitrailError("this explanation was saved without its preprocessing, so image= cannot be a tensor.")
    return Preprocess.from_dict(saved["model"]["preprocessing"])


def _find_model(saved: Mapping[str, Any], model: View | nn.Module | str | None, path: Path, check: bool) -> View | None:
    if model is None and not check:
        return None
    view = _load_again(saved, path) if model is None else as_view(model)
    question = saved.get("question")
    if question is not None and view.question is None:
        view = ask(view, question)
    for part, now, then in (
        ("weights", view.fingerprint(), saved["fingerprint"]),
        ("preprocessing", view.preprocessing.to_dict(), saved["preprocessing"]),
    ):
        if check and now != then:
            raise VitrailError(f"the model {view.name} is not the one of {path}: its {part} changed.")
    return view


def _load_again(saved: Mapping[str, Any], path: Path) -> View:
    if saved["load"] is None:
        raise VitrailError(f"the model of {path} ({saved['name']}) was not loaded by name: give it as model=.")
    spec = dict(saved["load"])
    if isinstance(spec.get("img_size"), list):
        spec["img_size"] = tuple(spec["img_size"])
    return load(spec.pop("name", None), **spec)


def _coarse(values: Tensor) -> Tensor:
    """A map of which areas are taken: values of pixels are averaged, or the areas would be dust."""
    return values if min(values.shape) < 2 * _COARSE else F.adaptive_avg_pool2d(values[None], _COARSE)[0]


def tensor_hash(values: Tensor) -> str:
    """The SHA-256 of a tensor's shape and values, in single precision."""
    array = np.ascontiguousarray(values.detach().cpu().float().numpy(), dtype="<f4")
    return hashlib.sha256(f"{array.shape}:".encode() + array.tobytes()).hexdigest()
