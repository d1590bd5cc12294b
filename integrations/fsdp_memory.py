"""What a rank holds and sends under FSDP2, computed from a model's shapes; the meta device is enough.

with torch.device("meta"):
    model = timm.create_model("vit_giant_patch14_224")
stiefel_geo.patch(model)
print(estimate(model, ranks=8))
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from stiefel_geo.optim.kinds import is_frame

FLOAT32 = 4
SCALARS = 4 * 8  # bytes per frame: exp_avg_sq, step, skipped, capped
GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Bytes for the fullest rank; activations and the gathered layer at work come on top."""

    weights: int
    gradients: int
    state: int
    sent: int  # per step

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.state

    def __str__(self) -> str:
        return f"{self.held / GIB:.2f} GiB held, {self.sent / GIB:.2f} GiB sent a step"


def estimate(model: nn.Module, ranks: int, *, gathered_bytes: int = FLOAT32) -> Estimate:
    """Estimate for float32 weights sharded on dimension 0 over `ranks`.

    `gathered_bytes` is the size of an element in the two all-gathers of a step, 2 under a bfloat16
    MixedPrecisionPolicy; gradients are reduced in float32. FSDP2 pads each parameter to equal parts, and a part of
    frames (n, d, r) is whole frames: with more ranks than frames the parts stay one frame, padding goes over the wire.
    """
    parts = [(p, _part(p, ranks)) for p in model.parameters()]
    numel = sum(part for _, part in parts)
    state = sum(part * FLOAT32 * (1 if is_frame(p) else 2) for p, part in parts)
    state += sum(math.ceil(len(p) / ranks) * SCALARS for p, _ in parts if is_frame(p))
    sent = (ranks - 1) * numel * (2 * gathered_bytes + FLOAT32)
    return Estimate(numel * FLOAT32, numel * FLOAT32, state, sent)


def _part(p: Tensor, ranks: int) -> int:
    """Elements of `p` on a rank, padding included."""
    rows = p.shape[0] if p.ndim else 1
    return math.ceil(rows / ranks) * (p.numel() // rows)
