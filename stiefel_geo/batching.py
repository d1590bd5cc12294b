"""Frames of many parameters as batches (n, d, r): state, grouping, and the way there and back."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import full_precision
from .sharding import like, local
from .step import Batch, Scalars, Settings, update_

# Bytes of W in a batch: on a CPU what the caches hold, on an accelerator enough to keep it busy.
CPU_BATCH_BYTES = 5 << 20
DEVICE_BATCH_BYTES = 1 << 30
# On a CPU only parameters up to this size are joined: for larger ones the copies cost more than the calls.
CPU_JOIN_BYTES = 64 << 10


class FrameLists(NamedTuple):
    """Parallel lists, one entry per ManifoldParameter of shape (..., d, r), N = its number of frames."""

    params: list[Tensor]
    grads: list[Tensor]
    masters: list[Tensor]  # float32 twin of a half-precision parameter, otherwise the parameter itself
    exp_avgs: list[Tensor]  # (N, d, r)
    exp_avg_sqs: list[Tensor]  # (N,) and so are the counters
    steps: list[Tensor]
    skipped: list[Tensor]
    capped: list[Tensor]

    def add(self, p: Tensor, state: dict[str, Tensor]) -> None:
        """Append a parameter that has a gradient, with its state."""
        keys = ("exp_avg", "exp_avg_sq", "step", "skipped", "capped")
        assert p.grad is not None
        entries = (p, p.grad, state.get("master", p), *(state[key] for key in keys))
        for target, entry in zip(self, entries, strict=True):
            target.append(local(entry))


class Piece(NamedTuple):
    """Frames start … stop − 1 of the parameter at place `at`."""

    at: int
    start: int
    stop: int


def is_half(p: Tensor) -> bool:
    """Whether the parameter is stored in less than float32 and so needs a master."""
    return p.dtype in (torch.bfloat16, torch.float16)


def new_state(p: Tensor) -> dict[str, Tensor]:
    """State of the frames of `p` before their first step, sharded as `p` is."""
    whole, p = p, local(p)
    d, r = p.shape[-2:]
    n = math.prod(p.shape[:-2])
    dtype = torch.float32 if is_half(p) else p.dtype

    def zeros(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=p.device)

    state = {
        "step": zeros(torch.float32, n),
        "exp_avg": zeros(dtype, n, d, r),
        "exp_avg_sq": zeros(torch.float64, n),
        "skipped": zeros(torch.int64, n),
        "capped": zeros(torch.int64, n),
    }
    if is_half(p):
        state["master"] = p.detach().to(torch.float32, memory_format=torch.contiguous_format)
    return {key: like(whole, value) for key, value in state.items()}


def step_(lists: FrameLists, settings: Settings, *, join: bool) -> None:
    """Step every frame in `lists`, in place."""
    for p, master in zip(lists.params, lists.masters, strict=True):
        if is_half(p):
            # What somebody else wrote into the parameter wins over the master, entry by entry.
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
    work = [_frames(master) for master in lists.masters]
    with full_precision(lists.params[0].device.type):
        for alike in _alike(work, join):
            _step_alike_(alike, work, lists, settings)
    for p, master, frames in zip(lists.params, lists.masters, work, strict=True):
        if is_half(p) or not master.is_contiguous():
            p.copy_(frames.view(p.shape))


def _frames(X: Tensor) -> Tensor:
    """(..., d, r) as contiguous (n, d, r): a view where the memory allows it, a copy elsewhere."""
    return X.reshape(-1, *X.shape[-2:]).contiguous()


def _alike(work: Sequence[Tensor], join: bool) -> list[list[int]]:
    """Places of the parameters that step together: those of equal (d, r), dtype and device."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, W in enumerate(work):
        if len(W):
            alike.setdefault((W.shape[1:], W.dtype, W.device) if join else (at,), []).append(at)
    return list(alike.values())


def _step_alike_(alike: list[int], work: Sequence[Tensor], lists: FrameLists, settings: Settings) -> None:
    """Step parameters of equal (d, r): their frames in batches, their scalars all at once."""
    W = work[alike[0]]
    on_cpu, frame_bytes = W.device.type == "cpu", W[0].numel() * W.element_size()
    most = max(1, (CPU_BATCH_BYTES if on_cpu else DEVICE_BATCH_BYTES) // frame_bytes)
    groups = _pieces([len(work[at]) for at in alike], most, CPU_JOIN_BYTES // frame_bytes if on_cpu else most)
    grads = [_frames(lists.grads[at]).to(W.dtype) for at in alike]
    stacks = [work[at] for at in alike], grads, [lists.exp_avgs[at] for at in alike]
    kept = [[tensors[at] for at in alike] for tensors in lists[4:]]
    for bunch in _bunches(groups):
        batches = [Batch(*(_gather(stack, pieces) for stack in stacks)) for pieces in bunch]
        every = [piece for pieces in bunch for piece in pieces]
        scalars = Scalars(*(_gather(tensors, every) for tensors in kept))
        update_(batches, scalars, settings)
        for tensors, joined in zip(kept, scalars, strict=True):
            _scatter_(tensors, every, joined)
        for pieces, batch in zip(bunch, batches, strict=True):
            _scatter_(stacks[0], pieces, batch.W)
            _scatter_(stacks[2], pieces, batch.m)


def _bunches(groups: list[list[Piece]]) -> list[list[list[Piece]]]:
    """Batches whose scalars are stepped at once: all that are views; a joined one alone, to hold one copy at a time."""
    views = [pieces for pieces in groups if len(pieces) == 1]
    joined = [[pieces] for pieces in groups if len(pieces) > 1]
    return [views, *joined] if views else joined


def _pieces(sizes: list[int], most: int, joined: int) -> list[list[Piece]]:
    """Cut parameters of `sizes` frames into batches of at most `most`, in order, joining those of up to `joined`."""
    groups: list[list[Piece]] = []
    room = 0  # frames that still fit the last group
    for at, n in enumerate(sizes):
        if n <= min(joined, room):
            groups[-1].append(Piece(at, 0, n))
            room -= n
            continue
        parts = math.ceil(n / most)
        edges = [n * part // parts for part in range(parts + 1)]
        groups.extend([Piece(at, start, stop)] for start, stop in itertools.pairwise(edges))
        room = most - n if n <= joined else 0
    return groups


def _gather(stack: Sequence[Tensor], pieces: list[Piece]) -> Tensor:
    """The frames of the pieces: a view of one parameter, or a copy of several."""
    parts = [stack[at][start:stop] for at, start, stop in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter_(stack: Sequence[Tensor], pieces: list[Piece], batch: Tensor) -> None:
    """Write a batch back that `_gather` copied."""
    if len(pieces) > 1:
        parts = torch.split(batch, [stop - start for _, start, stop in pieces])
        torch._foreach_copy_([stack[at][start:stop] for at, start, stop in pieces], parts)
