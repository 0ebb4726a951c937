"""How a model sees an image: resize, crop and normalise exactly as its own library does, and undo it.

Agreement with the libraries, same image: timm and torchvision 1e-6; Hugging Face 1e-5 (its processors fold the
division by 255 into the mean). Only a shape so extreme that the resized image would exceed 64 million pixels is
sampled directly inside the crop instead; single 8-bit steps may then differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.geometry import Box, clip_box

Triple: TypeAlias = tuple[float, float, float]
Interpolation: TypeAlias = Literal["bicubic", "bilinear", "nearest", "lanczos"]
Fit: TypeAlias = Literal["crop", "squash", "border"]
Arithmetic: TypeAlias = Literal["torchvision", "hf_pil", "hf_torchvision", "hf_torchvision_float"]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_MAX_RESIZED_PIXELS = 64_000_000
_TINY = 8  # pixels of an edge below which nothing is recognisable
_LEAST_SEEN = 0.15  # part of an image that the input should show, and the least ratio of its two scales


@dataclass(frozen=True)
class Preprocess:
    """The steps from an RGB image to a model input.

    `size` is the (height, width) of the input. `fit` "crop" scales the shorter edge and cuts the middle, "squash"
    ignores the aspect ratio, "border" scales the longer edge and pads. The image is scaled to `size / crop_pct`, or
    to `resize`: the shorter edge for "crop", (height, width) for "squash".
    `arithmetic` names the code whose rounding is copied ("torchvision" is timm's too).
    `dropped` rows and columns at the lower and right edge come on top of `size`: the library's transform returns them,
    but the network cuts its patches from `size` alone.
    """

    size: tuple[int, int]
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    interpolation: Interpolation = "bicubic"
    fit: Fit = "crop"
    crop_pct: float = 1.0
    resize: int | tuple[int, int] | None = None
    arithmetic: Arithmetic = "torchvision"
    dropped: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, kind in (("interpolation", Interpolation), ("fit", Fit), ("arithmetic", Arithmetic)):
            if getattr(self, name) not in get_args(kind):
                raise _wrong(name, getattr(self, name), "one of " + ", ".join(get_args(kind)))
        if not _is_size(self.size):
            raise _wrong("size", self.size, "a positive (height, width)")
        if len(self.dropped) != 2 or min(self.dropped) < 0:
            raise _wrong("dropped", self.dropped, "two numbers from 0 up, rows and columns")
        if len(self.mean) != 3 or not all(map(math.isfinite, self.mean)):
            raise _wrong("mean", self.mean, "three numbers, one per colour")
        if len(self.std) != 3 or not all(math.isfinite(value) and value > 0 for value in self.std):
            raise _wrong("std", self.std, "three positive numbers, one per colour")
        if not 0 < self.crop_pct < math.inf:
            raise _wrong("crop_pct", self.crop_pct, "a positive number, usually 0.875 to 1")
        expected = {"crop": _is_edge(self.resize), "squash": _is_size(self.resize), "border": False}
        if self.resize is not None and not expected[self.fit]:
            raise _wrong("resize", self.resize, 'an edge for fit="crop", (height, width) for "squash", else None')

    @classmethod
    def from_timm(cls, data_config: Mapping[str, Any]) -> "Preprocess":
        """Reads timm's `resolve_model_data_config(model)`; the result equals timm's evaluation transform."""
        channels, height, width = data_config["input_size"]
        if channels != 3:
            raise VitrailError(
                f"the model takes {channels} colour channels, expected 3: only RGB models are supported."
            )
        mode = data_config.get("crop_mode") or "center"
        # timm's own default for a missing crop_pct, and its fallback for an unknown crop mode.
        crop_pct = data_config.get("crop_pct") or 0.875
        fit = cast(Fit, mode if mode in ("squash", "border") else "crop")
        return cls(
            size=(height, width),
            mean=_triple(data_config.get("mean", IMAGENET_MEAN)),
            std=_triple(data_config.get("std", IMAGENET_STD)),
            interpolation=data_config.get("interpolation", "bicubic"),
            fit=fit,
            crop_pct=crop_pct,
        )

    @classmethod
    def from_torchvision(cls, transforms: Any) -> "Preprocess":
        """Reads the `weights.transforms()` object of a torchvision classifier."""
        try:
            crop, resize = list(transforms.crop_size), list(transforms.resize_size)
            mean, std, interpolation = transforms.mean, transforms.std, transforms.interpolation.value
        except (AttributeError, TypeError) as error:
            raise VitrailError(
                f"cannot read transforms of class {type(transforms).__name__}: expected the `weights.transforms()` "
                "of a torchvision classifier."
            ) from error
        size = (crop[0], crop[-1])
        exact = len(resize) == 2
        return cls(
            size=size,
            mean=_triple(mean),
            std=_triple(std),
            interpolation=interpolation,
            fit="squash" if exact else "crop",
            resize=(resize[0], resize[1]) if exact else resize[0],
        )

    @classmethod
    def from_huggingface(cls, processor: Any, image_size: int | tuple[int, int] | None = None) -> "Preprocess":
        """Reads a Hugging Face image processor.

        Args:
            processor: the image processor, of either backend (PIL or torchvision).
            image_size: the model's input (height, width), used where the processor does not fix one.
        """
        config: dict[str, Any] = processor.to_dict()
        if config.get("do_pad"):
            raise VitrailError(f"{type(processor).__name__} pads its images (do_pad), which is not supported.")
        size, fit, resize = _huggingface_geometry(config, type(processor).__name__, image_size)
        mean, std = _huggingface_colours(config)
        resample = config.get("resample")
        return cls(
            size=size,
            mean=mean,
            std=std,
            interpolation=cast(Interpolation, Image.Resampling(2 if resample is None else resample).name.lower()),
            fit=fit,
            resize=resize,
            arithmetic=_huggingface_arithmetic(processor),
        )

    @classmethod
    def from_detector(cls, processor: Any, image_size: tuple[int, int]) -> "Preprocess":
        """Reads the image processor of a Hugging Face detector or segmenter, which keeps the shape of any image.

        Inputs have one size here: the image is scaled to fit into ``image_size`` (height, width), and the rest padded.
        Of a processor that splits an image into windows along its longer edge, the input is the one in the middle.
        """
        config: dict[str, Any] = processor.to_dict()
        mean, std = _huggingface_colours(config)
        exact, resample = _pair(config.get("size")), config.get("resample")
        return cls(
            size=exact or image_size,
            mean=mean,
            std=std,
            interpolation=cast(Interpolation, Image.Resampling(2 if resample is None else resample).name.lower()),
            fit="squash" if exact else "crop" if config.get("do_split_image") else "border",
            arithmetic=_huggingface_arithmetic(processor),
        )

    @classmethod
    def from_open_clip(cls, config: Mapping[str, Any], size: tuple[int, int]) -> "Preprocess":
        """Reads the ``preprocess_cfg`` of the image tower of an open_clip model; what it leaves out is as for CLIP."""
        fit = {"shortest": "crop", "longest": "border", "squash": "squash"}[config.get("resize_mode") or "shortest"]
        return cls(
            size=size,
            mean=_triple(config.get("mean") or CLIP_MEAN),
            std=_triple(config.get("std") or CLIP_STD),
            interpolation=cast(Interpolation, config.get("interpolation") or "bicubic"),
            fit=cast(Fit, fit),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Rebuilds from `to_dict`, also after a round trip through JSON."""
        names = {field.name for field in fields(cls)}
        if not names >= values.keys() >= {"size"}:
            raise VitrailError(
                f"preprocessing has the keys {sorted(values)}, expected size and others of {sorted(names)}."
            )
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """The fields as values that JSON can hold; without `dropped` where nothing is."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return values if any(self.dropped) else {name: value for name, value in values.items() if name != "dropped"}

    def resized(self, size: tuple[int, int]) -> "Preprocess":
        """The same steps for another input (height, width): the same share of the image is seen."""
        rows, columns = size[0] / self.size[0], size[1] / self.size[1]
        resize = self.resize
        if isinstance(resize, int):
            resize = round(resize * max(rows, columns))
        elif resize is not None:
            resize = (round(resize[0] * rows), round(resize[1] * columns))
        return replace(self, size=size, resize=resize)

    def changed(
        self,
        *,
        fit: str | None = None,
        mean: Sequence[float] | float | None = None,
        std: Sequence[float] | float | None = None,
        crop_pct: float | None = None,
        interpolation: str | None = None,
    ) -> "Preprocess":
        """The same steps with other settings; None keeps one. Another fit scales to the input size exactly, unless
        `crop_pct` is given too.

        Args:
            fit: "squash", "crop" or "pad", which `fit` calls "border".
            mean: colour mean, three numbers or one.
            std: colour standard deviation, likewise.
            crop_pct: the image is scaled to the input size divided by this.
            interpolation: "bicubic", "bilinear", "nearest" or "lanczos".
        """
        changes: dict[str, Any] = {"interpolation": interpolation}
        changes |= {name: None if value is None else _triple(value) for name, value in (("mean", mean), ("std", std))}
        if fit is not None and fit not in ("squash", "crop", "pad", "border"):
            raise _wrong("fit", fit, "squash, crop or pad")
        if fit is not None and (fit := "border" if fit == "pad" else fit) != self.fit:
            changes |= {"fit": fit, "crop_pct": 1.0}
        changes |= {} if crop_pct is None else {"crop_pct": crop_pct}
        resize = None if "crop_pct" in changes else self.resize
        return replace(self, resize=resize, **{name: value for name, value in changes.items() if value is not None})

    def describe(self) -> str:
        """What happens to an image, for people."""
        height, width = self.library_size
        scaled = self.resize or tuple(math.floor(edge / self.crop_pct) for edge in (height, width))
        if isinstance(scaled, tuple) and (self.fit == "squash" or scaled[0] != scaled[1]):
            goal = f"{scaled[0]}×{scaled[1]}"
        else:
            goal = f"{scaled[0] if isinstance(scaled, tuple) else scaled} pixels"
        step = {"crop": f"shorter edge scaled to {goal}", "border": f"longer edge scaled to {goal}, the rest padded"}
        steps = [step.get(self.fit, f"squashed to {goal}") + f" ({self.interpolation})"]
        if self.fit == "crop" or scaled != (height, width):
            steps.append(f"{height}×{width} cut from the middle")
        colours = [f"{name} {', '.join(f'{value:g}' for value in getattr(self, name))}" for name in ("mean", "std")]
        return "; ".join([*steps, *colours])

    def doubt(self, image_size: tuple[int, int]) -> str | None:
        """Why an image of this (width, height) is hardly recognisable in the input, if it is."""
        width, height = image_size
        if min(image_size) < _TINY:
            return f"the image has only {width} × {height} pixels, which the model sees enlarged: is it the right file?"
        left, top, right, bottom = self.box(image_size)
        seen = (min(right, width) - max(left, 0)) * (min(bottom, height) - max(top, 0)) / (width * height)
        stretch = (right - left) / (bottom - top) * self.size[0] / self.size[1]
        if seen < _LEAST_SEEN:
            return (
                f"the model sees {seen:.0%} of the image ({width} × {height} pixels), the rest is cropped away: "
                'fit="pad" (--fit pad) shows all of it.'
            )
        if max(stretch, 1 / stretch) > 1 / _LEAST_SEEN:
            return (
                f"the image ({width} × {height} pixels) is squashed to {self.size[1]} × {self.size[0]} pixels, "
                f'{max(stretch, 1 / stretch):.0f} times more in one direction: fit="pad" (--fit pad) keeps its shape.'
            )
        return None

    @property
    def library_size(self) -> tuple[int, int]:
        """(height, width) of what the library's own transform returns: `size` and what is `dropped`."""
        return self.size[0] + self.dropped[0], self.size[1] + self.dropped[1]

    def __call__(self, image: Image.Image) -> Tensor:
        """Turns an RGB image into the normalised model input, float32 (3, height, width)."""
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        # With NumPy, which rounds as torch does: torch would start threads of its own in each thread that reads images.
        mean, std = (np.array(triple, dtype=np.float32)[:, None, None] for triple in (self.mean, self.std))
        fitted = self._fitted(rgb)
        colours = fitted.astype(np.float32, order="C")
        if fitted.dtype == np.uint8:
            colours /= np.float32(255)
        colours -= mean
        colours /= std
        return self.trim(torch.from_numpy(colours))

    def trim(self, images: Tensor) -> Tensor:
        """Cuts what the library's own transform returns, (…, H, W), to the part that the network uses."""
        return images[..., : self.size[0], : self.size[1]] if images.shape[-2:] == self.library_size else images

    def box(self, image_size: tuple[int, int]) -> Box:
        """The (left, top, right, bottom) that the model input covers, in pixels of the original image.

        Args:
            image_size: (width, height) of the original. The box exceeds it where the input is padded.
        """
        (width, height), (scaled_width, scaled_height) = image_size, self._scaled_size(image_size)
        left, top = self._corner((scaled_width, scaled_height))
        across, down = width / scaled_width, height / scaled_height
        return left * across, top * down, (left + self.size[1]) * across, (top + self.size[0]) * down

    def mask(self, mask: NDArray[np.bool_]) -> Tensor:
        """Carries a mask of the original image to the model input, bool (height, width).

        Each pixel of the input takes the value of the original's pixel that its centre falls on ("nearest-exact");
        outside the image it is False.

        Args:
            mask: (height, width) of the upright original, bool.
        """
        original = np.asarray(mask)
        if original.ndim != 2 or original.size == 0 or original.dtype != np.bool_:
            raise VitrailError(
                f"a mask of shape {original.shape} and type {original.dtype} was given, expected (height, width) of "
                "the original image, bool."
            )
        height, width = original.shape
        scaled_width, scaled_height = self._scaled_size((width, height))
        left, top = self._corner((scaled_width, scaled_height))
        columns, seen_columns = _nearest(left, self.size[1], width, scaled_width)
        rows, seen_rows = _nearest(top, self.size[0], height, scaled_height)
        return torch.from_numpy(original[np.ix_(rows, columns)] & np.outer(seen_rows, seen_columns))

    def boxes(self, boxes: Iterable[Box], image_size: tuple[int, int]) -> list[Box]:
        """Carries boxes of the original image to the model input, in its pixels.

        Each is clipped to the part of the image that the input shows, and left out when nothing of it remains.

        Args:
            boxes: (x0, y0, x1, y1) in pixels of the upright original, x1 and y1 exclusive.
            image_size: (width, height) of the original.
        """
        (left, top, right, bottom), (rows, columns) = self.box(image_size), self.size
        across, down = columns / (right - left), rows / (bottom - top)
        carried = []
        for box in boxes:
            if (visible := clip_box(box, *image_size)) is None:
                continue
            x0, y0, x1, y1 = visible
            scaled = ((x0 - left) * across, (y0 - top) * down, (x1 - left) * across, (y1 - top) * down)
            if (part := clip_box(scaled, columns, rows)) is not None:
                carried.append(part)
        return carried

    def normalise(self, rgb: Tensor) -> Tensor:
        """Normalises colours in 0…1, (…, 3, H, W)."""
        return (rgb - self._column(self.mean, rgb)) / self._column(self.std, rgb)

    def denormalise(self, tensor: Tensor) -> Image.Image:
        """Turns a normalised (3, H, W) tensor back into an image."""
        if tensor.ndim != 3 or tensor.shape[0] != 3:
            raise VitrailError(f"a tensor of shape {tuple(tensor.shape)} was given, expected one image (3, H, W).")
        values = tensor.detach().to("cpu", torch.float32)
        rgb = values * self._column(self.std, values) + self._column(self.mean, values)
        return Image.fromarray((rgb.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy())

    @staticmethod
    def _column(triple: Triple, like: Tensor) -> Tensor:
        return torch.tensor(triple, dtype=like.dtype, device=like.device).view(3, 1, 1)

    def _scaled_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """The (width, height) of the whole image after scaling, before the crop."""
        width, height = image_size
        target_height, target_width = (math.floor(edge / self.crop_pct) for edge in self.library_size)
        if self.fit == "squash":
            if isinstance(self.resize, tuple):
                target_height, target_width = self.resize
            return target_width, target_height
        edge = self.resize if isinstance(self.resize, int) else target_height
        if self.fit == "crop" and (self.resize is not None or target_height == target_width):
            if width <= height:
                return edge, int(edge * height / width)
            return int(edge * width / height), edge
        ratios = height / target_height, width / target_width
        ratio = max(ratios) if self.fit == "border" else min(ratios)
        return max(1, round(width / ratio)), max(1, round(height / ratio))

    def _corner(self, scaled_size: tuple[int, int]) -> tuple[int, int]:
        """The (left, top) of the model input in the scaled image, negative where it is padded."""
        margins = scaled_size[0] - self.library_size[1], scaled_size[1] - self.library_size[0]
        if self.arithmetic == "hf_pil":
            return margins[0] // 2, margins[1] // 2
        if self.arithmetic == "torchvision":
            left, top = (round(margin / 2) if margin > 0 else int(margin / 2) for margin in margins)
            return left, top
        return int(margins[0] / 2), int(margins[1] / 2)

    def _fitted(self, image: Image.Image) -> NDArray[Any]:
        """Scale, crop and pad, (3, height, width) as the library makes it: uint8, or colours in 0…1."""
        scaled_size = self._scaled_size(image.size)
        left, top = self._corner(scaled_size)
        height, width = self.library_size
        if scaled_size[0] * scaled_size[1] > _MAX_RESIZED_PIXELS:
            visible = self._sampled_inside(image, scaled_size, left, top)
        else:
            scaled = self._scaled(image, scaled_size)
            visible = scaled[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
        if visible.shape[1:] == (height, width):
            return visible
        canvas = np.zeros((3, height, width), dtype=visible.dtype)
        if self.fit == "border":
            border = np.array([round(255 * value) for value in self.mean], dtype=np.float32)
            border = border if visible.dtype == np.uint8 else border / np.float32(255)
            canvas[:] = border[:, None, None]
        rows, columns = max(-top, 0), max(-left, 0)
        canvas[:, rows : rows + visible.shape[1], columns : columns + visible.shape[2]] = visible
        return canvas

    def _scaled(self, image: Image.Image, size: tuple[int, int]) -> NDArray[Any]:
        """The whole image, (3, height, width): uint8, or colours in 0…1."""
        if self.arithmetic in ("torchvision", "hf_pil"):
            return _planes(image.resize(size, Image.Resampling[self.interpolation.upper()]))
        from torchvision.transforms.v2 import InterpolationMode, functional

        mode = InterpolationMode("nearest-exact" if self.interpolation == "nearest" else self.interpolation)

        def resized(pixels: Tensor) -> Tensor:
            return cast(Tensor, functional.resize(pixels, [size[1], size[0]], interpolation=mode, antialias=True))

        if self.arithmetic == "hf_torchvision_float":  # one colour at a time: all floats of a photograph are a gigabyte
            return np.concatenate(
                [resized(torch.from_numpy(np.array(colour))[None].float() / 255).numpy() for colour in image.split()]
            )
        return resized(torch.from_numpy(np.array(_planes(image), order="C"))).numpy()

    def _sampled_inside(
        self, image: Image.Image, scaled_size: tuple[int, int], left: int, top: int
    ) -> NDArray[np.uint8]:
        """Samples only the part of a huge scaled image that the crop shows."""
        right, bottom = (
            min(left + self.library_size[1], scaled_size[0]),
            min(top + self.library_size[0], scaled_size[1]),
        )
        left, top = max(left, 0), max(top, 0)
        across, down = image.width / scaled_size[0], image.height / scaled_size[1]
        box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
        method = Image.Resampling[self.interpolation.upper()]
        return _planes(image.resize((right - left, bottom - top), method, box=box))


def _nearest(start: int, count: int, edge: int, scaled_edge: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Which original pixel each of `count` scaled pixels falls on, and which of them lie in the image."""
    scaled = np.arange(start, start + count)
    # Integers: the centre may fall exactly between two pixels, where rounding would decide.
    original = (2 * scaled + 1) * edge // (2 * scaled_edge)
    return original.clip(0, edge - 1), (original >= 0) & (original < edge)


def _planes(image: Image.Image) -> NDArray[np.uint8]:
    """The colours of an RGB image, (3, height, width)."""
    return np.asarray(image).transpose(2, 0, 1)


def _huggingface_geometry(
    config: Mapping[str, Any], name: str, image_size: int | tuple[int, int] | None
) -> tuple[tuple[int, int], Fit, int | tuple[int, int] | None]:
    """(input size, fit, resize) of an image processor's configuration."""
    model_size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if (
        model_size is not None and "max_num_patches" in config
    ):  # as many patches as fit, whatever the shape of the image
        return model_size, "squash", None
    crop = _pair(config.get("crop_size")) if config.get("do_center_crop") else None
    resize = config.get("size") if config.get("do_resize", True) else None
    exact, shortest = _pair(resize), (resize or {}).get("shortest_edge")
    size = crop or exact or model_size
    loose = crop is None and shortest is not None and model_size != (shortest, shortest)
    if size is None or loose or (resize is None and crop is not None) or (resize or {}).get("longest_edge"):
        raise VitrailError(
            f"{name} (size {resize}, crop {crop}) does not lead to inputs of one size: "
            "set its size to height and width, or to shortest_edge with a center crop."
        )
    if exact is None and shortest is not None:
        return size, "crop", int(shortest)
    return size, "squash", exact


def _huggingface_colours(config: Mapping[str, Any]) -> tuple[Triple, Triple]:
    """The (mean, std) that act on colours in 0…1 as the processor's rescaling and normalisation do."""
    scale = 255 * config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 255.0
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if config.get("do_normalize", True):
        mean, std = _triple(config["image_mean"]), _triple(config["image_std"])
    # Rounded so that the usual 255 · (1/255) leaves the published numbers as they are.
    scale = round(scale, 12)
    return _triple([value / scale for value in mean]), _triple([value / scale for value in std])


def _huggingface_arithmetic(processor: Any) -> Arithmetic:
    if getattr(processor, "backend", "pil") == "pil":
        return "hf_pil"
    # DINOv3's processor alone divides by 255 before it resizes.
    return "hf_torchvision_float" if type(processor).__name__.startswith("DINOv3") else "hf_torchvision"


def _pair(size: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if size and size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    return None


def _triple(values: Any) -> Triple:
    """Three floats from three numbers, or from one for all colours."""
    try:
        numbers = [float(value) for value in values] if np.iterable(values) else [float(values)]
    except (TypeError, ValueError):
        raise _wrong("mean or std", values, "three numbers, one per colour") from None
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3:
        raise _wrong("mean or std", values, "three numbers, one per colour")
    return numbers[0], numbers[1], numbers[2]


def _is_edge(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_edge(edge) for edge in value)


def _wrong(name: str, value: object, expected: str) -> VitrailError:
    return VitrailError(f"preprocessing has {name} = {value!r}, expected {expected}.")
