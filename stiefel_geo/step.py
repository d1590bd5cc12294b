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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .retraction import factors

# A tangent part below NOISE·eps·‖G‖ is the rounding error of the projection, not a direction.
NOISE = 16.0
# Frobenius norms within these bounds are ordinary: their float32 squares neither overflow nor underflow.
SAFE_NORMS = (1e-16, 1e16)
# Below it 1/unit would overflow float32: denormal entries are measured in this unit, and so is 0.
SMALLEST_UNIT = torch.finfo(torch.float32).tiny


class Batch(NamedTuple):
    """n ≥ 1 frames with their gradients and momentum, of one dtype, float32 or float64.

    They come in parts, contiguous (n_i, d, r), as they lie in memory: what is d×r goes through part by part,
    what is r×r for all parts at once.
    """

    W: list[Tensor]
    G: list[Tensor]  # read only
    m: list[Tensor]
    sizes: list[int]  # n_i

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
    """What the state keeps of each frame besides its momentum, (N,) for all batches in order; updated in place."""

    exp_avg_sq: Tensor  # float64, v
    step: Tensor  # float32, t: a skipped step does not count
    skipped: Tensor  # int64, steps skipped because the gradient was not finite
    capped: Tensor  # int64, steps that the trust region shortened


class Settings(NamedTuple):
    """Hyper-parameters of a step; `lr` is the RMS change of a frame's entries per step, the unit of AdamW's lr."""

    lr: float | Tensor
    beta1: float
    beta2: float
    trust_radius: float
    maximize: bool = False


def update_(batches: Sequence[Batch], scalars: Scalars, settings: Settings) -> None:
    """One step of all frames of equal (d, r), in place.

    A frame whose gradient is not finite stays as it was, state included, and is counted.
    """
    n, (_, d, r) = max(batch.n for batch in batches), batches[0].W[0].shape
    workspace = batches[0].W[0].new_empty(n, d, r)  # one for all batches, so that it stays in the caches
    eps, largest = torch.finfo(workspace.dtype).eps, torch.finfo(workspace.dtype).max
    sizes = advance_momenta_(batches, settings.beta1, workspace)
    g_sq, G_sq, m_sq = squares(sizes, settings.beta1, eps)

    floor_sq = (NOISE * eps) ** 2 * G_sq
    finite = advance_second_moment_(scalars, torch.where(g_sq <= floor_sq, 0.0, g_sq) / (d * r), settings)
    factor = step_factor(scalars, settings)
    factor = torch.where(finite & (m_sq > floor_sq) & (scalars.exp_avg_sq > 0), factor, 0.0)
    factor, length = cap_(scalars, factor, factor * m_sq.sqrt(), settings.trust_radius)

    bound = longest_step(length, d * r, settings)
    scale = (factor if settings.maximize else -factor).clamp(-largest, largest).to(workspace.dtype)
    all_move = _reads_are_free(scale) and bool((scale != 0).all())
    scales = scale[:, None, None].split_with_sizes([batch.n for batch in batches])
    for batch, part in zip(batches, scales, strict=True):
        move_(batch, part, bound, workspace[: batch.n], all_move=all_move)


def advance_momenta_(batches: Sequence[Batch], beta1: float, workspace: Tensor) -> Tensor:
    """`advance_momentum_` of all batches; the norms (4, N) in float64. Its r×r workspace is gone before they move."""
    n, _, r = workspace.shape
    grams = workspace.new_empty(4, n, r, r)
    sizes = [advance_momentum_(batch, beta1, workspace[: batch.n], grams[:, : batch.n]) for batch in batches]
    return torch.cat(sizes, dim=1).double()


def advance_momentum_(batch: Batch, beta1: float, U: Tensor, grams: Tensor) -> Tensor:
    """m ← P_W(β₁ m + (1−β₁) g) in place, U and grams (4, n, r, r) as workspace; what `squares` takes, (4, n).

    P_W is linear, so the new m is β₁ m + (1−β₁) U with U = G − W·(sym(WᵀG) + θ·sym(Wᵀm)) and θ = β₁/(1−β₁): one
    product with W serves the gradient and the transport.
    """
    products, AB = grams[:2], grams[2:]
    A, B = products.unbind()
    for W, G, m, WtG, Wtm in zip(batch.W, batch.G, batch.m, batch.split(A), batch.split(B), strict=True):
        torch.bmm(W.mT, G, out=WtG)
        torch.bmm(W.mT, m, out=Wtm)
    torch.add(products, products.mT, out=AB)  # twice the symmetric parts
    S = torch.add(AB[0], AB[1], alpha=beta1 / (1 - beta1), out=A)
    parts = batch.split(U)
    for W, G, SW, UW in zip(batch.W, batch.G, batch.split(S), parts, strict=True):
        torch.baddbmm(G, W, SW, alpha=-0.5, out=UW)
    sizes, ordinary = norms(AB.flatten(0, 1), U)
    if ordinary:
        torch._foreach_lerp_(batch.m, parts, 1 - beta1)
    else:
        finite = torch.isfinite(sizes[-batch.n :, None, None])
        U.masked_fill_(~finite, 0)
        torch._foreach_lerp_(batch.m, parts, batch.split(finite.to(U.dtype) * (1 - beta1)))
    return torch.cat([sizes, norms(*batch.m)[0]]).view(4, batch.n)


def squares(sizes: Tensor, beta1: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """‖g‖², ‖G‖² and ‖m‖² (n,) from the norms (4, n) of 2·sym(WᵀG), 2·sym(Wᵀm), U and the new m.

    The tangent g and the normal θ·W·sym(Wᵀm) are orthogonal, so Pythagoras gives ‖g‖² from ‖U‖², and ‖G‖² from
    ‖g‖². The subtraction loses nothing that v could see: sym(Wᵀm) is of the order of the last step times m, and
    v remembers the gradients that m is made of.
    """
    normal, transport, tangent, m_sq = sizes.square()
    transport = (beta1 / (1 - beta1) / 2) ** 2 * transport
    g_sq = tangent - transport
    # After momentum a zero gradient leaves the rounding error of the difference, which v without memory would believe.
    g_sq = torch.where(g_sq <= NOISE * eps * transport, 0.0, g_sq)
    return g_sq, torch.add(g_sq, normal, alpha=0.25), m_sq


def advance_second_moment_(scalars: Scalars, mean_sq: Tensor, settings: Settings) -> Tensor:
    """v ← β₂ v + (1−β₂) ‖g‖²/(d·r) and t ← t + 1 for the frames whose gradient is finite; returns which are."""
    finite = torch.isfinite(mean_sq)
    mean_sq = torch.where(finite, mean_sq, 0.0)
    scalars.exp_avg_sq.lerp_(mean_sq, finite.double() * (1 - settings.beta2))
    scalars.step.add_(finite)
    scalars.skipped.add_(~finite)
    return finite


def step_factor(scalars: Scalars, settings: Settings) -> Tensor:
    """a = lr/((1−β₁ᵗ)·√v̂), so that ξ = −a·m; not finite where v or t is 0."""
    t = scalars.step.double()
    v_hat = scalars.exp_avg_sq / (1 - settings.beta2**t)
    factor: Tensor = settings.lr / ((1 - settings.beta1**t) * v_hat.sqrt())
    return factor


def cap_(scalars: Scalars, factor: Tensor, length: Tensor, trust_radius: float) -> tuple[Tensor, Tensor]:
    """Shorten steps longer than Δ to Δ, and count them: the new factor and length."""
    too_long = length > trust_radius
    scalars.capped.add_(too_long)
    return torch.where(too_long, factor * (trust_radius / length), factor), length.clamp(max=trust_radius)


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


def move_(batch: Batch, scale: Tensor, bound: float, Y: Tensor, *, all_move: bool) -> None:
    """W ← polar factor of W + ξ, ξ = scale·m, in place, scale (n, 1, 1) or 0 for frames at rest, which keep their bits.

    Y is workspace.
    """
    for W, m, a, YW in zip(batch.W, batch.m, batch.split(scale), batch.split(Y), strict=True):
        torch.addcmul(W, m, a, out=YW)
    Z, C = factors(Y, bound, None if all_move else scale != 0)
    for W, ZW, CW in zip(batch.W, batch.split(Z), batch.split(C), strict=True):
        torch.bmm(ZW, CW, out=W)


def _reads_are_free(X: Tensor) -> bool:
    """Whether Python may look at values without waiting for a device or breaking a graph."""
    return X.device.type == "cpu" and not torch.compiler.is_compiling()


def norms(*stacks: Tensor) -> tuple[Tensor, bool]:
    """Frobenius norms of all matrices in stacks (·, ·, ·), one vector, and whether all are known to be ordinary.

    For entries up to 1e37 they are right to rounding, even where float32 squares would overflow or underflow.
    Ordinary norms are finite and not near 0; nothing is known where reading is not free.
    """
    if not _reads_are_free(stacks[0]):
        return torch.cat([torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float64) for X in stacks]), False
    sizes = torch.cat([torch.linalg.vector_norm(X, dim=(1, 2)) for X in stacks])
    smallest, largest = SAFE_NORMS
    low, high = sizes.aminmax()
    if float(low) > smallest and float(high) < largest:
        return sizes, True
    if sizes.dtype == torch.float64:  # as far as the squares that v is made of
        return sizes, False
    return torch.cat([_scaled_norms(X) for X in stacks]), False


def _scaled_norms(X: Tensor) -> Tensor:
    """Norms through division by a power of two, which is exact; on a CPU faster than sums in float64."""
    flat = X.flatten(1)
    peak = torch.maximum(flat.amax(1), -flat.amin(1)).double()
    unit = torch.exp2(torch.floor(torch.log2(peak))).clamp(min=SMALLEST_UNIT)
    size: Tensor = torch.linalg.vector_norm(flat * (1 / unit).to(X.dtype)[:, None], dim=1)
    return size.double() * unit


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
