"""Two processes that measure, and what they do for tests/test_distributed.py: functions that run on every rank."""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam, diagnostics
from stiefel_geo.sharding import local

from .tiny_vit import batch, frame_values, gap, largest_defect, tiny_vit, train

WORLD = 2
STEPS = 50
LR = 1e-3


def measured(main: Callable[[int, Path], None], folder: Path) -> list[dict[str, Any]]:
    """What `main` saved in `folder` on each rank.

    Children of a fork server end without finalising Python. FSDP2's mesh keeps gloo's threads past the group, and a
    thread that lets a tensor go meanwhile aborts the process (pytorch#190489).
    """
    torch.multiprocessing.start_processes(main, (folder,), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"rank {rank}.pt") for rank in range(WORLD)]


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    return tiny_vit(depth=2).to(dtype)


def optimizer_of(model: nn.Module) -> ScaleFreeRiemannianAdam:
    return ScaleFreeRiemannianAdam(model.parameters(), lr=LR, weight_decay=0.05)


def part_of_loss(model: nn.Module, index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The loss on this rank's share of a batch."""
    images, labels = (x[dist.get_rank() :: WORLD] for x in batch(index))
    return nn.functional.cross_entropy(model(images.to(dtype)), labels)


def train_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], dtype: Any = torch.float64
) -> None:
    for index in steps:
        part_of_loss(model, index, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(steps: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model after one process has trained it on the joined batches."""
    model = build(dtype)
    train(model, optimizer_of(model), range(steps))
    return model


def frames_gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def spread(model: nn.Module) -> float:
    """Largest difference of a parameter between the ranks."""
    largest = 0.0
    for p in model.parameters():
        copies = [torch.empty_like(p) for _ in range(WORLD)]
        dist.all_gather(copies, p.detach())
        largest = max(largest, *(float((copy - copies[0]).abs().max()) for copy in copies))
    return largest


def data_parallel(dtype: torch.dtype) -> dict[str, Any]:
    model = build(dtype)
    parallel, optimizer = DistributedDataParallel(model), optimizer_of(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    train_parts(parallel, optimizer, range(STEPS), dtype)
    reference = alone(STEPS, dtype)
    return {
        "spread": spread(model),
        "gap": gap(model, reference),
        "frames' gap": frames_gap(frame_values(model), frame_values(reference)),
        "moved": [p.data_ptr() for p in model.parameters()] != pointers,
        "defect": largest_defect(model),
    }


def accumulating() -> dict[str, Any]:
    """Two batches a step, the first under no_sync, against one process that adds both losses."""
    model, reference = build(), build()
    parallel, optimizer, other = DistributedDataParallel(model), optimizer_of(model), optimizer_of(reference)
    for index in range(0, 10, 2):
        for half, context in ((index, parallel.no_sync()), (index + 1, contextlib.nullcontext())):
            with context:
                part_of_loss(parallel, half).backward()
            images, labels = batch(half)
            nn.functional.cross_entropy(reference(images.double()), labels).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    return {"gap": gap(model, reference), "spread": spread(model)}


def zero_redundancy() -> dict[str, Any]:
    model = build()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), ScaleFreeRiemannianAdam, lr=LR, weight_decay=0.05)
    train_parts(DistributedDataParallel(model), optimizer, range(10))
    held = sum(len(state) > 0 for state in optimizer.optim.state.values())
    return {"gap": gap(model, alone(10)), "share": held / len(list(model.parameters()))}


def shard(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


def _gathered(p: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    whole: Tensor = p.full_tensor().detach()
    return whole


class Whole(nn.Module):
    """The parameters of a sharded model, gathered, for `gap`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.values = nn.ParameterList(_gathered(p) for p in model.parameters())


def _bytes(tensor: Tensor) -> int:
    here = local(tensor)
    return here.numel() * here.element_size()


def fully_sharded(dtype: torch.dtype, folder: Path | None = None) -> dict[str, Any]:
    model = shard(build(dtype))
    optimizer = optimizer_of(model)
    train_parts(model, optimizer, range(10), dtype)
    _, frames = next(stiefel_geo.frames(model))
    reference = alone(10, dtype)
    whole = [_gathered(frame) for _, frame in stiefel_geo.frames(model)]
    figures = {
        "gap": gap(Whole(model), reference),
        "frames' gap": frames_gap(whole, frame_values(reference)),
        "frames": optimizer.num_frames,
        "bytes": sum(_bytes(p) for p in model.parameters()),
        "state bytes": sum(_bytes(value) for state in optimizer.state.values() for value in state.values()),
        "local frames": len(frames.to_local()),
        "local momentum": tuple(optimizer.state[frames]["exp_avg"].to_local().shape),
    }
    if folder is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "from two ranks")
    return figures


def in_bfloat16() -> dict[str, Any]:
    """FSDP2 that gathers and computes in bfloat16, from float32 shards."""
    policy, model = MixedPrecisionPolicy(torch.bfloat16, torch.float32), build(torch.float32)
    for part in (*model.get_submodule("blocks").children(), model):
        fully_shard(part, mp_policy=policy)
    train_parts(model, optimizer_of(model), range(5), torch.float32)
    return {
        "dtypes": {frame.dtype for _, frame in stiefel_geo.frames(model)},
        "defect": max(float(each.max()) for each in diagnostics.defect(model).values()),
    }


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a distributed checkpoint into model and optimizer."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def back_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Resume sharded what one process saved after 20 steps, and go on to 30."""
    model = shard(build())
    optimizer = optimizer_of(model)
    resumed(model, optimizer, folder / "from one rank")
    train_parts(model, optimizer, range(20, 30))
    return {"gap": gap(Whole(model), alone(30))}


def refusal(build_optimizer: Any) -> str:
    try:
        build_optimizer()
    except ValueError as error:
        return str(error)
    return "not refused"


def split_by_rows() -> dict[str, Any]:
    """What the optimizer says to a sharding that puts the upper rows of every frame here and the lower ones there."""
    model = build()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 and p.shape[0] > 1 else None)
    try:
        optimizer_of(model)
    except ValueError as error:
        return {"refusal": str(error)}
    return {"refusal": ""}


def together(rank: int, folder: Path, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work` in a process group of both ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=WORLD)
    try:
        return work()
    finally:
        dist.destroy_process_group()


def all_together(folder: Path) -> dict[str, Any]:
    return {
        "ddp": data_parallel(torch.float64),
        "ddp float32": data_parallel(torch.float32),
        "no_sync": accumulating(),
        "zero": zero_redundancy(),
        "fsdp": fully_sharded(torch.float64, folder),
        "fsdp float32": fully_sharded(torch.float32),
        "bfloat16": in_bfloat16(),
        "split": split_by_rows(),
    }


def on_one_rank(folder: Path) -> dict[str, Any]:
    """Resume in one process what two ranks saved after 10 steps, go on to 20, and save that."""
    model = build()
    optimizer = optimizer_of(model)
    resumed(model, optimizer, folder / "from two ranks")
    train(model, optimizer, range(10, 20))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "from one rank")
    return {"gap": gap(model, alone(20))}


def main(rank: int, folder: Path) -> None:
    """Everything on this rank; its figures go to a file in `folder`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures = together(rank, folder, "first store", lambda: all_together(folder))
    if rank == 0:
        figures["one rank"] = on_one_rank(folder)
    figures["back"] = together(rank, folder, "second store", lambda: back_on_two_ranks(folder))
    torch.save(figures, folder / f"rank {rank}.pt")
