"""timm's train.py recipe on a patched model: its factory, scheduler, mixup, EMA, loss scaler and checkpoints.

    python examples/train_timm.py                                            # a small ViT on handwritten digits
    python examples/train_timm.py --data DIR --model vit_small_patch16_224 --img-size 224 --pretrained

Three lines differ from timm's script: `register_optimizer()`, `stiefel_geo.patch(model)`, and `project_frames_(ema)`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from loaders import digits, folder
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, NativeScaler, accuracy
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import diagnostics, project_frames_
from stiefel_geo.integrations.timm_optim import register_optimizer

MODEL = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 4, "num_classes": 10}
FLOATS = {"lr": 1e-3, "weight-decay": 0.05, "layer-decay": 0.9, "clip-grad": 1.0, "mixup": 0.2, "ema-decay": 0.99}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder that holds train and validation, one folder a class (default: digits)")
    add("--model", help="any timm model, for --data (default: a ViT of four blocks, for the digits)")
    add("--pretrained", action="store_true", help="weights from the hub")
    add("--opt", default="scalefreeradam", help="any of timm's names; lookahead_scalefreeradam works too")
    add("--sched", default="cosine", help="any of timm's schedulers")
    for name, default in {"img-size": None, "epochs": 10, "batch-size": 64, "warmup-epochs": 1, "seed": 0}.items():
        add(f"--{name}", type=int, default=default)
    for name, value in FLOATS.items():
        add(f"--{name}", type=float, default=value)
    add("--amp", choices=("bfloat16", "float16"), default=None)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=Path("runs/train_timm"))
    add("--resume", action="store_true", help="go on from last.pth.tar in --out")
    add("--smoke", action="store_true", help="two epochs on 128 images")
    args = parser.parse_args(argv)
    if (args.data is None) != (args.model is None):
        parser.error("--data and --model go together; give both, or neither for the digits")
    if args.resume and not (args.out / "last.pth.tar").is_file():
        parser.error(f"--resume needs a checkpoint: {args.out} holds no last.pth.tar; start without --resume")
    if args.smoke:
        args.epochs, args.batch_size = 2, 32
    return args


class Training:
    """Everything that timm's train.py keeps in local variables."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, torch.device(args.device)
        if args.data is None:
            self.model = timm.create_model(MODEL, **SMALL)
            self.train, self.test = digits(args.batch_size, 128 if args.smoke else None)
        else:
            size = {} if args.img_size is None else {"img_size": args.img_size}
            classes = sum(path.is_dir() for path in (args.data / "train").iterdir())
            self.model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=classes, **size)
            self.train, self.test = folder(args.data, self.model, args.img_size, args.batch_size, args.device)
        model = self.model.to(self.device)
        print(stiefel_geo.patch(model))
        decays = {"weight_decay": args.weight_decay, "layer_decay": args.layer_decay}
        register_optimizer()
        self.optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, **decays)
        epochs = {"num_epochs": args.epochs, "warmup_epochs": min(args.warmup_epochs, args.epochs - 1)}
        self.scheduler, _ = create_scheduler_v2(self.optimizer, sched=args.sched, **epochs)
        self.ema = ModelEmaV3(model, decay=args.ema_decay, use_warmup=True)
        self.scaler = NativeScaler(args.device) if args.amp == "float16" else None
        dtype = torch.float16 if args.amp == "float16" else torch.bfloat16
        self.autocast = torch.autocast(self.device.type, dtype, enabled=args.amp is not None)
        self.mixup = Mixup(args.mixup, label_smoothing=0.1, num_classes=model.num_classes)
        self.loss = SoftTargetCrossEntropy()
        args.out.mkdir(parents=True, exist_ok=True)
        folders = {"checkpoint_dir": str(args.out), "recovery_dir": str(args.out)}
        self.saver = CheckpointSaver(model, self.optimizer, None, self.ema, self.scaler, **folders)

    def resume(self) -> int:
        """The epoch to go on with, after model, optimizer, scaler and EMA copy were loaded."""
        last = str(self.args.out / "last.pth.tar")
        epoch = resume_checkpoint(self.model, last, self.optimizer, self.scaler)
        load_checkpoint(self.ema.module, last, use_ema=True)
        self.scheduler.step(epoch)
        return int(epoch or 0)

    def epoch(self) -> float:
        """One epoch; returns the mean loss."""
        self.model.train()
        meter = AverageMeter()
        for images, labels in self.train:
            images, targets = self.mixup(images.to(self.device), labels.to(self.device))
            with self.autocast:
                loss = self.loss(self.model(images).float(), targets)
            self.step(loss)
            self.ema.update(self.model)
            meter.update(loss.item(), len(images))
        return float(meter.avg)

    def step(self, loss: Tensor) -> None:
        if self.scaler is not None:
            self.scaler(loss, self.optimizer, self.args.clip_grad, parameters=self.model.parameters())
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad)
            self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the test images in percent."""
        model.eval()
        right = AverageMeter()
        for images, labels in self.test:
            with self.autocast:
                logits = model(images.to(self.device))
            right.update(accuracy(logits.float(), labels.to(self.device))[0].item(), len(images))
        return float(right.avg)


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    run = Training(args)
    for epoch in range(run.resume() if args.resume else 0, args.epochs):
        loss = run.epoch()
        run.scheduler.step(epoch + 1, loss)
        project_frames_(run.ema)
        top1 = run.evaluate(run.ema)
        run.saver.save_checkpoint(epoch, top1)
        worst = max(float(defects.max()) for defects in diagnostics.defect(run.model).values())
        print(f"epoch {epoch + 1}: loss {loss:.4f}, EMA top-1 {top1:.2f} %, largest defect {worst:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
