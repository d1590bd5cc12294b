"""The ways in which a user lowers the precision of float32 products, and what torch then says of it."""

from collections.abc import Callable

import pytest
import torch

from stiefel_geo import precision

NEWER = hasattr(torch._C, "_get_fp32_precision_getter")
needs_fp32_precision = pytest.mark.skipif(not NEWER, reason="this torch has the older settings alone")
PLACES = [("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("mkldnn", "all"), ("mkldnn", "matmul")]


def read(backend: str, operation: str) -> str:
    return torch._C._get_fp32_precision_getter(backend, operation)


def write(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)


def _high_and_bfloat16() -> None:
    torch.set_float32_matmul_precision("high")
    write("mkldnn", "matmul", "bf16")


def _allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


SETTINGS: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": _allow_tf32,
}
if NEWER:
    SETTINGS |= {
        "torch.backends.fp32_precision": lambda: write("generic", "all", "tf32"),
        "backend": lambda: write("cuda", "all", "tf32"),
        "operation": lambda: write("cuda", "matmul", "tf32"),
        "older and newer": _high_and_bfloat16,
    }


def settings() -> dict[object, object]:
    """Everything that torch says; "mixed" where it refuses to, because its interfaces contradict each other."""
    found: dict[object, object] = {place: read(*place) for place in PLACES} if NEWER else {}
    found["legacy"] = _asked(torch.get_float32_matmul_precision)
    found["allow_tf32"] = _asked(lambda: torch.backends.cuda.matmul.allow_tf32)
    return {**found, "full": precision.is_full()}


def _asked(question: Callable[[], object]) -> object:
    try:
        return question()
    except RuntimeError:
        return "mixed"


def usual_settings() -> None:
    """What torch starts with."""
    torch.set_float32_matmul_precision("highest")
    if NEWER:
        for place in PLACES:
            write(*place, "none")
