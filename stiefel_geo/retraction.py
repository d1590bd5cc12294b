"""The polar retraction by matrix products alone: Y ← Y·p(YᵀY) with p(x) ≈ x^{−1/2}.

For a tangent step ξ at a frame W the spectrum of YᵀY, Y = W + ξ, lies in [1, 1 + ‖ξ‖²]. So once a bound on
‖ξ‖ is known on the host, the degree of p is known too: p is the weighted least-squares fit of x^{−1/2} on that
interval (near-minimax, like the polynomials of Newton–Schulz but fitted to the interval instead of to the point 1),
evaluated on r×r matrices by the scheme of Paterson and Stockmeyer. A wide interval takes several rounds, each
from a fresh Gram matrix, which squeeze the singular values towards 1.

Source: N. Higham, "Functions of Matrices" (2008), §4.2 (Paterson–Stockmeyer), §8.3–8.4 (polar factor by
Newton–Schulz). The fitted interval in place of Newton–Schulz is our choice: fewer products for the same error.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import stiefel

# Frames that something else moved a little (a bf16 round trip) stay inside the interval by this margin. Farther out
# (an EMA) the error of the fit grows with a power of the distance, and the next steps remove it.
MARGIN = 1e-3
# Degrees that 0, 1, 2, 3 and 4 products of r×r matrices reach.
DEGREES = (1, 2, 4, 6, 9)
# What a fit made in float64 on the host can resolve.
HOST_PRECISION = 1e-15


class Polynomial(NamedTuple):
    """p(x) = Σ_k c_k z^k with z = (x − center)/halfwidth in [−1, 1]: powers of z keep their digits."""

    center: float
    halfwidth: float
    coefficients: tuple[float, ...]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        z = (x - self.center) / self.halfwidth
        return np.polynomial.polynomial.polyval(z, self.coefficients)


def _inverse_root_fit(low: float, high: float, degree: int) -> Polynomial:
    """Least-squares fit of √x·p(x) ≈ 1 at the Chebyshev nodes of [low, high]."""
    center, halfwidth = (high + low) / 2, (high - low) / 2
    z = np.polynomial.chebyshev.chebpts1(8 * (degree + 1))
    root = np.sqrt(center + halfwidth * z)
    basis = np.polynomial.chebyshev.chebvander(z, degree)
    solution = np.linalg.lstsq(basis * root[:, None], np.ones_like(root), rcond=None)[0]
    return Polynomial(center, halfwidth, tuple(np.polynomial.chebyshev.cheb2poly(solution).tolist()))


def _image(polynomial: Polynomial, low: float, high: float) -> tuple[float, float]:
    """Range of the new singular values σ·p(σ²) for σ² in [low, high]."""
    x = np.concatenate([np.linspace(low, high, 512), np.geomspace(low, high, 512)])
    sigma = np.sqrt(x) * polynomial(x)
    return float(sigma.min()), float(sigma.max())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def polar_plan(bound: float, eps: float) -> tuple[Polynomial, ...]:
    """The polynomials of `_fitted_plan`; torch.compile takes them as constants."""
    return _fitted_plan(bound, eps)


@lru_cache(maxsize=256)
def _fitted_plan(bound: float, eps: float) -> tuple[Polynomial, ...]:
    """Polynomials, in order, that bring every singular value of Y to within eps/8 of 1 when ‖ξ‖ ≤ `bound`.

    `eps` is the machine epsilon of the arithmetic. Eigenvalues of YᵀY below the rounding error of the largest
    one are not resolved, so nothing is fitted to them: they grow by p at the fitted edge, round by round.
    """
    low, high = 1 - MARGIN, 1 + MARGIN + bound**2
    target = max(eps / 8, HOST_PRECISION)
    plan: list[Polynomial] = []
    error = math.inf
    while error > target:
        fitted_low = max(low, 64 * eps * high)
        for degree in DEGREES:
            polynomial = _inverse_root_fit(fitted_low, high, degree)
            smallest, largest = _image(polynomial, low, high)
            error = max(1 - smallest, largest - 1)
            if error <= target:
                break
        plan.append(polynomial)
        low, high = (smallest - eps) ** 2, (largest + eps) ** 2
    return tuple(plan)


def evaluate(polynomial: Polynomial, D: Tensor) -> Tensor:
    """p(D) for symmetric D (n, r, r), which is overwritten, in 0 to 4 products of r×r matrices (Paterson–Stockmeyer).

    Horner's scheme in Z^s, p = (c_0 + … ) + Z^s·((c_s + …) + Z^s·(…)), with s = 2 up to degree 4 and 3 above.
    The innermost block holds s + 1 terms.
    """
    c = [c_k / polynomial.halfwidth**k for k, c_k in enumerate(polynomial.coefficients)]  # of powers of D − center
    _diagonal(D).sub_(polynomial.center)
    degree = len(c) - 1
    if degree == 1:
        return _plus(D.mul_(c[1]), c[0])
    if degree == 2:  # the usual case, in one call
        return _plus(torch.baddbmm(D, D, D, beta=c[1], alpha=c[2]), c[0])
    s = 2 if degree <= 4 else 3
    at = range(0, degree - s + 1, s)
    powers = [D, torch.bmm(D, D)]
    if s == 3:
        powers.append(torch.bmm(powers[1], D))
    *blocks, result = _blocks(powers, c, at)
    scale = c[at[-1] + 1]
    for block, k in zip(reversed(blocks), reversed(at[:-1]), strict=True):
        _plus(result, c[k + s] / scale)
        result, scale = block.baddbmm_(powers[-1], result, beta=c[k + 1], alpha=scale), 1.0
    return _plus(result, c[0])


def _blocks(powers: list[Tensor], c: list[float], at: Sequence[int]) -> Sequence[Tensor]:
    """The block from each power k in `at` on, c_{k+1} Z + c_{k+2} Z² + …, over c_{k+1}; the last one has one term more.

    Without constants, and so that few operations make all of them.
    """
    D, square, top = *powers[:2], at[-1]
    if len(powers) == 2:
        return D, torch.add(D, square, alpha=c[top + 2] / c[top + 1])
    blocks = torch._foreach_mul([square] * len(at), [c[k + 2] / c[k + 1] for k in at])
    torch._foreach_add_(blocks, [D] * len(at))
    blocks[-1].add_(powers[2], alpha=c[top + 3] / c[top + 1])
    return blocks


def _plus(A: Tensor, constant: float) -> Tensor:
    """A + constant·I, in place."""
    _diagonal(A).add_(constant)
    return A


def _diagonal(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1)


def retract(Y: Tensor, bound: float, *, rest: Tensor | None = None) -> Tensor:
    """Polar factor Y(YᵀY)^{−1/2} of Y = W + ξ, shape (n, d, r), for tangent steps with ‖ξ‖_F ≤ `bound`.

    The Gram matrix is formed from Y itself, so frames with a small defect are repaired on the way.
    Frames at `rest` (n,) come back bit for bit.
    """
    return torch.bmm(*factors(Y, bound, None if rest is None else rest[:, None, None]))


def factors(Y: Tensor, bound: float, rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Z (n, d, r) and C (n, r, r) whose product, the last of `retract`, is the polar factor of Y; rest (n, 1, 1)."""
    plan = polar_plan(bound, torch.finfo(Y.dtype).eps)
    for polynomial in plan:
        C = evaluate(polynomial, stiefel.cross(Y, Y))
        if rest is not None:
            C.masked_fill_(rest, 0.0)
            _diagonal(C).masked_fill_(rest[:, 0], 1.0)
        if polynomial is plan[-1]:
            break
        Y = torch.bmm(Y, C)
    return Y, C
