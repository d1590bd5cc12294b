"""The three lines in Lightning: patch in __init__, the optimizer in configure_optimizers, and a callback that watches.

python examples/train_lightning.py            # needs: pip install stiefel-geo[examples,lightning]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from loaders import digits
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.integrations.lightning_callback import FrameDiagnostics


class Classifier(LightningModule):
    """Any timm model."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        super().__init__()
        self.model, self.lr, self.weight_decay = model, lr, weight_decay
        print(stiefel_geo.patch(model))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = stiefel_geo.param_groups(self, self.weight_decay)
        return stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=self.lr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, default=Path("runs/train_lightning"))
    parser.add_argument("--smoke", action="store_true", help="two epochs on 128 images")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    train, _ = digits(32, 128 if args.smoke else None)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=10)
    trainer = Trainer(
        max_epochs=2 if args.smoke else args.epochs, devices=1, log_every_n_steps=1,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",  # "auto" would choose MPS, which has no float64
        default_root_dir=args.out, logger=CSVLogger(args.out, name="", version=""), enable_progress_bar=not args.smoke,
        callbacks=[FrameDiagnostics(every=2)],
    )  # fmt: skip
    trainer.fit(Classifier(model, args.lr, 0.05), train)
    worst = max(float(defects.max()) for defects in diagnostics.defect(model).values())
    print(
        f"loss {trainer.callback_metrics['train_loss']:.4f}, largest defect {worst:.1e}; metrics.csv is in {args.out}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
