"""Runs of finetune.py on the digits, and what their metrics say."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finetune

from .rows import Row, Settings, at_least, at_most

SCRIPT = Path(finetune.__file__)
TINY = ["--limit-train", "32", "--limit-test", "16", "--batch-size", "16", "--epochs", "2"]
ACCURATE, APART, LARGEST_DEFECT = 0.95, 0.03, 1e-5


def options(settings: Settings, folder: str, *more: str) -> list[str]:
    """The command line of a new run, --resume is added to go on with it; what an earlier validation left there goes."""
    out = settings.out / "finetune" / folder
    shutil.rmtree(out, ignore_errors=True)
    return [*TINY * settings.smoke, "--device", settings.device, "--out", str(out), *more]


def metrics(settings: Settings, folder: str) -> list[dict[str, Any]]:
    file = settings.out / "finetune" / folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trained(settings: Settings, folder: str, *more: str) -> Iterator[Row]:
    """One run from its start to its end, its frames and its scores."""
    code = finetune.main(options(settings, folder, *more))
    yield Row(f"finetune.py {' '.join(more)}: exit code", str(code), "0", code == 0)
    last = {row["arm"]: row for row in metrics(settings, folder)}
    for arm, row in last.items():
        accuracy = row["test_accuracy"]
        yield at_least(f"{folder}, {arm}: test accuracy", accuracy, None if settings.smoke else ACCURATE)
        yield Row(f"{folder}, {arm}: training loss", str(row["train_loss"]), "finite", is_finite(row["train_loss"]))
    yield at_most(f"{folder}: largest defect", last["stiefel"]["defect"], LARGEST_DEFECT)
    if len(last) == 2:
        apart = abs(last["stiefel"]["test_accuracy"] - last["adamw"]["test_accuracy"])
        yield at_most(f"{folder}: the arms' test accuracies apart by", apart, None if settings.smoke else APART)


def is_finite(value: float | None) -> bool:
    """JSON has no NaN: it stands there as null."""
    return value is not None and math.isfinite(value)


def resumed(settings: Settings, whole: str, *more: str) -> Iterator[Row]:
    """A run that is killed after its first epoch and goes on, against the run `whole` that was not."""
    folder = f"{whole}-killed"
    command = options(settings, folder, *more, "--arm", "stiefel")
    process = subprocess.Popen([sys.executable, "-W", "ignore", str(SCRIPT), *command])
    try:
        while process.poll() is None and not metrics(settings, folder):
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    done = len(metrics(settings, folder))
    yield Row("killed after its first epoch, epochs done", str(done), "≥ 1", done >= 1)
    code = finetune.main([*command, "--resume"])
    yield Row("resumed: exit code", str(code), "0", code == 0)
    ends = [[row for row in metrics(settings, name) if row["arm"] == "stiefel"][-1] for name in (whole, folder)]
    bound = 0.02 if settings.cuda else 0.0  # a GPU's sums have no fixed order
    gap = abs(ends[0]["test_accuracy"] - ends[1]["test_accuracy"])
    yield at_most("resumed: test accuracy from the uninterrupted run's", gap, bound)
