"""Frames of many parameters as batches (n, d, r): state, grouping, and the way there and back."""

import math
from collections.abc import Iterable, Sequence
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


class Member(NamedTuple):
    """The frames of one parameter as its batches see them, contiguous (n, d, r), and their scalars."""

    W: Tensor
    G: Tensor
    m: Tensor
    scalars: Scalars


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
            _step_alike_([_member(work[at], lists, at) for at in alike], settings)
    for p, master, frames in zip(lists.params, lists.masters, work, strict=True):
        if is_half(p) or not master.is_contiguous():
            p.copy_(frames.view(p.shape))


def _frames(X: Tensor) -> Tensor:
    """(..., d, r) as contiguous (n, d, r): a view where the memory allows it, a copy elsewhere."""
    return X.reshape(-1, *X.shape[-2:]).contiguous()


def _member(W: Tensor, lists: FrameLists, at: int) -> Member:
    scalars = Scalars(lists.exp_avg_sqs[at], lists.steps[at], lists.skipped[at], lists.capped[at])
    return Member(W, _frames(lists.grads[at]).to(W.dtype), lists.exp_avgs[at], scalars)


def _alike(work: Sequence[Tensor], join: bool) -> list[list[int]]:
    """Places of the parameters that step together: those of equal (d, r), dtype and device."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, W in enumerate(work):
        if W.shape[0]:
            alike.setdefault((W.shape[1:], W.dtype, W.device) if join else (at,), []).append(at)
    return list(alike.values())


def _step_alike_(members: list[Member], settings: Settings) -> None:
    """Step parameters of equal (d, r): small ones joined by a copy, one such group at a time, others where they lie."""
    most, joined = _batch_sizes([member.W for member in members])
    groups = _groups(members, most, joined)
    alone = [group[0] for group in groups if len(group) == 1]
    if alone:
        _update_(_batches(alone, most), alone, settings)
    for group in groups:
        if len(group) > 1:
            Ws, Gs, ms, _ = zip(*group, strict=True)
            W, m = torch.cat(Ws), torch.cat(ms)
            _update_([Batch([W], [torch.cat(Gs)], [m], [W.shape[0]])], group, settings)
            _write_back_(Ws, W)
            _write_back_(ms, m)


def _update_(batches: list[Batch], members: Sequence[Member], settings: Settings) -> None:
    """`update_` with the scalars of all members at once, in the order in which the batches hold their frames."""
    kept = list(zip(*(member.scalars for member in members), strict=True))
    scalars = Scalars(*(tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in kept))
    update_(batches, scalars, settings)
    for tensors, stepped in zip(kept, scalars, strict=True):
        _write_back_(tensors, stepped)


def _write_back_(tensors: tuple[Tensor, ...], joined: Tensor) -> None:
    """Write a concatenation into the tensors that it was made from; a single one was used itself."""
    if len(tensors) > 1:
        torch._foreach_copy_(tensors, joined.split_with_sizes([tensor.shape[0] for tensor in tensors]))


def _batch_sizes(work: Sequence[Tensor]) -> tuple[int, int]:
    """How many frames a batch may hold, and up to how many of one parameter are joined with others by a copy."""
    frame_bytes = work[0][0].numel() * work[0].element_size()
    if work[0].device.type != "cpu":
        most = max(1, DEVICE_BATCH_BYTES // frame_bytes)
        return most, most
    smallest, largest = CPU_BATCH_BYTES
    share = sum(W.shape[0] for W in work) * frame_bytes // CPU_BATCH_SHARE
    return max(1, min(max(share, smallest), largest) // frame_bytes), CPU_JOIN_BYTES // frame_bytes


def _groups(members: Sequence[Member], most: int, joined: int) -> list[list[Member]]:
    """Members in order, neighbours of up to `joined` frames each together as long as they fit into `most`."""
    groups: list[list[Member]] = []
    room = 0  # frames that still fit the last group
    for member in members:
        n = member.W.shape[0]
        if n <= min(joined, room):
            groups[-1].append(member)
            room -= n
        else:
            groups.append([member])
            room = most - n if n <= joined else 0
    return groups


def _batches(members: Sequence[Member], most: int) -> list[Batch]:
    """The members' frames in order, as views, in batches of at most `most`."""
    batches: list[Batch] = []
    room = 0  # frames that still fit the last batch
    for W, G, m, _ in members:
        for part in _parts(W, G, m, most):
            n = part[0].shape[0]
            if n > room:
                batches.append(Batch([], [], [], []))
                room = most
            batches[-1].add(*part)
            room -= n
    return batches


def _parts(W: Tensor, G: Tensor, m: Tensor, most: int) -> Iterable[tuple[Tensor, ...]]:
    """W, G and m of one parameter in as few parts of at most `most` frames as there can be, of about equal size."""
    n = W.shape[0]
    if n <= most:  # the usual case of one parameter per head, without calls
        return [(W, G, m)]
    cuts = math.ceil(n / most)
    sizes = [n * (cut + 1) // cuts - n * cut // cuts for cut in range(cuts)]
    return zip(*(X.split_with_sizes(sizes) for X in (W, G, m)), strict=True)
