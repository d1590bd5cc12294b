"""The arms of the ablation: what moves the query and key frames, one small change at a time.

Two of them change one formula each of the package's literal step.
Everything that is not a frame is trained by the same AdamW in every arm.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import geoopt
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import stiefel_geo
from stiefel_geo import stiefel
from stiefel_geo.optim.literal import LiteralStep

BETAS = (0.9, 0.999)
FLAT = torch.contiguous_format
Views = Callable[[Tensor], Sequence[Tensor]]


class CanonicalStep(LiteralStep):
    """Gradient of the canonical metric, G − W·GᵀW: its rotation inside the frame counts twice."""

    def project(self, W: Tensor, G: Tensor) -> Tensor:
        return G - W @ (G.mT @ W)


class ElementwiseStep(LiteralStep):
    """One second moment per entry, as in Adam: no longer equivariant, and the quotient is tangent only after P_W."""

    def mean_square(self, g: Tensor) -> Tensor:
        return g.square()

    def direction(self, W: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return stiefel.project(W, super().direction(W, m, v).to(W.dtype))


class ElsewhereLaidOut:
    """An optimizer of a library that wants frames in another layout: each head alone, or transposed.

    `views` gives a frame's parts in that layout; the optimizer moves copies of them, which are then written back.
    """

    def __init__(self, frames: list[nn.Parameter], views: Views, build: Callable[[list[nn.Parameter]], Optimizer]):
        self.views, self.frames = views, frames
        self.copies = [nn.Parameter(v.detach().clone(memory_format=FLAT)) for W in frames for v in views(W)]
        self.inner = build(self.copies)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self) -> None:
        for copy, W, G in zip(self.copies, self._parts(self.frames), self._parts(_gradients(self.frames)), strict=True):
            copy.copy_(W)
            copy.grad = G.contiguous()
        self.inner.step()
        for copy, view in zip(self.copies, self._parts(self.frames), strict=True):
            view.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def _parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [view for W in tensors for view in self.views(W)]


def _gradients(frames: Iterable[nn.Parameter]) -> list[Tensor]:
    return [G for W in frames if (G := W.grad) is not None]


Moving = Optimizer | ElsewhereLaidOut
Build = Callable[[list[nn.Parameter], float], Moving]


def _muon(frames: list[nn.Parameter], lr: float, decay: float) -> ElsewhereLaidOut:
    """torch's Muon, which takes matrices alone, in AdamW's unit of lr: its step has an RMS of 0.2·lr."""

    def build(heads: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Muon(heads, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    return ElsewhereLaidOut(frames, lambda W: W.unbind(0), build)


def _pogo(frames: list[nn.Parameter], lr: float) -> ElsewhereLaidOut:
    """POGO keeps orthonormal rows. Like geoopt's, its second moment is a sum over a frame's entries."""
    from pogo import POGO, base

    return ElsewhereLaidOut(frames, lambda W: (W.mT,), lambda rows: POGO(rows, base.VectorAdam(), lr))


def _geoopt_adam(frames: list[nn.Parameter], lr: float) -> Optimizer:
    """geoopt's RiemannianAdam.

    On Stiefel its second moment is ONE number a frame too, but a sum over the entries instead of a mean: at an equal
    lr it steps √(d·r) times shorter than ours.
    """
    optimizer: Optimizer = geoopt.optim.RiemannianAdam(frames, lr=lr, betas=BETAS)
    return optimizer


def _riemannian_sgd(frames: list[nn.Parameter], lr: float) -> Optimizer:
    """The fixed step: geoopt's Riemannian SGD with momentum."""
    optimizer: Optimizer = geoopt.optim.RiemannianSGD(frames, lr=lr, momentum=0.9)
    return optimizer


def _scale_free(trust_radius: float) -> Build:
    def build(frames: list[nn.Parameter], lr: float) -> Optimizer:
        return stiefel_geo.ScaleFreeRiemannianAdam(frames, lr=lr, betas=BETAS, trust_radius=trust_radius)

    return build


# Arms whose frames live on the manifold, and what moves them.
ON_MANIFOLD: dict[str, Build | None] = {
    "frozen": None,
    "riemannian_sgd": _riemannian_sgd,
    "geoopt_adam": _geoopt_adam,
    "pogo": _pogo,
    "scale_free": _scale_free(1.0),
    "scale_free_canonical": CanonicalStep,
    "scale_free_elementwise": ElementwiseStep,
    "scale_free_uncapped": _scale_free(math.inf),
}
# Arms whose queries and keys are plain matrices, decayed like every other matrix unless the name says not.
PLAIN = ("adamw", "adamw_default_init", "adamw_no_decay", "muon")
ARMS = (*PLAIN, *ON_MANIFOLD)
# POGO is GPL, so no extra but `benchmark` installs it.
INSTALLED = tuple(arm for arm in ARMS if arm != "pogo" or find_spec("pogo"))


def as_arm(arm: str, frames: list[nn.Parameter], seed: int) -> list[nn.Parameter]:
    """The starting frames as the arm wants them: on the manifold, plain, or drawn anew with std 0.02."""
    if arm == "adamw_default_init":
        generator = torch.Generator().manual_seed(seed + 1_000_003)
        for frame in frames:
            nn.init.trunc_normal_(frame, std=0.02, generator=generator)
    if arm in PLAIN:
        return frames
    manifold = stiefel_geo.PolarStiefel()
    trained = arm != "frozen"
    return [geoopt.ManifoldParameter(frame.detach(), manifold=manifold, requires_grad=trained) for frame in frames]


def optimizers(
    arm: str, frames: list[nn.Parameter], others: list[nn.Parameter], lr: float, decay: float, k: float = 1.0
) -> list[Moving]:
    """AdamW for everything else (matrices decayed, vectors not), and the arm's own step for the frames at k·lr."""
    matrices, vectors = [p for p in others if p.ndim == 2], [p for p in others if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    if arm.startswith("adamw"):
        groups.append({"params": frames, "weight_decay": 0.0 if arm == "adamw_no_decay" else decay, "lr": k * lr})
    result: list[Moving] = [AdamW(groups, lr=lr, betas=BETAS, fused=True)]
    build = ON_MANIFOLD.get(arm)
    if build is not None:
        result.append(build(frames, k * lr))
    if arm == "muon":
        result.append(_muon(frames, k * lr, decay))
    return result
