"""The plain ViT of the embedded models, with timm's names for its parts.

timm's own would do; but it is imported with its whole zoo and torchvision, which takes longer than an explanation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Square patches → tokens."""

    def __init__(self, img_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.img_size = (img_size, img_size)
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.proj = nn.Conv2d(3, width, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Softmax attention of several heads."""

    fused_attn = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """Two linear layers and a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(tokens)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """A ViT with a class token whose head reads that token or the mean of the patches."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        num_classes: int,
        mlp_ratio: float = 4.0,
        global_pool: Literal["token", "avg"] = "token",
        fc_norm: bool = False,
    ) -> None:
        super().__init__()
        assert not fc_norm, "the norm stands before the pooling"
        self.global_pool, self.num_classes, self.head_hidden_size = global_pool, num_classes, embed_dim
        self.no_embed_class, self.num_prefix_tokens = False, 1
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim)
        rows, columns = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + rows * columns, embed_dim))
        blocks = [Block(embed_dim, num_heads, int(embed_dim * mlp_ratio)) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.fc_norm = nn.Identity()
        self.head = nn.Linear(embed_dim, num_classes)

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the head by a new one, to be trained."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.head_hidden_size, num_classes).to(self.head.weight)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, 1 + N, d): the tokens that the head pools."""
        patches = self.patch_embed(images)
        tokens = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1) + self.pos_embed
        features: Tensor = self.norm(self.blocks(tokens))
        return features

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.forward_features(images)
        logits: Tensor = self.head(tokens[:, 0] if self.global_pool == "token" else tokens[:, 1:].mean(1))
        return logits
