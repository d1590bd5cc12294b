"""Looks at the query and key matrices while they train, every few steps: each look waits for the device."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stiefel_geo import diagnostics

EVERY = 10  # steps


class FrameWatch:
    """Largest defect of an epoch, and how far every matrix went in the steps that were looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lengths: list[float] = []
        self.defect = largest_defect(model)

    @contextmanager
    def around(self, step: int, *, last: bool) -> Iterator[bool]:
        """Look before and after every tenth step, and after the last; yields whether this is one of them."""
        before = diagnostics.snapshot(self.model) if step % EVERY == 0 else None
        yield last or before is not None
        if before is not None:
            lengths = diagnostics.movement(self.model, before).values()
            self.lengths += [length for each in lengths for length in each.tolist()]
        if (last or before is not None) and self.defect is not None:
            self.defect = max(self.defect, largest_defect(self.model) or 0.0)

    def movement(self) -> float | None:
        """Median movement of a matrix in a step, the patched model's frames or the plain one's weights alike."""
        return statistics.median_low(self.lengths) if self.lengths else None


def largest_defect(model: nn.Module) -> float | None:
    """Largest distance of a frame from orthonormality; None in a model without frames."""
    return max((float(each.max()) for each in diagnostics.defect(model).values()), default=None)


def spectrum(model: nn.Module) -> dict[str, float]:
    """Smallest, median and largest singular value of all query and key matrices."""
    values = torch.cat([each.flatten() for each in diagnostics.spectrum(model).values()])
    named = {"low": values.min(), "median": values.median(), "high": values.max()}
    return {f"spectrum_{end}": float(value) for end, value in named.items()}
