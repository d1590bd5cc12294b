"""What a certificate is: one claim, one measured number beside its bound, on one shape and seed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import stiefel


@dataclass(frozen=True)
class Certificate:
    """`measured` stands in `relation` ("≤" or "≥") to `bound`, or the claim failed on this shape and seed."""

    proposition: int
    claim: str
    measured: float
    bound: float
    d: int
    r: int
    seed: int
    relation: str = "≤"

    @property
    def holds(self) -> bool:
        """False for a NaN as well."""
        return self.measured <= self.bound if self.relation == "≤" else self.measured >= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Every field and `holds`, for JSON, which has no NaN and no infinity: those become None."""
        measured = self.measured if math.isfinite(self.measured) else None
        return {**vars(self), "measured": measured, "holds": self.holds}


@dataclass(frozen=True)
class Case:
    """A shape and a seed; hands out random data and certificates that carry both."""

    d: int
    r: int
    seed: int

    def __post_init__(self) -> None:
        if self.r < 2 or self.d < self.r or self.d % self.r:
            raise ValueError(f"rule: r ≥ 2 and d a multiple of r, for d/r heads; found ({self.d}, {self.r})")

    def generator(self, proposition: int) -> torch.Generator:
        """Random numbers of one proposition: the same alone as among all."""
        return torch.Generator().manual_seed(1000 * self.seed + proposition)

    def frame_and_gradient(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A uniform frame W and a Gaussian G, both (d, r) float64."""
        W = stiefel.random_frame(self.d, self.r, dtype=torch.float64, generator=generator)
        return W, gaussian(self.d, self.r, generator=generator)

    def at_most(self, proposition: int, claim: str, measured: float | Tensor, bound: float) -> Certificate:
        return Certificate(proposition, claim, float(measured), bound, self.d, self.r, self.seed)

    def at_least(self, proposition: int, claim: str, measured: float | Tensor, bound: float) -> Certificate:
        return Certificate(proposition, claim, float(measured), bound, self.d, self.r, self.seed, "≥")


def worst(measurements: Iterable[float]) -> float:
    """The largest; NaN if one is, which Python's `max` may pass over."""
    return float(torch.tensor(list(measurements), dtype=torch.float64).max())


def gaussian(*size: int, generator: torch.Generator) -> Tensor:
    """Independent standard normal entries, float64."""
    return torch.randn(*size, dtype=torch.float64, generator=generator)


def markdown(certificates: Sequence[Certificate]) -> str:
    """One row per proposition and claim: the worst of its measurements, beside the bound it had to keep."""
    groups: dict[tuple[int, str], list[Certificate]] = {}
    for certificate in certificates:
        groups.setdefault((certificate.proposition, certificate.claim), []).append(certificate)
    lines = ["| | certificate | measured (worst) | bound | at | holds |", "|---|---|---|---|---|---|"]
    for (proposition, claim), group in groups.items():
        worst = min(group, key=_slack)
        holds = f"{sum(c.holds for c in group)}/{len(group)}"
        lines.append(
            f"| {proposition} | {claim} | {worst.measured:.4g} | {worst.relation} {worst.bound:.4g} "
            f"| {worst.d}×{worst.r}, seed {worst.seed} | {holds} |"
        )
    return "\n".join(lines)


def _slack(certificate: Certificate) -> float:
    """How far inside its bound a measurement lies; a NaN lies outside of everything."""
    slack = certificate.bound - certificate.measured
    if math.isnan(slack):
        return -math.inf
    return slack if certificate.relation == "≤" else -slack
