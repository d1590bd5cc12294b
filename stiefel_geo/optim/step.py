"""One step of the scale-free Riemannian Adam on batches of frames, in the paper's order.

    project → momentum → second moment → step → cap → retract

Symbols: W the frames (n, d, r), G their Euclidean gradients, m the tangent momentum (n, d, r), v the ONE scalar
second moment of each frame (n,), t the steps each frame has taken (n,), Δ the trust radius.

    g = P_W(G) = G − W·sym(WᵀG)                           project
    m ← P_W(β₁ m + (1−β₁) g)                              momentum; projecting at the new point transports it
    v ← β₂ v + (1−β₂) ‖g‖²_F/(d·r)                        second moment
    ξ = −lr · m̂/√v̂,  m̂ = m/(1−β₁ᵗ),  v̂ = v/(1−β₂ᵗ)     step, with 0/0 = 0 and no epsilon
    ξ ← ξ·min(1, Δ/‖ξ‖_F)                                 trust region
    W ← (W+ξ)((W+ξ)ᵀ(W+ξ))^{−1/2}                         polar retraction

Source: R. D. Guerrero, "Stiefel Attention" (2026). Everything is a fixed sequence of tensor operations without
host synchronisation on an accelerator, and scalars of a frame are float64. `literal.py` is the same without batches,
workspaces and shared products; `norms.py` says how lengths are formed, `bounds.py` what the host knows of them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..retraction import factors
from .bounds import reads_are_free, rounded, step_bound
from .norms import Lengths, frobenius_, measured_type, squares


class Batch(NamedTuple):
    """n ≥ 1 frames with their momentum, float32 or float64, and their gradients.

    They come in parts, contiguous (n_i, d, r), as they lie in memory: what is d×r goes through part by part,
    what is r×r for all parts at once. Of a batch of copies, which has one part, W and G are overwritten, and the
    new frames are left in G.
    """

    W: list[Tensor]
    G: list[Tensor]  # read only, but for copies, which have the type of W
    m: list[Tensor]
    sizes: list[int]  # n_i
    copies: bool = False

    def add(self, W: Tensor, G: Tensor, m: Tensor) -> None:
        """Append a part."""
        self.W.append(W)
        self.G.append(G)
        self.m.append(m)
        self.sizes.append(W.shape[0])

    @property
    def n(self) -> int:
        return sum(self.sizes)

    def split(self, stack: Tensor) -> tuple[Tensor, ...]:
        """The same parts of a stack (n, …)."""
        return (stack,) if len(self.sizes) == 1 else stack.split_with_sizes(self.sizes)


class Scalars(NamedTuple):
    """What the state keeps of each frame besides its momentum, (N,) float64, for all batches in order.

    Updated in place.
    """

    exp_avg_sq: Tensor  # v
    step: Tensor  # t: a skipped step does not count
    skipped: Tensor  # steps skipped because the gradient was not finite
    capped: Tensor  # steps that the trust region shortened


class Settings(NamedTuple):
    """Hyper-parameters of a step; lr is the RMS change of a frame's entries per step, the unit of AdamW's lr."""

    lr: float | Tensor  # a tensor has no dimension, or one entry for each frame
    beta1: float
    beta2: float
    trust_radius: float
    maximize: bool = False
    largest_lr: float | None = None  # as far as the host knows it

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2


class Workspace:
    """Memory (n, d, r) that the batches of a step use in turn, so that it stays in the caches; copies bring their own.

    Gradients lie in it, then their tangent parts, and then W + ξ.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        W = batches[0].W[0]
        self.rows = W.new_empty(max(0 if batch.copies else batch.n for batch in batches), *W.shape[1:])

    def tangent(self, batch: Batch) -> Tensor:
        return batch.G[0] if batch.copies else self.rows[: batch.n]

    def moved(self, batch: Batch) -> Tensor:
        return batch.W[0] if batch.copies else self.rows[: batch.n]


def step_(batches: Sequence[Batch], scalars: Scalars, settings: Settings) -> None:
    """One step of all frames of equal (d, r), in place.

    A frame whose gradient is not finite stays as it was, state included, and is counted.
    """
    (_, d, r), dtype = batches[0].W[0].shape, batches[0].W[0].dtype
    workspace = Workspace(batches)
    lengths = momenta_(batches, settings.beta1, workspace)  # g and m
    g_sq, m_sq, floor = squares(lengths, settings.beta1, torch.finfo(dtype).eps)
    advance_second_moment_(scalars, g_sq, d * r, lengths.finite, settings.beta2)  # v
    a = step_scale(scalars, settings, m_sq > floor)  # ξ = −a·m, or +a·m to ascend
    a = cap_(scalars, a, lengths.momentum, lengths.finite, settings.trust_radius)

    bound = longest_step(a, lengths.momentum, d * r, settings)
    largest = torch.full((), torch.finfo(dtype).max, dtype=a.dtype)
    a = torch.minimum(a, largest, out=torch.empty_like(a, dtype=dtype))
    all_move = reads_are_free(a) and bool((a != 0).all())
    for batch, part in zip(batches, a[:, None, None].split_with_sizes([batch.n for batch in batches]), strict=True):
        Y = workspace.moved(batch)
        for W, m, length, YW in zip(batch.W, batch.m, batch.split(part), batch.split(Y), strict=True):
            torch.addcmul(W, m, length, value=1 if settings.maximize else -1, out=YW)  # W + ξ
        retract_(batch, Y, bound, None if all_move else part == 0)


def momenta_(batches: Sequence[Batch], beta1: float, workspace: Workspace) -> Lengths:
    """`momentum_` of all batches, and what it measured. Its r×r workspace is gone before they move."""
    W, sizes = batches[0].W[0], [batch.n for batch in batches]
    r = W.shape[-1]
    products = W.new_empty(2, max(sizes), r, r)
    lengths = Lengths.empty(sum(sizes), W.device)
    for batch, n, part in zip(batches, sizes, lengths.split(sizes), strict=True):
        momentum_(batch, beta1, workspace.tangent(batch), products[:, :n], part)
    return lengths


def momentum_(batch: Batch, beta1: float, U: Tensor, products: Tensor, lengths: Lengths) -> None:
    """m ← P_W(β₁ m + (1−β₁) g) in place, and its `lengths`; U (n, d, r) and products (2, n, r, r) are workspace.

    P_W is linear, so the new m is β₁ m + (1−β₁) U with U = G − W·(sym(WᵀG) + θ·sym(Wᵀm)) and θ = β₁/(1−β₁): one
    product with W serves the gradient and the transport. U is G at first.
    """
    parts = batch.split(U)
    if not batch.copies:
        torch._foreach_copy_(parts, batch.G)
    A, B = products.unbind()
    for W, G, m, WtG, Wtm in zip(batch.W, parts, batch.m, batch.split(A), batch.split(B), strict=True):
        WtG.baddbmm_(W.mT, G, beta=0, alpha=0.5)
        Wtm.baddbmm_(W.mT, m, beta=0, alpha=0.5)
    S, ordinary = symmetric_part(products, beta1, lengths)
    for W, SW, UW in zip(batch.W, batch.split(S), parts, strict=True):
        UW.baddbmm_(W, SW, alpha=-1)
    ordinary = frobenius_((lengths.tangent,), (U,)) and ordinary
    lengths.find_ambient_()
    if ordinary:
        torch._foreach_lerp_(batch.m, parts, 1 - beta1)
        frobenius_(batch.split(lengths.momentum), batch.m)
    else:
        for m, new in zip(batch.m, parts, strict=True):
            torch.lerp(m, new, 1 - beta1, out=new)
        frobenius_((lengths.momentum,), (U,))
        keep_broken_(batch, parts, lengths.finite)


def symmetric_part(products: Tensor, beta1: float, lengths: Lengths) -> tuple[Tensor, bool]:
    """sym(WᵀG) + θ·sym(Wᵀm) (n, r, r) from half of both products, over the first; whether both parts are ordinary."""
    symmetric = torch.empty_like(products, dtype=measured_type(products))
    torch.add(products, products.mT, out=symmetric)
    S = torch.add(*symmetric.unbind(), alpha=beta1 / (1 - beta1), out=products[0])
    return S, frobenius_((lengths.rows[:2],), (symmetric,))


def keep_broken_(batch: Batch, parts: Sequence[Tensor], finite: Tensor) -> None:
    """Write the new momentum over m, where the gradient is finite."""
    for m, new, whole in zip(batch.m, parts, batch.split(finite[:, None, None]), strict=True):
        torch.where(whole, new, m, out=m)


def advance_second_moment_(scalars: Scalars, g_sq: Tensor, numel: int, finite: Tensor, beta2: float) -> None:
    """v ← β₂ v + (1−β₂) ‖g‖²/(d·r) and t ← t + 1 for the frames whose gradient is finite; g_sq is so everywhere."""
    v = scalars.exp_avg_sq
    v.addcmul_(finite, torch.sub(v, g_sq, alpha=1 / numel), value=beta2 - 1)
    scalars.step.add_(finite)


def step_scale(scalars: Scalars, settings: Settings, moves: Tensor) -> Tensor:
    """a = lr/((1−β₁ᵗ)·√v̂), so that ξ = −a·m; 0 where v or t is 0, and for frames that `moves` leaves out."""
    lr = settings.lr
    per_lr, second = bias_corrections(scalars.step, settings.betas, 1.0 if isinstance(lr, Tensor) else lr)
    a = (second / scalars.exp_avg_sq).sqrt() / per_lr * moves  # `where` would launch once more, to make its 0
    return (a * lr if isinstance(lr, Tensor) else a).nan_to_num(nan=0.0, posinf=0.0)


def bias_corrections(t: Tensor, betas: tuple[float, float], lr: float) -> Sequence[Tensor]:
    """(1−β₁ᵗ)/lr and 1−β₂ᵗ."""
    corrections = torch._foreach_mul([t, t], [math.log(beta) if beta else -math.inf for beta in betas])
    torch._foreach_expm1_(corrections)
    torch._foreach_mul_(corrections, [-1 / lr if lr else -math.inf, -1.0])
    return corrections


def cap_(scalars: Scalars, a: Tensor, length: Tensor, finite: Tensor, trust_radius: float) -> Tensor:
    """Shorten steps a·m longer than Δ to Δ; count them, and those left out since the gradient is not finite.

    `length` is that of m, and NaN where nothing moves.
    """
    longest = torch.full((), trust_radius, dtype=length.dtype) / length
    skipped = torch.logical_not(finite, out=torch.empty_like(a))
    capped = torch.gt(a, longest, out=torch.empty_like(a))
    torch._foreach_add_([scalars.skipped, scalars.capped], [skipped, capped])
    return torch.fmin(a, longest)


def longest_step(a: Tensor, length: Tensor, numel: int, settings: Settings) -> float:
    """A bound on every ‖ξ‖_F: the longest step itself where reading is free, and else what the host knows."""
    if reads_are_free(a):
        return rounded(float((a * length).nan_to_num(nan=0.0).max()))
    return rounded(step_bound(settings.largest_lr, settings.betas, settings.trust_radius, numel))


def retract_(batch: Batch, Y: Tensor, bound: float, rest: Tensor | None) -> None:
    """W ← polar factor of Y = W + ξ; frames at `rest` (n, 1, 1) keep their bits."""
    Z, C = factors(Y, bound, rest)
    for ZW, CW, new in zip(batch.split(Z), batch.split(C), batch.G if batch.copies else batch.W, strict=True):
        torch.bmm(ZW, CW, out=new)
