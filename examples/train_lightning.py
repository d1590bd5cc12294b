"""The three lines in Lightning: patch in __init__, the optimizer in configure_optimizers, and a callback that watches.

python examples/train_lightning.py            # needs: pip install stiefel-geo[examples,lightning]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from image_data import load_images, prepare
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from starting_model import SMALL, input_size, starting_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
    images = load_images("digits", None, download=False)
    model = starting_model(SMALL, images.classes, None, None, pretrained=False)
    train, _ = prepare(images, model, input_size(model, None), (128 if args.smoke else None, None))
    trainer = Trainer(
        max_epochs=2 if args.smoke else args.epochs, accelerator="auto", devices=1, log_every_n_steps=1,
        default_root_dir=args.out, logger=CSVLogger(args.out, name="", version=""), enable_progress_bar=not args.smoke,
        callbacks=[FrameDiagnostics(every=2)],
    )  # fmt: skip
    trainer.fit(Classifier(model, args.lr, 0.05), DataLoader(train, 32, shuffle=True))
    worst = max(float(defects.max()) for defects in diagnostics.defect(model).values())
    print(
        f"loss {trainer.callback_metrics['train_loss']:.4f}, largest defect {worst:.1e}; metrics.csv is in {args.out}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
