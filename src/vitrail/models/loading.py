"""``load``: a view from a name, with its weights from the hub, a file or the package."""

from __future__ import annotations

import difflib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.errors import VitrailError
from vitrail.models import clip, embedded, huggingface
from vitrail.models.checkpoints import head_of, linear_head, load_state, read_state
from vitrail.models.hub import cached_commit, split_revision
from vitrail.models.names import classes, is_backbone, is_projecting, tags, with_head
from vitrail.models.preprocessing import Preprocess
from vitrail.models.registry import MODELS, build, is_built_in, is_registered
from vitrail.models.view import Output, View
from vitrail.models.wrapping import as_pair, outline, prompts_of, reads_no_texts, wrap
from vitrail.models.zero_shot import Prompts, checked_prompts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FOLDERS = (".", "/", "~")  # how a local folder starts, as opposed to a name on the hub
TIMM_HUB = ("hf_hub:", "hf-hub:")  # how timm names its models on the hub
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
REACH_SECONDS = 4.0  # in which the hub must answer
UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")  # in the message of a TypeError


@torch.inference_mode(False)  # weights made in inference mode could never be explained by gradients
def load(
    name: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    head: str | Path | None = None,
    pool: str | None = None,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    pretrained: bool | None = None,
    num_classes: int | None = None,
    embedding: bool = False,
    img_size: int | tuple[int, int] | None = None,
    output: Output | None = None,
    fit: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    prompts: Prompts | None = None,
    features: str | Sequence[str] | None = None,
    black_box: bool = False,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    **model_args: Any,
) -> View:
    """A view of a model by name.

    Args:
        name: a timm name (its tag allowed), ``hf_hub:ORG/NAME`` (a timm model on the hub), ``hf:ORG/NAME`` or
            ``hf:./folder`` (Hugging Face), ``torchvision:NAME``, an embedded model, or one registered with
            ``vitrail.model``; None = the embedded default. ``NAME@REVISION`` pins what comes from the hub to a branch,
            tag or commit.
        checkpoint: a file with the weights (safetensors or torch).
        head: a file with weights that replace those of ``checkpoint``: those of a linear probe, for example. With
            ``pool``: a file with the weights of a linear head for a backbone.
        pool: with ``head``: what the head reads, as in ``wrap``; "patches" for a segmentation head.
        labels: class names, or a file of them.
        pretrained: fetch weights; by default yes, unless ``checkpoint`` is given.
        num_classes: size of the head, where ``checkpoint`` does not determine it.
        embedding: leave the head out, to compare images by their embeddings; a CLIP tower keeps its projection.
        img_size: input size, if not the model's default.
        output: "softmax" or "sigmoid"; None = as the model says.
        fit: how images become inputs, if not as the model says: "squash", "crop" or "pad"; another fit scales to the
            input size exactly.
        mean: colour mean of the preprocessing, likewise.
        std: colour standard deviation, likewise.
        crop_pct: the image is scaled to the input size divided by this, likewise.
        interpolation: "bicubic", "bilinear", "nearest" or "lanczos", likewise.
        prompts: the classes of a CLIP or SigLIP of Hugging Face, or of `scenes-text`: texts, lists of texts that are
            averaged, or either by a name.
        features: the path of a layer whose output is a feature map, or several, of a model that is no plain ViT.
        black_box: explain the model by its logits, even where it is a plain ViT.
        device: "auto" = CUDA if available.
        dtype: "auto" = float32.
        model_args: passed on to the library that builds the model.
    """
    if name is not None and not isinstance(name, str):
        raise VitrailError(f"load() takes a name, but got {type(name).__name__}. For a module: vitrail.wrap.")
    if name is not None and _on_hub(name) and "revision" in model_args:
        name = f"{name}@{model_args.pop('revision')}"
    device, dtype, _ = pick_device(device), pick_dtype(dtype), as_pair(img_size)  # refuse wrong ones before any work
    if prompts is not None:
        _check_takes_prompts(name)
        is_unknown = name is not None and name.startswith("hf:")  # until its configuration is read
        prompts = checked_prompts(prompts, fewest=1 if is_unknown else 2)
    features = features if features is None or isinstance(features, str) else list(features)
    view_args = {
        "labels": labels, "output": output, "prompts": prompts, "features": features, "black_box": black_box
    }  # fmt: skip
    request = LoadRequest(
        name=name or "",
        checkpoint=checkpoint,
        head=head,
        pool=pool,
        pretrained=pretrained,
        num_classes=num_classes,
        embedding=embedding,
        img_size=img_size,
        view_args=view_args,
        model_args=model_args,
        device=device,
        dtype=dtype,
    )
    kind = (name or embedded.DEFAULT).partition(":")[0]
    if is_built_in(kind):
        MODELS.mention_hidden(kind)
    if name is None or name in embedded.names():
        request.refuse_for_embedded()
        view = embedded.load_embedded(name, prompts)
    elif name.startswith("hf:"):
        view = _load_huggingface(request)
    elif name.startswith("torchvision:"):
        view = _load_torchvision(request)
    elif is_registered(name):
        view = _load_registered(request)
    else:
        view = _load_timm(request)
    changes = {"fit": fit, "mean": mean, "std": std, "crop_pct": crop_pct, "interpolation": interpolation}
    settings: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    view.preprocessing = view.preprocessing.changed(**settings)
    view.spec = request.spec(view.commit) | settings
    if dtype != torch.float32:
        view.spec["dtype"] = str(dtype).removeprefix("torch.")
    view.module.eval()
    view.module.requires_grad_(False)
    return view.to(device, dtype)


def _check_takes_prompts(name: str | None) -> None:
    """Refuses prompts for a model whose classes are no texts, as far as its name tells."""
    name = name or embedded.DEFAULT
    if not (embedded.reads_texts(name) if name in embedded.names() else name.startswith("hf:")):
        raise VitrailError(
            f"{name} takes no prompts, which are for scenes-text and for CLIP and SigLIP of Hugging Face "
            "(hf:ORG/NAME): ask about the classes that it has, or name one of these."
        )


def load_embedder(name: str | None, **options: Any) -> View:
    """As ``load``; a timm name without classes is loaded as the embedding that it is."""
    has_head = not {"checkpoint", "head", "num_classes"}.isdisjoint(options)
    is_bare = name is not None and not has_head and is_backbone(split_revision(name)[0])
    return load(name, embedding=True, **options) if is_bare else load(name, **options)


def as_view(model: View | nn.Module | str) -> View:
    """A view from whatever names or holds a model."""
    if isinstance(model, View):
        return model
    return load(model) if isinstance(model, str) else wrap(model)


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The arguments of a ``load`` call."""

    name: str
    checkpoint: str | Path | None
    head: str | Path | None
    pool: str | None
    pretrained: bool | None
    num_classes: int | None
    embedding: bool
    img_size: int | tuple[int, int] | None
    view_args: dict[str, Any]  # labels, output, prompts, features, black_box
    model_args: dict[str, Any]
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.embedding and self.name.startswith(("hf:", "torchvision:")):
            raise VitrailError(f"{self.name} is loaded with the head that it has: embedding= is for timm models.")

    def view(self, module: nn.Module, **options: Any) -> View:
        """The module as a view; on the meta device there is nothing to run."""
        make = outline if self.device.type == "meta" else wrap
        if self.pool is not None:
            if self.head is None:
                raise VitrailError("pool= says what a head reads: give head=, the file with its weights.")
            options |= {"head": linear_head(self.head), "pool": self.pool}
        return make(module, name=self.name, **options, **self.view_args)

    @property
    def wants_weights(self) -> bool:
        """Whether the library should fetch weights: by default, unless a file brings them."""
        return self.checkpoint is None if self.pretrained is None else self.pretrained

    def state(self) -> dict[str, torch.Tensor] | None:
        if self.checkpoint is None:
            if self.head is not None and self.pool is None:
                raise VitrailError(
                    "head= replaces weights of a checkpoint: give checkpoint= too, or pool=, what a head of a backbone "
                    "reads."
                )
            return None
        replaced = {} if self.head is None or self.pool is not None else read_state(self.head)
        return read_state(self.checkpoint) | replaced

    def classes(self, state: Mapping[str, torch.Tensor] | None) -> int | None:
        """The size of the head: as given, or as the checkpoint has it; None = the library's default; 0 = no head."""
        if self.num_classes is not None and self.num_classes < 1:
            raise VitrailError(f"num_classes must be at least 1 to explain a class, but got {self.num_classes}.")
        if self.pool is not None:
            if self.num_classes is not None:
                raise VitrailError("num_classes= contradicts head= and pool=: the head has its own number of classes.")
            return 0
        if self.embedding:
            if self.num_classes is not None or self.head is not None:
                raise VitrailError("embedding= leaves the head out: leave num_classes= and head= out too.")
            return None if is_projecting(split_revision(self.name)[0]) else 0
        return _classes_in(state) if self.num_classes is None and state is not None else self.num_classes

    def spec(self, commit: str | None = None) -> dict[str, Any]:
        """The arguments that load the same model again, as JSON can hold them; ``commit``: what the hub gave."""
        labels = self.view_args["labels"]
        if isinstance(labels, str | Path):
            labels = str(Path(labels).resolve())
        elif labels is not None:
            labels = dict(labels) if isinstance(labels, Mapping) else list(labels)
        arguments = {
            "name": self._exact_name(commit) or None,
            "checkpoint": None if self.checkpoint is None else str(Path(self.checkpoint).resolve()),
            "head": None if self.head is None else str(Path(self.head).resolve()),
            "pool": self.pool,
            "pretrained": self.pretrained,
            "num_classes": self.num_classes,
            "embedding": self.embedding or None,
            "img_size": self.img_size,
            "labels": labels,
            "output": self.view_args["output"],
            "prompts": self.view_args["prompts"],
            "features": self.view_args["features"],
            "black_box": self.view_args["black_box"] or None,
            **self.model_args,
        }
        return {key: value for key, value in arguments.items() if value is not None}

    def _exact_name(self, commit: str | None) -> str:
        """The name, with an absolute path where it holds a folder, else with the commit."""
        if self.name.startswith("hf:") and not _on_hub(self.name):
            return f"hf:{Path(self.name.removeprefix('hf:')).expanduser().resolve()}"
        return self.name if commit is None else f"{split_revision(self.name)[0]}@{commit}"

    def refuse_for_embedded(self) -> None:
        allowed = {"name", "prompts"} if self.name and embedded.reads_texts(self.name) else {"name"}
        arguments = sorted(set(self.spec()) - allowed)
        if arguments:
            raise VitrailError(f"an embedded model takes no {', '.join(arguments)}: name another model to use it with.")


def pick_device(device: str | torch.device) -> torch.device:
    """CUDA where there is one, for "auto"; anything else must exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise VitrailError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}.") from None


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in DTYPES:
        raise VitrailError(f"unknown dtype {name!r}: expected auto, {', '.join(DTYPES)}.")
    return torch.float32 if name == "auto" else DTYPES[name]


def _load_timm(request: LoadRequest) -> View:
    import timm

    (name, revision), state = split_revision(request.name), request.state()
    num_classes, wants_weights = request.classes(state), request.wants_weights
    from_hub = name.startswith(TIMM_HUB)
    source: dict[str, Any] = {}
    if from_hub:  # timm splits off the revision itself
        name = request.name
    else:
        if not timm.is_model(name) or ("." in name and name not in tags(name)):
            raise _unknown_name(name)
        if not request.embedding:
            _check_has_head(name, num_classes)
        source = _timm_source(name, revision, wants_weights)
    sizes = {"num_classes": num_classes, "img_size": request.img_size}
    given = {key: value for key, value in sizes.items() if value is not None}
    arguments = {**source, **given, **request.model_args}

    def build() -> Any:
        try:
            return timm.create_model(name, pretrained=wants_weights, **arguments)
        except TypeError as error:
            unknown = UNKNOWN.search(str(error))
            if unknown is None or unknown[1] != "img_size":
                raise
        del arguments["img_size"]  # a network that takes any size
        return timm.create_model(name, pretrained=wants_weights, **arguments)

    module = _fetch(name, build, wants_weights or from_hub)
    trained = None if state is None or request.img_size is None else _trained_size(module, state)
    if trained is not None:  # weights of another size: fill a model of theirs, then let timm resample its positions
        module = _fetch(name, lambda: timm.create_model(name, pretrained=False, **{**arguments, "img_size": trained}))
    _fill(module, state, request)
    if trained is not None:
        module.set_input_size(img_size=as_pair(request.img_size))
    view = request.view(module, img_size=None if "img_size" in arguments else request.img_size)
    repository = (module.pretrained_cfg or {}).get("hf_hub_id")
    if repository and (wants_weights or from_hub):
        view.commit = cached_commit(*split_revision(repository), arguments.get("cache_dir"))
    return view


def _timm_source(name: str, revision: str | None, wants_weights: bool) -> dict[str, Any]:
    """The argument by which timm takes the weights of a name from a revision of its repository."""
    import timm

    if revision is None:
        return {}
    config = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if not wants_weights or config is None or not config.hf_hub_id:
        reason = "whose weights are not on the hub" if wants_weights else "without weights of the hub"
        raise VitrailError(f"{name}@{revision} names a revision of {name}, {reason}: leave out @{revision}.")
    return {"pretrained_cfg_overlay": {"hf_hub_id": f"{config.hf_hub_id}@{revision}"}}


def _trained_size(module: Any, state: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
    """The square input size that a checkpoint's positions are for, if not the module's own."""
    expected, table = getattr(module, "pos_embed", None), state.get("pos_embed")
    if expected is None or table is None or expected.shape == table.shape or not hasattr(module, "set_input_size"):
        return None
    prefix = 0 if getattr(module, "no_embed_class", False) else module.num_prefix_tokens
    side = math.isqrt(max(table.shape[1] - prefix, 0))
    patch = module.patch_embed.patch_size
    return (side * patch[0], side * patch[1]) if side * side + prefix == table.shape[1] else None


def _load_torchvision(request: LoadRequest) -> View:
    from torchvision import models

    short, state = request.name.removeprefix("torchvision:"), request.state()
    if short not in models.list_models():
        close = difflib.get_close_matches(short, models.list_models(include=["*vit*", "*swin*"]), n=4)
        raise VitrailError(f"torchvision has no model {short!r}. Did you mean {', '.join(close) or 'vit_b_16'}?")
    num_classes = request.classes(state)
    arguments = {**request.model_args, **({"num_classes": num_classes} if num_classes else {})}
    is_vit = short.startswith("vit")
    if request.img_size is not None and is_vit:
        arguments["image_size"] = request.img_size
    weights = models.get_model_weights(short).DEFAULT if request.wants_weights else None
    shows_progress = sys.stderr is not None and sys.stderr.isatty()
    module = _fetch(
        request.name, lambda: models.get_model(short, weights=weights, progress=shows_progress, **arguments)
    )
    _fill(module, state, request)
    view = request.view(module, img_size=None if is_vit else request.img_size)
    if weights is not None and request.img_size is None:
        view.preprocessing = Preprocess.from_torchvision(weights.transforms())
    return view


def _load_registered(request: LoadRequest) -> View:
    sizes = {"pretrained": request.pretrained, "num_classes": request.num_classes, "img_size": request.img_size}
    options = {**{name: value for name, value in sizes.items() if value is not None}, **request.model_args}
    made = build(request.name, options)
    if isinstance(made, View):
        others = sorted(set(request.spec()) - {"name", *options})
        if others:
            raise VitrailError(f"the model {request.name} is a complete view: leave out {', '.join(others)}.")
        made.name = request.name
        return made
    state = request.state()
    if state is not None:
        load_state(made, state, str(request.checkpoint))
    return request.view(made)


def _fill(module: nn.Module, state: Mapping[str, torch.Tensor] | None, request: LoadRequest) -> None:
    """Loads the weights of the file into the model; warns if the model or its head has random weights."""
    if state is not None:
        load_state(module, state, str(request.checkpoint))
        return
    if not request.wants_weights:
        warnings.warn(
            f"{request.name} has random weights (pretrained=False): its explanations are meaningless.", stacklevel=5
        )
        return
    config = getattr(module, "pretrained_cfg", None) or {}
    trained, num_classes = config.get("num_classes"), getattr(module, "num_classes", None)
    if trained is not None and trained != num_classes and request.pool is None and not request.embedding:
        warnings.warn(
            f"{request.name} has a random head: {num_classes} classes, its weights have {trained}.", stacklevel=5
        )


def _load_huggingface(request: LoadRequest) -> View:
    try:
        from transformers import AutoImageProcessor, AutoTokenizer
    except ImportError:
        raise VitrailError('Hugging Face models need an extra: pip install "vitrail[hf]".') from None
    name = request.name
    arguments = _huggingface_arguments(request)
    source, revision = _huggingface_source(name.removeprefix("hf:"))
    is_local, reads_texts = Path(source).is_dir(), request.view_args["prompts"] is not None
    pin = {} if revision is None else {"revision": revision}
    loader = _huggingface_loader(request, source, is_local, pin)
    with _quiet_transformers(local=is_local):
        module, info = _fetch(
            name,
            lambda: loader.from_pretrained(
                source, output_loading_info=True, trust_remote_code=False, **pin, **arguments
            ),
            not is_local,
        )
    if reads_texts:
        prompts_of(module, request.view_args["prompts"])
        module.to(torch.promote_types(request.dtype, torch.float32))  # embeddings of texts are not rounded to half
    _check_complete(name, module, info, request.pool or huggingface.own_pool(module))
    processor = None
    if not is_local or _has_any(source, PROCESSOR_FILES):
        read = AutoImageProcessor.from_pretrained
        processor = _fetch(name, lambda: read(source, trust_remote_code=False, **pin), not is_local)
    tokenizer = None
    if reads_texts:
        if is_local and not _has_any(source, TOKENIZER_FILES):  # transformers would make up an empty one
            raise VitrailError(f"{name} has no tokenizer, which reads the prompts: save it in the same folder.")
        read = AutoTokenizer.from_pretrained
        tokenizer = _fetch(name, lambda: read(source, trust_remote_code=False, **pin), not is_local)
    view = request.view(module, processor=processor, tokenizer=tokenizer, img_size=request.img_size)
    if not is_local:
        view.commit = cached_commit(source, revision, arguments.get("cache_dir"))
    return view


def _huggingface_arguments(request: LoadRequest) -> dict[str, Any]:
    """What goes on to transformers; what a folder of transformers determines itself, and what runs code, is refused."""
    name, arguments = request.name, dict(request.model_args)
    has_head = request.head is not None and request.pool is None
    if request.checkpoint is not None or has_head or request.pretrained is False:
        raise VitrailError("hf: models carry their own weights; give the folder (hf:./folder), not checkpoint=.")
    if request.num_classes is not None:
        raise VitrailError(f"{name} keeps the head it was saved with: num_classes= is for timm and torchvision models.")
    if arguments.pop("trust_remote_code", False):
        raise _remote_code(name)
    if not arguments.pop("weights_only", True):  # as a plan or a stored explanation may ask
        raise VitrailError(
            f"weights_only=False would run the code that a pickle of {name} holds, which load() never does: save its "
            "weights as safetensors."
        )
    return arguments


def _huggingface_loader(request: LoadRequest, source: str, is_local: bool, pin: Mapping[str, str]) -> Any:
    """The class that loads a model: its backbone, a model of two towers, a detector, a segmenter or a classifier."""
    import transformers

    prompts = request.view_args["prompts"]
    if request.pool is not None:
        return transformers.AutoModel
    read = transformers.PreTrainedConfig.get_config_dict
    config, _ = _fetch(request.name, lambda: read(source, **pin), not is_local)
    kind = str((config.get("architectures") or [""])[0])
    if prompts is not None:
        if config.get("model_type") not in clip.KINDS:
            raise reads_no_texts(kind)
        checked_prompts(prompts)
        return transformers.AutoModel
    huggingface.check_class(kind)
    if kind == huggingface.DETECTOR:
        return transformers.AutoModelForObjectDetection
    if kind in huggingface.BACKBONES:
        return transformers.AutoModel
    if kind in huggingface.SEGMENTERS:
        return transformers.AutoModelForUniversalSegmentation
    return transformers.AutoModelForImageClassification


def _has_any(folder: str, files: Sequence[str]) -> bool:
    return any((Path(folder) / file).is_file() for file in files)


def _check_complete(name: str, module: nn.Module, info: Mapping[str, Any], pool: str | None) -> None:
    """Every weight of the model must come from its files, but for those of a pooler that is not used."""
    kind = type(module).__name__
    lost = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
    if pool not in (None, "pooler", "map"):
        lost = [key for key in lost if not key.startswith(("pooler.", "head."))]
    if lost:
        if kind.startswith(("CLIPFor", "SiglipFor", "Siglip2For")):
            raise VitrailError(
                f'{name} has no classes of its own: give prompts=["a photo of a cat", "a photo of a dog"] (--prompt).'
            )
        if kind in clip.MODELS:
            raise VitrailError(f"{name} has no weights for {', '.join(lost[:6])}: both towers are needed.")
        raise VitrailError(
            f"{name} has no weights for {', '.join(lost[:6])}: it is a backbone without a classifier. Load it with "
            f'transformers and use vitrail.wrap(backbone, head=…, pool="token"|"avg"|"pooler"|"patches").'
        )


@contextmanager
def _quiet_transformers(local: bool) -> Iterator[None]:
    """Silences the log of transformers: our errors report its failures. A progress bar is shown for downloads only."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if local and bars:
            logging.enable_progress_bar()


def _on_hub(name: str) -> bool:
    """Whether it names a Hugging Face model on the hub, and no folder."""
    return name.startswith("hf:") and not name.removeprefix("hf:").startswith(FOLDERS)


def _huggingface_source(name: str) -> tuple[str, str | None]:
    """The folder, or the repository and its revision."""
    if not name.startswith(FOLDERS):
        return split_revision(name)
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise VitrailError(f"{folder} is not a Hugging Face model folder: it has no config.json.")
    return str(folder), None


@contextmanager
def _hub(is_needed: bool) -> Iterator[None]:
    """Inside, a hub that cannot be reached is not asked: its cache is read at once, its own retries take a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if is_needed and not before and not _is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    is_offline = is_needed and constants.HF_HUB_OFFLINE
    try:
        yield
    except OSError as error:
        if not is_offline:
            raise
        raise VitrailError(
            f"the hub ({constants.ENDPOINT}) is offline, and its cache does not hold the weights: give checkpoint=FILE "
            "(--checkpoint) or a local folder (hf:./folder), or use an embedded model: "
            f"{' or '.join(embedded.names())}."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable(address: str) -> bool:
    """Whether a server answers, whatever it answers; through the user's proxy where there is one."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(address, timeout=REACH_SECONDS)
    except Exception:  # of whichever HTTP library the hub's client uses
        return False
    return True


def _fetch(name: str, build: Callable[[], Any], from_hub: bool = False) -> Any:
    """Builds a model whose weights may come over the network; any failure becomes one clear error."""
    try:
        with (
            _hub(from_hub),
            torch.random.fork_rng(),
        ):  # modules draw their first weights from the global state, which is the user's
            return build()
    except VitrailError as error:
        raise VitrailError(f"could not load {name}: {error}") from error
    except Exception as error:
        unknown = UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
        if unknown:
            raise VitrailError(f"{name} takes no argument {unknown[1]!r}: check its spelling, or remove it.") from error
        if "trust_remote_code" in str(error):
            raise _remote_code(name) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise VitrailError(
            f"could not build {name} or get its weights: {reason[:300]}. If this machine is offline, give "
            f"checkpoint=FILE (timm, torchvision) or a local folder (hf:./folder), or use vitrail.load()."
        ) from error


def _remote_code(name: str) -> VitrailError:
    return VitrailError(
        f"{name} needs custom code (trust_remote_code), which load() never runs: if you trust it, build the model "
        f"with transformers and give it to vitrail.wrap."
    )


def _classes_in(state: Mapping[str, torch.Tensor]) -> int | None:
    """The number of outputs of the head in a checkpoint."""
    names = [name for (_, kind), name in head_of(state).items() if kind == "weight"]
    # the last layer, where others stand beside it: torchvision's representation_size, the norm of a timm CNN's head
    names += ["heads.head.weight", "head.fc.weight"]
    return next((int(state[name].shape[0]) for name in names if name in state), None)


def _unknown_name(name: str) -> VitrailError:
    import timm

    stem = name.partition(".")[0]
    close = difflib.get_close_matches(stem, [*timm.list_models(), *MODELS.every_entry()], n=4)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    if timm.is_model(stem):
        hint = f" {stem} has the tags {', '.join(n.split('.', 1)[1] for n in tags(stem)) or 'none'}."
    return VitrailError(
        f"there is no model {name!r}.{hint} Names are timm's (vitrail models 'vit*'), hf_hub:ORG/NAME, hf:ORG/NAME, "
        f"hf:./folder, torchvision:NAME or those of plugins."
    )


def _check_has_head(name: str, num_classes: int | None) -> None:
    """A name whose default weights have no classes cannot be explained without more."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if num_classes is not None or config is None or classes(name):
        return
    alternatives = ", ".join(with_head(name)[:6]) or "none in timm"
    raise VitrailError(
        f"{name} is a backbone: its default weights have no classes. Weights with a head: {alternatives}. Or bring "
        f"your own head: vitrail.load({name!r}, checkpoint=FILE) or num_classes=N with checkpoint=FILE. To compare "
        "images by its embeddings: embedding=True, or vitrail similar."
    )
