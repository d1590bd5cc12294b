"""Two processes that share every batch, by DDP and by FSDP2, against one process that sees the whole batches."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stiefel_geo

from .rows import Row, Settings, at_most, left_out

WORLD, STEPS, BATCH = 2, 10, 8
LARGEST_GAP, LARGEST_DEFECT = 1e-4, 1e-5
SHAPE: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 16,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 10,
}


def rows(settings: Settings) -> Iterator[Row]:
    if settings.cuda and torch.cuda.device_count() < WORLD:
        yield left_out("DDP and FSDP2 over nccl", f"it needs {WORLD} GPUs, torch sees {torch.cuda.device_count()}")
    else:
        yield from compared(settings)


def compared(settings: Settings) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        # Children of a fork server end without finalising Python. FSDP2's mesh keeps gloo's threads past the group,
        # and a thread that lets a tensor go meanwhile aborts the process (pytorch#190489).
        torch.multiprocessing.start_processes(
            on_rank, (settings.device, folder), nprocs=WORLD, start_method="forkserver"
        )
        for name in WAYS:
            found = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
            yield at_most(f"{name}: frames from those of one process", found["gap"], LARGEST_GAP)
            yield at_most(f"{name}: largest defect", found["defect"], LARGEST_DEFECT)


def on_rank(rank: int, device: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    try:
        alone = frames_after(lambda model: model, place, slice(None))
        for name, wrap in WAYS.items():
            shared = frames_after(wrap, place, slice(rank, None, WORLD))
            if rank == 0:
                gap = max(float((a - b).abs().max()) for a, b in zip(alone, shared, strict=True))
                defect = max(float(stiefel_geo.stiefel.defect(frame).max()) for frame in shared)
                torch.save({"gap": gap, "defect": defect}, Path(folder) / f"{name}.pt")
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": DistributedDataParallel, "FSDP2": sharded}


def frames_after(wrap: Callable[[nn.Module], nn.Module], place: torch.device, part: slice) -> list[Tensor]:
    """The whole frames after some steps on this rank's part of every batch."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE).to(place)
    stiefel_geo.patch(model)
    wrapped = wrap(model)
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        images, labels = torch.randn(BATCH, 3, 32, 32, generator=batches), torch.arange(BATCH)
        nn.functional.cross_entropy(wrapped(images[part].to(place)), labels[part].to(place)).backward()
        optimizer.step()
        optimizer.zero_grad()
    frames = (frame.detach() for _, frame in stiefel_geo.frames(model))
    return [frame.full_tensor() if hasattr(frame, "full_tensor") else frame for frame in frames]
