"""A whole training step in bfloat16: the patched model with our optimizer beside the plain one with AdamW."""

import time
from collections.abc import Callable, Iterator

import torch
from benchmark import median
from benchmarking.training import pair

from .rows import Row, Settings, at_most

DEAREST = 1.15  # patched ÷ plain
# Model, batch size, image size.
WORKLOADS = (("vit_small_patch16_224", 128, 224), ("vit_base_patch16_224", 128, 224))
TINY = (("vit_tiny_patch16_224", 2, 32),)


def rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(0)
    for name, batch, size in TINY if settings.smoke else WORKLOADS:
        found = ratios(pair(name, batch, size, settings.device), 1 if settings.smoke else 15, settings)
        bound = DEAREST if settings.cuda else None
        yield at_most(f"{name}, batch {batch}, bf16: a training step, patched ÷ plain", median(found), bound)


def ratios(steps: dict[str, Callable[[], None]], repeats: int, settings: Settings) -> list[float]:
    """Of neighbouring steps, after three of each that are not counted."""
    found: list[float] = []
    for repeat in range(repeats + (0 if settings.smoke else 3)):
        plain, patched = (seconds(step, settings) for step in steps.values())
        if settings.smoke or repeat >= 3:
            found.append(patched / plain)
    return found


def seconds(step: Callable[[], None], settings: Settings) -> float:
    started = time.perf_counter()
    with torch.autocast(settings.device, torch.bfloat16):
        step()
    if settings.cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
