"""Frames of many parameters as batches (n, d, r): state, grouping, and the way there and back."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import full_precision
from .step import Moments, Settings, update_

# Bytes of W in a batch: on a CPU what the caches hold, on an accelerator enough to keep it busy.
CPU_BATCH_BYTES = 5 << 20
DEVICE_BATCH_BYTES = 1 << 30


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
            target.append(entry)


class Piece(NamedTuple):
    """Frames start … stop − 1 of the parameter `at` its place in the lists."""

    at: int
    start: int
    stop: int


def is_half(p: Tensor) -> bool:
    """Whether the parameter is stored in less than float32 and so needs a master."""
    return p.dtype in (torch.bfloat16, torch.float16)


def new_state(p: Tensor) -> dict[str, Tensor]:
    """State of the frames of `p` before their first step."""
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
    return state


def step_(lists: FrameLists, settings: Settings, *, join: bool) -> None:
    """Step every frame in `lists`, in place."""
    for p, master in zip(lists.params, lists.masters, strict=True):
        if is_half(p):
            # What somebody else wrote into the parameter wins over the master, entry by entry.
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
    work = [_frames(master) for master in lists.masters]
    with full_precision(lists.params[0].device.type):
        for pieces in _batches(work, join):
            _step_batch_(pieces, work, lists, settings)
    for p, master, frames in zip(lists.params, lists.masters, work, strict=True):
        if is_half(p) or not master.is_contiguous():
            p.copy_(frames.view(p.shape))


def _frames(X: Tensor) -> Tensor:
    """(..., d, r) as contiguous (n, d, r): a view where the memory allows it, a copy elsewhere."""
    return X.reshape(-1, *X.shape[-2:]).contiguous()


def _batches(work: Sequence[Tensor], join: bool) -> Iterator[list[Piece]]:
    """Split and join parameters of equal (d, r), dtype and device into batches of bounded size."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, W in enumerate(work):
        key = (W.shape[1:], W.dtype, W.device) if join else (index,)
        alike.setdefault(key, []).append(index)
    for indices in alike.values():
        W = work[indices[0]]
        limit = CPU_BATCH_BYTES if W.device.type == "cpu" else DEVICE_BATCH_BYTES
        yield from _cut(indices, work, max(1, limit // (W[:1].numel() * W.element_size() or 1)))


def _cut(indices: list[int], work: Sequence[Tensor], most: int) -> Iterator[list[Piece]]:
    """Batches of at most `most` frames; a parameter of that many or more is never joined with another."""
    batch: list[Piece] = []
    for index in indices:
        n = len(work[index])
        taken = sum(piece.stop - piece.start for piece in batch)
        if batch and taken + n > most:
            yield batch
            batch = []
        parts = math.ceil(n / most)
        if parts > 1:
            edges = [n * part // parts for part in range(parts + 1)]
            yield from ([Piece(index, a, b)] for a, b in itertools.pairwise(edges))
        elif n:
            batch.append(Piece(index, 0, n))
    if batch:
        yield batch


def _step_batch_(pieces: list[Piece], work: Sequence[Tensor], lists: FrameLists, settings: Settings) -> None:
    def parts(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[at][start:stop] for at, start, stop in pieces]

    grads = [_frames(lists.grads[at])[start:stop].to(work[at].dtype) for at, start, stop in pieces]
    targets = [parts(work), *(parts(tensors) for tensors in lists[3:])]
    if len(pieces) == 1:
        W, *moments = (target[0] for target in targets)
        update_(W, grads[0], Moments(*moments), settings)
        return
    joined = [torch.cat(target) for target in targets]
    update_(joined[0], torch.cat(grads), Moments(*joined[1:]), settings)
    sizes = [piece.stop - piece.start for piece in pieces]
    for target, whole in zip(targets, joined, strict=True):
        torch._foreach_copy_(target, torch.split(whole, sizes))
