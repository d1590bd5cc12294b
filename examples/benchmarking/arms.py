"""The optimizers that examples/benchmark.py times: one factory each, from frames (n, d, r) and their gradients."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import geoopt
import torch
from torch import Tensor

from stiefel_geo import PolarStiefel, ScaleFreeRiemannianAdam, stiefel
from stiefel_geo.optim.literal import LiteralStep

LR = 1e-3
Arm = Callable[[Sequence[Tensor], Sequence[Tensor]], torch.optim.Optimizer]


class Landing(torch.optim.Optimizer):
    """The Landing step for tall frames with a fixed step size and λ = 1.

    X ← X − η·(skew(G Xᵀ) X + λ·X(XᵀX − I)), where 2·skew(G Xᵀ) X = G(XᵀX) − X(GᵀX).
    Source: Ablin and Peyré, "Fast and accurate optimization on the orthogonal manifold without retraction" (2022).
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for X in group["params"]:
                gram, cross = X.mT @ X, X.grad.mT @ X
                field = X.grad @ (gram / 2) - X @ (cross / 2 - gram) - X
                X.sub_(field, alpha=group["lr"])


def _with_gradients(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    for p, G in zip(params, grads, strict=True):
        p.grad = G.clone()
    return params


def _points(frames: Sequence[Tensor], grads: Sequence[Tensor], manifold: geoopt.Manifold) -> Sequence[Tensor]:
    return _with_gradients([geoopt.ManifoldParameter(W.clone(), manifold=manifold) for W in frames], grads)


def _plain(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    return _with_gradients([torch.nn.Parameter(W.clone()) for W in frames], grads)


def ours(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    return ScaleFreeRiemannianAdam(_points(frames, grads, PolarStiefel()), lr=LR)


def geoopt_adam(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = geoopt.optim.RiemannianAdam(
        _points(frames, grads, geoopt.EuclideanStiefel()), lr=LR
    )
    return optimizer


def pogo(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    """POGO keeps orthonormal rows, so it gets the transposed frames, contiguous."""
    from pogo import POGO, base

    rows = _plain([W.mT.contiguous() for W in _stacked(frames)], [G.mT.contiguous() for G in _stacked(grads)])
    optimizer: torch.optim.Optimizer = POGO(rows, base.VectorAdam(), LR)
    return optimizer


def landing(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    return Landing(_plain(frames, grads), lr=LR)


def adamw_fused(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_plain(frames, grads), lr=LR, fused=True)


def adamw_foreach(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_plain(frames, grads), lr=LR, foreach=True)


def muon(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> torch.optim.Optimizer:
    """torch's Muon takes matrices alone: one parameter per head in every layout."""
    return torch.optim.Muon(_plain(_heads(frames), _heads(grads)), lr=LR)


def _stacked(frames: Sequence[Tensor]) -> list[Tensor]:
    return [W.view(-1, *W.shape[-2:]) for W in frames]


def _heads(frames: Sequence[Tensor]) -> list[Tensor]:
    return [W for stack in _stacked(frames) for W in stack]


def give(optimizer: torch.optim.Optimizer, grads: Sequence[Tensor]) -> None:
    """New gradients for the parameters of an arm, in whatever layout it keeps its frames."""
    mine = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for G, new in zip(_heads(mine), _heads(grads), strict=True):
        G.copy_(new if G.shape == new.shape else new.mT)


def arms() -> dict[str, Arm]:
    """Every arm whose package is installed, ours first."""
    found: dict[str, Arm] = {
        "ours": ours,
        "geoopt RiemannianAdam": geoopt_adam,
        "POGO + VectorAdam": pogo,
        "Landing": landing,
        "Muon": muon,
        "AdamW fused": adamw_fused,
        "AdamW foreach": adamw_foreach,
    }
    if importlib.util.find_spec("pogo") is None:
        del found["POGO + VectorAdam"]
    return found


def largest_defect(optimizer: torch.optim.Optimizer) -> float:
    """The worst ‖WᵀW − I‖_F over an optimizer's parameters, of the transpose where rows are orthonormal."""
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return max(float(stiefel.defect(p if p.shape[-2] >= p.shape[-1] else p.mT).max()) for p in params)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))


def distance_to_twin(steps: int = 10) -> float:
    """The largest difference from the literal float64 step over some steps in float32."""
    W = stiefel.random_frame(2, 192, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    optimizer = ours([W], [torch.zeros_like(W)])
    (p,) = optimizer.param_groups[0]["params"]
    twin = torch.nn.Parameter(W.double())
    literal = LiteralStep([twin], lr=LR)
    for _ in range(steps):
        p.grad = torch.randn_like(W)
        twin.grad = p.grad.double()
        optimizer.step()
        literal.step()
    return float((twin - p).detach().abs().max())
