"""Fine-tuning in bfloat16, both arms, and a run that is killed and resumed."""

from collections.abc import Iterator

from .finetuning_runs import resumed, trained
from .rows import Row, Settings


def rows(settings: Settings) -> Iterator[Row]:
    yield from trained(settings, "bf16", "--amp", "bf16")
    yield from resumed(settings, "bf16", "--amp", "bf16")
