"""What a rank holds and sends under FSDP2, computed from a model's shapes; the meta device is enough.

    with torch.device("meta"):
        model = timm.create_model("vit_giant_patch14_224")
    stiefel_geo.patch(model)
    print(estimate(model, ranks=8))

docs/distributed.md has what it gives for two models.
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
    """Bytes for the fullest rank; activations and the gathered layer at work come on top.

    Attributes:
        weights: 4 a parameter on the rank, float32.
        gradients: as many.
        state: 8 a Euclidean parameter (two moments), 4 an entry of a frame (one) and 32 a frame (four scalars).
        sent: received in a step of the other ranks' parts: two all-gathers and one reduce-scatter.
    """

    weights: int
    gradients: int
    state: int
    sent: int

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.state

    def __str__(self) -> str:
        return f"{self.held / GIB:.2f} GiB held, {self.sent / GIB:.2f} GiB sent a step"


def estimate(model: nn.Module, ranks: int, *, gathered_bytes: int = FLOAT32) -> Estimate:
    """Estimate for float32 weights sharded on dimension 0 over `ranks`.

    With P the entries of a rank's parts, a parameter of n rows giving ⌈n/ranks⌉ of them (FSDP2 pads to equal parts):
    weights and gradients are 4·P bytes each, state is 4·P for frames and 8·P for others plus 32·⌈n/ranks⌉ for
    frames (n, d, r), and sent is (ranks − 1)·P·(2·gathered_bytes + 4). A part holds whole frames, so with more ranks
    than frames parts stay one frame, and padding goes over the wire.

    Args:
        model: patched or not, on any device.
        ranks: number of processes that share the parameters, 1 or more.
        gathered_bytes: size of an element in the two all-gathers of a step: 4, or 2 under a bfloat16
            MixedPrecisionPolicy; gradients are reduced in float32.

    Raises:
        ValueError: `ranks` is below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more; got {ranks}.")
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
