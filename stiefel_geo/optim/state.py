"""The state of a parameter before its first step."""

import math
from typing import Any

import torch
from torch import Tensor

from ..sharding import like, local
from .kinds import is_frame, is_half, is_other_point
from .step import Scalars


def new_state(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """State of `p` in a group with these options; that of a Euclidean one is made as `torch.optim.AdamW` makes it."""
    if is_frame(p):
        return _of_frames(p)
    if is_other_point(p):
        return _of_points(p)
    on_device = group["capturable"] or group["fused"]
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
    }


def _of_frames(p: Tensor) -> dict[str, Tensor]:
    """For frames (..., d, r), n in all: momentum (n, d, r), scalars (n,), sharded as `p` is."""
    here = local(p)
    d, r = here.shape[-2:]
    n = math.prod(here.shape[:-2])
    momentum = torch.zeros(n, d, r, dtype=torch.float32 if is_half(p) else p.dtype, device=here.device)
    state = {"exp_avg": momentum, **_scalars(momentum.new_zeros(n, dtype=torch.float64))}
    if is_half(p):
        state["master"] = here.detach().to(torch.float32, memory_format=torch.contiguous_format)
    return {key: like(p, value) for key, value in state.items()}


def _of_points(p: Any) -> dict[str, Tensor]:
    """For points on another manifold: momentum like `p`, scalars of the shape (..., 1, …) of its inner products."""
    x = p.detach()
    inner = p.manifold.inner(x, x, x, keepdim=True)
    return {"exp_avg": torch.zeros_like(x), **_scalars(torch.zeros_like(inner, dtype=torch.float64))}


def _scalars(zeros: Tensor) -> dict[str, Tensor]:
    return {key: torch.zeros_like(zeros) for key in Scalars._fields}
