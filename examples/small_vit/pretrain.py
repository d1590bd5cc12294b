"""Pretrain the examples' default model on CIFAR-10 with plain AdamW, and write the weights beside this file.

    PYTHONPATH=examples python -m small_vit.pretrain --data ../shared/data/cifar10-jpeg

Tuned for one CPU core: images are decoded once, augmented as whole batches, the network runs under bf16
autocast, and half of the patches are dropped in all but the last epochs.
Killed runs go on where they stopped: the state is written after each epoch to `--work`. A run that goes on
with other options follows them from there; the record beside the weights names every command.
"""

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import timm
import torch
from finetuning.atomic_files import fill, load_state, save_state, write_atomically
from timm.data import create_dataset
from timm.layers import PatchDropout, build_sincos2d_pos_embed, set_fused_attn
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from . import ASSET, SHAPE, small_vit

Images = tuple[Tensor, Tensor]  # uint8 (n, 3, 32, 32), int64 (n,)


def decode(tar: Path, limit: int | None) -> Images:
    """Every image of the archive in one array, evenly thinned to `limit`."""
    dataset = create_dataset("", root=str(tar))
    stride = 1 if limit is None else max(1, len(dataset) // limit)
    pairs = [dataset[i] for i in range(0, len(dataset), stride)]
    pixels = np.stack([np.asarray(image.convert("RGB")) for image, _ in pairs])
    labels = torch.tensor([label for _, label in pairs])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels


def augment(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels and mirror half of them, as one gather."""
    n, _, height, width = batch.shape
    padded = F.pad(batch.float(), (4, 4, 4, 4), mode="reflect")
    top, left = torch.randint(0, 9, (2, n, 1), generator=generator)
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(n)[:, None, None]
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # n h w c -> n c h w


def normalise(batch: Tensor) -> Tensor:
    """[0, 255] to [−1, 1]: mean and standard deviation 0.5, timm's convention for this architecture."""
    return (batch.float() / 127.5 - 1).contiguous()


def train_epoch(
    model: nn.Module, data: Images, optimizer: torch.optim.Optimizer,
    scheduler: CosineLRScheduler, epoch: int, args: argparse.Namespace,
) -> float:  # fmt: skip
    """One pass in an order that follows from (seed, epoch) alone; returns the mean loss."""
    model.train()
    generator = torch.Generator().manual_seed(args.seed * 1000 + epoch)
    torch.manual_seed(args.seed * 1000 + epoch)
    images, labels = data
    batches = torch.randperm(len(labels), generator=generator).split(args.batch_size)
    total = 0.0
    for step, index in enumerate(batches):
        scheduler.step_update(epoch * len(batches) + step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(normalise(augment(images[index], generator)))
        loss = F.cross_entropy(logits.float(), labels[index], label_smoothing=args.smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * len(index)
    return total / len(labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Share of right answers, in float32."""
    model.eval()
    right = 0
    for images, labels in zip(data[0].split(500), data[1].split(500), strict=True):
        right += int((model(normalise(images)).argmax(1) == labels).sum())
    return right / len(data[1])


def write_asset(model: nn.Module, record: dict[str, object], path: Path) -> None:
    """Float16 weights, and beside them the text that says where they come from."""
    halves = {name: value.detach().half().contiguous() for name, value in model.state_dict().items()}
    write_atomically(path, lambda part: fill(part, safetensors.torch.save(halves)))
    lines = [
        f"# {path.name}",
        "",
        "Weights of the examples' default model (`examples/small_vit/__init__.py`), float16, in timm's own keys.",
        "Written by `examples/small_vit/pretrain.py`; MIT license like the rest of the repository.",
        "",
        *(f"- {key}: {value}" for key, value in record.items()),
        "",
    ]
    text = "\n".join(lines)
    write_atomically(path.with_suffix(".md"), lambda part: fill(part, text.encode()))


def build(args: argparse.Namespace, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, CosineLRScheduler]:
    """Model, AdamW and schedule at the start of the run."""
    torch.manual_seed(args.seed)
    model = small_vit(num_classes=10, patch_drop_rate=0.5)
    # A grid of sines as the starting position embedding: in a run this short a random one costs points.
    sines = build_sincos2d_pos_embed([8, 8], dim=SHAPE["embed_dim"])
    model.get_parameter("pos_embed").data.copy_(sines / sines.square().mean().sqrt() * 0.2)
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.98))
    scheduler = CosineLRScheduler(
        optimizer, t_initial=args.epochs * steps, warmup_t=min(2, args.epochs) * steps,
        warmup_lr_init=args.lr / 100, lr_min=args.lr / 1000, t_in_epochs=False, warmup_prefix=False,
    )  # fmt: skip
    return model, optimizer, scheduler


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options; `--smoke` shrinks everything to a few seconds."""
    parser = argparse.ArgumentParser(description="pretrain the examples' default model on CIFAR-10")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tar and test.tar")
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--full-epochs", type=int, default=4, help="last epochs, without dropped patches")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="folder of the run's state")
    parser.add_argument("--asset", type=Path, default=ASSET)
    parser.add_argument("--smoke", action="store_true", help="one epoch on a few hundred images")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "-m", "small_vit.pretrain", *(sys.argv[1:] if argv is None else argv)])
    if args.smoke:
        args.epochs, args.full_epochs, args.batch_size = 1, 0, 64
    return args


def provenance(
    args: argparse.Namespace, legs: list[tuple[int, str]], score: float, seconds: float
) -> dict[str, object]:
    """What a reader needs to repeat the run."""
    return {
        "data": f"CIFAR-10 (JPEG copies), {'a few hundred' if args.smoke else '50,000'} training images",
        "commands": "; ".join(f"`{command}` from epoch {epoch + 1}" for epoch, command in legs),
        "seed": args.seed,
        "epochs": args.epochs,
        "test accuracy of the float16 weights": f"{score:.4f}",
        "training time": f"{seconds / 60:.0f} min on {args.threads} CPU threads of a shared machine",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, timm {timm.__version__}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on training, and write the asset after the last epoch."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    set_fused_attn(False)  # torch's fused attention has a bf16 backward on the CPU that is 4 × slower
    train, test = (decode(args.data / f"{part}.tar", 512 if args.smoke else None) for part in ("train", "test"))
    model, optimizer, scheduler = build(args, math.ceil(len(train[1]) / args.batch_size))
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint, first, seconds, legs = args.work / "checkpoint.pt", 0, 0.0, []
    if checkpoint.exists():
        state = load_state(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds, legs = state["epoch"], state["seconds"], state["legs"]
    legs = [*legs, (first, args.command)]
    patch_drop = next(module for module in model.modules() if isinstance(module, PatchDropout))
    for epoch in range(first, args.epochs):
        started = time.perf_counter()
        patch_drop.prob = 0.5 if epoch < args.epochs - args.full_epochs else 0.0
        loss = train_epoch(model, train, optimizer, scheduler, epoch, args)
        seconds += time.perf_counter() - started
        row = {"epoch": epoch + 1, "loss": loss, "seconds": seconds}
        if epoch % 4 == 3:
            row["test_accuracy"] = accuracy(model, test)
        print(json.dumps(row), flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_state(checkpoint, {**state, "epoch": epoch + 1, "seconds": seconds, "legs": legs})
    model.half().float()
    score = accuracy(model, test)
    write_asset(model, provenance(args, legs, score, seconds), args.asset)
    print(f"test accuracy {score:.4f}, weights in {args.asset}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
