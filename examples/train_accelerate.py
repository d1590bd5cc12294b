"""The three lines in an accelerate loop; `accelerate launch` runs it on several devices unchanged.

python examples/train_accelerate.py           # needs: pip install stiefel-geo[examples,accelerate]
"""

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from image_data import load_images, prepare
from starting_model import SMALL, input_size, starting_model
from torch import nn
from torch.utils.data import DataLoader

import stiefel_geo
from stiefel_geo import diagnostics


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--smoke", action="store_true", help="two epochs on 128 images")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    images = load_images("digits", None, download=False)
    model = starting_model(SMALL, images.classes, None, None, pretrained=False)
    train, _ = prepare(images, model, input_size(model, None), (128 if args.smoke else None, None))

    accelerator.print(stiefel_geo.patch(model))
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05), lr=args.lr)
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(train, 32, shuffle=True))
    for epoch in range(2 if args.smoke else args.epochs):
        wrapped.train()
        for pixels, labels in batches:
            with accelerator.accumulate(wrapped):
                loss = nn.functional.cross_entropy(wrapped(pixels), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        worst = max(float(defects.max()) for defects in diagnostics.defect(model).values())
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.4f}, largest defect {worst:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
