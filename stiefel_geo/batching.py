"""Frames of many parameters as batches (n, d, r): state, grouping, and the way there and back."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import full_precision
from .sharding import is_sharded, like, local
from .step import Batch, Scalars, Settings, update_

# Bytes of W in a batch: on a CPU what the caches hold, and a share of all frames, since a batch needs memory of its
# own, about twice as much; on an accelerator enough to keep it busy.
CPU_BATCH_BYTES = (512 << 10, 5 << 20)
CPU_BATCH_SHARE = 6
DEVICE_BATCH_BYTES = 1 << 30
# On a CPU only parameters up to this size are joined by a copy: for larger ones it costs more than calls do.
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
        entries: tuple[Tensor, ...] = (p, p.grad, state.get("master", p), *(state[key] for key in keys))
        if is_sharded(p):
            entries = tuple(map(local, entries))
        for target, entry in zip(self, entries, strict=True):
            target.append(entry)


class Piece(NamedTuple):
    """Frames start … stop − 1 of the parameter at place `at`."""

    at: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """What the parameters' tensors (N, …) hold of these frames, as a view."""
        whole = tensors[self.at]
        return whole if self.size == whole.shape[0] else whole[self.start : self.stop]

    @property
    def size(self) -> int:
        return self.stop - self.start


Part = list[Piece]  # frames that go through as one tensor: of one parameter a view, of several a copy


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
        if W.shape[0]:
            alike.setdefault((W.shape[1:], W.dtype, W.device) if join else (at,), []).append(at)
    return list(alike.values())


def _step_alike_(alike: list[int], work: Sequence[Tensor], lists: FrameLists, settings: Settings) -> None:
    """Step parameters of equal (d, r): their frames in batches, their scalars all at once."""
    frames = [work[at] for at in alike]
    most, joined = _batch_sizes(frames)
    parts = _parts([W.shape[0] for W in frames], most, joined)
    grads = [_frames(lists.grads[at]).to(frames[0].dtype) for at in alike]
    stacks = frames, grads, [lists.exp_avgs[at] for at in alike]
    kept = [[tensors[at] for at in alike] for tensors in lists[4:]]
    for bunch in _bunches(parts, most):
        batches = [_batch(stacks, batch) for batch in bunch]
        every = [piece for batch in bunch for part in batch for piece in part]
        scalars = Scalars(*(_gather(tensors, every) for tensors in kept))
        update_(batches, scalars, settings)
        for tensors, stepped in zip(kept, scalars, strict=True):
            _scatter_(tensors, every, stepped)
        for cut, batch in zip(bunch, batches, strict=True):
            for part, W, m in zip(cut, batch.W, batch.m, strict=True):
                _scatter_(stacks[0], part, W)
                _scatter_(stacks[2], part, m)


def _batch(stacks: Sequence[Sequence[Tensor]], parts: list[Part]) -> Batch:
    W, G, m = ([_gather(stack, part) for part in parts] for stack in stacks)
    return Batch(W, G, m, [sum(piece.size for piece in part) for part in parts])


def _batch_sizes(work: Sequence[Tensor]) -> tuple[int, int]:
    """How many frames a batch may hold, and up to how many of one parameter are joined with others by a copy."""
    frame_bytes = work[0][0].numel() * work[0].element_size()
    if work[0].device.type != "cpu":
        most = max(1, DEVICE_BATCH_BYTES // frame_bytes)
        return most, most
    smallest, largest = CPU_BATCH_BYTES
    share = sum(W.shape[0] for W in work) * frame_bytes // CPU_BATCH_SHARE
    return max(1, min(max(share, smallest), largest) // frame_bytes), CPU_JOIN_BYTES // frame_bytes


def _bunches(parts: list[Part], most: int) -> list[list[list[Part]]]:
    """Batches of up to `most` frames, in bunches whose scalars are stepped at once.

    All parts that are views make one bunch; a joined part is one alone, so that one copy is held at a time.
    """
    batches: list[list[Part]] = []
    room = 0  # frames that still fit the last batch
    for part in (part for part in parts if len(part) == 1):
        n = part[0].size
        if n > room:
            batches.append([])
            room = most
        batches[-1].append(part)
        room -= n
    joined = [[[part]] for part in parts if len(part) > 1]
    return [batches, *joined] if batches else joined


def _parts(sizes: list[int], most: int, joined: int) -> list[Part]:
    """Cut parameters of `sizes` frames into parts of at most `most`, in order, joining those of up to `joined`."""
    groups: list[Part] = []
    room = 0  # frames that still fit the last part
    for at, n in enumerate(sizes):
        if n <= min(joined, room):
            groups[-1].append(Piece(at, 0, n))
            room -= n
            continue
        cuts = math.ceil(n / most)
        edges = [n * cut // cuts for cut in range(cuts + 1)]
        groups.extend([Piece(at, start, stop)] for start, stop in itertools.pairwise(edges))
        room = most - n if n <= joined else 0
    return groups


def _gather(tensors: Sequence[Tensor], part: Part) -> Tensor:
    """The frames of the pieces: a view of one parameter, or a copy of several."""
    return part[0].of(tensors) if len(part) == 1 else torch.cat([piece.of(tensors) for piece in part])


def _scatter_(tensors: Sequence[Tensor], part: Part, joined: Tensor) -> None:
    """Write back what `_gather` copied."""
    if len(part) > 1:
        pieces = torch.split(joined, [piece.size for piece in part])
        torch._foreach_copy_([piece.of(tensors) for piece in part], pieces)
