"""One optimizer step on the frames of ViT-Ti to ViT-L, compiled: its time, and that it takes the eager step."""

import time
from collections.abc import Iterator

import torch
from benchmarking import arms
from torch import Tensor

from .rows import Row, Settings, at_most
from .step_costs import REPEATS, drawn, sizes, times

LARGEST_GAP = 1e-6  # of entries, after two steps


def rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(0)
    for model, shape in sizes(settings).items():
        yield from of_one(f"ViT-{model}", *drawn(shape, settings), settings)


def of_one(title: str, frames: list[Tensor], grads: list[Tensor], settings: Settings) -> Iterator[Row]:
    backend = "aot_eager" if settings.smoke else "inductor"  # its kernels for a CPU take a minute to build
    eager, compiled = arms.ours(frames, grads), arms.ours(frames, grads)
    step = torch.compile(compiled.step, backend=backend)
    started = time.perf_counter()
    for _ in range(2):  # state is made in the first one, so the second compiles again
        eager.step()
        step()
    yield Row(f"{title}, compiled: seconds to compile", f"{time.perf_counter() - started:.1f}")
    pairs = zip(eager.param_groups[0]["params"], compiled.param_groups[0]["params"], strict=True)
    gap = max(float((p - q).detach().abs().max()) for p, q in pairs)
    yield at_most(f"{title}, compiled: from the eager steps", gap, LARGEST_GAP)
    yield Row(f"{title}, compiled", times(step, 1 if settings.smoke else REPEATS, settings))
