"""Tiny seeded networks, one per supported family: every parameter is random, so nothing hides behind a zero or a one.

Modules are built through the libraries' own registered names, so the flags that set a family apart are the real ones.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Whether full cross products are run: most of their tests are not even collected otherwise, which takes long enough.
FULL = "VITRAIL_TEST_ALL" in os.environ
CLASSES = 5
WIDTH = 32
PROMPTS = ("a photo of a cat", "a photo of a dog", "the red star", "a blue ring", "a dog")
WORDS = ("<pad>", "<s>", "</s>", "<unk>", *"a photo of the red blue cat dog star ring".split())

QUERY_KEY_VALUE = {"qkv", "q_proj", "k_proj", "v_proj", "q", "kv"}
LAYER_SCALE = {"gamma", "gamma_1", "gamma_2", "lambda1", "lambda_1", "lambda_2"}


@dataclass(frozen=True)
class Family:
    """One kind of network and what is true of it."""

    name: str
    make: Callable[[], nn.Module]
    image_size: tuple[int, int]
    grid: tuple[int, int]
    prefix: int
    library: str
    pool: str | None = None  # headless backbones only: how their head pools
    resize: tuple[int, int] | None = None  # timm's set_input_size, called after the parameters are drawn
    reads_texts: bool = False  # its classes are `PROMPTS`

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """The network in eval mode; the global random state is neither read nor changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make()
        randomize(module, seed)
        if self.resize is not None:
            module.set_input_size(img_size=self.resize)
        module.eval().to(dtype)
        if getattr(module, "rope_mixed", False):
            module.rope.float()  # timm computes mixed frequencies in float32 whatever the input is, and fails otherwise
        return module

    def wrap(self, module: nn.Module) -> dict[str, Any]:
        """Keyword arguments for `vitrail.wrap(module, …)`: a headless backbone gets a seeded head and its pooling."""
        if self.reads_texts:
            # the oracles know softmax only; SigLIP's own sigmoid is tested in tests/models/test_zero_shot.py
            return {"prompts": list(PROMPTS), "tokenizer": tokenizer(), "output": "softmax"}
        if self.pool is None:
            return {}
        head = nn.utils.skip_init(nn.Linear, WIDTH, CLASSES)
        randomize(head, seed=1)
        return {"head": head.eval().to(next(module.parameters()).dtype), "pool": self.pool}

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches


def randomize(module: nn.Module, seed: int) -> None:
    """Draw every parameter and every value buffer; structural buffers (indices, rotary tables) keep their values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, owner in module.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                parameter.copy_(_draw(path.rpartition(".")[2], owner, name, parameter, generator))
            if getattr(owner, "k_bias", None) is not None:
                owner.k_bias.copy_(0.3 * torch.randn(owner.k_bias.shape, generator=generator))


def _draw(owner_name: str, owner: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    normal = torch.randn(parameter.shape, generator=generator)
    uniform = torch.rand(parameter.shape, generator=generator)
    if name in LAYER_SCALE:
        return normal.sign() * (0.3 + 0.9 * uniform)
    if name == "logit_scale":  # Swin v2: the logarithm of an inverse temperature
        return 1.0 + 0.3 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    if "norm" in type(owner).__name__.lower():
        return 1.0 + 0.3 * (2 * uniform - 1)
    if isinstance(owner, nn.Linear | nn.Conv2d) or name == "in_proj_weight":
        sharp = owner_name in QUERY_KEY_VALUE or name == "in_proj_weight"  # keeps attention far from uniform
        return (1.5 if sharp else 1.0) * normal / math.sqrt(parameter[0].numel())
    return 0.5 * normal  # tokens, positions, relative position tables, pooling queries


def _timm(name: str, **overrides: Any) -> nn.Module:
    import timm

    tiny = {"embed_dim": WIDTH, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return timm.create_model(name, pretrained=False, **(tiny | overrides))


def _gated_attention() -> nn.Module:
    """Blocks of timm can have gates that no registered name sets."""
    from timm.models.eva import EvaAttention

    module = _timm("eva02_base_patch14_224", img_size=(24, 32), patch_size=8)
    for block in module.blocks:
        block.attn = EvaAttention(WIDTH, num_heads=2, qkv_fused=False, gated=True, qk_norm=False, scale_norm=False)
    return module


def _vitamin() -> nn.Module:
    from timm.models.vitamin import VitCfg, VitConvCfg

    stem = VitCfg(embed_dim=(8, 12, WIDTH), depths=(1, 1), stem_width=8, conv_cfg=VitConvCfg(norm_layer="layernorm2d"))
    return _timm("vitamin_small_224", embed_cfg=stem, img_size=(48, 64))


def _torchvision_vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=WIDTH, mlp_dim=64, num_classes=CLASSES)


def _huggingface(kind: str, config_kind: str | None = None, **overrides: Any) -> nn.Module:
    import transformers

    tiny = {"image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{config_kind or kind.partition('For')[0]}Config")
    return getattr(transformers, kind)(config(**(tiny | {"num_labels": CLASSES} | overrides)))


def _huggingface_pair(kind: str) -> nn.Module:
    """Image classifiers made from two-tower models, whose configuration has a vision part."""
    import transformers

    vision = {"image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "intermediate_size": 64}
    text = {"bos_token_id": 0, "eos_token_id": 1}  # unused; the defaults make transformers warn
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")
    return getattr(transformers, kind)(config(vision_config=vision, text_config=text, num_labels=CLASSES))


def _huggingface_texts(kind: str) -> nn.Module:
    """A model of two towers."""
    import transformers

    tower = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**tower, **tokens, "vocab_size": len(WORDS), "max_position_embeddings": 8}
    vision = {**tower, "patch_size": 8} | ({"num_patches": 16} if kind == "Siglip2" else {"image_size": 32})
    joint = {"projection_dim": 24} if kind == "CLIP" else {}
    config = getattr(transformers, f"{kind}Config")
    return getattr(transformers, f"{kind}Model")(config(text_config=text, vision_config=vision, **joint))


OBJECTS = ("cat", "dog", "cup", "car", "cow")


def yolos(mid: bool = True, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A detector with six boxes; ``mid``: positions are added after each block but the last too."""
    import transformers

    tiny = {"image_size": [32, 48], "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 3}
    tiny |= {"num_attention_heads": 2, "intermediate_size": 64, "num_detection_tokens": 6}
    tiny |= {"use_mid_position_embeddings": mid, "id2label": dict(enumerate(OBJECTS))}
    with torch.random.fork_rng(devices=[]):
        module = transformers.YolosForObjectDetection(transformers.YolosConfig(**(tiny | changes)))
    randomize(module, seed=0)
    return module.eval().to(dtype)


def eomt(kind: str = "Eomt", dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A segmenter with five queries, which join the last two of its four blocks; kind: "Eomt" or "EomtDinov3"."""
    import transformers

    tiny = {"image_size": 32, "patch_size": 8, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
    tiny |= {"num_blocks": 2, "num_queries": 5, "num_register_tokens": 2, "num_upscale_blocks": 2}
    tiny |= {"id2label": dict(enumerate(OBJECTS))}
    tiny |= {"mlp_ratio": 2} if kind == "Eomt" else {"intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(**(tiny | changes))
    with torch.random.fork_rng(devices=[]):
        module = getattr(transformers, f"{kind}ForUniversalSegmentation")(config)
    randomize(module, seed=0)
    module.attn_mask_probs.zero_()  # as at the end of the training
    return module.eval().to(dtype)


@functools.cache
def tokenizer() -> Any:
    """The tokenizer of the tiny models that read texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def read_texts(module: Any, texts: Sequence[str] = PROMPTS) -> dict[str, Tensor]:
    """The input of the text tower; SigLIP attends to its padding."""
    if type(module).__name__ in ("SiglipModel", "Siglip2Model"):
        tokens = tokenizer()(list(texts), padding="max_length", max_length=8, return_tensors="pt")
        return {"input_ids": tokens["input_ids"]}
    tokens = tokenizer()(list(texts), padding=True, return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def text_embeddings(module: Any, texts: Sequence[str] = PROMPTS) -> Tensor:
    """(K, D): by the module's own text tower, of length 1."""
    features = module.get_text_features(**read_texts(module, texts)).pooler_output
    return features / features.norm(dim=1, keepdim=True)


FAMILIES: dict[str, Family] = {}


def _add_timm(
    name: str,
    model: str,
    grid: tuple[int, int],
    patch: int = 8,
    prefix: int = 1,
    pool: str | None = None,
    built_at: tuple[int, int] | None = None,
    pixels: int | None = None,
    **overrides: Any,
) -> None:
    """Real patch sizes matter to nothing but the first convolution, so 8 pixels unless the entry is about them.

    ``pixels``: the edge of a patch in the image, where a stem comes before the patches.
    """
    edge = pixels or patch
    size = (grid[0] * edge, grid[1] * edge)
    made_at = size if built_at is None else (built_at[0] * edge, built_at[1] * edge)
    make = functools.partial(_timm, model, img_size=made_at, patch_size=patch, **overrides)
    resize = None if built_at is None else size
    FAMILIES[name] = Family(name, make, size, grid, prefix, "timm", pool, resize)


def _add_huggingface(
    name: str,
    make: Callable[[], nn.Module],
    prefix: int = 1,
    grid: tuple[int, int] = (4, 4),
    pool: str | None = None,
    reads_texts: bool = False,
) -> None:
    size = (8 * grid[0], 8 * grid[1])
    FAMILIES[name] = Family(name, make, size, grid, prefix, "hf", pool, reads_texts=reads_texts)


_add_timm("timm_vit", "vit_base_patch16_224", (4, 4), depth=3)
_add_timm("timm_vit_patch8", "vit_base_patch8_224", (5, 5), embed_dim=48, num_heads=3)
_add_timm("timm_vit_patch16", "vit_base_patch16_224", (3, 3), patch=16)
_add_timm("timm_vit_patch32", "vit_base_patch32_224", (3, 3), patch=32)
_add_timm("timm_vit_not_square", "vit_base_patch16_224", (3, 5))
_add_timm("timm_vit_avg", "vit_base_patch16_224", (3, 4), global_pool="avg")
_add_timm("timm_vit_avgmax", "vit_base_patch16_224", (3, 4), global_pool="avgmax")
_add_timm("timm_vit_max", "vit_base_patch16_224", (3, 4), global_pool="max")
_add_timm("timm_vit_gap", "vit_base_patch16_gap_224", (4, 3), prefix=0)
_add_timm("timm_vit_qk_norm", "vit_base_patch16_224", (3, 4), qk_norm=True)
_add_timm("timm_vit_inner_norms", "vit_base_patch16_224", (3, 4), scale_attn_norm=True, scale_mlp_norm=True)
_add_timm("timm_vit_resized", "vit_base_patch16_224", (5, 4), built_at=(4, 4))
_add_timm("timm_deit", "deit_tiny_patch16_224", (4, 4))
_add_timm("timm_deit_distilled", "deit_tiny_distilled_patch16_224", (3, 4), prefix=2)
_add_timm("timm_deit3", "deit3_small_patch16_224", (3, 4))
_add_timm("timm_dinov2", "vit_small_patch14_dinov2", (3, 4), patch=14)
_add_timm("timm_dinov2_reg4", "vit_small_patch14_reg4_dinov2", (3, 4), prefix=5)
_add_timm("timm_dinov2_giant", "vit_giant_patch14_dinov2", (3, 4))
_add_timm("timm_clip", "vit_base_patch16_clip_224", (3, 4))
_add_timm("timm_clip_quickgelu", "vit_base_patch16_clip_quickgelu_224", (3, 4))
_add_timm("timm_siglip", "vit_base_patch16_siglip_224", (3, 4), prefix=0)
_add_timm("timm_siglip_so400m", "vit_so400m_patch14_siglip_224", (3, 4), prefix=0)
_add_timm("timm_aimv2", "aimv2_large_patch14_224", (3, 4), prefix=0)
_add_timm("timm_eva", "eva_large_patch14_196", (3, 4), patch=14)
_add_timm("timm_eva_giant", "eva_giant_patch14_224", (3, 4))
_add_timm("timm_eva02_tiny", "eva02_tiny_patch14_224", (3, 4))
_add_timm("timm_eva02_base", "eva02_base_patch14_224", (4, 3))
_add_timm("timm_eva02_clip", "eva02_base_patch16_clip_224", (3, 4))
_add_timm("timm_eva02_resized", "eva02_tiny_patch14_224", (5, 3), built_at=(4, 4))
_add_timm("timm_rope_mixed", "vit_small_patch16_rope_mixed_224", (3, 4))
_add_timm("timm_dinov3", "vit_small_patch16_dinov3", (3, 4), prefix=5)
_add_timm("timm_dinov3_token", "vit_small_patch16_dinov3", (3, 4), prefix=5, global_pool="token")
_add_timm("timm_dinov3_plus", "vit_small_plus_patch16_dinov3_qkvb", (3, 4), prefix=5)
_add_timm("timm_beit", "beit_base_patch16_224", (4, 4))
_add_timm("timm_beit_token", "beit_base_patch16_224", (3, 4), global_pool="token")
_add_timm("timm_beit_shared", "beit_base_patch16_224", (3, 4), use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
_add_timm("timm_beit_both", "beit_base_patch16_224", (3, 4), use_shared_rel_pos_bias=True)
_add_timm("timm_beitv2", "beitv2_base_patch16_224", (3, 4))
_add_timm("timm_parallel", "vit_base_patch16_xp_224", (3, 4), depth=3)
_add_timm("timm_parallel_fused", "vit_pwee_patch16_reg1_gap_256", (3, 4), prefix=1)
_add_timm("timm_post_norm", "vit_base_patch16_rpn_224", (3, 4), prefix=0, depth=3)
_add_timm("timm_eva_post_norm", "eva02_enormous_patch14_clip_224", (3, 4))
_add_timm("timm_relpos", "vit_relpos_base_patch16_224", (3, 4), prefix=0)
_add_timm("timm_relpos_cls", "vit_relpos_base_patch16_cls_224", (3, 4))
_add_timm("timm_relpos_shared", "vit_srelpos_small_patch16_224", (3, 4), prefix=0)
_add_timm("timm_relpos_post_norm", "vit_relpos_base_patch16_rpn_224", (3, 4), prefix=0)
_add_timm("timm_grouped_queries", "vit_large_patch16_sapiens2", (3, 4), prefix=9, num_heads=4, num_kv_heads=2)
FAMILIES["timm_gated_attention"] = Family("timm_gated_attention", _gated_attention, (24, 32), (3, 4), 1, "timm")
FAMILIES["timm_vitamin"] = Family("timm_vitamin", _vitamin, (48, 64), (3, 4), 0, "timm")
_add_timm("timm_qwen3", "qwen3_vit_88m", (3, 4), prefix=0, pos_embed_grid_size=5)
_add_timm("timm_cait", "cait_xxs24_224", (3, 4), num_heads=4)
_SMALL_INPUT = {"pretrained_cfg_overlay": {"input_size": (3, 24, 32)}}
_add_timm(
    "timm_naflex", "naflexvit_base_patch16_parfac_gap", (3, 4), prefix=4, pos_embed_grid_size=(5, 5), rope_type="axial",
    **_SMALL_INPUT,
)  # fmt: skip
_add_timm(
    "timm_gemma4", "gemma4_vit_167m", (3, 4), prefix=0, head_dim=24, intermediate_size=48, position_embedding_size=8,
    **_SMALL_INPUT,
)  # fmt: skip
_add_timm("timm_hybrid", "vit_tiny_r_s16_p8_224", (3, 4), pixels=8, patch=2)
_add_timm("timm_headless_token", "vit_small_patch14_dinov2", (3, 4), num_classes=0, pool="token")
_add_timm("timm_headless_avg", "vit_base_patch16_224", (3, 4), num_classes=0, pool="avg")
_add_timm("timm_patches", "vit_small_patch14_reg4_dinov2", (3, 4), prefix=5, num_classes=0, pool="patches")

FAMILIES["torchvision_vit"] = Family("torchvision_vit", _torchvision_vit, (32, 32), (4, 4), 1, "torchvision")


def _make(kind: str, config_kind: str | None = None, **config: Any) -> Callable[[], nn.Module]:
    return functools.partial(_huggingface, kind, config_kind, **config)


_add_huggingface("hf_vit", _make("ViTForImageClassification", intermediate_size=64))
_add_huggingface(
    "hf_vit_not_square", _make("ViTForImageClassification", intermediate_size=64, image_size=(24, 32)), grid=(3, 4)
)
_add_huggingface("hf_deit", _make("DeiTForImageClassification", intermediate_size=64), prefix=2)
_add_huggingface("hf_deit_teacher", _make("DeiTForImageClassificationWithTeacher", intermediate_size=64), prefix=2)
_add_huggingface("hf_dinov2", _make("Dinov2ForImageClassification", mlp_ratio=2))
_add_huggingface("hf_dinov2_swiglu", _make("Dinov2ForImageClassification", mlp_ratio=3, use_swiglu_ffn=True))
_add_huggingface(
    "hf_dinov2_registers",
    _make("Dinov2WithRegistersForImageClassification", mlp_ratio=2, num_register_tokens=3),
    prefix=4,
)
_add_huggingface(
    "hf_beit_mean", _make("BeitForImageClassification", intermediate_size=64, use_relative_position_bias=True)
)
_add_huggingface(
    "hf_beit_token",
    _make(
        "BeitForImageClassification",
        intermediate_size=64,
        use_mean_pooling=False,
        use_shared_relative_position_bias=True,
        use_absolute_position_embeddings=True,
    ),
)
_add_huggingface("hf_clip", functools.partial(_huggingface_pair, "CLIPForImageClassification"))
_add_huggingface("hf_siglip", functools.partial(_huggingface_pair, "SiglipForImageClassification"), prefix=0)
_add_huggingface("hf_clip_text", functools.partial(_huggingface_texts, "CLIP"), reads_texts=True)
_add_huggingface("hf_siglip_text", functools.partial(_huggingface_texts, "Siglip"), prefix=0, reads_texts=True)
_dinov3 = functools.partial(
    _make, "DINOv3ViTModel", "DINOv3ViT", intermediate_size=64, num_register_tokens=2, image_size=(24, 32)
)
_add_huggingface("hf_dinov3_token", _dinov3(), prefix=3, grid=(3, 4), pool="token")
_add_huggingface("hf_dinov3_avg", _dinov3(), prefix=3, grid=(3, 4), pool="avg")
_add_huggingface("hf_patches", _make("Dinov2Model", "Dinov2", mlp_ratio=2), pool="patches")
_add_huggingface("hf_dinov3_gated", _dinov3(use_gated_mlp=True, hidden_act="silu"), prefix=3, grid=(3, 4), pool="token")


# Their head reads two tokens with two linear layers, so there is no single embedding.
PAIRED = ("timm_deit_distilled", "hf_deit_teacher")


def _torchvision_swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == 2 else {}
    return swin.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, **parts)


def _timm_swin(model: str, classes: int = CLASSES) -> nn.Module:
    import timm

    tiny = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    return timm.create_model(model, pretrained=False, num_classes=classes, **tiny)


def _huggingface_swin(kind: str) -> nn.Module:
    import transformers

    tiny = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    config = getattr(transformers, f"{kind}Config")(**tiny, num_labels=CLASSES)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def _swin(name: str, library: str, make: Callable[[], nn.Module]) -> Family:
    return Family(name, make, (32, 32), (4, 4), 0, library)  # grid: of the last stage


HIERARCHICAL: dict[str, Family] = {
    family.name: family
    for family in (
        _swin("timm_swin", "timm", functools.partial(_timm_swin, "swin_tiny_patch4_window7_224")),
        _swin("timm_swinv2", "timm", functools.partial(_timm_swin, "swinv2_tiny_window8_256")),
        _swin("torchvision_swin", "torchvision", functools.partial(_torchvision_swin, 1)),
        _swin("torchvision_swinv2", "torchvision", functools.partial(_torchvision_swin, 2)),
        _swin("hf_swin", "hf", functools.partial(_huggingface_swin, "Swin")),
        _swin("hf_swinv2", "hf", functools.partial(_huggingface_swin, "Swinv2")),
    )
}


def _timm_box(model: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(model, pretrained=False, num_classes=CLASSES, **sizes)


def _huggingface_resnet() -> nn.Module:
    import transformers

    tiny = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 1], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**tiny, num_labels=CLASSES))


def _box(name: str, library: str, grid: tuple[int, int], make: Callable[[], nn.Module]) -> Family:
    return Family(name, make, (32, 32), grid, 0, library)  # grid: of its feature map


# Networks that are explained by their logits, and by the last feature map where they have one.
BLACK_BOXES: dict[str, Family] = {
    family.name: family
    for family in (
        _box(
            "timm_resnet",
            "timm",
            (2, 2),
            functools.partial(_timm_box, "resnet10t", channels=(8, 12, 16, 20), stem_width=8, output_stride=16),
        ),
        _box("hf_resnet", "hf", (4, 4), _huggingface_resnet),
        _box(
            "timm_xcit",
            "timm",
            (0, 0),
            functools.partial(
                _timm_box, "xcit_nano_12_p8_224", img_size=32, embed_dim=16, depth=2, num_heads=2, cls_attn_layers=1
            ),
        ),
    )
}


def _opaque(model: str) -> Callable[[], nn.Module]:
    return lambda: _timm(model, img_size=64).eval()


# name → (builder, class that the note on the black box must name)
OPAQUE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "differential": (_opaque("vit_dwee_patch16_reg1_gap_256"), "DiffAttention"),
    "differential_parallel": (_opaque("vit_dpwee_patch16_reg1_gap_256"), "DiffParallelScalingBlock"),
    "merging": (_opaque("qwen3_vit_88m_merge"), "Qwen3VitClassifier"),
}


def few(names: Sequence[str], step: int) -> Sequence[str]:
    """Parameters of a test: one name of ``step``, or all for `make test-all`."""
    return names if FULL else names[::step]


def find(name: str) -> Family:
    return {**FAMILIES, **HIERARCHICAL, **BLACK_BOXES}[name]


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    return find(name).build(dtype, seed)


def images(name: str, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normalised images (B, 3, H, W)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(batch, 3, *find(name).image_size, generator=generator).to(dtype)


@torch.no_grad()
def expected_logits(family: Family, module: nn.Module, images: Tensor) -> Tensor:
    """The module's own logits (B, C); a headless backbone's head applied to its own normed output."""
    if family.reads_texts:
        return module(pixel_values=images, **read_texts(module)).logits_per_image
    if family.pool is None:
        output = module(images)
        return output.logits if family.library == "hf" else output
    if family.pool == "patches":
        tokens = module(images).last_hidden_state if family.library == "hf" else module.forward_features(images)
        return family.wrap(module)["head"](tokens[:, family.prefix :]).mean(dim=1)
    return family.wrap(module)["head"](expected_embedding(family, module, images))


@torch.no_grad()
def expected_embedding(family: Family, module: nn.Module, images: Tensor) -> Tensor:
    """(B, D): what the module's own head reads; of two towers what is compared with texts, before it has length 1."""
    if family.reads_texts:
        return module.get_image_features(pixel_values=images).pooler_output
    if family.pool is not None:
        tokens = module(images).last_hidden_state if family.library == "hf" else module.forward_features(images)
        return tokens[:, 0] if family.pool == "token" else tokens[:, family.prefix :].mean(dim=1)
    if family.library == "timm":
        return module.forward_head(module.forward_features(images), pre_logits=True)
    read: list[Tensor] = []
    head = module.classifier if family.library == "hf" else module.heads.head
    hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    module(images)
    hook.remove()
    return read[0]
