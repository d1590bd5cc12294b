"""When does it matter how queries and keys are trained? A small transformer on images, in paired runs of twelve arms.

    python examples/experiment.py patches --data ../shared/data/cifar10-jpeg

The stages run in the order of their worth: `screen` looks for a configuration in which training queries and keys is
worth something at all; `tune` and `tune_many` choose k on validation images, with seeds of their own; the others make
the paired runs. Runs of a pair share start, images, data order and mirroring. Stopped or killed, the same command
goes on; so a part of the stages may be run, and later the rest.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from finetuning.atomic_files import load_state, save_state
from finetuning.image_data import Source, load_images
from torch import Tensor

from .frame_steps import INSTALLED
from .harness import RESULTS, Config, Record, key, read_records, run_grid
from .patch_stages import PAIRS, STAGES, base, one
from .patch_training import FIRST_GRID_SEED, run


def decode(source: Source, side: int) -> tuple[Tensor, Tensor]:
    """Every image as uint8 (n, 3, side, side), and its label."""
    pairs = [source[i] for i in range(len(source))]
    pixels = np.stack([np.asarray(image.resize((side, side))) for image, _ in pairs])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in pairs])


def load_pixels(args: argparse.Namespace) -> dict[str, Tensor]:
    """Training and test images, decoded once and kept in `--work`."""
    side = 16 if args.data == "digits" else 32
    file = args.work / f"pixels-{Path(args.data).name}-{side}.pt"
    if not file.exists():
        images = load_images(args.data, args.root, download=False)
        train, test = decode(images.train, side), decode(images.test, side)
        args.work.mkdir(parents=True, exist_ok=True)
        save_state(file, {"train": train[0], "train_labels": train[1], "test": test[0], "test_labels": test[1]})
    return load_state(file)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data", default="digits", help="digits, cifar10, or a folder that holds train and test (folders or tars)")
    add("--root", type=Path, help="folder of --data cifar10")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--seeds", type=int, default=PAIRS, help="no more pairs than that, so that every stage gets some first")
    add("--out", type=Path, default=RESULTS / "patches.jsonl")
    add("--work", type=Path, default=Path("runs/patches"), help="decoded images are kept here")
    add("--side", type=int, default=32, help="images are reduced to that many pixels")
    add("--position", choices=("wide", "narrow", "sin-cos"), default="wide", help="std 1, 0.02, or fixed")
    add("--batch-size", type=int, default=64)
    add("--weight-decay", type=float, default=0.05)
    add("--width", type=int, default=64)
    add("--depth", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 products in a compiled model")
    add("--device", default="cpu")
    add("--smoke", action="store_true", help="every arm for 8 steps on 64 digits, two seeds")
    return result


def smoke(args: argparse.Namespace) -> list[Config]:
    args.data, args.side, args.batch_size, args.width, args.depth, args.bf16 = "digits", 16, 16, 32, 1, False
    return [
        {**one(base(args), arm, 1e-3, 1, seed, 64), "steps": 8} for seed in (0, FIRST_GRID_SEED) for arm in INSTALLED
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one for every shape and kind of parameter
    runs = smoke(args) if args.smoke else None
    pixels, common = load_pixels(args), base(args)

    def make(config: Config) -> Record:
        return run(config, pixels, args.device)

    if runs:
        run_grid(runs, make, args.out, "smoke")
        return 0
    for name in args.stages:
        stage = STAGES[name](common, read_records(args.out))
        planned = {key(c): c for c in stage if c["seed"] < args.seeds or c["seed"] >= FIRST_GRID_SEED}
        run_grid(list(planned.values()), make, args.out, name)
    return 0
