"""The ways in which a user lowers the precision of float32 products, and what torch then says of it."""

import pytest
import torch

from stiefel_geo import precision

read = getattr(torch._C, "_get_fp32_precision_getter", None)
write = getattr(torch._C, "_set_fp32_precision_setter", None)
needs_fp32_precision = pytest.mark.skipif(read is None, reason="this torch has the older settings alone")
PLACES = [("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("mkldnn", "all"), ("mkldnn", "matmul")]


def _allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


SETTINGS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": _allow_tf32,
}
if write is not None:
    SETTINGS |= {
        "torch.backends.fp32_precision": lambda: write("generic", "all", "tf32"),
        "backend": lambda: write("cuda", "all", "tf32"),
        "operation": lambda: write("cuda", "matmul", "tf32"),
        "older and newer": lambda: (torch.set_float32_matmul_precision("high"), write("mkldnn", "matmul", "bf16")),
    }


def settings() -> dict[str, object]:
    """Everything that torch says; "mixed" where it refuses to, because its interfaces contradict each other."""
    found: dict[str, object] = {place: read(*place) for place in PLACES} if read is not None else {}  # type: ignore[misc]
    found["legacy"] = _asked(torch.get_float32_matmul_precision)
    found["allow_tf32"] = _asked(lambda: torch.backends.cuda.matmul.allow_tf32)
    return {**found, "full": precision.is_full()}


def _asked(question: object) -> object:
    try:
        return question()  # type: ignore[operator]
    except RuntimeError:
        return "mixed"


def usual_settings() -> None:
    """What torch starts with."""
    torch.set_float32_matmul_precision("highest")
    if write is not None:
        for place in PLACES:
            write(*place, "none")
