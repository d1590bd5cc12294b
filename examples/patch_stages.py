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
FIRST_GRID_SEED = 100  # no other stage uses seeds from here on
# One-line variants of another arm: they take its learning rate, so that the ladder compares equal ones.
VARIANTS = {
    "fixed_step_long": "fixed_step",
    "scale_free_canonical": "scale_free",
    "scale_free_elementwise": "scale_free",
    "scale_free_uncapped": "scale_free",
}
DECAYS = (0.05, 1.0, 0.0, 0.3)  # in the order in which they run
SIZES = (1000, 4000, 16000)
SWEEP_SEEDS = 3
EPOCHS = 8  # the stage `data` sees every image that often, whatever their number
EPOCHS_SIZES = (2000, 5000, 10_000, 20_000)
LONGER = 4  # the stage `length` trains this many times as many steps


def base(args: argparse.Namespace) -> dict[str, Any]:
    """What every run of a command has in common."""
    return {
        "experiment": "patches", "data": Path(args.data).name, "mirror": args.data != "digits", "side": args.side,
        "images": args.images, "steps": args.steps, "batch": args.batch_size, "decay": args.weight_decay,
        "width": args.width, "depth": args.depth, "heads": args.heads,
    }  # fmt: skip


def grid_stage(common: Config, lrs: Sequence[float] = LEARNING_RATES) -> list[Config]:
    """Every arm that is no variant at every learning rate, with a seed that no other stage uses."""
    arms = [arm for arm in ARMS if arm not in VARIANTS]
    return [{**common, "arm": arm, "seed": FIRST_GRID_SEED, "lr": lr} for arm in arms for lr in lrs]


def chosen_lr(records: Sequence[Record], common: Config) -> dict[str, float]:
    """For each arm the learning rate with the best mean validation accuracy over the grid's runs."""
    found: dict[str, dict[float, list[float]]] = {}
    for record in records:
        config = record["config"]
        if config["seed"] >= FIRST_GRID_SEED and all(config.get(name) == value for name, value in common.items()):
            found.setdefault(config["arm"], {}).setdefault(config["lr"], []).append(record["val_accuracy"])
    best = {arm: max(by_lr, key=lambda lr: float(np.mean(by_lr[lr]))) for arm, by_lr in found.items()}
    inherited = {arm: best[origin] for arm, origin in VARIANTS.items() if origin in best and arm not in best}
    return {**best, **inherited}


def arms_stage(common: Config, lr: dict[str, float]) -> list[Config]:
    """The paired runs: first the main pairs, then the other arms, seed by seed, so that whole pairs get finished."""
    main = [(arm, seed) for seed in range(max(PAIRS.values())) for arm in PAIRS if seed < PAIRS[arm]]
    rest = [(arm, seed) for seed in range(OTHER_PAIRS) for arm in ARMS if arm not in PAIRS]
    return [{**common, "arm": arm, "seed": seed, "lr": lr[arm]} for arm, seed in [*main, *rest]]


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


def data_stage(common: Config, lr: dict[str, float]) -> list[Config]:
    """AdamW and ours over training images at an equal number of epochs, at both ends of weight decay."""
    return [
        {**common, "images": images, "steps": EPOCHS * images // common["batch"], "decay": decay, "arm": arm,
         "seed": seed, "lr": lr[arm]}
        for images in EPOCHS_SIZES for seed in range(SWEEP_SEEDS) for decay in (common["decay"], max(DECAYS))
        for arm in PAIRS
    ]  # fmt: skip


STAGES = {"arms": arms_stage, "sweep": sweep_stage, "length": length_stage, "data": data_stage}
