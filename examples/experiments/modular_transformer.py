"""One pre-norm transformer layer that adds two numbers modulo p, read at the position of '='.

The input is the sequence (a, b, =). With one layer, keys and values depend on the token and its position alone,
so they are computed once for the 2p + 1 possible ones and looked up for every pair: the same function as on
sequences (a test compares them), at a fraction of the work.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .patch_transformer import HeadAttention


class ModularTransformer(nn.Module):
    def __init__(self, p: int, d: int, heads: int) -> None:
        super().__init__()
        self.p = p
        self.token = nn.Parameter(torch.randn(p + 1, d) / d**0.5)
        self.position = nn.Parameter(torch.randn(3, 1, d) / d**0.5)
        self.norm1, self.attention = nn.LayerNorm(d), HeadAttention(d, heads, d // heads)
        self.norm2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, p, bias=False)

    def inputs(self) -> Tensor:
        """(2p + 1, d): every number in the first place, every number in the second, and '='."""
        numbers, equals = self.token[:-1], self.token[-1:]
        places = zip((numbers, numbers, equals), self.position, strict=True)
        return torch.cat([token + position for token, position in places])

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits (n, p) of (a + b) mod p for pairs (n, 2)."""
        x = self.inputs()
        y = self.norm1(x)
        q, k = self.attention.queries_and_keys(y[None])  # (1, heads, 2p + 1, r)
        scores = (k[0] @ q[0, :, -1:].mT)[..., 0].T / k.shape[-1] ** 0.5  # what '=' thinks of each input
        index = F.pad(pairs + torch.tensor([0, self.p], device=pairs.device), (0, 1), value=2 * self.p)
        weights = F.embedding(index, scores).softmax(1)  # (n, 3, heads)
        values = F.embedding(index, self.attention.value(y)).unflatten(-1, (weights.shape[-1], -1))
        mixed = torch.einsum("nsh,nshr->nhr", weights, values).flatten(1)
        z = x[-1] + self.attention.out(mixed)
        logits: Tensor = self.head(self.norm(z + self.mlp(self.norm2(z))))
        return logits
