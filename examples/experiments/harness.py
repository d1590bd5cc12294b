"""Grids of runs that survive kill -9: one JSON line a finished run, and finished runs are never run again.

A run is a flat dict, its config. `run_grid` skips configs whose line is in the file, claims the others one by one
(so any number of processes can work on one grid) and appends each result in a single locked, synced write.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

SCRIPT = Path(__file__).resolve().parents[1] / "experiment.py"
RESULTS = Path(__file__).resolve().parents[1] / "results"
PACKAGES = ("stiefel-geo", "torch", "geoopt", "timm", "numpy")
Config = Mapping[str, Any]
Record = dict[str, Any]


def key(config: Config) -> str:
    """The identity of a run."""
    return json.dumps(dict(config), sort_keys=True)


def whole_lines(content: bytes) -> bytes:
    """Everything up to the last newline: a killed process may have left half a line behind it."""
    return content[: content.rfind(b"\n") + 1]


def read_records(path: Path) -> list[Record]:
    """The finished runs in the file, in the order in which they ended; a run that is there twice counts once."""
    content = path.read_bytes() if path.exists() else b""
    records = [json.loads(line) for line in whole_lines(content).splitlines()]
    return list({key(record["config"]): record for record in records}.values())


def append_record(path: Path, record: Record) -> None:
    """Add one line, after removing what a killed process left of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(finite(record), allow_nan=False).encode() + b"\n"
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when the process dies
        file.seek(0)
        file.truncate(len(whole_lines(file.read())))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null. Floats keep six significant digits."""
    if isinstance(value, Mapping):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@contextmanager
def claim(path: Path, config: Config) -> Iterator[bool]:
    """Whether this process got the run; a claim ends with its process, also by kill -9."""
    name = hashlib.sha256(f"{path.resolve()} {key(config)}".encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"stiefel-geo-claims-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with open(folder / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@lru_cache
def provenance() -> Record:
    """Versions of the packages and the commit of this process; `dirty` says that tracked sources differed from it."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": _git(RESULTS.parent, "rev-parse", "HEAD"),
        "dirty": dirty(RESULTS.parent),
    }


def dirty(examples: Path) -> bool:
    """Whether a tracked source differs from the commit; the runs themselves, which a grid appends to, do not count."""
    sources = ("../stiefel_geo", "../integrations", ".", ":(exclude)results")
    return bool(_git(examples, "status", "--porcelain", "--untracked-files=no", "--", *sources))


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # an installed copy without its repository
    return done.stdout.strip()


def run_grid(grid: Sequence[Config], run: Callable[[Config], Record], path: Path, title: str = "runs") -> int:
    """Return when every run is finished, by whichever process; how many this one made.

    A run that another process has claimed is waited for, and taken over when that process dies.
    """
    made = 0
    with tqdm(total=len(grid), desc=title, disable=None) as bar:
        while True:
            left = [config for config in grid if not is_finished(path, config)]
            bar.update(len(grid) - len(left) - bar.n)
            if not left:
                return made
            before = made
            for config in left:
                bar.set_postfix_str(" ".join(str(value) for value in list(config.values())[-3:]))
                made += _run_if_free(config, run, path)
                bar.update(1)
            if made == before:
                time.sleep(0.2)


def _run_if_free(config: Config, run: Callable[[Config], Record], path: Path) -> bool:
    """Make one run, unless it is claimed or finished; whether it was made."""
    with claim(path, config) as mine:
        if not mine or is_finished(path, config):
            return False
        started = time.perf_counter()
        result = run(config)
        seconds = time.perf_counter() - started
        append_record(path, {"config": dict(config), **result, "seconds": seconds, **provenance()})
        return True


def is_finished(path: Path, config: Config) -> bool:
    return any(key(record["config"]) == key(config) for record in read_records(path))


def side_by_side(processes: int, name: str, argv: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start processes − 1 further processes of the experiment `name` on the same grid; the caller is the first."""
    command = [sys.executable, str(SCRIPT), name, *argv, "--processes", "1"]  # the last of two equal options counts
    return [subprocess.Popen(command) for _ in range(processes - 1)]
