"""PatchReport: what `patch` changed, what it left alone and why."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar


@dataclass(frozen=True)
class Patched:
    """One attention module whose queries and keys are frames now.

    `change` is what the patch did to the function: 0 for core="learn" and "freeze" (rounding aside); for
    core="identity" the relative Frobenius change of the projections over all heads, NaN on the meta device, where
    there are no values.
    """

    module: str
    cls: str
    core: str
    shapes: tuple[tuple[int, int, int], ...]  # (frames, d, r) of every ManifoldParameter
    change: float

    @property
    def frames(self) -> int:
        return sum(n for n, _, _ in self.shapes)

    @property
    def d(self) -> int:
        """Rows of the frames: the width of the model there (the largest, where projections differ)."""
        return max(d for _, d, _ in self.shapes)

    @property
    def r(self) -> int:
        """Columns of the frames: the width of a head (the largest, where heads differ)."""
        return max(r for _, _, r in self.shapes)

    def summary(self) -> str:
        spaces = " + ".join(f"{n} × St({d}, {r})" for n, d, r in self.shapes)
        return f"{self.cls}: core {self.core}, {spaces}"


@dataclass(frozen=True)
class Skipped:
    """One module that looks like attention and was left as it is."""

    module: str
    cls: str
    reason: str

    def summary(self) -> str:
        return f"{self.cls}: {self.reason}"


@dataclass(frozen=True)
class PatchReport:
    """The attention modules of a model, in the model's order. `str()` groups equal ones."""

    patched: list[Patched]
    skipped: list[Skipped]

    def __str__(self) -> str:
        frames = sum(entry.frames for entry in self.patched)
        lines = [f"patched {len(self.patched)} attention modules, {frames} frames"]
        lines += [f"  {line}{_change(group)}" for line, group in _grouped(self.patched, Patched.summary)]
        if self.skipped:
            lines.append(f"skipped {len(self.skipped)}")
            lines += [f"  {line}" for line, _ in _grouped(self.skipped, Skipped.summary)]
        return "\n".join(lines)


Entry = TypeVar("Entry", Patched, Skipped)


def _grouped(entries: Iterable[Entry], summary: Callable[[Entry], str]) -> Iterable[tuple[str, list[Entry]]]:
    """Runs of entries with one summary, as lines that name the first and the last."""
    for text, run in groupby(entries, summary):
        group = list(run)
        names = [entry.module or "(the model itself)" for entry in group]
        where = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        yield f"{len(group)} × {text}  [{where}]", group


def _change(group: list[Patched]) -> str:
    """What core="identity" did to the function, as the range over the group."""
    if group[0].core != "identity":
        return ""
    changes = [entry.change for entry in group]
    return f"; the projections changed by {min(changes):.2g} … {max(changes):.2g} relative"
