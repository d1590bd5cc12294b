"""Proposition 3: the retraction's argument is well conditioned.

Statement. For a tangent step with ‖ξ‖_F ≤ Δ the singular values of W + ξ lie in [1, √(1+Δ²)], so
κ(W+ξ) ≤ √(1+Δ²). For d > r the bound is attained; for d = r, where it tightens to √(1+Δ²/2), that one is.

Proof. Wᵀξ is skew, so (W+ξ)ᵀ(W+ξ) = I + Wᵀξ + ξᵀW + ξᵀξ = I + ξᵀξ, whose spectrum lies in [1, 1+‖ξ‖₂²] and
‖ξ‖₂ ≤ ‖ξ‖_F ≤ Δ. Equality: ξ = Δ·uvᵀ with unit u ⊥ W, which exists for d > r, and one singular value of W + ξ
stays 1. For d = r, ξ = WΩ with Ω skew, whose singular values come in pairs: 2‖Ω‖₂² ≤ Δ², attained by rank two.

Checked here. Steps with the trust region binding, Δ from 1e-3 to 10. The optimizer says where the frame went
and its momentum says in which direction; the length of ξ follows from the distance moved, so a missing cap
shows. The retraction picks its polynomials from a bound known on the host, `retraction.polar_plan`; the frame is
compared with the SVD polar factor of W + ξ. The equality case is constructed. That ξ is tangent, the premise, is
checked along a trajectory, where the momentum is carried from frame to frame.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import stiefel
from ..stiefel import sym
from .certificate import Case, Certificate, worst
from .observing import STEPS, OptimizerFactory, Regression, one_step, parameter

RADII = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def check(case: Case, make: OptimizerFactory) -> list[Certificate]:
    """Six certificates, all but the first the worst over RADII."""
    generator = case.generator(3)
    W, G = case.frame_and_gradient(generator)
    normal_part = _normal_part(make, W, Regression.draw(case, generator))
    measured = [_measure(make, W, G, radius) for radius in RADII]
    extreme = _extreme_gradient(W, G)
    gaps = [abs(_measure(make, W, extreme, radius).kappa - _largest(radius, case)) for radius in RADII]
    return [
        case.at_most(3, "100 steps with momentum: ‖sym(Wᵀξ)‖_F/‖ξ‖_F", normal_part, 1e-13),
        case.at_most(3, "the cap binds, Δ from 1e-3 to 10: ‖ξ‖_F/Δ off 1 by", worst(m.length for m in measured), 1e-12),
        case.at_most(3, "1 − σ_min(W+ξ)", worst(1 - m.smallest for m in measured), 1e-13),
        case.at_most(3, "κ(W+ξ)/√(1+Δ²)", worst(m.kappa for m in measured), 1 + 1e-13),
        case.at_most(3, "‖R(ξ) − SVD polar factor of W+ξ‖_F/√r", worst(m.error for m in measured), 1e-13),
        case.at_most(3, "κ where the bound is attained, over the bound: off 1 by", worst(gaps), 1e-12),
    ]


def _normal_part(make: OptimizerFactory, W: Tensor, problem: Regression) -> float:
    """The worst ‖sym(Wᵀm)‖_F/‖m‖_F of a trajectory, m the momentum with which the step leaves W."""
    p = parameter(W)
    optimizer = make([p], lr=1e-2)
    parts = []
    for t in range(STEPS):
        W = p.detach().clone()
        p.grad = problem.gradient(W, t)
        optimizer.step()
        m = optimizer.state[p]["exp_avg"].view(W.shape)
        parts.append(float(torch.linalg.matrix_norm(sym(W.mT @ m)) / torch.linalg.matrix_norm(m)))
    return worst(parts)


class Measured(NamedTuple):
    """One step with trust radius Δ."""

    length: float  # | ‖ξ‖_F/Δ − 1 |
    smallest: float  # σ_min(W+ξ)
    kappa: float  # κ(W+ξ)/√(1+Δ²)
    error: float  # of the retraction


def _measure(make: OptimizerFactory, W: Tensor, G: Tensor, radius: float) -> Measured:
    """A step that would be √(dr)·100 times as long as its trust radius."""
    V, m = one_step(make, W, G, lr=100 * radius, trust_radius=radius)
    xi = _step(W, V, m)
    sigma = torch.linalg.svdvals(W + xi)
    return Measured(
        length=abs(float(torch.linalg.matrix_norm(xi)) / radius - 1),
        smallest=float(sigma[-1]),
        kappa=float(sigma[0] / sigma[-1]) / math.hypot(1, radius),
        error=float(torch.linalg.matrix_norm(V - stiefel.polar(W + xi))) / W.shape[1] ** 0.5,
    )


def _step(W: Tensor, V: Tensor, m: Tensor) -> Tensor:
    """ξ = −a·m with ‖polar(W + ξ) − W‖_F = ‖V − W‖_F.

    With μ the singular values of m that distance is √(2Σ(1 − 1/√(1+a²μ²))), monotone in a: by bisection.
    """
    moved = float((V - W).square().sum()) / 2
    mu = torch.linalg.svdvals(m) / torch.linalg.matrix_norm(m)
    low, high = -35.0, 15.0  # of log ‖ξ‖
    for _ in range(64):
        middle = (low + high) / 2
        x = (math.exp(middle) * mu).square()
        root = (1 + x).sqrt()
        distance = float((x / (root * (1 + root))).sum())  # 1 − 1/root without its cancellation
        low, high = (middle, high) if distance < moved else (low, middle)
    xi: Tensor = -math.exp((low + high) / 2) * m / torch.linalg.matrix_norm(m)
    return xi


def _extreme_gradient(W: Tensor, G: Tensor) -> Tensor:
    """A gradient along which κ is largest: uvᵀ with u ⊥ W for d > r, W times a skew matrix of rank two for d = r."""
    d, r = W.shape
    if d > r:
        return torch.outer(G[:, 0] - W @ (W.mT @ G[:, 0]), G[0])
    skew = torch.outer(G[0], G[1])
    return W @ (skew - skew.mT)


def _largest(radius: float, case: Case) -> float:
    """The largest κ that a step of length Δ can have, over √(1+Δ²)."""
    return 1.0 if case.d > case.r else math.hypot(1, radius / 2**0.5) / math.hypot(1, radius)
