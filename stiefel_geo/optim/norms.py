"""Lengths of gradients and momenta, formed so that squares of float32 values neither overflow nor underflow.

The step's products give 2·sym(WᵀG), 2·sym(Wᵀm) and U = g − θ·W·sym(Wᵀm), whose lengths are measured. g is tangent
and the normal rest orthogonal to it, so Pythagoras gives the others.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .bounds import reads_are_free

# A tangent part below NOISE·eps·‖G‖ is the rounding error of the projection, not a direction.
NOISE = 16.0
# Frobenius norms within these bounds are ordinary: their float32 squares neither overflow nor underflow.
SAFE_NORMS = (1e-16, 1e16)
# Below it 1/unit would overflow float32: denormal entries are measured in this unit, and so is 0.
SMALLEST_UNIT = torch.finfo(torch.float32).tiny


class Lengths:
    """Frobenius norms of what a step measured of n frames, (n,) each, or their squares; `rows` (4, n) has all."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.normal, self.transport, self.tangent, self.momentum = rows.unbind()


class Squares(NamedTuple):
    """Squared lengths that the moments and the step are made of, (n,) float64."""

    g: Tensor  # ‖g‖², 0 where it is rounding error; not to be used where the gradient is not finite
    m: Tensor  # ‖m‖²
    floor: Tensor  # up to it a square is rounding error; not finite where the gradient is not


def squares(lengths: Lengths, beta1: float, eps: float) -> Squares:
    """Squared lengths from those of 2·sym(WᵀG), 2·sym(Wᵀm), U and the new m.

    The subtraction loses nothing that v could see: sym(Wᵀm) is of the order of the last step times m, and v remembers
    the gradients that m is made of. What it leaves of a zero gradient is rounding error, which v without memory would
    believe.
    """
    squared = Lengths(lengths.rows.square())
    share = (beta1 / (1 - beta1) / 2) ** 2
    g = torch.sub(squared.tangent, squared.transport, alpha=share)
    floor = ambient(squared.normal, squared.tangent) * (NOISE * eps) ** 2
    noise = torch.add(floor, squared.transport, alpha=NOISE * eps * share)
    return Squares(torch.where(g > noise, g, 0.0), squared.momentum, floor)


def ambient(normal_squared: Tensor, tangent_squared: Tensor) -> Tensor:
    """‖G‖², but for what of U is the transport's, which is far below.

    Not finite where a gradient is not, or where its square has no float64: then the frame rests.
    """
    return torch.add(tangent_squared, normal_squared, alpha=0.25)


def frobenius(*stacks: Tensor) -> tuple[Tensor, bool]:
    """Frobenius norms of all matrices in stacks (·, ·, ·), one vector, and whether all are known to be ordinary.

    For entries up to 1e37 they are right to rounding, even where float32 squares would overflow or underflow.
    Ordinary norms are finite and not near 0; nothing is known where reading is not free.
    """
    if not reads_are_free(stacks[0]):
        return _cat([torch.linalg.vector_norm(X, dim=(1, 2), dtype=torch.float64) for X in stacks]), False
    sizes = _cat([torch.linalg.vector_norm(X, dim=(1, 2)) for X in stacks])
    smallest, largest = SAFE_NORMS
    low, high = sizes.aminmax()
    if float(low) > smallest and float(high) < largest:
        return sizes, True
    if sizes.dtype == torch.float64:  # as far as the squares that v is made of
        return sizes, False
    return _cat([_scaled(X) for X in stacks]), False


def _cat(sizes: list[Tensor]) -> Tensor:
    return sizes[0] if len(sizes) == 1 else torch.cat(sizes)


def _scaled(X: Tensor) -> Tensor:
    """Norms through division by a power of two, which is exact; on a CPU faster than sums in float64."""
    flat = X.flatten(1)
    peak = torch.maximum(flat.amax(1), -flat.amin(1)).double()
    unit = torch.exp2(torch.floor(torch.log2(peak))).clamp(min=SMALLEST_UNIT)
    size: Tensor = torch.linalg.vector_norm(flat * (1 / unit).to(X.dtype)[:, None], dim=1)
    return size.double() * unit


def is_finite(floor: Tensor) -> Tensor:
    """Whether the gradient is finite, and its square too: the one test for masks, moments and counters."""
    return floor < math.inf
