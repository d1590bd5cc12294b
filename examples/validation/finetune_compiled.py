"""Fine-tuning in bfloat16 with the model compiled."""

import functools
from collections.abc import Iterator

import torch

from .finetuning_runs import trained
from .rows import Row, Settings


def rows(settings: Settings) -> Iterator[Row]:
    if settings.smoke:  # kernels for a CPU take a minute to build: the graphs alone
        torch.compile = functools.partial(torch.compile, backend="eager")
    yield from trained(settings, "compiled", "--amp", "bf16", "--compile", "--arm", "stiefel")
