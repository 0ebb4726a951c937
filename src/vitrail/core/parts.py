"""The canonical parts of a Vision Transformer: plain descriptions that hold the model's own weights.

Every adapter translates its library's modules into these; the engine knows nothing else.
Tensors are detached views of the live parameters: no graph ever reaches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

EVERY = slice(0, None)
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm, or RMSNorm (no mean, no shift); affine or not."""

    width: int
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    rms: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """``x @ weight.T + bias`` with weight (out, in)."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position tables of the patches, (N, head width) or (heads, N, head width)."""

    sin: Tensor
    cos: Tensor
    half: bool  # the second half of the width is the partner of the first (else: odd of even)
    sections: int = 1  # equal parts of the width, each of which rotates by itself


@dataclass(frozen=True, slots=True)
class Talk:
    """Heads that are mixed: their scores by ``before`` (heads, heads), their attention by ``after``.

    A bias of ``before`` would add the same to the scores of all keys, which softmax does not see.
    """

    before: Tensor
    after: Linear


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head attention; ``bias`` (heads, n, n) is added to the scores, ``norm`` stands before ``proj``.

    With ``gate``, what ``proj`` reads is multiplied by ``sigmoid(gate(x))`` of the token that attends.
    ``together`` is the fused q, k and v layer, where they are contiguous in memory.
    """

    heads: int
    q: Linear
    k: Linear
    v: Linear
    proj: Linear
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    rope: Rope | None = None
    bias: Tensor | None = None
    norm: Norm | None = None
    together: Linear | None = None
    gate: Linear | None = None
    talk: Talk | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """``fc2(norm(act(fc1(x))))``, or with ``up``: ``fc2(norm(act(fc1(x)) * up(x)))``; ``first`` is a norm of ``x``."""

    fc1: Linear
    fc2: Linear
    activation: Activation
    up: Linear | None = None
    norm: Norm | None = None
    first: Norm | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Residual block: ``x + s1·post1(attention(norm1 x))``, ``x + s2·post2(mlp(norm2 x))``, ``x + positions``.

    A pre-norm block has ``norm1`` and ``norm2``, a post-norm block ``post1`` and ``post2``. In a ``parallel`` block the
    MLP reads what attention reads, ``norm1 x``. The first tokens that are ``waiting`` join in a later block: here no
    other token sees them, and they stay as they are. Where the first tokens alone are ``asking`` (class attention),
    they see all tokens, and the others stay as they are.
    """

    norm1: Norm | None
    attention: Attention
    norm2: Norm | None
    mlp: Mlp
    scale1: Tensor | None = None
    scale2: Tensor | None = None
    post1: Norm | None = None
    post2: Norm | None = None
    parallel: bool = False
    positions: Tensor | None = None  # (P + N, d)
    waiting: int = 0
    asking: int | None = None  # None: all

    @property
    def changing(self) -> slice:
        """The tokens that attend, and that the block changes."""
        return slice(self.waiting, self.asking)

    def changed(self, branch: Tensor) -> Tensor:
        """What a branch adds to the stream, (B, n, …): nothing to tokens that stay as they are."""
        if self.changing == EVERY:
            return branch
        added = torch.zeros_like(branch)
        added[:, self.changing] = branch[:, self.changing]
        return added


@dataclass(frozen=True, slots=True)
class Stem:
    """A network before the patch convolution, (B, 3, H, W) → (B, C, h, w): it is run as it is, under every rule."""

    run: Callable[[Tensor], Tensor]
    patch: tuple[int, int]  # pixels of the image that one patch stands for


@dataclass(frozen=True, slots=True)
class Embedding:
    """Patch convolution, prefix tokens (P, d), positions (P + N, d) and an optional norm after them.

    Where there is a ``stem``, the convolution embeds its features.
    """

    weight: Tensor  # (d, channels, patch height, patch width)
    bias: Tensor | None
    prefix: Tensor
    positions: Tensor | None = None
    patch_norm: Norm | None = None
    norm: Norm | None = None
    stem: Stem | None = None

    @property
    def patch(self) -> tuple[int, int]:
        """(height, width) of a patch in pixels."""
        return self.stem.patch if self.stem is not None else (self.weight.shape[2], self.weight.shape[3])


@dataclass(frozen=True, slots=True)
class AttentionPool:
    """One learned query attends to the patches; its output passes one more residual MLP."""

    query: Tensor  # (1, d): the latent, not yet projected
    attention: Attention
    norm: Norm | None
    mlp: Mlp | None


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, the norm before it and the activation after it, where there are any."""

    linear: Linear
    activation: Activation | None = None
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Upscale:
    """Each cell becomes two by two: ``norm(spread(act(expand(x))))``; ``spread`` mixes neighbours by channel."""

    expand: Linear  # (4 d, d): the four cells row by row
    activation: Activation
    spread: Tensor  # (d, 1, 3, 3)
    norm: Norm


@dataclass(frozen=True, slots=True)
class Queries:
    """The first ``count`` tokens each say a class and, by ``masks``, where it is on the upscaled map of the patches."""

    count: int
    grid: tuple[int, int]  # of the patches
    masks: tuple[Dense, ...]
    upscales: tuple[Upscale, ...]

    @property
    def cells(self) -> tuple[int, int]:
        """(rows, columns) of the masks."""
        factor = 2 ** len(self.upscales)
        return self.grid[0] * factor, self.grid[1] * factor


PoolKind = Literal["token", "pair", "mean", "max", "avgmax", "token_and_mean", "attention", "patches", "queries"]


@dataclass(frozen=True, slots=True)
class Head:
    """From the last block to the logits: final norm, pooling, norm of the pooled vector, linear head(s).

    ``token`` is the number of the token that a head with ``pool="token"`` reads. Where there are several ``choices``,
    it is the first of them, and the head reads the one that is the surest of any class but the last, "no object".
    ``pair`` reads token 0 with the first linear and token 1 with the second, and averages the logits. ``patches`` reads
    every patch and averages the logits, evenly or by ``weights`` (N,); of patches that are present, these alone count,
    and where all of these have weight 0, so that nothing is known, the logits are 0. ``queries`` reads what the
    ``queries`` say, where ``weights`` are those of the cells of masks. The layers ``dense`` stand before the head (the
    pooler of Hugging Face's ViT, torchvision's ``representation_size``, CLIP's projection, which has no activation),
    and after them the norm ``unit``, as of embeddings that texts or other images are compared with. ``answer`` replaces
    the logits by a function of all that the head has seen: the tokens (B, n, d) after the norm, the pooled vectors
    (B, D) and the logits (B, C) → (B,).
    """

    norm: Norm | None
    pool: PoolKind
    linears: tuple[Linear, ...]
    pooled_norm: Norm | None = None
    include_prefix: bool = False
    attention_pool: AttentionPool | None = None
    dense: tuple[Dense, ...] = ()
    unit: Norm | None = None
    token: int = 0
    choices: int = 1
    weights: Tensor | None = None
    queries: Queries | None = None
    answer: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def outputs(self) -> int:
        """The number of logits; of queries, "no object" is none."""
        if self.answer is not None:
            return 1
        return self.linears[0].weight.shape[0] - int(self.pool == "queries")

    @property
    def reads(self) -> int | None:
        """Number of leading tokens that it reads; None = it needs the patches as well."""
        return None if self.answer is not None else {"token": self.token + self.choices, "pair": 2}.get(self.pool)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole network, from the image to the logits."""

    embedding: Embedding
    blocks: tuple[Block, ...]
    head: Head


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Every weight in a part; rotary tables do not count."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif is_dataclass(part) and not isinstance(part, Rope):
        for entry in fields(part):
            yield from tensors_of(getattr(part, entry.name))


def converted(part: Any, dtype: torch.dtype) -> Any:
    """A copy of a part with all its numbers in another precision."""
    return mapped(part, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a part with ``change`` applied to all its tensors."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        return tuple(mapped(item, change) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{entry.name: mapped(getattr(part, entry.name), change) for entry in fields(part)})
    return part
