"""What the host knows of a step's length before it is taken, from which the degree of the retraction follows."""

import math

import torch
from torch import Tensor

# Shorter steps do not take a shorter plan.
SHORTEST = 2.0**-7


def reads_are_free(X: Tensor) -> bool:
    """Whether Python may look at values without waiting for a device or breaking a graph."""
    return X.device.type == "cpu" and not torch.compiler.is_compiling()


def step_bound(lr: float | None, betas: tuple[float, float], trust_radius: float, numel: int) -> float:
    """A bound on every ‖ξ‖_F for frames of `numel` entries: Δ, or less where lr (None: not known here) allows less.

    A graph is compiled for every lr to come, so there it is Δ, as long as there is one.
    """
    if math.isfinite(trust_radius) and (lr is None or torch.compiler.is_compiling()):
        return trust_radius
    assert lr is not None
    return min(trust_radius, lr * largest_ratio(*betas) * math.sqrt(numel)) if lr else 0.0


def rounded(bound: float) -> float:
    """The next power of two, so that few plans occur."""
    return 2.0 ** math.ceil(math.log2(max(bound, SHORTEST)))


def largest_ratio(beta1: float, beta2: float) -> float:
    """The supremum over t and all gradients of ‖m̂_t‖/√(v̂_t·d·r).

    By Cauchy–Schwarz the square of the ratio at t is (1−β₁)²/(1−β₁ᵗ)² · (1−β₂ᵗ)/(1−β₂) · (1−qᵗ)/(1−q) with
    q = β₁²/β₂, since projections do not lengthen. It grows with t: with a = −ln β₂ and b = −ln q its share of the limit
    is 1 − sinh²((a−b)t/4)/sinh²((a+b)t/4). Infinite when β₁² ≥ β₂, where old momentum outlives the second moment.
    """
    if beta1 == 0 and beta2 == 0:
        return 1.0
    if beta1**2 >= beta2:
        return math.inf
    q = beta1**2 / beta2
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - q))
