"""One process, or several under torchrun: who they are, what each trains on, and who writes."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .bad_input import BadInput


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Under torchrun: gloo, or nccl with one GPU a process. Alone: nothing."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        gc.collect()  # DDP stands in a cycle and would keep the group, and with it gloo's threads, to the very end:
        dist.destroy_process_group()  # a thread that lets a tensor go while Python ends aborts (pytorch#190489)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def first_writes(folder: Path) -> Iterator[Path]:
    """`folder` for the first process; the others print nothing and write to a folder that goes away."""
    if world() > 1:
        dist.barrier()  # nobody reads in `folder` any more
    if rank() == 0:
        yield folder
        return
    with tempfile.TemporaryDirectory() as own, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield Path(own)


def share(order: Sequence[int], batch_size: int) -> tuple[Sequence[int], int]:
    """This process's images of every batch, and how many: all processes' together are the batches of one process."""
    if world() == 1:
        return order, batch_size
    if batch_size % world() or len(order) < batch_size:
        raise BadInput(
            f"--batch-size must be a multiple of the {world()} processes, and not above the {len(order)} training "
            f"images: got {batch_size}; choose another"
        )
    whole = len(order) // batch_size * batch_size
    return order[rank() : whole : world()], batch_size // world()


def parallel(model: nn.Module) -> Callable[[Tensor], Any]:
    """`model`, its gradients averaged over the processes."""
    return DistributedDataParallel(model) if world() > 1 else model


def summed(*numbers: float) -> list[float]:
    """The sum of each number over all processes."""
    if world() == 1:
        return list(numbers)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(values)
    sums: list[float] = values.tolist()
    return sums
