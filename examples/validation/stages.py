"""The stages in order, and how one runs: in a process of its own, with a time limit, its rows kept as they come."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .rows import Row, Settings

SECONDS = 600  # of the whole validation
# Stage → its module, and the most seconds that it may take.
STAGES = {
    "environment": ("environment", 60),
    "agreement": ("agreement", 60),
    "cuda_tests": ("cuda_tests", 180),
    "step": ("step_costs", 120),
    "step_compiled": ("step_compiled", 120),
    "training_step": ("training_cost", 90),
    "finetune_bf16": ("finetune_bf16", 120),
    "finetune_fp16": ("finetune_fp16", 60),
    "finetune_compiled": ("finetune_compiled", 120),
    "several_gpus": ("several_gpus", 90),
}
SCRIPT = Path(__file__).resolve().parents[1] / "validate_gpu.py"


@dataclass(frozen=True)
class Result:
    """What a stage found, and how long it took."""

    rows: list[Row]
    seconds: float


def rows_file(name: str, settings: Settings) -> Path:
    return settings.out / "stages" / f"{name}.jsonl"


def run_here(name: str, settings: Settings) -> int:
    """The stage itself, in the process that was started for it."""
    module = importlib.import_module(f"validation.{STAGES[name][0]}")
    with rows_file(name, settings).open("w", encoding="utf-8") as file:
        for row in module.rows(settings):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
    return 0


def run_stage(name: str, settings: Settings, left: float) -> Result:
    """The stage in a process of its own; how that ended is a failed row unless it ended well."""
    file, log = rows_file(name, settings), settings.out / "stages" / f"{name}.log"
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    limit = min(STAGES[name][1], left)
    if limit <= 0:
        return Result([Row("the stage", "not started", f"{SECONDS} s in all", False)], 0.0)
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--stage", name, "--device", settings.device]
    code = ended([*command, *["--smoke"] * settings.smoke, "--out", str(settings.out)], log, limit)
    rows = kept(file)
    if code is None:
        rows.append(Row("the stage", "stopped by its time limit", f"≤ {limit:.0f} s", False))
    elif code or not rows:
        rows.append(Row("the stage", f"ended with {code}: {last_line(log)}", "0", False))
    return Result(rows, time.monotonic() - started)


def kept(file: Path) -> list[Row]:
    """The rows that were written whole: a process may be killed in the middle of one."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def ended(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Exit code of the command, or None when it and all its children were killed at the limit."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
