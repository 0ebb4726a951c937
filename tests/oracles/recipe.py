"""What each library's network computes, taken apart into one literal description.

The networks' own normalisations and activations are called as they are; projections are read as plain matrices, so that
every oracle can write attention, pooling and decomposition out in full.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from tests.families import Family, text_embeddings
from torch import Tensor, nn


class Affine(NamedTuple):
    """x ↦ x Wᵀ + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Rotary(NamedTuple):
    """Rotation of the patches' queries and keys; cos and sin are (N, d_h) or (H, N, d_h)."""

    cos: Tensor
    sin: Tensor
    half: bool  # channel pairs are (i, i + d_h/2); otherwise (2i, 2i + 1)
    sections: int = 1  # equal parts of the channels, each of which has pairs of its own


@dataclass(frozen=True)
class Attention:
    q: Affine
    k: Affine
    v: Affine
    heads: int
    out: Affine
    q_norm: nn.Module
    k_norm: nn.Module
    inner_norm: nn.Module
    score_bias: Tensor | None = None  # (H, n, n), added to the scaled scores
    rotary: Rotary | None = None
    gate: Affine | None = None  # of the attending token: its sigmoid multiplies what `out` reads
    v_norm: nn.Module = field(default_factory=nn.Identity)
    scale: float | None = None  # of the scores; None: 1/√d_h
    talk: tuple[Affine, Affine] | None = None  # over the heads: of scores, and of attention
    queries: slice = field(
        default_factory=lambda: slice(None)
    )  # the tokens that attend; others get nothing and stay as they are
    keys: slice = field(default_factory=lambda: slice(None))  # the tokens that they can see

    def gated(self, mixed: Tensor, u: Tensor) -> Tensor:
        return mixed if self.gate is None else mixed * torch.sigmoid(self.gate(u))


@dataclass(frozen=True)
class Mlp:
    up: Affine
    act: nn.Module
    down: Affine
    inner_norm: nn.Module
    gate: Affine | None = None  # gated: act(gate(x)) ⊙ up(x); plain: act(up(x))
    first: nn.Module = field(default_factory=nn.Identity)  # a norm of x


@dataclass(frozen=True)
class Block:
    norm1: nn.Module
    attention: Attention
    scale1: Tensor | None
    norm2: nn.Module
    mlp: Mlp
    scale2: Tensor | None
    after1: nn.Module = field(default_factory=nn.Identity)  # of a post-norm block: on the output of attention
    after2: nn.Module = field(default_factory=nn.Identity)  # and on that of the MLP
    parallel: bool = False  # the MLP reads what attention reads

    def changed(self, branch: Tensor) -> Tensor:
        """A branch (B, n, d), zero where tokens stay as they are."""
        changes = torch.zeros(branch.shape[1], 1, dtype=branch.dtype)
        changes[self.attention.queries] = 1
        return branch * changes


@dataclass(frozen=True)
class AttentionPool:
    """One learned query attends to the patches; y = o + MLP(norm(o)) of the projected output o."""

    query: Tensor  # (H, d_h), projected
    k: Affine
    v: Affine
    out: Affine
    norm: nn.Module
    mlp: Mlp


class Unit(nn.Module):
    """x / |x|; as a norm it is an RMS norm without ε and with the weight 1/√d."""

    eps = 0.0

    def __init__(self, like: Tensor):
        super().__init__()
        self.weight = torch.full_like(like, like.numel() ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(dim=-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class Readout:
    """From the last block's tokens to the logits: norm → pool → pooled norm → mean of the heads.

    Where classes are texts: norm → pool → pooled norm → projection → x / |x| → scaled embeddings of the texts.
    """

    norm: nn.Module
    # token, avg, max, avgmax, pair (two tokens, two heads), token_avg (concatenated), attention, patches (mean logits)
    pool: str
    pooled_norm: nn.Module
    heads: list[Affine]
    attention: AttentionPool | None = None
    projection: Affine | None = None
    unit: nn.Module = field(default_factory=nn.Identity)

    def embedding(self, pooled: Tensor) -> Tensor:
        """What has the length 1 next, where classes are texts."""
        normed = self.pooled_norm(pooled)
        return normed if self.projection is None else self.projection(normed)

    def logits(self, pooled: Tensor) -> Tensor:
        return self.heads[0](self.unit(self.embedding(pooled)))


@dataclass(frozen=True)
class Recipe:
    tokens: Tensor  # x_0 (B, n, d)
    blocks: list[Block]
    readout: Readout
    prefix: int


@torch.no_grad()
def describe(family: Family, module: nn.Module, images: Tensor) -> Recipe:
    """The description of `module`; with it x_0 of `images`. It is kept until a parameter or the images change."""
    return _describe(family, module, version(module, images), images)


def version(module: nn.Module, images: Tensor) -> int:
    """Another number when a parameter, a buffer or the images were changed or replaced."""
    tensors = itertools.chain(module.parameters(), module.buffers(), [images])
    return hash(tuple((id(tensor), tensor._version) for tensor in tensors))


@functools.lru_cache(maxsize=8)
def _describe(family: Family, module: nn.Module, version: int, images: Tensor) -> Recipe:
    if family.library == "timm":
        return _timm(family, module, images)
    if family.library == "torchvision":
        return _torchvision(module, images)
    return _huggingface(family, module, images)


def affine(linear: nn.Linear) -> Affine:
    return Affine(linear.weight, linear.bias)


def _thirds(weight: Tensor, bias: Tensor | None) -> list[Affine]:
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [Affine(w, b) for w, b in zip(weight.chunk(3), biases, strict=True)]


def _relative_bias(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """BEiT's bias (H, n, n): one entry per offset between two patches, then CLS→patch, patch→CLS, CLS→CLS."""
    height, width = grid
    n = 1 + height * width
    rows = torch.empty(n, n, dtype=torch.long)
    for i in range(height * width):
        for j in range(height * width):
            down, right = i // width - j // width, i % width - j % width
            rows[1 + i, 1 + j] = (down + height - 1) * (2 * width - 1) + right + width - 1
    rows[0, :], rows[:, 0], rows[0, 0] = len(table) - 3, len(table) - 2, len(table) - 1
    return table[rows].permute(2, 0, 1)


# ---------------------------------------------------------------------------------------------------------------- timm


def _timm_encoder(family: Family, module: nn.Module, images: Tensor) -> Recipe:
    """Qwen3's encoder, whose patches have a position from a grid and rotate as well."""
    encoder = module.encoder
    if type(module).__name__ == "Gemma4VitClassifier":
        return _timm_gemma(family, module, images)
    tokens, table = encoder._pos_embed(encoder.patch_embed(images))
    sin, cos = table.chunk(2, dim=-1)
    blocks = [_timm_block(family, block, Rotary(cos, sin, True), None) for block in encoder.blocks]
    pooled_norm = nn.LayerNorm(tokens.shape[-1], module.norm.eps).to(tokens)  # theirs has no weights: ones and zeros
    return Recipe(tokens, blocks, Readout(nn.Identity(), "avg", pooled_norm, [affine(module.head)]), family.prefix)


def _timm_gemma(family: Family, module: nn.Module, images: Tensor) -> Recipe:
    """Gemma 4's encoder: a norm before and one behind each branch, normed values, pairs of channels in two halves."""
    tokens, places, _ = module.encoder.patch_embed(images)
    cos, sin = module.encoder.rotary_emb(tokens, places)
    rotary, blocks = Rotary(cos[0], sin[0], True, sections=2), []
    for block in module.encoder.blocks:
        attn, mlp = block.attn, block.mlp
        q, k, v, out = (affine(part.linear) for part in (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj))
        norms, v_norm = (attn.q_norm, attn.k_norm, nn.Identity()), _ones(attn.v_norm, tokens)
        attention = Attention(q, k, v, attn.num_heads, out, *norms, rotary=rotary, v_norm=v_norm, scale=1.0)
        gate, up, down = (affine(part.linear) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        gated = Mlp(up, mlp.act, down, nn.Identity(), gate=gate)
        blocks.append(
            Block(block.norm1, attention, None, block.norm3, gated, None, after1=block.norm2, after2=block.norm4)
        )
    readout = Readout(nn.Identity(), "avg", _ones(module.norm, tokens), [affine(module.head)])
    return Recipe(tokens, blocks, readout, family.prefix)


def _ones(norm: nn.Module, like: Tensor) -> nn.Module:
    """An RMS norm without weights as one whose weights are ones."""
    return nn.RMSNorm(norm.normalized_shape, norm.eps).to(like)


def _timm(family: Family, module: nn.Module, images: Tensor) -> Recipe:
    if hasattr(module, "encoder"):
        return _timm_encoder(family, module, images)
    tokens, rotaries = _timm_tokens(family, module, images)
    shared = None
    if getattr(module, "shared_rel_pos", None) is not None:
        shared = module.shared_rel_pos.get_bias()[0]
    if getattr(module, "rel_pos_bias", None) is not None:
        shared = _relative_bias(module.rel_pos_bias.relative_position_bias_table, family.grid)
    blocks = [_timm_block(family, b, r, shared) for b, r in zip(module.blocks, rotaries, strict=True)]
    if type(module).__name__ == "Cait":
        patches, first = slice(1, None), slice(0, 1)
        late = [_timm_block(family, b, None, None) for b in module.blocks_token_only]
        blocks = [replace(b, attention=replace(b.attention, queries=patches, keys=patches)) for b in blocks]
        blocks += [replace(b, attention=replace(b.attention, queries=first)) for b in late]
    return Recipe(tokens, blocks, _timm_readout(family, module), family.prefix)


def _timm_tokens(family: Family, module: nn.Module, images: Tensor) -> tuple[Tensor, list[Rotary | None]]:
    kind, depth = type(module).__name__, len(module.blocks)
    if kind == "NaFlexVit":
        return module.norm_pre(module.embeds(images)[0]), _timm_rotaries(family, module)
    patches = module.patch_embed(images)
    if kind == "Beit":
        tokens = torch.cat([module.cls_token.expand(len(images), -1, -1), patches], dim=1)
        return tokens if module.pos_embed is None else tokens + module.pos_embed, [None] * depth
    if kind == "Cait":
        patches = patches + module.pos_embed
        return torch.cat([module.cls_token.expand(len(images), -1, -1), patches], dim=1), [None] * depth
    if kind == "VisionTransformerRelPos":
        return (patches if module.cls_token is None else torch.cat(
            [module.cls_token.expand(len(images), -1, -1), patches], dim=1)), [None] * depth  # fmt: skip
    if kind != "Eva":
        return module.norm_pre(module._pos_embed(patches)), [None] * depth
    return module.norm_pre(module._pos_embed(patches)[0]), _timm_rotaries(family, module)


def _timm_rotaries(family: Family, module: nn.Module) -> list[Rotary | None]:
    if module.rope is None:
        return [None] * len(module.blocks)
    table = module.rope.get_embed(shape=family.grid)  # (N, 2 d_h), or (L, H, N, 2 d_h) when every block has its own
    per_block = list(table) if getattr(module, "rope_mixed", False) else [table] * len(module.blocks)
    halves = [block.attn.rotate_half for block in module.blocks]
    pairs = [entry.chunk(2, dim=-1) for entry in per_block]
    return [Rotary(cos, sin, half) for (sin, cos), half in zip(pairs, halves, strict=True)]


def _timm_parallel_block(block: nn.Module) -> Block:
    """One projection of norm(x) to the hidden units of the MLP, queries, keys and values."""
    hidden, width = block.in_split[0], block.in_split[1]
    weights, bias = block.in_proj.weight, block.in_proj.bias
    up = Affine(weights[:hidden], block.mlp_bias if bias is None else bias[:hidden])
    q, k, v = _thirds(weights[hidden:], None if bias is None else bias[hidden:])
    if block.out_proj is None:
        out, down = affine(block.attn_out_proj), affine(block.mlp_out_proj)
    else:
        out = Affine(block.out_proj.weight[:, :width], block.out_proj.bias)
        down = Affine(block.out_proj.weight[:, width:], None)
    nothing, scale = nn.Identity(), getattr(block.ls, "gamma", None)
    attention = Attention(q, k, v, block.num_heads, out, block.q_norm, block.k_norm, nothing)
    return Block(block.in_norm, attention, scale, nothing, Mlp(up, block.mlp_act, down, nothing), scale, parallel=True)


def _timm_block(family: Family, block: nn.Module, rotary: Rotary | None, shared: Tensor | None) -> Block:
    if type(block).__name__ == "ParallelScalingBlock":
        return _timm_parallel_block(block)
    attn = block.attn
    if getattr(attn, "qkv", None) is None:
        q, k, v = (affine(_first(attn, name, f"{name}_proj")) for name in "qkv")
        if len(k.weight) < len(q.weight):  # head h reads the keys and values of head h // group
            width = attn.head_dim
            rows = [h // (attn.num_heads // attn.num_kv_heads) * width + i
                    for h in range(attn.num_heads) for i in range(width)]  # fmt: skip
            k, v = (Affine(p.weight[rows], None if p.bias is None else p.bias[rows]) for p in (k, v))
    elif getattr(attn, "q_bias", None) is not None:
        q, k, v = _thirds(attn.qkv.weight, torch.cat([attn.q_bias, attn.k_bias, attn.v_bias]))
    else:
        q, k, v = _thirds(attn.qkv.weight, attn.qkv.bias)
    bias, table = shared, getattr(attn, "relative_position_bias_table", None)
    if table is not None:
        own = _relative_bias(table, family.grid)
        bias = own if shared is None else own + shared
    if getattr(attn, "rel_pos", None) is not None:
        bias = attn.rel_pos.get_bias()[0]
    nothing = nn.Identity()
    norms = [getattr(attn, name, nothing) for name in ("q_norm", "k_norm", "norm")]
    gate = None if getattr(attn, "gate", None) is None else affine(attn.gate)
    talk = (affine(attn.proj_l), affine(attn.proj_w)) if hasattr(attn, "proj_l") else None
    attention = Attention(q, k, v, attn.num_heads, affine(attn.proj), *norms, bias, rotary, gate, talk=talk)
    if "Post" in type(block).__name__:
        mlp = _timm_mlp(block.mlp)
        return Block(nothing, attention, None, nothing, mlp, None, after1=block.norm1, after2=block.norm2)
    return Block(
        block.norm1, attention, _timm_scale(block, 1), block.norm2, _timm_mlp(block.mlp), _timm_scale(block, 2)
    )


def _timm_scale(block: nn.Module, number: int) -> Tensor | None:
    if hasattr(block, f"ls{number}"):
        return getattr(getattr(block, f"ls{number}"), "gamma", None)
    return getattr(block, f"gamma_{number}")


def _timm_mlp(mlp: nn.Module) -> Mlp:
    if hasattr(mlp, "w0"):
        return Mlp(affine(mlp.w1), mlp.act, affine(mlp.w2), nn.Identity(), gate=affine(mlp.w0), first=mlp.norm)
    if hasattr(mlp, "fc1_g"):
        return Mlp(affine(mlp.fc1_x), mlp.act, affine(mlp.fc2), mlp.norm, gate=affine(mlp.fc1_g))
    if type(mlp).__name__ == "GluMlp":
        assert not mlp.gate_last
        (gate_w, up_w), (gate_b, up_b) = mlp.fc1.weight.chunk(2), mlp.fc1.bias.chunk(2)
        return Mlp(Affine(up_w, up_b), mlp.act, affine(mlp.fc2), mlp.norm, gate=Affine(gate_w, gate_b))
    return Mlp(affine(mlp.fc1), mlp.act, affine(mlp.fc2), mlp.norm)


def _timm_readout(family: Family, module: nn.Module) -> Readout:
    if family.pool is not None:
        return Readout(module.norm, family.pool, nn.Identity(), [affine(family.wrap(module)["head"])])
    if hasattr(module, "head_dist"):
        return Readout(module.norm, "pair", nn.Identity(), [affine(module.head), affine(module.head_dist)])
    pool, attention = module.global_pool, None
    if pool == "map":
        pool, attention = "attention", _timm_attention_pool(module.attn_pool)
    pooled_norm = getattr(module, "fc_norm", nn.Identity())
    return Readout(module.norm, pool, pooled_norm, [affine(module.head)], attention)


def _timm_attention_pool(pool: nn.Module) -> AttentionPool:
    query = affine(pool.q)(pool.latent[0, 0]).view(pool.num_heads, -1)
    (k_w, v_w), (k_b, v_b) = pool.kv.weight.chunk(2), pool.kv.bias.chunk(2)
    return AttentionPool(query, Affine(k_w, k_b), Affine(v_w, v_b), affine(pool.proj), pool.norm, _timm_mlp(pool.mlp))


# --------------------------------------------------------------------------------------------------------- torchvision


def _torchvision(module: nn.Module, images: Tensor) -> Recipe:
    patches = module.conv_proj(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([module.class_token.expand(len(images), -1, -1), patches], dim=1) + module.encoder.pos_embedding
    blocks, nothing = [], nn.Identity()
    for block in module.encoder.layers:
        attn = block.self_attention
        q, k, v = _thirds(attn.in_proj_weight, attn.in_proj_bias)
        attention = Attention(q, k, v, attn.num_heads, affine(attn.out_proj), nothing, nothing, nothing)
        mlp = Mlp(affine(block.mlp[0]), block.mlp[1], affine(block.mlp[3]), nothing)
        blocks.append(Block(block.ln_1, attention, None, block.ln_2, mlp, None))
    return Recipe(tokens, blocks, Readout(module.encoder.ln, "token", nothing, [affine(module.heads.head)]), prefix=1)


# -------------------------------------------------------------------------------------------------------- Hugging Face


def _huggingface(family: Family, module: nn.Module, images: Tensor) -> Recipe:
    backbone = module if family.pool is not None else getattr(module, _BACKBONE[module.config.model_type])
    tokens = backbone.embeddings(images)
    if hasattr(backbone, "pre_layrnorm"):
        tokens = backbone.pre_layrnorm(tokens)
    rotary, shared = None, None
    if hasattr(backbone, "rope_embeddings"):
        rotary = Rotary(*backbone.rope_embeddings(images), half=True)
    if getattr(backbone, "shared_position_bias", None) is not None:
        shared = _relative_bias(backbone.shared_position_bias.relative_position_bias_table, family.grid)
    holder = next(getattr(backbone, name) for name in ("encoder", "model", "layers") if hasattr(backbone, name))
    layers = next((getattr(holder, name) for name in ("layers", "layer") if hasattr(holder, name)), holder)
    blocks = [_huggingface_block(family, layer, rotary, shared) for layer in layers]
    return Recipe(tokens, blocks, _huggingface_readout(family, module, backbone), family.prefix)


_BACKBONE = {
    "vit": "vit",
    "deit": "deit",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2_with_registers",
    "beit": "beit",
    "clip": "vision_model",
    "siglip": "vision_model",
}


def _first(owner: nn.Module, *names: str) -> nn.Module:
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def _huggingface_block(family: Family, layer: nn.Module, rotary: Rotary | None, shared: Tensor | None) -> Block:
    attn, nothing = _first(layer, "attention", "self_attn"), nn.Identity()
    bias = shared
    if getattr(layer, "relative_position_bias", None) is not None:
        own = _relative_bias(layer.relative_position_bias.relative_position_bias_table, family.grid)
        bias = own if shared is None else own + shared
    q, k, v, out = (affine(p) for p in (attn.q_proj, attn.k_proj, attn.v_proj, _first(attn, "o_proj", "out_proj")))
    heads = q.weight.shape[0] // attn.head_dim
    attention = Attention(q, k, v, heads, out, nothing, nothing, nothing, bias, rotary)
    norm1 = _first(layer, "norm1", "layernorm_before", "layer_norm1")
    norm2 = _first(layer, "norm2", "layernorm_after", "layer_norm2")
    scales = [_huggingface_scale(layer, number) for number in (1, 2)]
    return Block(norm1, attention, scales[0], norm2, _huggingface_mlp(layer.mlp), scales[1])


def _huggingface_scale(layer: nn.Module, number: int) -> Tensor | None:
    if hasattr(layer, f"layer_scale{number}"):
        return getattr(layer, f"layer_scale{number}").lambda1
    return getattr(layer, f"lambda_{number}", None)


def _huggingface_mlp(mlp: nn.Module) -> Mlp:
    if hasattr(mlp, "gate_proj"):
        return Mlp(affine(mlp.up_proj), mlp.act_fn, affine(mlp.down_proj), nn.Identity(), gate=affine(mlp.gate_proj))
    up, down = _first(mlp, "fc1", "up_proj"), _first(mlp, "fc2", "down_proj")
    return Mlp(affine(up), _first(mlp, "activation_fn", "act_fn"), affine(down), nn.Identity())


def _huggingface_readout(family: Family, module: nn.Module, backbone: nn.Module) -> Readout:
    nothing, kind = nn.Identity(), type(module).__name__
    if family.pool is not None:
        return Readout(
            _first(backbone, "norm", "layernorm"), family.pool, nothing, [affine(family.wrap(module)["head"])]
        )
    if kind == "DeiTForImageClassificationWithTeacher":
        heads = [affine(module.cls_classifier), affine(module.distillation_classifier)]
        return Readout(backbone.layernorm, "pair", nothing, heads)
    if family.reads_texts:
        return _text_readout(module, backbone)
    heads = [affine(module.classifier)]
    if kind.startswith("CLIP"):  # the mean is taken before any final norm; post_layernorm is not used
        return Readout(nothing, "avg", nothing, heads)
    if kind.startswith("Siglip"):  # the attention pool is computed by the library and then ignored
        return Readout(backbone.post_layernorm, "avg", nothing, heads)
    if kind.startswith("Beit") and module.config.use_mean_pooling:
        return Readout(nothing, "avg", backbone.pooler.layernorm, heads)
    return Readout(backbone.layernorm, "token_avg" if kind.startswith("Dinov2") else "token", nothing, heads)


def _text_readout(module: nn.Module, backbone: nn.Module) -> Readout:
    """The cosine of an image and the texts, times the exponential of a scale, plus SigLIP's bias."""
    texts, nothing = text_embeddings(module), nn.Identity()
    bias = module.logit_bias.expand(len(texts)) if hasattr(module, "logit_bias") else None
    heads, unit = [Affine(module.logit_scale.exp() * texts, bias)], Unit(texts[0])
    if type(module).__name__ == "CLIPModel":
        projection = affine(module.visual_projection)
        return Readout(nothing, "token", backbone.post_layernorm, heads, projection=projection, unit=unit)
    return Readout(
        backbone.post_layernorm, "attention", nothing, heads, _huggingface_attention_pool(backbone.head), unit=unit
    )


def _huggingface_attention_pool(pool: nn.Module) -> AttentionPool:
    attention = pool.attention
    q, k, v = _thirds(attention.in_proj_weight, attention.in_proj_bias)
    query = q(pool.probe[0, 0]).view(attention.num_heads, -1)
    return AttentionPool(query, k, v, affine(attention.out_proj), pool.layernorm, _huggingface_mlp(pool.mlp))
