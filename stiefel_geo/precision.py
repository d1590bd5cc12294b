"""Full precision for the optimizer's products, whatever the caller's autocast and matmul settings say."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def _ieee_products() -> Iterator[None]:
    """float32 products in float32: no TF32 on CUDA, no bfloat16 in oneDNN."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]  # untyped
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Context without autocast and without reduced-precision products; see `checks.check_compilable` for graphs."""
    with torch.autocast(device_type, enabled=False):
        if torch.compiler.is_compiling():
            yield
        else:
            with _ieee_products():
                yield
