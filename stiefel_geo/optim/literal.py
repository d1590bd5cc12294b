"""The step once more, slow and literal: the formulas of `step.py` in its order, each a method that a variant replaces.

No batches, no workspaces, no shared products, every length a float64 norm: what the optimizer is checked against, and
what experiments change by one line. It steps frames alone, in their own precision.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import stiefel
from .norms import NOISE


def length(X: Tensor) -> Tensor:
    """‖X‖_F of every frame (..., 1, 1), in float64."""
    size: Tensor = torch.linalg.matrix_norm(X.double(), keepdim=True)
    return size


class LiteralStep(Optimizer):
    """W (..., d, r) → the polar factor of W + ξ; state m like W, and v and t of shape (..., 1, 1)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        trust_radius: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "trust_radius": trust_radius})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; no closure is called."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move_(p, p.grad, group)

    def move_(self, p: Tensor, G: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter, in place."""
        p.copy_(self.new_frame(p.detach(), G, self.state[p], group))

    def new_frame(self, W: Tensor, G: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The method, line by line; a frame with a non-finite gradient stays, state included."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        if not state:
            start = {"exp_avg": W, "exp_avg_sq": self.mean_square(W), "step": length(W)}
            state.update({key: torch.zeros_like(like) for key, like in start.items()})
        finite = torch.isfinite(length(G).square())
        g = self.project(W, G)
        floor = self.floor(G)
        t = state["step"] + 1
        m = self.transport(W, beta1 * state["exp_avg"] + (1 - beta1) * g)
        v = beta2 * state["exp_avg_sq"] + (1 - beta2) * self.mean_square(torch.where(length(g) > floor, g, 0.0))
        xi = self.direction(W, m / (1 - beta1**t), v / (1 - beta2**t)) * -lr
        xi = self.cap(torch.where(length(m) > floor, xi, 0.0), group["trust_radius"])
        for key, value in {"exp_avg": m, "exp_avg_sq": v, "step": t}.items():
            state[key] = torch.where(finite, value, state[key])
        return torch.where(finite & (length(xi) > 0), self.retract(W + xi.to(W.dtype)), W)

    def project(self, W: Tensor, G: Tensor) -> Tensor:
        """g = P_W(G)."""
        return stiefel.project(W, G)

    def floor(self, G: Tensor) -> Tensor:
        """Up to this length a tangent part of G is the rounding error of the projection."""
        return length(G) * (NOISE * torch.finfo(G.dtype).eps)

    def transport(self, W: Tensor, m: Tensor) -> Tensor:
        """P_W(m): projecting at the new point is the vector transport."""
        return stiefel.project(W, m)

    def mean_square(self, g: Tensor) -> Tensor:
        """‖g‖²/(d·r), ONE scalar a frame."""
        return length(g).square() / (g.shape[-2] * g.shape[-1])

    def direction(self, W: Tensor, m: Tensor, v: Tensor) -> Tensor:
        """m̂/√v̂, with 0/0 = 0 and no epsilon."""
        return torch.where(v > 0, m / v.sqrt(), 0.0)

    def cap(self, xi: Tensor, trust_radius: float) -> Tensor:
        """ξ·min(1, Δ/‖ξ‖)."""
        return xi * (trust_radius / length(xi)).clamp(max=1.0).nan_to_num(nan=1.0)

    def retract(self, Y: Tensor) -> Tensor:
        """The polar factor, by decompositions."""
        return stiefel.polar(Y)
