"""What our step consists of: its arithmetic alone, and where its time goes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::baddbmm_")


def kind_of(name: str, shapes: Sequence[Sequence[int]], d: int, r: int) -> str | None:
    """The kind of work of one operation, from the shapes it was called with; None where it touches scalars alone."""
    sizes = [shape for shape in shapes if shape]
    whole = any(d in shape or d * r in shape or (r in shape and shape[-2:] != [r, r]) for shape in sizes)
    small = any(list(shape[-2:]) == [r, r] for shape in sizes)
    if name in PRODUCTS:
        return "d×r products" if whole else "r×r products"
    return "passes over d×r" if whole else "other r×r" if small else None


def shares(step: Callable[[], Any], frames: Sequence[Tensor], repeats: int, total: float) -> dict[str, float]:
    """Milliseconds of CPU time of one step by kind; `calls` is what of `total` is beyond the operations' own time."""
    d, r = frames[0].shape[-2:]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for _ in range(repeats):
            step()
    found = dict.fromkeys(("d×r products", "passes over d×r", "r×r products", "other r×r"), 0.0)
    for event in profile.events():
        kind = kind_of(event.name, event.input_shapes or [], d, r)
        if kind and not event.name.startswith("Optimizer."):
            found[kind] += event.self_cpu_time_total / 1e3 / repeats
    return {**found, "calls": total - sum(found.values()), "step": total}


def floor_of(frames: Sequence[Tensor], grads: Sequence[Tensor]) -> dict[str, Callable[[], None]]:
    """The step's arithmetic alone: its five products, and its passes over memory, on operands of their own."""
    momenta = [torch.randn_like(W) for W in frames]
    widest = max(frames, key=len)
    r = widest.shape[-1]
    out, out2 = torch.empty_like(widest), torch.empty_like(widest)
    small = widest.new_zeros(len(widest), r, r)

    def products() -> None:
        for W, G, m in zip(frames, grads, momenta, strict=True):
            S, U = small[: len(W)], out[: len(W)]
            torch.bmm(W.mT, G, out=S)
            torch.bmm(W.mT, m, out=S)
            torch.bmm(W, S, out=U)  # the normal parts
            torch.bmm(U.mT, U, out=S)  # the Gram matrix
            torch.bmm(U, S, out=out2[: len(W)])  # the retraction

    def passes() -> None:
        for W, G, m in zip(frames, grads, momenta, strict=True):
            U = out[: len(W)]
            U.copy_(G)
            torch.linalg.vector_norm(U, dim=(1, 2))  # ‖g‖
            m.lerp_(U, 0.1)
            torch.linalg.vector_norm(m, dim=(1, 2))  # ‖m‖
            torch.add(W, m, out=U)  # W + ξ

    return {"five products": products, "memory passes": passes}
