"""Does generalisation on modular addition hold? Paired long runs of full-batch training, AdamW against ours.

    python examples/experiment.py grokking                                   # p = 53, width 64, 20,000 epochs, 5 pairs
    python examples/experiment.py grokking --p 97 --width 128 --seeds 1 --minutes 60

Both arms start from the same orthonormal frames; AdamW with weight decay 1.0 trains everything else (and, in the
arm `adamw`, queries and keys too). The state is kept in `--work` every thousand epochs: a killed run goes on there.
With `--minutes`, a run that is not done by then leaves what it has in the file ….partial.jsonl, and the next begins.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from finetuning.atomic_files import load_state, save_state
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from .frame_steps import Moving, as_arm, optimizers
from .harness import RESULTS, Config, Record, append_record, key, provenance, run_grid, side_by_side
from .modular_transformer import ModularTransformer
from .patch_transformer import frames, others, replace_frames, spectrum

GROKKING_ARMS = ("adamw", "scale_free")
ROW_EVERY = 100  # epochs between two rows of metrics
SAVE_EVERY = 1000
WARM_UP = 10  # epochs


class OutOfTime(Exception):
    """The deadline passed; carries the rows so far."""

    def __init__(self, rows: list[Record]) -> None:
        self.rows = rows


def equations(config: Config) -> tuple[Tensor, Tensor]:
    """All pairs (a, b) in an order that follows from the seed, cut into training and validation."""
    p = config["p"]
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(config["seed"]))
    count = round(config["fraction"] * len(pairs))
    return pairs[order[:count]], pairs[order[count:]]


def build(config: Config) -> tuple[ModularTransformer, list[Moving]]:
    torch.manual_seed(config["seed"])
    model = ModularTransformer(config["p"], config["width"], config["heads"])
    replace_frames(model, as_arm(config["arm"], frames(model), config["seed"]))
    return model, optimizers(config["arm"], frames(model), others(model), config["lr"], config["decay"])


@torch.no_grad()
def row(epoch: int, model: ModularTransformer, train: Tensor, val: Tensor) -> Record:
    """Accuracies, loss, the norm of the output logits, and the singular values of queries and keys."""
    result: Record = {"epoch": epoch}
    for name, pairs in (("train", train), ("val", val)):
        logits, sums = model(pairs), pairs.sum(1) % model.p
        result[f"{name}_accuracy"] = float((logits.argmax(1) == sums).float().mean())
        result[f"{name}_loss"] = float(F.cross_entropy(logits, sums))
    return {**result, "logit_norm": float(logits.norm(dim=1).mean()), **spectrum(model)}


def state_file(work: Path, config: Config) -> Path:
    return work / f"{hashlib.sha256(key(config).encode()).hexdigest()[:16]}.pt"


def run(config: Config, work: Path, deadline: float) -> Record:
    """One run, from its last saved epoch to its end."""
    train, val = equations(config)
    sums = train.sum(1) % config["p"]
    model, opts = build(config)
    rows = resume(state_file(work, config), model, opts)
    done = rows[-1]["epoch"] if rows else 0
    for epoch in tqdm(range(done + 1, config["epochs"] + 1), desc=f"{config['arm']} {config['seed']}", disable=None):
        for group in (group for opt in opts for group in opt.param_groups):
            group["lr"] = config["lr"] * min(1.0, epoch / WARM_UP)
        loss = F.cross_entropy(model(train), sums)
        model.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        if epoch % ROW_EVERY == 0:
            rows.append(row(epoch, model, train, val))
        if epoch % SAVE_EVERY == 0:
            save(state_file(work, config), model, opts, rows)
        if epoch % ROW_EVERY == 0 and epoch < config["epochs"] and time.monotonic() > deadline:
            save(state_file(work, config), model, opts, rows)
            raise OutOfTime(rows)
    return {"reached": config["epochs"], "rows": rows}


def save(file: Path, model: nn.Module, opts: list[Moving], rows: list[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_state(file, {"model": model.state_dict(), "opts": [opt.state_dict() for opt in opts], "rows": rows})


def resume(file: Path, model: nn.Module, opts: list[Moving]) -> list[Record]:
    """Load what is saved, if anything; returns the rows so far."""
    if not file.exists():
        return []
    state = load_state(file)
    model.load_state_dict(state["model"])
    for opt, saved in zip(opts, state["opts"], strict=True):
        opt.load_state_dict(saved)
    return list(state["rows"])


def grid(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs, seed by seed."""
    common = {
        "experiment": "grokking", "p": args.p, "width": args.width, "heads": args.heads, "fraction": args.fraction,
        "epochs": args.epochs, "lr": args.lr, "decay": args.weight_decay,
    }  # fmt: skip
    return [{**common, "arm": arm, "seed": seed} for seed in range(args.seeds) for arm in GROKKING_ARMS]


def partial_file(out: Path) -> Path:
    return out.with_suffix(".partial.jsonl")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--p", type=int, default=53)
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--fraction", type=float, default=0.5, help="of the p² equations for training")
    add("--epochs", type=int, default=20_000)
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=1.0)
    add("--seeds", type=int, default=5)
    add("--minutes", type=float, default=float("inf"), help="stop each run after that many minutes")
    add("--processes", type=int, default=1)
    add("--out", type=Path, default=RESULTS / "grokking.jsonl")
    add("--work", type=Path, default=Path("runs/grokking"))
    add("--smoke", action="store_true", help="20 epochs at p = 7, one pair")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.smoke:
        args.p, args.width, args.epochs, args.seeds = 7, 16, 20, 1
    torch.set_num_threads(1)
    partners = side_by_side(args.processes, "grokking", sys.argv[1:] if argv is None else argv)
    for config in grid(args):
        deadline = time.monotonic() + 60 * args.minutes
        try:
            run_grid([config], partial(run, work=args.work, deadline=deadline), args.out, "grokking")
        except OutOfTime as stop:
            reached = {"config": config, "reached": stop.rows[-1]["epoch"], "rows": stop.rows}
            append_record(partial_file(args.out), {**reached, **provenance()})
    return max((partner.wait() for partner in partners), default=0)
