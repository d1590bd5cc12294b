"""Weight ↔ frame and core, the one factorisation of the patch.

A head's projection is W ∈ R^{d×r}, q = x·W + b, stored by PyTorch as the r rows Wᵀ of a (rows, d) weight.
It becomes W = F·C with F = W(WᵀW)^{−1/2} ∈ St(d, r) and the symmetric core C = (WᵀW)^{1/2}, whatever its rank.
"""

import torch
from torch import Tensor

from .. import stiefel
from ..sharding import is_sharded


def polar(W: Tensor) -> tuple[Tensor, Tensor]:
    """Frames F (n, d, r) and symmetric cores C (n, r, r) with W = F·C, by W = QR, R = U Σ Vᵀ, F = QUVᵀ, C = VΣVᵀ."""
    Q, R = torch.linalg.qr(W)
    U, S, Vh = torch.linalg.svd(R)
    return Q @ (U @ Vh), stiefel.sym(Vh.mT @ (S.unsqueeze(-1) * Vh))


def whole(tensor: Tensor) -> Tensor:
    """`tensor` without its graph, gathered from all ranks where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def exact(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU, where weights are factorised and folded whatever device, autocast or TF32 say."""
    return whole(tensor).to("cpu", torch.float64)
