"""Which runs the patch experiment consists of: the grid of learning rates, the pairs, the sweeps."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from frame_steps import ARMS
from harness import Config, Record

LEARNING_RATES = (1e-3, 3e-3, 1e-2)
PAIRS = {"adamw": 12, "scale_free": 12}  # seeds of an arm; OTHER_PAIRS for the rest
OTHER_PAIRS = 5
FIRST_GRID_SEED = 100  # no other stage uses seeds from here on; the arms of PAIRS get two, the others one
DECAYS = (0.05, 1.0, 0.0, 0.3)  # in the order in which they run
SIZES = (1000, 4000, 16000)
SWEEP_SEEDS = 3
LONGER = 4  # the stage `length` trains this many times as many steps


def base(args: argparse.Namespace) -> dict[str, Any]:
    """What every run of a command has in common."""
    return {
        "experiment": "patches", "data": Path(args.data).name, "mirror": args.data != "digits", "side": args.side,
        "images": args.images, "steps": args.steps, "batch": args.batch_size, "decay": args.weight_decay,
        "width": args.width, "depth": args.depth, "heads": args.heads,
    }  # fmt: skip


def grid_stage(common: Config, lrs: Sequence[float] = LEARNING_RATES) -> list[Config]:
    """Every arm at every learning rate, with seeds that no other stage uses."""
    return [
        {**common, "arm": arm, "seed": FIRST_GRID_SEED + i, "lr": lr}
        for i in range(2) for arm in ARMS if i == 0 or arm in PAIRS for lr in lrs
    ]  # fmt: skip


def chosen_lr(records: Sequence[Record], common: Config) -> dict[str, float]:
    """For each arm the learning rate with the best mean validation accuracy over the grid's seeds."""
    found: dict[str, dict[float, list[float]]] = {}
    for record in records:
        config = record["config"]
        if config["seed"] >= FIRST_GRID_SEED and all(config.get(name) == value for name, value in common.items()):
            found.setdefault(config["arm"], {}).setdefault(config["lr"], []).append(record["val_accuracy"])
    return {arm: max(by_lr, key=lambda lr: float(np.mean(by_lr[lr]))) for arm, by_lr in found.items()}


def arms_stage(common: Config, lr: dict[str, float]) -> list[Config]:
    """The paired runs, seed by seed, so that whole pairs are finished whenever the command is stopped."""
    most = max(OTHER_PAIRS, *PAIRS.values())
    return [
        {**common, "arm": arm, "seed": seed, "lr": lr[arm]}
        for seed in range(most) for arm in ARMS if seed < PAIRS.get(arm, OTHER_PAIRS)
    ]  # fmt: skip


def sweep_stage(common: Config, lr: dict[str, float]) -> list[Config]:
    """AdamW and ours over weight decay × training images, at an equal number of steps in every cell."""
    return [
        {**common, "images": images, "decay": decay, "arm": arm, "seed": seed, "lr": lr[arm]}
        for decay in DECAYS for images in SIZES for seed in range(SWEEP_SEEDS) for arm in PAIRS
    ]  # fmt: skip


def length_stage(common: Config, lr: dict[str, float]) -> list[Config]:
    """AdamW and ours with more steps, at the largest size, at both ends of weight decay."""
    longer = {**common, "steps": LONGER * common["steps"], "images": max(SIZES)}
    return [
        {**longer, "decay": decay, "arm": arm, "seed": seed, "lr": lr[arm]}
        for seed in range(SWEEP_SEEDS) for decay in (common["decay"], max(DECAYS)) for arm in PAIRS
    ]  # fmt: skip


STAGES = {"arms": arms_stage, "sweep": sweep_stage, "length": length_stage}
