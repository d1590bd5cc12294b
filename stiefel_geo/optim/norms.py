"""Lengths of gradients and momenta, formed so that squares of float32 values neither overflow nor underflow.

The step's products give sym(WᵀG), sym(Wᵀm) and U = g − θ·W·sym(Wᵀm), whose lengths are measured. g is tangent
and the normal rest orthogonal to it, so Pythagoras gives the others.
"""

from collections.abc import Sequence
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
# Gradients from here on count as not finite: their squares have no float64.
LARGEST = 1e150


class Lengths:
    """Frobenius norms of what a step measured of n frames, in float64, and which gradients are finite, all (n,)."""

    def __init__(self, rows: Tensor, finite: Tensor) -> None:
        self.rows = rows  # (4, n), the following
        self.ambient, self.transport, self.tangent, self.momentum = rows.unbind()
        self.finite = finite

    @classmethod
    def empty(cls, n: int, device: torch.device) -> "Lengths":
        """Of n frames that are still to be measured."""
        rows = torch.empty(4, n, dtype=torch.float64, device=device)
        return cls(rows, torch.empty(n, dtype=torch.bool, device=device))

    def split(self, sizes: list[int]) -> list["Lengths"]:
        """Those of batches, as views."""
        if len(sizes) == 1:
            return [self]
        return [
            Lengths(*each)
            for each in zip(self.rows.split_with_sizes(sizes, 1), self.finite.split_with_sizes(sizes), strict=True)
        ]

    def find_ambient_(self) -> None:
        """Make ‖G‖ of the length of the normal part, which lies in its place, and say which gradients are finite.

        What of U is the transport's is left out: it is far below.
        """
        torch.hypot(self.ambient, self.tangent, out=self.ambient)
        torch.lt(self.ambient, LARGEST, out=self.finite)


class Squares(NamedTuple):
    """Squared lengths that the moments and the step are made of, (n,) float64."""

    g: Tensor  # ‖g‖², 0 where it is rounding error or not finite
    m: Tensor  # ‖m‖²
    floor: Tensor  # up to it a square is rounding error


def squares(lengths: Lengths, beta1: float, eps: float) -> Squares:
    """‖g‖² = ‖U‖² − θ²‖sym(Wᵀm)‖² with θ = β₁/(1−β₁), and how much of it counts.

    The subtraction loses nothing that v could see: sym(Wᵀm) is of the order of the last step times m, and v remembers
    the gradients that m is made of. What it leaves of a zero gradient is rounding error, which v without memory would
    believe.
    """
    ambient, transport, tangent, momentum = lengths.rows.square().unbind()
    share = (beta1 / (1 - beta1)) ** 2
    g = torch.sub(tangent, transport, alpha=share)
    floor = ambient * (NOISE * eps) ** 2
    noise = torch.add(floor, transport, alpha=NOISE * eps * share)
    return Squares(torch.where(g > noise, g, 0.0), momentum, floor)


def measured_type(X: Tensor) -> torch.dtype:
    """The type in which r×r matrices come to `frobenius_`: float64 where it would cast them."""
    return X.dtype if reads_are_free(X) else torch.float64


def frobenius_(out: Sequence[Tensor], stacks: Sequence[Tensor]) -> bool:
    """Write the Frobenius norms of the matrices in each stack (…, ·, ·) into its `out` (…), float64.

    Returns whether all are known to be ordinary.
    For entries up to 1e37 they are right to rounding, even where float32 squares would overflow or underflow.
    Ordinary norms are finite and not near 0; nothing is known where reading is not free.
    """
    if not reads_are_free(stacks[0]):
        for sizes, X in zip(out, stacks, strict=True):
            torch.linalg.vector_norm(X, dim=(-2, -1), dtype=torch.float64, out=sizes)
        return False
    found = [torch.linalg.vector_norm(X, dim=(-2, -1)) for X in stacks]
    ordinary = _are_ordinary(found)
    if not ordinary and found[0].dtype == torch.float32:  # in float64 as far as the squares that v is made of
        found = [_scaled(X) for X in stacks]
    for sizes, norms in zip(out, found, strict=True):
        sizes.copy_(norms)
    return ordinary


def _are_ordinary(sizes: list[Tensor]) -> bool:
    smallest, largest = SAFE_NORMS
    low, high = torch.cat([each.flatten() for each in sizes]).aminmax()
    return float(low) > smallest and float(high) < largest


def _scaled(X: Tensor) -> Tensor:
    """Norms through division by a power of two, which is exact; on a CPU faster than sums in float64."""
    flat = X.flatten(-2)
    peak = torch.maximum(flat.amax(-1), -flat.amin(-1)).double()
    unit = torch.exp2(torch.floor(torch.log2(peak))).clamp(min=SMALLEST_UNIT)
    size: Tensor = torch.linalg.vector_norm(flat * (1 / unit).to(X.dtype)[..., None], dim=-1)
    return size.double() * unit
