"""Fine-tune a pretrained vision transformer with Stiefel attention, beside the same model under AdamW.

    python examples/finetune.py                                  # a small ViT on handwritten digits, offline
    python examples/finetune.py --data DIR --model vit_small_patch16_224 --pretrained --img-size 224

Writes to `--out`: metrics.jsonl, curves.png, and for each arm checkpoint.pt (for `--resume`) and
model.safetensors (plain timm keys: load it with `timm.create_model(..., checkpoint_path=...)`).
Under `torchrun --nproc-per-node N` the processes share every batch out (DDP) and the first one writes.
A killed run loses its running epoch at the most; `--resume` with the same options goes on.
"""

import argparse
import copy
import importlib.util
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from finetuning.atomic_files import fill, write_atomically
from finetuning.bad_input import BadInput
from finetuning.batches import Prepared, loading, moved, prepare, shuffled
from finetuning.image_data import load_images
from finetuning.process_group import first_writes, parallel, process_group
from finetuning.run_record import closing_table, draw_curves, log_scalars, verdict, write_metrics
from finetuning.starting_model import SMALL, input_size, largest_gap, starting_model
from finetuning.stored_run import load, save, stored_states
from finetuning.training import Arm, build_optimizer, evaluate, train_epoch
from finetuning.worker_errors import death_of_worker, first_cause
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader

import stiefel_geo

ARMS = {"both": ("stiefel", "adamw"), "stiefel": ("stiefel",), "adamw": ("adamw",)}
HALF = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def positive(kind: type) -> Any:
    """Argument type: a number above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parser() -> argparse.ArgumentParser:
    """The options, in the order in which they are added."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data", default="digits", help="digits, cifar10, or a folder that holds train and test (folders or tars)")
    add("--root", type=Path, help="folder of --data cifar10")
    add("--download", action="store_true", help="let torchvision fetch CIFAR-10 into --root")
    add("--model", default=SMALL, help=f"any timm model; {SMALL} (default) comes with its weights")
    add("--pretrained", action="store_true", help="weights from the hub")
    add("--checkpoint", type=Path, help="weights from a file, .safetensors or .pth, in timm's keys")
    add("--img-size", type=positive(int), help="side of the images in pixels (default: the model's own)")
    add("--arm", choices=ARMS, default="both", help="both: same start, same data order, one after the other")
    add("--core", choices=("learn", "freeze", "identity"), default="learn", help="see stiefel_geo.patch")
    add("--epochs", type=positive(int), default=3)
    add("--batch-size", type=positive(int), default=32)
    add("--lr", type=positive(float), default=1e-3, help="peak; one unit for both arms")
    add("--frame-lr-scale", type=positive(float), default=1.0, help="lr of frames over that of the rest")
    add("--weight-decay", type=float, default=0.05)
    add("--warmup-epochs", type=float, default=0.5, help="linear warm-up, then a cosine to zero")
    add("--amp", choices=HALF, default="off", help="autocast")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--limit-train", type=positive(int), help="use this many training images")
    add("--limit-test", type=positive(int), help="use this many test images")
    add("--workers", type=int, help="processes that load images (default: up to 8 on CUDA, none on a CPU)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/finetune"))
    add("--tensorboard", action="store_true", help="the scalars of metrics.jsonl to TensorBoard too")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--smoke", action="store_true", help="two epochs on 128 images")
    return result


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed options, checked as far as they can be without looking at files."""
    args = parser().parse_args(argv)
    if args.smoke:
        args.epochs, args.limit_train, args.limit_test, args.batch_size = 2, 128, 64, 32
    for name in ("weight_decay", "warmup_epochs", "workers"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise BadInput(f"--{name.replace('_', '-')} must be 0 or above, got {value}; give such a number")
    if args.warmup_epochs > args.epochs:
        raise BadInput(f"--warmup-epochs must not exceed --epochs: {args.warmup_epochs} > {args.epochs}; lower it")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("--tensorboard needs the package tensorboard: it is not installed; pip install tensorboard")
    if args.pretrained and args.checkpoint:
        raise BadInput("weights come from --pretrained or from --checkpoint: both were given; drop one")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda needs a CUDA device: torch sees none; use --device cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def start_arm(name: str, start: nn.Module, args: argparse.Namespace, steps: int) -> Arm:
    """The arm at its first step, with its own copy of the starting model."""
    device = torch.device(args.device)
    model = copy.deepcopy(start).to(device)
    if name == "stiefel":
        try:
            print(stiefel_geo.patch(model, core=args.core))
        except ValueError as error:
            raise BadInput(f"--arm stiefel needs a model that can be patched: {args.model}: {error}") from error
    optimizer = build_optimizer(name, model, args.lr, args.weight_decay, args.frame_lr_scale)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=args.epochs * steps, warmup_t=round(args.warmup_epochs * steps),
        warmup_lr_init=args.lr / 100, t_in_epochs=False,
    )  # fmt: skip
    return Arm(
        name, model, optimizer, scheduler,
        scaler=torch.amp.GradScaler(device.type, enabled=args.amp == "fp16"),
        amp=torch.autocast(device.type, HALF[args.amp], enabled=args.amp != "off"),
        forward=torch.compile(parallel(model)) if args.compile else parallel(model),
        device=device,
    )  # fmt: skip


@torch.no_grad()
def report_start(start: nn.Module, arm: Arm, test: Prepared) -> None:
    """Print how far the patch moved the outputs of the starting model, both computed on the arm's device."""
    batch = next(iter(DataLoader(test, min(16, len(test)))))
    images, _ = moved(batch, arm.device)
    plain = copy.deepcopy(start).to(arm.device).eval()(images)
    gap = largest_gap(plain, arm.model.eval()(images))
    print(f"start: logits differ from the unpatched model's by {gap:.1e}", flush=True)


def run_arm(arm: Arm, train: Prepared, test: Prepared, args: argparse.Namespace, others: list[Any]) -> None:
    """Train the epochs that are left; after each, everything on disk is whole and up to date."""
    folder, load_by = args.out / arm.name, loading(args.device, args.workers)
    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(len(arm.rows), args.epochs):
        if not arm.rows:
            save(arm, args)
        title = f"{arm.name} epoch {epoch + 1}/{args.epochs}"
        row = train_epoch(arm, shuffled(train, args.batch_size, args.seed, epoch, load_by), title)
        loss, accuracy = evaluate(arm, DataLoader(test, 2 * args.batch_size, **load_by))
        scores = f"train loss {row['train_loss']:.4f}, test accuracy {accuracy:.4f}, {row['seconds']:.0f} s"
        row["seconds"] += arm.rows[-1]["seconds"] if arm.rows else 0.0
        arm.rows.append({**row, "test_loss": loss, "test_accuracy": accuracy})
        save(arm, args)
        write_metrics([*others, *arm.rows], args.out / "metrics.jsonl")
        if args.tensorboard:
            log_scalars(arm.rows[-1], args.out / "tensorboard" / arm.name)
        print(f"{title}: {scores}", flush=True)
    plain = stiefel_geo.plain_state_dict(arm.model) if arm.name == "stiefel" else arm.model.state_dict()
    weights = {key: value.detach().cpu().contiguous() for key, value in plain.items()}
    write_atomically(folder / "model.safetensors", lambda part: fill(part, safetensors.torch.save(weights)))


def check_stored(stored: dict[str, Any], start: nn.Module, args: argparse.Namespace, steps: int) -> None:
    """Load every checkpoint once before any arm trains: one that does not fit the second must not cost the first."""
    with redirect_stdout(io.StringIO()):  # each arm reports when its turn comes
        for name in ARMS[args.arm]:
            if name in stored:
                load(start_arm(name, start, args, steps), stored[name], args)


def finetune(args: argparse.Namespace) -> None:
    """Check everything, then train."""
    stored = stored_states(args, ARMS["both"])
    with first_writes(args.out) as args.out:
        train_arms(args, stored)


def train_arms(args: argparse.Namespace, stored: dict[str, dict[str, Any]]) -> None:
    """Train the arms one after the other."""
    images = load_images(args.data, args.root, args.download)
    torch.manual_seed(args.seed)
    start = starting_model(args.model, images.classes, args.img_size, args.checkpoint, args.pretrained)
    size = input_size(start, args.img_size)
    train, test = prepare(images, start, size, (args.limit_train, args.limit_test))
    print(
        f"{args.model} on {args.data}: {len(train)} images to train on, {len(test)} to test, {args.device}", flush=True
    )
    steps = len(shuffled(train, args.batch_size, args.seed, 0, {}))
    check_stored(stored, start, args, steps)
    rows = [row for name, state in stored.items() if name not in ARMS[args.arm] for row in state["rows"]]
    frames: dict[str, int] = {}
    for name in ARMS[args.arm]:
        arm = start_arm(name, start, args, steps)
        if name == "stiefel":
            report_start(start, arm, test)
        if name in stored:
            load(arm, stored[name], args)
        run_arm(arm, train, test, args, rows)
        rows += arm.rows
        frames[name] = arm.frames()
    write_metrics(rows, args.out / "metrics.jsonl")
    draw_curves(rows, args.out / "curves.png")
    print(closing_table(rows, frames))
    print(verdict(rows, list(frames), len(test)))
    print(f"curves, metrics and plain timm weights are in {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """0: done. 1: a data worker died. 2: bad input, nothing written. 130: interrupted. The last whole epoch is kept."""
    try:
        args = options(argv)
        with process_group(args.device):
            finetune(args)
    except BadInput as error:
        return complain(2, first_cause(error))
    except OSError as error:
        remedy = "mend it, and if epochs were done add --resume to go on"
        return complain(2, f"files must be readable and --out writable: {first_cause(error)}; {remedy}")
    except RuntimeError as error:
        if (found := death_of_worker(error)) is None:
            raise
        remedy = "add --resume to the same command to go on, with fewer --workers if memory ran out (0 needs none)"
        return complain(1, f"the processes that load images must live: {found}; the last whole epoch is kept, {remedy}")
    except KeyboardInterrupt:
        return complain(130, "stopped; the last whole epoch is kept, add --resume to go on")
    return 0


def complain(code: int, message: str) -> int:
    print(f"finetune: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
