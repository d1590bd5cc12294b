"""One step of the scale-free Riemannian Adam on a batch of frames, in the paper's order.

    project → moments → step → cap → retract

Symbols: W the frames (n, d, r), G their Euclidean gradients, m the tangent momentum (n, d, r), v the ONE scalar
second moment of each frame (n,), t the steps each frame has taken (n,), Δ the trust radius.

    g = P_W(G) = G − W·sym(WᵀG)                           project
    m ← P_W(β₁ m + (1−β₁) g)                              momentum; projecting at the new point transports it
    v ← β₂ v + (1−β₂) ‖g‖²_F/(d·r)                        second moment
    ξ = −lr · m̂/√v̂,  m̂ = m/(1−β₁ᵗ),  v̂ = v/(1−β₂ᵗ)     step, with 0/0 = 0 and no epsilon
    ξ ← ξ·min(1, Δ/‖ξ‖_F)                                 trust region
    W ← (W+ξ)((W+ξ)ᵀ(W+ξ))^{−1/2}                         polar retraction

Source: R. D. Guerrero, "Stiefel Attention" (2026). Everything is a fixed sequence of tensor operations without
host synchronisation on an accelerator, and scalars of a frame are kept in float64, where the squares of float32
values neither overflow nor underflow.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import stiefel
from .retraction import retract

# A tangent part below NOISE·eps·‖G‖ is the rounding error of the projection, not a direction.
NOISE = 16.0
# Frobenius norms within these bounds have float32 squares that neither overflow nor underflow.
SAFE_NORMS = (1e-16, 1e16)


class Moments(NamedTuple):
    """State of n frames; updated in place."""

    exp_avg: Tensor  # (n, d, r) tangent momentum m
    exp_avg_sq: Tensor  # (n,) float64, v
    step: Tensor  # (n,) float32, steps taken: a skipped step does not count
    skipped: Tensor  # (n,) int64, steps skipped for a gradient that was not finite
    capped: Tensor  # (n,) int64, steps that the trust region shortened


class Settings(NamedTuple):
    """Hyper-parameters of a step; `lr` is the RMS change of a frame's entries per step, the unit of AdamW's lr."""

    lr: float | Tensor
    beta1: float
    beta2: float
    trust_radius: float
    maximize: bool = False


def _reads_are_free(X: Tensor) -> bool:
    """Whether Python may look at values without waiting for a device or breaking a graph."""
    return X.device.type == "cpu" and not torch.compiler.is_compiling()


def norm(X: Tensor) -> Tensor:
    """‖X‖_F of each matrix (n, d, r), float64 (n,), for entries from 1e-37 to 1e37."""
    flat = X.flatten(1)
    size: Tensor
    if X.dtype == torch.float64 or not _reads_are_free(X):
        size = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
        return size
    size = torch.linalg.vector_norm(flat, dim=1)
    smallest, largest = SAFE_NORMS
    if bool(((size > smallest) & (size < largest)).all()):
        return size.double()
    # On the CPU a float64 accumulation is slow; scaling by a power of two is exact, and as good.
    peak = torch.maximum(flat.amax(1), -flat.amin(1)).double()
    unit = torch.where(peak > 0, torch.exp2(torch.floor(torch.log2(peak))), 1.0)
    scaled = flat * (1 / unit).to(X.dtype)[:, None]
    size = torch.linalg.vector_norm(scaled, dim=1)
    return size.double() * unit


@lru_cache
def largest_ratio(beta1: float, beta2: float) -> float:
    """The supremum over t and all gradients of ‖m̂_t‖/√(v̂_t·d·r).

    By Cauchy–Schwarz the ratio at t is (1−β₁)/(1−β₁ᵗ) · √((1−β₂ᵗ)/(1−β₂) · Σ_{i<t} (β₁²/β₂)ⁱ), since projections
    do not lengthen. Infinite when β₁² ≥ β₂, where old momentum outlives the second moment.
    """
    if beta1 == 0 and beta2 == 0:
        return 1.0
    if beta1**2 >= beta2:
        return math.inf
    q = beta1**2 / beta2
    limit = (1 - beta1) / math.sqrt((1 - beta2) * (1 - q))
    ratios = (
        (1 - beta1) / (1 - beta1**t) * math.sqrt((1 - beta2**t) / (1 - beta2) * (1 - q**t) / (1 - q))
        for t in range(1, 2000)
    )
    return max(limit, *ratios)


def project(W: Tensor, G: Tensor, m: Tensor, beta1: float) -> tuple[Tensor, Tensor, Tensor]:
    """U with m ← m + (1−β₁)(U − m) as the new momentum, ‖g‖² and ‖G‖² (n,) in float64.

    P_W is linear, so P_W(β₁ m + (1−β₁) G) = β₁ m + (1−β₁) U with U = G − W·(sym(WᵀG) + θ·sym(Wᵀm)) and
    θ = β₁/(1−β₁): one product with W serves gradient and momentum. The tangent g and the normal θ·W·sym(Wᵀm)
    are orthogonal, so Pythagoras gives ‖g‖² from ‖U‖², and ‖G‖² from ‖g‖². The subtraction loses nothing that v
    could see: sym(Wᵀm) is of the order of the last step times m, and v remembers the gradients that m is made of.
    """
    A = stiefel.sym(stiefel.cross(W, G))
    B = stiefel.sym(stiefel.cross(W, m)).mul_(beta1 / (1 - beta1))
    normal_sq, transport_sq = norm(A).square(), norm(B).square()
    U = torch.baddbmm(G, W, A.add_(B), alpha=-1)
    g_sq = (norm(U).square() - transport_sq).clamp(min=0)
    return U, g_sq, g_sq + normal_sq


def accumulate_(state: Moments, U: Tensor, g_sq: Tensor, settings: Settings) -> Tensor:
    """Update m, v and t in place; frames with a gradient that is not finite keep all three. Returns who stepped."""
    finite = torch.isfinite(g_sq)
    if not (_reads_are_free(U) and bool(finite.all())):
        U.masked_fill_(~finite[:, None, None], 0)
        g_sq = g_sq.masked_fill(~finite, 0)
    state.exp_avg.lerp_(U, finite.to(U.dtype)[:, None, None] * (1 - settings.beta1))
    mean_sq = g_sq / (U.shape[1] * U.shape[2])
    state.exp_avg_sq.lerp_(mean_sq, finite.double() * (1 - settings.beta2))
    state.step.add_(finite)
    state.skipped.add_(~finite)
    return finite


def step_sizes(state: Moments, size_m: Tensor, active: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Factor a with ξ = −a·m and length ‖ξ‖_F, both (n,) float64; zero for frames that are not `active`."""
    t = state.step.double()
    v_hat = state.exp_avg_sq / (1 - settings.beta2**t)
    factor = settings.lr / ((1 - settings.beta1**t) * v_hat.sqrt())
    factor = torch.where(active & (state.exp_avg_sq > 0), factor, 0.0)
    return factor, factor * size_m


def cap(factor: Tensor, length: Tensor, trust_radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shorten steps longer than Δ to Δ: the new factor and length, and which were shortened."""
    too_long = length > trust_radius
    factor = torch.where(too_long, factor * (trust_radius / length), factor)
    return factor, length.clamp(max=trust_radius), too_long


def longest_step(length: Tensor, numel: int, settings: Settings) -> float:
    """A bound on every ‖ξ‖_F known on the host, rounded up to a power of two so that few plans occur.

    Where reading is free it is the longest step itself. Otherwise it is Δ, or without a trust region the
    longest step that lr allows.
    """
    if _reads_are_free(length):
        bound = float(length.max())
    elif math.isfinite(settings.trust_radius):
        bound = settings.trust_radius
    else:
        bound = float(settings.lr) * largest_ratio(settings.beta1, settings.beta2) * math.sqrt(numel)
    return 2.0 ** math.ceil(math.log2(max(bound, 2**-7)))


def update_(W: Tensor, G: Tensor, state: Moments, settings: Settings) -> None:
    """One step of n ≥ 1 frames, in place. W, G and m are contiguous (n, d, r) of one dtype, float32 or float64.

    G is read only. A frame whose gradient is not finite stays as it was, state included.
    """
    U, g_sq, G_sq = project(W, G, state.exp_avg, settings.beta1)
    floor_sq = (NOISE * torch.finfo(W.dtype).eps) ** 2 * G_sq
    finite = accumulate_(state, U, torch.where(g_sq <= floor_sq, 0.0, g_sq), settings)
    size_m = norm(state.exp_avg)
    factor, length = step_sizes(state, size_m, finite & (size_m.square() > floor_sq), settings)
    factor, length, too_long = cap(factor, length, settings.trust_radius)
    state.capped.add_(too_long)
    sign = 1.0 if settings.maximize else -1.0
    scale = (sign * factor).clamp(min=-torch.finfo(W.dtype).max, max=torch.finfo(W.dtype).max)
    Y = torch.addcmul(W, state.exp_avg, scale.to(W.dtype)[:, None, None], out=U)
    retract(Y, longest_step(length, W[0].numel(), settings), moved=length > 0, out=W)
