r"""Does patching help when a pretrained ViT is fine-tuned, and at which learning rate? Paired runs of finetune.py.

    python examples/experiment.py finetune_pairs --data ../shared/data/cifar10-jpeg \
        --model vit_small_patch14_dinov2.lvd142m \
        --checkpoint ../shared/pretrained/vit_small_patch14_dinov2.fp16.safetensors

The arms of a pair share weights, learning rate, the start of the new head and the order of the images: the last two
follow from the seed. Stopped or killed, the same command goes on with the next run.
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import finetune
import torch
from finetuning.starting_model import SMALL

from .harness import RESULTS, Config, Record, run_grid, side_by_side
from .patch_stages import OTHER_PAIRS

ARMS = {"adamw": "adamw", "scale_free": "stiefel"}  # names in the evidence: names in finetune.py


def command(config: Config, args: argparse.Namespace, out: Path) -> list[str]:
    """The options of finetune.py for one run."""
    options = {
        "data": args.data, "root": args.root, "model": config["model"], "checkpoint": args.checkpoint,
        "img-size": config["img_size"], "arm": ARMS[config["arm"]], "epochs": config["epochs"],
        "batch-size": config["batch"], "lr": config["peak_lr"], "frame-lr-scale": config.get("k"),
        "weight-decay": config["decay"],
        "limit-train": config["images"], "limit-test": config["test_images"], "seed": config["seed"],
        "device": args.device, "out": out,
    }  # fmt: skip
    words = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return [word for pair in words for word in pair]


def run(config: Config, args: argparse.Namespace) -> Record:
    """One arm of one pair, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        if finetune.main(command(config, args, Path(folder))):
            raise SystemExit(f"a run failed, and said why above: {dict(config)}\n{printed.getvalue()}")
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {"test_accuracy": rows[-1]["test_accuracy"], "test_loss": rows[-1]["test_loss"], "rows": rows}


def grid(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs, seed by seed, so that every learning rate has as many; frames at each k, which AdamW has none of."""
    common = {
        "experiment": "finetune", "data": Path(args.data).name, "model": args.model,
        "checkpoint": args.checkpoint and args.checkpoint.name, "img_size": args.img_size, "images": args.images,
        "test_images": args.test_images, "epochs": args.epochs, "batch": args.batch_size, "decay": args.weight_decay,
    }  # fmt: skip
    return [
        {**common, "peak_lr": lr, "arm": arm, "seed": seed, **({} if k == 1 else {"k": k})}
        for seed in range(args.seeds) for lr in args.lrs for arm in ARMS for k in (args.ks if arm != "adamw" else [1])
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data", default="digits", help="as in finetune.py, and so are the others of its names")
    add("--root", type=Path)
    add("--model", default=SMALL)
    add("--checkpoint", type=Path)
    add("--img-size", type=int, default=56)
    add("--images", type=int, default=2000, help="for training")
    add("--test-images", type=int, default=2000)
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=32)
    add("--lrs", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4], help="peaks; both arms get each of them")
    add("--ks", type=float, nargs="+", default=[1.0], help="lr of frames over that of the rest")
    add("--weight-decay", type=float, default=0.05)
    add("--seeds", type=int, default=OTHER_PAIRS)
    add("--device", default="cpu")
    add("--processes", type=int, default=1, help="that many processes side by side, one thread each")
    add("--out", type=Path, default=RESULTS / "finetune.jsonl")
    add("--smoke", action="store_true", help="one pair on 64 digits")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.smoke:
        args.data, args.model, args.checkpoint, args.img_size = "digits", SMALL, None, None
        args.images, args.test_images, args.epochs, args.lrs, args.seeds = 64, 32, 1, [1e-3], 1
    torch.set_num_threads(1)
    partners = side_by_side(args.processes, "finetune_pairs", sys.argv[1:] if argv is None else argv)
    run_grid(grid(args), lambda config: run(config, args), args.out, "fine-tuning")
    return max((partner.wait() for partner in partners), default=0)
