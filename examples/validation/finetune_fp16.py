"""Fine-tuning in float16, whose gradients are scaled."""

from collections.abc import Iterator

from .finetuning_runs import trained
from .rows import Row, Settings


def rows(settings: Settings) -> Iterator[Row]:
    yield from trained(settings, "fp16", "--amp", "fp16", "--arm", "stiefel")
