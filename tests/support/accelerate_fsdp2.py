"""What accelerate's FSDP2 does with a patched model, on two processes; tests/test_transformers_ecosystem.py reads it.

accelerate takes FSDP2 on accelerators alone, so its state is told so here, and the rest is its own code over gloo.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import nn

import stiefel_geo
from stiefel_geo import diagnostics

from .ranks import WORLD
from .transformers_models import tiny, words

STEPS, LR = 4, 1e-2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return stiefel_geo.ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.01), lr=LR)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """The loss before each of as many steps, all ranks on the same words."""
    losses = []
    for _ in range(number):
        loss = model(**words(), labels=words()["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerator() -> Accelerator:
    result = Accelerator(cpu=True)
    result.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    result.state.distributed_type = DistributedType.FSDP
    return result


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}  # as torchrun sets them; accelerate reads them
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    ours, model = accelerator(), tiny("llama").train()
    stiefel_geo.patch(model)
    model, optimizer = ours.prepare(model, optimizer_of(model))
    found: dict[str, Any] = {"losses": steps(model, optimizer, STEPS)}
    found["sharded"] = [type(p).__name__ for _, p in stiefel_geo.frames(model)]
    ours.state.distributed_type = DistributedType.FSDP  # `prepare` read it off the devices again
    ours.save_state(str(folder / "state"))
    found["more"] = steps(model, optimizer, 2)
    ours.state.distributed_type = DistributedType.FSDP
    ours.load_state(str(folder / "state"))
    found["again"] = steps(model, optimizer, 2)
    found["defect"] = max(value.max().item() for value in diagnostics.defect(model).values())
    torch.save(found, folder / f"rank {rank}.pt")
    ours.end_training()
