"""A fine-tuning run's checkpoints: written whole, and refused before anything trains where they do not fit."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .atomic_files import load_state, save_state
from .bad_input import BadInput, first_line
from .training import Arm

# Options that do not change what is computed: a run may be resumed with other values of these.
FREE = {"out", "resume", "root", "download", "workers", "device", "smoke", "tensorboard"}


def computed_from(args: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the run's figures, as plain values. `arm` is free: each arm stands alone."""
    fixed = {key: value for key, value in vars(args).items() if key not in FREE | {"arm"}}
    return {key: str(value) if isinstance(value, Path) else value for key, value in fixed.items()}


def checkpoint(args: argparse.Namespace, arm: str) -> Path:
    return Path(args.out / arm / "checkpoint.pt")


def stored_states(args: argparse.Namespace, arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The checkpoints of `arms` in --out, also of those that this run leaves alone: all are read before any write."""
    files = {arm: checkpoint(args, arm) for arm in arms}
    there = {arm: path for arm, path in files.items() if path.exists()}
    if there and not args.resume:
        found = next(iter(there.values()))
        raise BadInput(f"--out must not hold a run: {found} exists; add --resume, or give another --out")
    if args.resume and not there:
        raise BadInput(f"--resume needs a checkpoint: {args.out} holds none; start the run without --resume")
    return {arm: _read(path, arm, computed_from(args)) for arm, path in there.items()}


def _read(path: Path, arm: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that was written whole, for this arm, by a run with the same options."""
    try:
        state = load_state(path)
        began = dict(state["options"])
        epochs = [(row["arm"], row["epoch"]) for row in state["rows"]]
        if epochs != [(arm, i + 1) for i in range(len(epochs))]:
            raise ValueError(f"its rows are not epochs of the arm {arm}")
    except Exception as error:  # whatever a truncated, foreign or hostile file makes torch raise
        raise _unreadable(path, error) from error
    for key in wanted.keys() | began.keys():
        if wanted.get(key) != began.get(key):
            flag = "--" + key.replace("_", "-")
            raise BadInput(
                f"--resume needs the options the run began with: {flag} was {began.get(key)}, now "
                f"{wanted.get(key)}; give {flag} as before, or another --out"
            )
    return state


def _unreadable(path: Path, error: Exception) -> BadInput:
    return BadInput(f"a checkpoint must be whole: {path} is not ({first_line(error)}); delete it to start anew")


def load(arm: Arm, state: dict[str, Any], args: argparse.Namespace) -> None:
    try:
        arm.load(state)
    except Exception as error:  # a foreign file may hold anything under the right names
        raise _unreadable(checkpoint(args, arm.name), error) from error


def save(arm: Arm, args: argparse.Namespace) -> None:
    save_state(checkpoint(args, arm.name), {**arm.state(), "options": computed_from(args)})
