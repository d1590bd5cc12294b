"""The experiment's model: a small pre-norm transformer over image patches, whose heads have frames of their own.

Query and key projections are parameters of shape (heads, d, r). An orthonormal frame cannot grow, so every head
has a learned logit gain, exp(gain)·q·k/√r with gain = 0 at the start: the same for every arm, never decayed.
With normed inputs (‖x‖ ≈ √d) logits of orthonormal frames start with a standard deviation near 1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stiefel_geo import stiefel


class HeadAttention(nn.Module):
    """Attention with frames Q, K (heads, d, r) and linear values."""

    def __init__(self, d: int, heads: int, r: int) -> None:
        super().__init__()
        self.query = nn.Parameter(stiefel.random_frame(heads, d, r))
        self.key = nn.Parameter(stiefel.random_frame(heads, d, r))
        self.gain = nn.Parameter(torch.zeros(heads, 1, 1))
        self.value = nn.Linear(d, heads * r)
        self.out = nn.Linear(heads * r, d)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q, k (batch, heads, n, r), the gain included in q."""
        heads, d, r = self.query.shape
        weights = torch.cat([self.query, self.key]).transpose(0, 1).reshape(d, 2 * heads * r)
        q, k = (x @ weights).unflatten(-1, (2, heads, r)).permute(2, 0, 3, 1, 4)
        return q * self.gain.exp(), k

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.value(x).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)  # b n (h r) -> b h n r
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, r: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), HeadAttention(d, heads, r)
        self.norm2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchTransformer(nn.Module):
    """Images (b, 3, side, side) in 4×4 patches → blocks → mean over patches → classes."""

    def __init__(self, side: int, classes: int, d: int, depth: int, heads: int, r: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 4 * 4, d)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, heads, r) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, 4).flatten(2).transpose(1, 2)  # b (c 4 4) n -> b n (c 4 4)
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


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
    """
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
