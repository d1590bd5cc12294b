"""Frames sharded over ranks: the part of a DTensor that lies here, and the shardings that leave frames whole.

FSDP2's `fully_shard` shards dimension 0, and dimension 0 of frames (n, d, r) counts whole frames. So every rank
steps its own frames, as if they were all, and nothing is communicated. Its state is sharded like the frames, so
that `torch.distributed.checkpoint` can reload it on another number of ranks.
"""

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; asked without importing torch.distributed.tensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """What of `tensor` lies on this rank, in the same memory; all of it where it is not sharded."""
    if not is_sharded(tensor):
        whole: Tensor = tensor
        return whole
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def like(p: Any, part: Tensor) -> Tensor:
    """`part` (n here, …), made for the frames of `p` that lie here, as one tensor sharded like `p`."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    shape = (p.shape[0], *part.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_whole_frames(p: Any) -> None:
    """Raise ValueError for a frame parameter whose sharding would split a frame between ranks."""
    if p.ndim < 2:
        raise ValueError(
            "rule: a rank holds whole frames; found frames inside the flat parameters of FullyShardedDataParallel, "
            "which are cut at any place; use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if not is_sharded(p):
        return
    whole = all(placement.is_replicate() or placement.is_shard(0) for placement in p.placements)
    if p.ndim != 3 or not whole:
        raise ValueError(
            f"rule: a rank holds whole frames, which sharding (n, d, r) on dimension 0 gives; found shape "
            f"{tuple(p.shape)} with placements {tuple(p.placements)}: it would split frames between ranks; "
            "leave shard_placement_fn out for frames, or return Shard(0) for them"
        )
