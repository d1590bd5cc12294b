"""Which part of Stiefel attention helps on small images, and when: paired runs of nine ways to train the frames.

    python examples/cifar10_patches.py --data ../shared/data/cifar10-jpeg
    python examples/cifar10_patches.py --data cifar10 --root DIR --device cuda --width 256 --steps 4000

Stages, in this order: `grid` chooses each arm's learning rate on validation images, with seeds of its own;
`arms` makes the paired runs; `sweep` the phase diagram over weight decay × training images; `length` trains longer;
`data` trains on more images for as many epochs.
Runs of a pair share start, images, data order and mirroring. Stopped or killed, the same command goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from atomic_files import load_state, save_state
from harness import RESULTS, read_records, run_grid, side_by_side
from image_data import Source, load_images
from patch_stages import FIRST_GRID_SEED, LEARNING_RATES, STAGES, base, chosen_lr, grid_stage
from patch_training import run
from torch import Tensor


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
    add("--stages", nargs="+", choices=("grid", *STAGES), default=["grid", *STAGES])
    add("--out", type=Path, default=RESULTS / "patches.jsonl")
    add("--work", type=Path, default=Path("runs/patches"), help="decoded images are kept here")
    add("--side", type=int, default=16, help="images are reduced to that many pixels; patches are 4×4 of these")
    add("--images", type=int, default=4000)
    add("--steps", type=int, default=300)
    add("--batch-size", type=int, default=64)
    add("--weight-decay", type=float, default=0.05)
    add("--width", type=int, default=64)
    add("--depth", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--processes", type=int, default=1, help="that many processes side by side, one thread each")
    add("--device", default="cpu")
    add("--smoke", action="store_true", help="grid and arms at one learning rate and one seed, 8 steps on 64 digits")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.smoke:
        args.data, args.stages, args.images, args.steps, args.batch_size = "digits", ["grid", "arms"], 64, 8, 16
        args.width, args.depth = 32, 1
    torch.set_num_threads(1)
    pixels, common = load_pixels(args), base(args)
    partners = side_by_side(args.processes, __file__, sys.argv[1:] if argv is None else argv)
    for stage in args.stages:
        if stage == "grid":
            grid = grid_stage(common, LEARNING_RATES[:1] if args.smoke else LEARNING_RATES)
        else:
            grid = STAGES[stage](common, chosen_lr(read_records(args.out), common))
        if args.smoke:
            grid = [config for config in grid if config["seed"] in (0, FIRST_GRID_SEED)]
        run_grid(grid, lambda config: run(config, pixels, args.device), args.out, stage)
    return max((partner.wait() for partner in partners), default=0)


if __name__ == "__main__":
    raise SystemExit(main())
