"""timm's ViT-Ti from scratch, patched at its random start: each form of the core, each lr of frames over the rest's.

    python examples/experiment.py scratch --data ../shared/data/cifar10-jpeg

32 pixels in 4×4 patches. The arms with orthonormal starting frames (`adamw_frames`, `identity`) start from one
function, and so do the others, which keep timm's own start (`adamw`, `learn`, `freeze`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import stiefel_geo
from stiefel_geo import diagnostics

from .frame_steps import BETAS
from .harness import RESULTS, Config, Record, run_grid, side_by_side
from .patch_training import Split, batches, loss_and_hits, schedule, scores, splits
from .patches import load_pixels

CORES = {"adamw_frames": "identity", "identity": "identity", "learn": "learn", "freeze": "freeze"}
KS = (1.0, 3.0, 10.0)


def build(config: Config) -> tuple[nn.Module, Optimizer]:
    """The model at its start and what trains it: AdamW, or ours with AdamW for the rest."""
    torch.manual_seed(config["seed"])
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=config["side"], patch_size=4, num_classes=10, depth=config["depth"]
    )
    if config["arm"] in CORES:
        stiefel_geo.patch(model, core=CORES[config["arm"]])
    groups = stiefel_geo.param_groups(model, config["decay"], frame_lr_scale=config["k"])
    if not config["arm"].startswith("adamw"):
        return model, stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=config["lr"], betas=BETAS)
    for group in groups:
        if group["name"] == "frames":  # to AdamW a matrix like any other
            group["weight_decay"] = config["decay"]
    return model, AdamW(groups, lr=config["lr"], betas=BETAS)


def train(model: nn.Module, optimizer: Optimizer, data: Split, config: Config) -> list[float]:
    """The training loss of every step."""
    losses, steps = [], config["steps"]
    stiefel_geo.scale_lr_(optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step, (images, labels) in zip(range(steps), batches(data, config), strict=False):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, steps)
        with torch.autocast(images.device.type, torch.bfloat16):
            loss, _ = loss_and_hits(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(config: Config, pixels: dict[str, torch.Tensor], device: str) -> Record:
    """One run, from its config to its record."""
    data, _, test = splits(pixels, config, device)
    model, optimizer = build(config)
    losses = train(model.to(device), optimizer, data, config)
    loss, accuracy = scores(model.eval(), test)
    eighth = max(1, len(losses) // 8)
    parts = [losses[i : i + eighth] for i in range(0, len(losses), eighth)]
    return {
        "test_loss": loss, "test_accuracy": accuracy, "train_loss": [sum(part) / len(part) for part in parts],
        "defect": max((float(value.max()) for value in diagnostics.defect(model).values()), default=None),
    }  # fmt: skip


def grid(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seed by seed, so that every arm has as many."""
    common = {
        "experiment": "scratch", "data": Path(args.data).name, "side": args.side, "depth": args.depth,
        "images": args.images, "steps": args.epochs * args.images // args.batch_size, "batch": args.batch_size,
        "decay": args.weight_decay, "lr": args.lr, "mirror": args.data != "digits",
    }  # fmt: skip
    cells = [("adamw", 1.0), *((arm, k) for arm in CORES for k in KS)]
    return [{**common, "arm": arm, "k": k, "seed": seed} for seed in range(args.seeds) for arm, k in cells]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data", default="digits", help="as in patches, and so are the others of its names")
    add("--root", type=Path)
    add("--work", type=Path, default=Path("runs/scratch"), help="decoded images are kept here")
    add("--side", type=int, default=32)
    add("--depth", type=int, default=12)
    add("--images", type=int, default=2000, help="for training")
    add("--epochs", type=int, default=8)
    add("--batch-size", type=int, default=64)
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--seeds", type=int, default=5)
    add("--device", default="cpu")
    add("--processes", type=int, default=1, help="that many processes side by side, one thread each")
    add("--out", type=Path, default=RESULTS / "scratch.jsonl")
    add("--smoke", action="store_true", help="every arm for 2 steps on 32 digits, one layer")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.smoke:
        args.data, args.side, args.depth = "digits", 16, 1
        args.images, args.epochs, args.batch_size, args.seeds = 32, 1, 16, 1
    torch.set_num_threads(1)
    pixels = load_pixels(args)
    partners = side_by_side(args.processes, "scratch", argv or ())
    run_grid(grid(args), lambda config: run(config, pixels, args.device), args.out, "from scratch")
    return max((partner.wait() for partner in partners), default=0)
