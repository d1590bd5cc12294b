"""timm's train.py recipe on a patched model: its factory, scheduler, mixup, EMA, loss scaler and checkpoints.

    python examples/train_timm.py                                            # a small ViT on handwritten digits
    python examples/train_timm.py --data DIR --model vit_small_patch16_224 --img-size 224 --pretrained

Three lines differ from timm's script: the import that registers the optimizer, `stiefel_geo.patch(model)`, and
`project_frames_(ema)` before the EMA copy is evaluated.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from bad_input import BadInput
from image_data import load_images, prepare, shuffled
from starting_model import SMALL, input_size, starting_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, ModelEmaV3, NativeScaler, accuracy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stiefel_geo
import stiefel_geo.integrations.timm_optim  # registers "scalefreeradam"
from stiefel_geo import stiefel
from stiefel_geo.averaging import project_frames_

FLOATS = {"lr": 1e-3, "weight-decay": 0.05, "layer-decay": 0.9, "clip-grad": 1.0, "mixup": 0.2, "ema-decay": 0.99}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="digits", help="digits, or a folder that holds train and test")
    add("--model", default=SMALL, help="any timm model")
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
    if args.smoke:
        args.epochs, args.batch_size = 2, 32
    return args


class Training:
    """Everything that timm's train.py keeps in local variables."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, torch.device(args.device)
        images = load_images(args.data, None, download=False)
        self.model = starting_model(args.model, images.classes, args.img_size, None, args.pretrained).to(self.device)
        model = self.model
        size = input_size(model, args.img_size)
        self.train_data, test = prepare(images, model, size, (128, 64) if args.smoke else (None, None))
        self.test = DataLoader(test, 2 * args.batch_size)
        print(stiefel_geo.patch(model))
        decays = {"weight_decay": args.weight_decay, "layer_decay": args.layer_decay}
        self.optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, **decays)
        epochs = {"num_epochs": args.epochs, "warmup_epochs": min(args.warmup_epochs, args.epochs - 1)}
        self.scheduler, _ = create_scheduler_v2(self.optimizer, sched=args.sched, **epochs)
        self.ema = ModelEmaV3(model, decay=args.ema_decay, use_warmup=True)
        self.scaler = NativeScaler(args.device) if args.amp == "float16" else None
        dtype = torch.float16 if args.amp == "float16" else torch.bfloat16
        self.autocast = torch.autocast(self.device.type, dtype, enabled=args.amp is not None)
        self.mixup = Mixup(args.mixup, label_smoothing=0.1, num_classes=images.classes)
        self.loss = SoftTargetCrossEntropy()
        args.out.mkdir(parents=True, exist_ok=True)
        folders = {"checkpoint_dir": str(args.out), "recovery_dir": str(args.out)}
        self.saver = CheckpointSaver(model, self.optimizer, None, self.ema, self.scaler, **folders)

    def resume(self) -> int:
        """The epoch to go on with, after model, optimizer, scaler and EMA copy were loaded."""
        last = self.args.out / "last.pth.tar"
        if not last.is_file():
            raise BadInput(f"--resume needs a checkpoint: {last} is not there; start the run without --resume")
        epoch = resume_checkpoint(self.model, str(last), self.optimizer, self.scaler)
        load_checkpoint(self.ema.module, str(last), use_ema=True)
        self.scheduler.step(epoch)
        return int(epoch or 0)

    def epoch(self, number: int) -> float:
        """One epoch; returns the mean loss."""
        self.model.train()
        meter = AverageMeter()
        for images, labels in shuffled(self.train_data, self.args.batch_size, self.args.seed, number, 0):
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
    try:
        run = Training(args)
        for epoch in range(run.resume() if args.resume else 0, args.epochs):
            loss = run.epoch(epoch)
            run.scheduler.step(epoch + 1, loss)
            project_frames_(run.ema)
            top1 = run.evaluate(run.ema)
            run.saver.save_checkpoint(epoch, top1)
            worst = max(float(stiefel.defect(frame).max()) for _, frame in stiefel_geo.frames(run.model))
            print(f"epoch {epoch + 1}: loss {loss:.4f}, EMA top-1 {top1:.2f} %, largest defect {worst:.1e}")
    except BadInput as error:
        print(f"train_timm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
