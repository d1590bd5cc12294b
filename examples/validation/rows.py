"""One row of the report: what was checked, what was measured, its bound, and whether it holds."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What every stage is told."""

    device: str
    smoke: bool
    out: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Row:
    """`holds` is None where nothing is bounded, or where the check was left out."""

    check: str
    measured: str
    bound: str = ""
    holds: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "holds", False: "FAILS", None: "–"}[self.holds]
        return f"{self.check}: {self.measured}{' ' + self.bound if self.bound else ''} ({verdict})"


def at_most(check: str, value: float, bound: float | None, unit: str = "") -> Row:
    """A figure with an upper bound, or with none; NaN is above every bound."""
    measured = f"{value:.3g}{unit}"
    return Row(check, measured) if bound is None else Row(check, measured, f"≤ {bound:g}{unit}", value <= bound)


def at_least(check: str, value: float, bound: float | None) -> Row:
    measured = f"{value:.4g}"
    return Row(check, measured) if bound is None else Row(check, measured, f"≥ {bound:g}", value >= bound)


def left_out(check: str, reason: str) -> Row:
    """A check that this machine or this run cannot make: not passed, and said so."""
    return Row(check, f"left out: {reason}")
