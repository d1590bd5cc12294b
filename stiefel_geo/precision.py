"""Full precision for products of frames, whatever the caller's autocast and matmul settings say.

torch keeps these settings twice. The older one is `torch.set_float32_matmul_precision`, which `allow_tf32` writes too.
The newer one (from 2.9 on) is `fp32_precision` of a backend's operation, which follows that of the backend, which
follows `torch.backends.fp32_precision`, until it is set itself. Code that reads the one while it contradicts the
other gets an error, so both are set together, and both come back as they were, those that followed another too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MATMULS = (("cuda", "matmul"), ("mkldnn", "matmul"))
# The functions below the attributes, since `torch.backends.mkldnn.fp32_precision` writes another setting than it reads.
_read: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_write: Any = getattr(torch._C, "_set_fp32_precision_setter", None)


def is_full() -> bool:
    """Whether float32 products are float32 products, on CUDA and in oneDNN."""
    if _read is None:
        return torch.get_float32_matmul_precision() == "highest"
    return all(_read(*matmul) in ("none", "ieee") for matmul in MATMULS)


def describe() -> str:
    """The settings that `is_full` reads, for messages."""
    if _read is None:
        return f"torch.get_float32_matmul_precision() = {torch.get_float32_matmul_precision()!r}"
    return " and ".join(f"torch.backends.{'.'.join(matmul)}.fp32_precision = {_read(*matmul)!r}" for matmul in MATMULS)


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Context without autocast and without reduced-precision products; see `checks.check_compilable` for graphs."""
    with torch.autocast(device_type, enabled=False):
        if torch.compiler.is_compiling():
            yield
        else:
            with _ieee_products():
                yield


@contextmanager
def _ieee_products() -> Iterator[None]:
    """float32 products in float32: no TF32 on CUDA, no bfloat16 in oneDNN."""
    own = [_own(*matmul) for matmul in MATMULS] if _read else []
    for matmul in MATMULS if own else ():  # first, since the older setting is not read beside another
        _write(*matmul, "ieee")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)  # which writes the newer ones too
        for matmul, value in zip(MATMULS if own else (), own, strict=True):
            _write(*matmul, value)


def _own(backend: str, op: str) -> str:
    """What was set for this operation itself: "none" where it follows its backend or the setting of all backends."""
    value: str = _read(backend, op)
    if value == "none" or backend == "generic":
        return value
    parent = ("generic", "all") if op == "all" else (backend, "all")
    above = _own(*parent)
    _write(*parent, "tf32" if value == "ieee" else "ieee")
    follows = _read(backend, op) != value
    _write(*parent, above)
    return "none" if follows else value
