"""Proposition 1: the update is steepest descent in the embedded metric.

Statement. Among tangent vectors ξ of length ρ at W none has ⟨G, ξ⟩ below −ρ‖P_W(G)‖_F, and the step attains
it. The retraction R_W(ξ) = polar(W + ξ) takes the frame nearest to W + ξ and follows the geodesic to second order.

Proof. P = P_W is the orthogonal projection onto the tangent space: idempotent, self-adjoint, with the normal
space {WS : S symmetric} as its kernel. So ⟨G, ξ⟩ = ⟨PG, ξ⟩ ≥ −‖PG‖ρ by Cauchy–Schwarz, with equality for
ξ = −ρ PG/‖PG‖ alone. Write Y = W + ξ = RS with R = polar(Y) and S = (YᵀY)^{1/2}; for every frame Q

    ‖Y − Q‖² − ‖Y − R‖² = tr S(Q−R)ᵀ(Q−R) ≥ σ_min(S)‖Q−R‖² ≥ ‖Q−R‖²,

as σ_min(S)² is an eigenvalue of I + ξᵀξ. Last, polar(W + tξ) = W + tξ − ½t²Wξᵀξ + O(t³), whose acceleration
−Wξᵀξ is normal: that of the geodesic, so the two part at order t³.

Checked here. The laws of P; 10,000 random tangent directions and adversarial ones (gradient ascent, and small
turns of the step itself) against the step; the slope of ‖R(tξ) − Exp(tξ)‖ with geoopt's exact exponential;
the inequality for Q near R. Tangent directions are drawn in the coordinates ξ = WΩ + W_⊥K, without any P.
"""

import geoopt
import torch
from torch import Tensor

from .. import stiefel
from ..stiefel import sym
from .certificate import Case, Certificate, gaussian
from .observing import OptimizerFactory, slope, step_of_length, tangent_between, tangent_part

DIRECTIONS = 10_000
LENGTH = 0.1  # of the step whose direction is judged
TURNS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def check(case: Case, make: OptimizerFactory) -> list[Certificate]:
    """Five certificates."""
    generator = case.generator(1)
    W, G = case.frame_and_gradient(generator)
    g = tangent_part(make, W, G)
    return [
        case.at_most(
            1, "P_W is idempotent, self-adjoint, tangent; its kernel is normal", _laws(make, W, generator), 1e-13
        ),
        *_direction(case, make, W, G, generator),
        case.at_least(1, "slope of ‖R(tξ) − Exp(tξ)‖ over three decades", _order(make, W, G, g), 2.9),
        case.at_least(
            1, "‖Y−Q‖² − ‖Y−R(ξ)‖² over ‖Q−R(ξ)‖², Q any frame", _nearest(make, W, G, g, generator), 1 - 1e-6
        ),
    ]


def _laws(make: OptimizerFactory, W: Tensor, generator: torch.Generator) -> float:
    """The worst relative residual of the four laws, on eight pairs of matrices."""
    W = W.expand(8, *W.shape)
    X, Y = gaussian(2, *W.shape, generator=generator)
    PX, PY = tangent_part(make, W, X), tangent_part(make, W, Y)
    size = torch.linalg.matrix_norm(X)
    normal = W.mT @ (X - PX)  # X − PX = W·normal with a symmetric matrix
    residuals = (
        torch.linalg.matrix_norm(tangent_part(make, W, PX) - PX),
        ((PX * Y).sum((1, 2)) - (X * PY).sum((1, 2))).abs() / torch.linalg.matrix_norm(Y),
        torch.linalg.matrix_norm(sym(W.mT @ PX)),
        torch.linalg.matrix_norm(X - PX - W @ sym(normal)),
    )
    return float(torch.stack([residual / size for residual in residuals]).max())


def _coordinates(W: Tensor) -> Tensor:
    """W_⊥ (d, d−r), an orthonormal basis of the complement of W."""
    complement: Tensor = torch.linalg.qr(W, mode="complete")[0][:, W.shape[-1] :]
    return complement


def _direction(
    case: Case, make: OptimizerFactory, W: Tensor, G: Tensor, generator: torch.Generator
) -> list[Certificate]:
    """The step's own ⟨G, ξ⟩ against the rivals', and against −ρ‖P_W(G)‖ formed in coordinates."""
    xi = tangent_between(W, step_of_length(make, W, G, LENGTH))
    basis = torch.cat([W, _coordinates(W)], 1)
    c = _isometric(basis.mT @ G)  # ⟨G, ξ⟩ = c·z for ξ with coordinates z
    z = _isometric(basis.mT @ xi)
    reached = float((G * xi).sum()) / LENGTH
    best = min(_random(c, generator), _ascent(c, generator), _turns(c, z, generator))
    size = float(torch.linalg.matrix_norm(G))
    return [
        case.at_most(
            1, "⟨G, ξ⟩ of the step above that of any rival of its length, over ρ‖G‖", (reached - best) / size, 1e-13
        ),
        case.at_most(
            1, "⟨G, ξ⟩ of the step against −ρ‖P_W(G)‖, over ρ‖G‖", abs(reached + float(c.norm())) / size, 1e-13
        ),
    ]


def _isometric(block: Tensor) -> Tensor:
    """Coordinates z with ‖z‖ = ‖ξ‖ of the tangent part of a matrix with rows (Wᵀξ; W_⊥ᵀξ)."""
    r = block.shape[1]
    i, j = torch.triu_indices(r, r, 1)
    omega = (block[:r] - block[:r].mT) / 2
    return torch.cat([2**0.5 * omega[i, j], block[r:].flatten()])


def _random(c: Tensor, generator: torch.Generator) -> float:
    """The lowest ⟨G, ξ⟩ among DIRECTIONS uniform unit tangent vectors; drawn in float32, which is four times faster."""
    chunk, lowest = 250, 0.0
    for _ in range(DIRECTIONS // chunk):
        z = torch.randn(chunk, len(c), generator=generator).double()
        lowest = min(lowest, float((z @ c / z.norm(dim=1)).min()))
    return lowest


def _ascent(c: Tensor, generator: torch.Generator) -> float:
    """The lowest ⟨G, ξ⟩ that gradient descent over the directions z/‖z‖ finds from eight random starts."""
    z = gaussian(8, len(c), generator=generator)
    for _ in range(16):
        z = (z / z.norm(dim=1, keepdim=True)).requires_grad_()
        value = z @ c / z.norm(dim=1)
        (uphill,) = torch.autograd.grad(value.sum(), z)
        z = z.detach() - uphill / c.norm()
    return float((z @ c / z.norm(dim=1)).min())


def _turns(c: Tensor, z: Tensor, generator: torch.Generator) -> float:
    """The lowest ⟨G, ξ⟩ among small random turns of the step's own direction z."""
    z = z / z.norm()
    turns = gaussian(40, len(c), generator=generator)
    turns = turns / turns.norm(dim=1, keepdim=True)
    rivals = torch.cat([z + angle * turns for angle in TURNS])
    return float((rivals @ c / rivals.norm(dim=1)).min())


def _order(make: OptimizerFactory, W: Tensor, G: Tensor, g: Tensor) -> float:
    """Slope of the distance between the step and the exponential, the longest step 0.3 in the spectral norm."""
    xi = -g / torch.linalg.matrix_norm(g)
    t = 0.3 / torch.linalg.matrix_norm(xi, 2) * torch.logspace(-3, 0, 10, dtype=torch.float64)
    exponential = geoopt.EuclideanStiefelExact().expmap
    gaps = [
        torch.linalg.matrix_norm(step_of_length(make, W, G, length) - exponential(W, length * xi))
        for length in t.tolist()
    ]
    return slope(t, torch.stack(gaps))


def _nearest(make: OptimizerFactory, W: Tensor, G: Tensor, g: Tensor, generator: torch.Generator) -> float:
    """The least of (‖Y−Q‖² − ‖Y−R‖²)/‖Q−R‖² over frames Q around R; for frames the numerator is 2⟨Y, R−Q⟩."""
    Y = W - g / torch.linalg.matrix_norm(g)
    R = step_of_length(make, W, G, 1.0)
    ratios = []
    for angle in TURNS:
        turn = gaussian(8, *R.shape, generator=generator)
        Q = stiefel.polar(R + angle * turn / torch.linalg.matrix_norm(turn)[:, None, None])
        ratios.append(2 * (Y * (R - Q)).sum((1, 2)) / (Q - R).square().sum((1, 2)))
    return float(torch.cat(ratios).min())
