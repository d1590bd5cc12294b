"""Parameter groups whose frames step together, each with its own lr, and what the step sees of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .step import Settings

# Options in which groups of a family may not differ: all that a frame sees, but for lr.
SHARED = ("betas", "trust_radius", "maximize", "foreach")
Member = tuple[dict[str, Any], list[Tensor]]  # a group and those of its frames that have a gradient


def families(members: Sequence[Member]) -> list[list[Member]]:
    """Groups together that differ for their frames in lr alone; groups without frames are left out."""
    found: list[list[Member]] = []
    for group, frames in members:
        if not frames:
            continue
        family = next((f for f in found if all(f[0][0][key] == group[key] for key in SHARED)), None)
        if family is None:
            found.append([(group, frames)])
        else:
            family.append((group, frames))
    return found


def lr_of(group: dict[str, Any]) -> Any:
    """lr as a number, or as a tensor without dimensions, which combines with tensors of every device."""
    lr = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def settings_of(groups: Sequence[dict[str, Any]]) -> Settings:
    """What the frames of a family see of its groups."""
    beta1, beta2 = groups[0]["betas"]
    lrs = [lr_of(group) for group in groups]
    largest = None if any(isinstance(lr, Tensor) for lr in lrs) else max(lrs)
    return Settings(lrs[0], beta1, beta2, groups[0]["trust_radius"], groups[0]["maximize"], largest)
