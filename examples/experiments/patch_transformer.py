"""The experiment's model: a small pre-norm transformer over image patches, whose heads have frames of their own.

Query and key projections are parameters of shape (heads, d, r). With normed inputs (‖x‖ ≈ √d) logits of orthonormal
frames start with a standard deviation near 1. They cannot grow; with `gain` every head has a learned exp(gain)·q·k/√r,
gain = 0 at the start, the same for every arm, never decayed.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stiefel_geo import stiefel


class HeadAttention(nn.Module):
    """Attention with frames Q, K (heads, d, r) and linear values."""

    def __init__(self, d: int, heads: int, r: int, gain: bool = True) -> None:
        super().__init__()
        self.query = nn.Parameter(stiefel.random_frame(heads, d, r))
        self.key = nn.Parameter(stiefel.random_frame(heads, d, r))
        self.gain = nn.Parameter(torch.zeros(heads, 1, 1)) if gain else None
        self.value = nn.Linear(d, heads * r)
        self.out = nn.Linear(heads * r, d)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q, k (batch, heads, n, r), the gain included in q."""
        heads, d, r = self.query.shape
        weights = torch.cat([self.query, self.key]).transpose(0, 1).reshape(d, 2 * heads * r)
        q, k = (x @ weights).unflatten(-1, (2, heads, r)).permute(2, 0, 3, 1, 4)
        return (q if self.gain is None else q * self.gain.exp()), k

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.value(x).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)  # b n (h r) -> b h n r
        mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v  # faster here than the fused kernel of CPUs
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, d: int, heads: int, gain: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), HeadAttention(d, heads, d // heads, gain)
        self.norm2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        wider: Tensor = self.mlp(self.norm2(x))
        return x + wider


def sin_cos(n: int, d: int) -> Tensor:
    """Fixed positions (1, n², d) of an n×n grid: sines and cosines of row and column, d/4 wavelengths."""
    angle = torch.arange(n)[:, None] / 10_000 ** (torch.arange(d // 4) * 4 / d)
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)  # (n, d/2)
    rows, columns = wave[:, None].expand(-1, n, -1), wave[None].expand(n, -1, -1)
    return torch.cat([rows, columns], dim=-1).reshape(1, n * n, d)


def positions(kind: str, n: int, d: int) -> nn.Parameter:
    """Learned from a standard deviation of 1 (`wide`) or 0.02 (`narrow`), or fixed (`sin-cos`)."""
    if kind == "sin-cos":
        return nn.Parameter(sin_cos(n, d), requires_grad=False)
    return nn.Parameter({"wide": 1.0, "narrow": 0.02}[kind] * torch.randn(1, n * n, d))


class PatchTransformer(nn.Module):
    """Images (b, 3, side, side) in patch×patch patches → blocks → mean over patches → classes."""

    def __init__(self, config: Mapping[str, Any], classes: int = 10) -> None:
        super().__init__()
        d, self.patch = config["width"], config["patch"]
        self.embed = nn.Linear(3 * self.patch**2, d)
        self.position = positions(config["position"], config["side"] // self.patch, d)
        blocks = (Block(d, config["heads"], config["gain"]) for _ in range(config["depth"]))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)  # b (c p p) n -> b n (c p p)
        x = self.blocks(self.embed(patches) + self.position)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def attentions(model: nn.Module) -> list[HeadAttention]:
    return [module for module in model.modules() if isinstance(module, HeadAttention)]


def frames(model: nn.Module) -> list[nn.Parameter]:
    """Queries and keys of every layer, in order."""
    return [frame for attention in attentions(model) for frame in (attention.query, attention.key)]


def replace_frames(model: nn.Module, new: list[nn.Parameter]) -> None:
    """Put parameters of the same shapes in the place of `frames(model)`."""
    for index, attention in enumerate(attentions(model)):
        attention.query, attention.key = new[2 * index : 2 * index + 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter that is no frame."""
    kept = {id(frame) for frame in frames(model)}
    return [p for p in model.parameters() if id(p) not in kept]


@torch.no_grad()
def spectrum(model: nn.Module) -> dict[str, float]:
    """Singular values of queries and keys, and the effective rank of W_Q·W_Kᵀ: medians over the heads.

    Effective rank: exp of the entropy of the normalised singular values; r for W_Q·W_Kᵀ with equal ones.
    NaN where a frame of a run that diverged is not finite.
    """
    if not all(frame.isfinite().all() for frame in frames(model)):
        return dict.fromkeys(("largest", "smallest", "product_rank"), math.nan)
    values = torch.cat([torch.linalg.svdvals(frame) for frame in frames(model)])
    R = [torch.linalg.qr(frame).R for frame in frames(model)]  # W_Q·W_Kᵀ has the singular values of R_Q·R_Kᵀ
    products = torch.cat([torch.linalg.svdvals(R_Q @ R_K.mT) for R_Q, R_K in zip(R[::2], R[1::2], strict=True)])
    share = (products / products.sum(-1, keepdim=True)).clamp(min=1e-12)
    rank = (-(share * share.log()).sum(-1)).exp()
    return {
        "largest": float(values[:, 0].median()),
        "smallest": float(values[:, -1].median()),
        "product_rank": float(rank.median()),
    }
