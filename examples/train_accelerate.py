"""The three lines in an accelerate loop; `accelerate launch` runs it on several devices unchanged.

python examples/train_accelerate.py           # needs: pip install stiefel-geo[examples,accelerate]
"""

import argparse
from collections.abc import Sequence

import timm
import torch
from accelerate import Accelerator
from loaders import digits
from torch import nn

import stiefel_geo
from stiefel_geo import diagnostics


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--smoke", action="store_true", help="two epochs on 128 images")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    # by itself accelerate chooses MPS where there is one, which has no float64
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    train, _ = digits(32, 128 if args.smoke else None)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=10)

    accelerator.print(stiefel_geo.patch(model))
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05), lr=args.lr)
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, train)
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
