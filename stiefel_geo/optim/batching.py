"""Frames of many parameters as batches (n, d, r): which step together, and the way there and back."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import full_precision
from ..sharding import local
from .kinds import is_half
from .step import Batch, Scalars, Settings, step_

# Bytes of W in a batch, at the least and at the most, and which share of all frames, since a batch needs memory of its
# own: on a CPU what the caches hold, on an accelerator enough to keep it busy.
CPU_BATCH_BYTES = (512 << 10, 5 << 20)
CPU_BATCH_SHARE = 6
DEVICE_BATCH_BYTES = (16 << 20, 64 << 20)
DEVICE_BATCH_SHARE = 4
# Parameters up to this size are joined by a copy: for larger ones it costs more than calls do.
CPU_JOIN_BYTES = 64 << 10
DEVICE_JOIN_BYTES = 2 << 20


class Frames(NamedTuple):
    """The n frames of one parameter with their state, contiguous (n, d, r), as far as they lie on this rank."""

    parameter: Tensor  # of any strides
    W: Tensor  # its memory, its float32 master, or a copy where it is not contiguous
    G: Tensor  # in the parameter's type
    m: Tensor
    scalars: Scalars
    lr: float | Tensor

    @property
    def n(self) -> int:
        return self.W.shape[0]


def frames_of(p: Tensor, state: dict[str, Tensor], lr: float | Tensor) -> Frames:
    """The frames of a parameter that has a gradient."""
    assert p.grad is not None
    W = local(state.get("master", p))
    scalars = Scalars(*(local(state[key]) for key in Scalars._fields))
    return Frames(local(p), _flat(W), _flat(local(p.grad)), local(state["exp_avg"]), scalars, lr)


def _flat(X: Tensor) -> Tensor:
    """(..., d, r) as contiguous (n, d, r): a view where the memory allows it, a copy elsewhere."""
    return X.reshape(-1, *X.shape[-2:]).contiguous()


def move_(frames: Sequence[Frames], settings: Settings, *, join: bool) -> None:
    """Step all frames, in place; their groups have one `settings` but for lr."""
    with full_precision(frames[0].W.device.type):
        for alike in _alike(frames, join):
            _move_alike_(alike, settings)


def _alike(frames: Sequence[Frames], join: bool) -> list[list[Frames]]:
    """The parameters that step together: those of equal (d, r), type and device."""
    alike: dict[tuple[object, ...], list[Frames]] = {}
    for at, each in enumerate(frames):
        if each.n:
            key = (each.W.shape[1:], each.parameter.dtype, each.G.dtype, each.W.device) if join else (at,)
            alike.setdefault(key, []).append(each)
    return list(alike.values())


def _move_alike_(frames: Sequence[Frames], settings: Settings) -> None:
    """Step parameters of equal (d, r): small ones joined by a copy, one such group at a time, others where they lie."""
    most, joined = _batch_sizes(frames)
    groups = _groups(frames, most, joined)
    alone = [group[0] for group in groups if len(group) == 1]
    if alone:
        _move_in_place_(alone, most, settings)
    for group in groups:
        if len(group) > 1:
            _move_joined_(group, settings)


def _move_joined_(frames: Sequence[Frames], settings: Settings) -> None:
    """Step copies of the frames as one batch, and write them back."""
    W, G, m = _joined(frames)
    _step_([Batch([W], [G], [m], [W.shape[0]], copies=True)], frames, settings)
    sizes = [each.n for each in frames]
    new = G.split_with_sizes(sizes)
    torch._foreach_copy_([each.W for each in frames] + [each.m for each in frames], [*new, *m.split_with_sizes(sizes)])
    _write_back_([(each, V) for each, V in zip(frames, new, strict=True) if _is_copy(each)])


def _joined(frames: Sequence[Frames]) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of W, G and m of all frames, each contiguous."""
    Ws, Gs, ms = [each.W for each in frames], [each.G for each in frames], [each.m for each in frames]
    if not is_half(frames[0].parameter) and Gs[0].dtype == Ws[0].dtype:
        W, G, m = torch.cat([*Ws, *Gs, *ms]).chunk(3)
        return W, G, m
    W, G, m = torch.cat(Ws), torch.cat(Gs), torch.cat(ms)
    if is_half(frames[0].parameter):
        _hear_(W, torch.cat([_flat(each.parameter) for each in frames]))
    return W, G.to(W.dtype), m


def _move_in_place_(frames: Sequence[Frames], most: int, settings: Settings) -> None:
    """Step the frames where they lie, in batches of at most `most`."""
    for each in frames:
        if is_half(each.parameter):
            _hear_(each.W, _flat(each.parameter))
    _step_(_batches(frames, most), frames, settings)
    _write_back_([(each, each.W) for each in frames if _is_copy(each)])


def _hear_(master: Tensor, parameter: Tensor) -> None:
    """Take into the master of half-precision frames what somebody else wrote into the parameter, entry by entry."""
    torch.where(master.to(parameter.dtype) == parameter, master, parameter, out=master)


def _is_copy(frames: Frames) -> bool:
    """Whether the new frames have still to be written into the parameter."""
    return is_half(frames.parameter) or not frames.parameter.is_contiguous()


def _write_back_(frames: Sequence[tuple[Frames, Tensor]]) -> None:
    if frames:
        torch._foreach_copy_(
            [each.parameter for each, _ in frames], [V.view(each.parameter.shape) for each, V in frames]
        )


def _step_(batches: list[Batch], frames: Sequence[Frames], settings: Settings) -> None:
    """`step_` with the scalars of all frames at once, in the order in which the batches hold them."""
    settings = settings._replace(lr=_lr(frames))
    if len(frames) == 1:
        step_(batches, frames[0].scalars, settings)
        return
    kept = [scalar for field in zip(*(each.scalars for each in frames), strict=True) for scalar in field]
    joined = torch.cat(kept)
    step_(batches, Scalars(*joined.view(len(Scalars._fields), -1).unbind()), settings)
    torch._foreach_copy_(kept, joined.split_with_sizes([scalar.shape[0] for scalar in kept]))


def _lr(frames: Sequence[Frames]) -> float | Tensor:
    """The lr of all frames, or where their groups differ a vector (N,) of them."""
    lrs = [each.lr for each in frames]
    if all(lr is lrs[0] for lr in lrs):
        return lrs[0]
    rates = frames[0].scalars.step.new_ones(sum(each.n for each in frames))
    parts = rates.split_with_sizes([each.n for each in frames])
    numbers = [lr for lr in lrs if not isinstance(lr, Tensor)]
    if len(numbers) == len(lrs) and not torch.compiler.is_compiling():
        torch._foreach_mul_(parts, numbers)  # one call for all, which takes the numbers along
    else:
        for part, lr in zip(parts, lrs, strict=True):
            part.mul_(lr)
    return rates


def _batch_sizes(frames: Sequence[Frames]) -> tuple[int, int]:
    """How many frames a batch may hold, and up to how many of one parameter are joined with others by a copy."""
    W = frames[0].W
    frame_bytes = W[0].numel() * W.element_size()
    on_cpu = W.device.type == "cpu"
    smallest, largest = CPU_BATCH_BYTES if on_cpu else DEVICE_BATCH_BYTES
    share = sum(each.n for each in frames) * frame_bytes // (CPU_BATCH_SHARE if on_cpu else DEVICE_BATCH_SHARE)
    most = max(1, min(max(share, smallest), largest) // frame_bytes)
    return most, (CPU_JOIN_BYTES if on_cpu else DEVICE_JOIN_BYTES) // frame_bytes


def _groups(frames: Sequence[Frames], most: int, joined: int) -> list[list[Frames]]:
    """Frames in order, neighbours of up to `joined` frames each together as long as they fit into `most`."""
    groups: list[list[Frames]] = []
    room = 0  # frames that still fit the last group
    for each in frames:
        if each.n <= min(joined, room):
            groups[-1].append(each)
            room -= each.n
        else:
            groups.append([each])
            room = most - each.n if each.n <= joined else 0
    return groups


def _batches(frames: Sequence[Frames], most: int) -> list[Batch]:
    """The frames in order, as views, in batches of at most `most`."""
    batches: list[Batch] = []
    room = 0  # frames that still fit the last batch
    for each in frames:
        for part in _parts((each.W, each.G, each.m), most):
            n = part[0].shape[0]
            if n > room:
                batches.append(Batch([], [], [], []))
                room = most
            batches[-1].add(*part)
            room -= n
    return batches


def _parts(stacks: tuple[Tensor, ...], most: int) -> Iterable[tuple[Tensor, ...]]:
    """W, G and m of one parameter in as few parts of at most `most` frames as there can be, of about equal size."""
    n = stacks[0].shape[0]
    if n <= most:  # the usual case of one parameter per head, without calls
        return [stacks]
    cuts = math.ceil(n / most)
    sizes = [n * (cut + 1) // cuts - n * cut // cuts for cut in range(cuts)]
    return zip(*(X.split_with_sizes(sizes) for X in stacks), strict=True)
