"""Hugging Face Vision Transformers in canonical form: ViT, DeiT, DINOv2 (± registers), BEiT, CLIP, SigLIP, DINOv3.

SigLIP 2 of any resolution (NaFlex) reads patches and the shape of their grid; a view has one shape.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models.clone import evaluation_clone
from vitrail.models.translation import (
    activation,
    check_dropout,
    classifier,
    fused_qkv,
    gamma,
    linear,
    mean_of_patches,
    needed_norm,
    no_pool,
    norm,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
)

# Classifier class → how its head pools.
CLASSIFIERS: dict[str, parts.PoolKind] = {
    "ViTForImageClassification": "token",
    "DeiTForImageClassification": "token",
    "DeiTForImageClassificationWithTeacher": "pair",
    "Dinov2ForImageClassification": "token_and_mean",
    "Dinov2WithRegistersForImageClassification": "token_and_mean",
    "BeitForImageClassification": "mean",
    "CLIPForImageClassification": "mean",
    "SiglipForImageClassification": "mean",
    "Siglip2ForImageClassification": "mean",
}
BACKBONES = (
    "ViTModel",
    "DeiTModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "BeitModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
    "Siglip2VisionModel",
    "DINOv3ViTModel",
)
NETWORKS = (*CLASSIFIERS, *BACKBONES)
DETECTOR = "YolosForObjectDetection"  # of models/detection.py
SEGMENTERS = ("EomtForUniversalSegmentation", "EomtDinov3ForUniversalSegmentation")  # of models/segmentation.py
HIERARCHICAL = ("SwinForImageClassification", "Swinv2ForImageClassification")


# End of the name of a class → why it cannot be seen into, and what can.
REFUSED = {
    "ObjectDetection": (
        "its boxes come from a decoder, not from tokens of a plain Vision Transformer as those of "
        "YolosForObjectDetection",
        "the logits of one box",
    ),
    "Segmentation": (
        "it merges patches or decodes them together, so that no output is that of a patch; EoMT and a plain backbone "
        'with a head on its patches are seen into, vitrail.wrap(backbone, head=…, pool="patches")',
        "the mean logits of a region",
    ),
}


def check_kind(module: nn.Module) -> None:
    """Refuses detectors and segmenters of Hugging Face that are not plain Vision Transformers."""
    if is_huggingface(module):
        check_class(type(module).__name__)


def check_class(name: str) -> None:
    """Refuses such classes by name."""
    for task, (why, outputs) in REFUSED.items():
        if name.endswith(task) and name not in (DETECTOR, *SEGMENTERS):
            raise VitrailError(
                f"{name} is not supported: {why}. To explain it by mask methods, wrap a module of your own that "
                f"returns {outputs}, (B, classes)."
            )


def is_huggingface(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.") and hasattr(module, "config")


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form of a Hugging Face network whose input is ``size`` (H, W)."""
    kind = type(module).__name__
    if kind not in CLASSIFIERS and not (kind in BACKBONES and head is not None):
        why = (
            "it has no classification head: give head= and pool="
            if kind in BACKBONES
            else "it is not a supported classifier"
        )
        raise refuse(module, why)
    backbone = _backbone(module)
    if type(backbone).__name__ not in BACKBONES:  # older releases have other parts under other names
        raise refuse(backbone, "it is not a backbone of transformers ≥ 5.22; upgrade transformers")
    embedding = _embedding(backbone, size)
    grid = (size[0] // embedding.weight.shape[-2], size[1] // embedding.weight.shape[-1])
    rope, shared = rotary(backbone, size, embedding.weight), _shared_bias(backbone, grid)
    blocks = tuple(block(layer, rope, shared, grid) for layer in _layers(backbone))
    classifier_head = _head(module, backbone) if head is None else _probe(backbone, head, pool)
    return parts.Architecture(embedding, blocks, classifier_head)


def logits(module: Any, images: Tensor, head: nn.Module | None, pool: str | None) -> Tensor:
    """The network's own logits; with ``head``, those of the head on the backbone's tokens or its pooled output."""
    options = inputs(module, images) | {"return_dict": True}
    if head is None:
        return module(**options).logits
    backbone = _backbone(module)
    out = backbone(**options)
    match pool:
        case "token":
            return head(out.last_hidden_state[:, 0])
        case "avg":
            return head(out.last_hidden_state[:, _count_prefix(backbone) :].mean(1))
        case "patches":
            return mean_of_patches(head, out.last_hidden_state[:, _count_prefix(backbone) :])
        case _:
            return head(out.pooler_output)


def own_pool(module: Any) -> str | None:
    """How a backbone without a head pools its tokens; None = it has a head.

    The poolers of ViT and DeiT are left out: few checkpoints have trained ones.
    """
    match type(module).__name__:
        case "CLIPVisionModel":
            return "pooler"
        case "SiglipVisionModel" | "Siglip2VisionModel":
            return "map" if isinstance(getattr(module, "head", None), nn.Module) else "avg"
        case "BeitModel":
            return "token" if module.pooler is None else "pooler"
        case kind:
            return "token" if kind in BACKBONES else None


def width(module: Any) -> int:
    """The number of channels of what a head reads."""
    return int(module.config.hidden_size)


def inputs(module: Any, images: Tensor) -> dict[str, Any]:
    """What a network is called with for images of one size (B, 3, H, W)."""
    if _takes_patches(module):
        edge = _backbone(module).config.patch_size
        grid = images.shape[-2] // edge, images.shape[-1] // edge
        pixels = images[..., : grid[0] * edge, : grid[1] * edge].unflatten(3, (-1, edge)).unflatten(2, (-1, edge))
        patches = pixels.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, N, rows · columns · colours)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=images.device),
            "spatial_shapes": torch.tensor([grid] * len(images), device=images.device),
        }
    resized = tuple(images.shape[-2:]) != native_size(module) and not adapts_to_input(module)
    return {"pixel_values": images} | ({"interpolate_pos_encoding": True} if resized else {})


def _takes_patches(module: Any) -> bool:
    """Whether it reads patches and the shape of their grid, not images."""
    return type(_backbone(module)).__name__ == "Siglip2VisionModel"


def native_size(module: Any) -> tuple[int, int]:
    """(H, W) of the input that it was built for; of one that reads patches, that of its table of positions."""
    config = _backbone(module).config
    if _takes_patches(module):
        edge = math.isqrt(config.num_patches) * config.patch_size
        return edge, edge
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def takes_other_sizes(module: Any) -> bool:
    """Whether positions can be interpolated; a relative bias is tied to its window here."""
    backbone = _backbone(module)
    interpolates = hasattr(backbone.embeddings, "interpolate_pos_encoding")
    return interpolates or hasattr(backbone, "rope_embeddings") or _takes_patches(module)


def adapts_to_input(module: Any) -> bool:
    """Whether it interpolates its positions without being asked to, as DINOv2, DINOv3, BEiT and SigLIP 2 do."""
    parameters = inspect.signature(type(_backbone(module).embeddings).forward).parameters
    return takes_other_sizes(module) and "interpolate_pos_encoding" not in parameters


def _backbone(module: Any) -> Any:
    for name in ("vit", "deit", "dinov2", "dinov2_with_registers", "beit", "vision_model"):
        if hasattr(module, name):
            return getattr(module, name)
    return module


def _first(module: Any, *names: str) -> Any:
    """The first of several attributes that a module has: families differ in names only."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise refuse(module, f"it has none of the parts {', '.join(names)}; upgrade to transformers ≥ 5.22")


def _layers(backbone: Any) -> Any:
    holder = backbone if hasattr(backbone, "layers") else _first(backbone, "encoder", "model")
    return _first(holder, "layers", "layer")


def _embedding(backbone: Any, size: tuple[int, int]) -> parts.Embedding:
    source = backbone.embeddings
    if _takes_patches(backbone):
        return _patch_embedding(source, size)
    conv = _first(source, "patch_embeddings", "patch_embedding")
    conv = conv.projection if hasattr(conv, "projection") else conv
    convolution = patch_convolution(conv)
    check_dropout(source, "dropout")
    positioned = _positioned_tokens(source)
    registers = getattr(source, "register_tokens", None)
    tokens = [*positioned, *([] if registers is None else [registers])]
    prefix = prefix_tokens(*tokens) if tokens else convolution.weight.new_zeros(0, conv.out_channels)
    count = (size[0] // conv.kernel_size[0]) * (size[1] // conv.kernel_size[1])
    table = _position_table(source, conv.weight, len(positioned), count, size)
    if table is not None and registers is not None:  # registers stand after the class token and have no position
        gap = table.new_zeros(1, registers.shape[1], table.shape[-1])
        table = torch.cat([table[:, : len(positioned)], gap, table[:, len(positioned) :]], dim=1)
    return parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=prefix,
        positions=positions(table, prefix.shape[0], count),
        norm=norm(getattr(backbone, "pre_layrnorm", None)),
    )


def _patch_embedding(source: Any, size: tuple[int, int]) -> parts.Embedding:
    """The embedding of patches that come with the shape of their grid, by the model's own rule for positions."""
    layer, edge = linear(source.patch_embedding), source.patch_size
    weight = layer.weight.unflatten(1, (edge, edge, -1)).permute(0, 3, 1, 2)  # (d, colours, rows, columns)
    grid = torch.tensor([[size[0] // edge, size[1] // edge]])
    side = source.position_embedding_size
    with torch.no_grad():
        table = source.position_embedding.weight.detach().unflatten(0, (side, side))
        placed = source.resize_positional_embeddings(table, grid, int(grid.prod()))[0]
    return parts.Embedding(weight, layer.bias, weight.new_zeros(0, weight.shape[0]), placed)


def _positioned_tokens(source: Any) -> list[Tensor]:
    """The prefix tokens that have an entry in the position table."""
    tokens = [getattr(source, name, None) for name in ("cls_token", "class_embedding", "distillation_token")]
    return [token for token in tokens if token is not None]


def _count_prefix(backbone: Any) -> int:
    registers = getattr(backbone.embeddings, "register_tokens", None)
    return len(_positioned_tokens(backbone.embeddings)) + (0 if registers is None else registers.shape[1])


def _position_table(source: Any, like: Tensor, extra: int, count: int, size: tuple[int, int]) -> Tensor | None:
    """(1, tokens with a position, d), interpolated by the model's own rule where the size is not its native one."""
    embedding = getattr(source, "position_embedding", None)
    table = embedding.weight[None] if embedding is not None else getattr(source, "position_embeddings", None)
    if table is None:
        return None
    table = table.detach()
    native = getattr(source, "image_size", None)
    native = (native, native) if isinstance(native, int) else native
    if (native is not None and tuple(native) == size) or not hasattr(source, "interpolate_pos_encoding"):
        return table
    with torch.no_grad():
        probe = like.new_zeros(1, count + extra, table.shape[-1])
        return source.interpolate_pos_encoding(probe, *size).detach()


def rotary(backbone: Any, size: tuple[int, int], like: Tensor) -> parts.Rope | None:
    """The rotary positions of an input of ``size`` (H, W), if there are some."""
    source = getattr(backbone, "rope_embeddings", None)
    if source is None:
        return None
    with torch.no_grad():  # in training mode the coordinates are augmented at random
        cos, sin = evaluation_clone(source)(like.new_zeros(1, 3, *size))
    return parts.Rope(sin, cos, half=True)


def _shared_bias(backbone: Any, grid: tuple[int, int]) -> Tensor | None:
    return _relative_bias(getattr(backbone, "shared_position_bias", None), grid)


def _relative_bias(source: Any, grid: tuple[int, int]) -> Tensor | None:
    """(heads, n, n)"""
    if source is None:
        return None
    with torch.no_grad():
        return source(grid)[0].detach()


def block(layer: Any, rope: parts.Rope | None, shared: Tensor | None, grid: tuple[int, int]) -> parts.Block:
    """A pre-norm block; families differ in the names of its parts."""
    check_dropout(layer, "dropout", "drop_path")
    own_bias = _relative_bias(getattr(layer, "relative_position_bias", None), grid)
    bias = own_bias if shared is None else shared if own_bias is None else own_bias + shared
    return parts.Block(
        norm1=needed_norm(_first(layer, "layernorm_before", "norm1", "layer_norm1")),
        attention=_attention(_first(layer, "attention", "self_attn"), rope, bias),
        norm2=needed_norm(_first(layer, "layernorm_after", "norm2", "layer_norm2")),
        mlp=_mlp(layer.mlp),
        scale1=gamma(getattr(layer, "lambda_1", getattr(layer, "layer_scale1", None))),
        scale2=gamma(getattr(layer, "lambda_2", getattr(layer, "layer_scale2", None))),
    )


def _attention(attention: Any, rope: parts.Rope | None, bias: Tensor | None) -> parts.Attention:
    heads = _first(attention, "num_attention_heads", "num_heads")
    q, k, v = (linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
    proj, scale = linear(_first(attention, "o_proj", "out_proj")), float(_first(attention, "scaling", "scale"))
    return parts.Attention(heads=heads, q=q, k=k, v=v, proj=proj, scale=scale, rope=rope, bias=bias)


def _mlp(mlp: Any) -> parts.Mlp:
    act = activation(_first(mlp, "activation_fn", "act_fn"))
    if hasattr(mlp, "gate_proj"):
        return parts.Mlp(linear(mlp.gate_proj), linear(mlp.down_proj), act, linear(mlp.up_proj))
    return parts.Mlp(linear(_first(mlp, "fc1", "up_proj")), linear(_first(mlp, "fc2", "down_proj")), act)


def _final_norm(backbone: Any) -> parts.Norm | None:
    """The norm of the last hidden state; CLIP has none (its post-norm sees only the pooled class token)."""
    if type(backbone).__name__ == "CLIPVisionModel":
        return None
    return norm(_first(backbone, "layernorm", "norm", "post_layernorm"))


def _head(module: Any, backbone: Any) -> parts.Head:
    final, kind = _final_norm(backbone), CLASSIFIERS[type(module).__name__]
    if kind == "pair":
        return parts.Head(final, kind, (linear(module.cls_classifier), linear(module.distillation_classifier)))
    if isinstance(module.classifier, nn.Identity):
        raise refuse(module, "it has no classification head (num_labels is 0)")
    if type(module).__name__ == "BeitForImageClassification":
        return _pooler(backbone, module.classifier)
    return classifier(module.classifier, final, kind)


def _probe(backbone: Any, head: nn.Module, pool: str | None) -> parts.Head:
    """A head on the tokens of a backbone, or on what its own pooler makes of them."""
    final = _final_norm(backbone)
    match pool:
        case "token":
            if not _positioned_tokens(backbone.embeddings):
                raise no_pool(backbone, pool)
            return classifier(head, final, "token")
        case "avg":
            return classifier(head, final, "mean")
        case "patches":
            return classifier(head, final, "patches")
        case "map" if not isinstance(getattr(backbone, "head", None), nn.Module):
            raise no_pool(backbone, pool)
        case _:
            return _pooler(backbone, head)


def _pooler(backbone: Any, head: nn.Module) -> parts.Head:
    """A head on the backbone's ``pooler_output``."""
    final, kind = _final_norm(backbone), type(backbone).__name__
    if kind == "CLIPVisionModel":
        return classifier(head, None, "token", pooled_norm=norm(backbone.post_layernorm))
    if kind in ("SiglipVisionModel", "Siglip2VisionModel") and isinstance(getattr(backbone, "head", None), nn.Module):
        return classifier(head, final, "attention", attention_pool=_attention_pool(backbone.head))
    if kind in ("Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel"):
        return classifier(head, final, "token")
    pooler = getattr(backbone, "pooler", None)
    if pooler is None:
        raise no_pool(backbone, "pooler")
    if kind == "BeitModel":
        return classifier(
            head, final, "token" if pooler.layernorm is None else "mean", pooled_norm=norm(pooler.layernorm)
        )
    probe, pooling = classifier(head, final, "token"), parts.Dense(linear(pooler.dense), activation(pooler.activation))
    return replace(probe, dense=(pooling, *probe.dense))


def _attention_pool(pool: Any) -> parts.AttentionPool:
    """SigLIP's: a learned query, attention, and a residual MLP."""
    attention = pool.attention
    q, k, v, _ = fused_qkv(attention.in_proj_weight, attention.in_proj_bias)
    mixing = parts.Attention(
        heads=attention.num_heads, q=q, k=k, v=v, proj=linear(attention.out_proj), scale=attention.head_dim**-0.5
    )
    return parts.AttentionPool(pool.probe.detach()[0], mixing, norm(pool.layernorm), _mlp(pool.mlp))
