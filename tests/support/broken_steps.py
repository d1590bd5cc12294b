"""The literal step sound or with one fault: what certificates have to tell apart."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import geoopt
import torch
from torch import Tensor

from stiefel_geo.optim.literal import LiteralStep, length


def broken(fault: str | None) -> Callable[..., torch.optim.Optimizer]:
    """A factory with the signature of ScaleFreeRiemannianAdam. None: the sound step.

    Faults: "no projection", "no transport", "element-wise moment", "epsilon in the root", "no cap", "QR retraction",
    "decay applied", "no noise floor".
    """
    return functools.partial(BrokenStep, fault=fault)


class BrokenStep(LiteralStep):
    """The method with one line wrong. Euclidean parameters descend along their gradients."""

    def __init__(
        self, params: Iterable[Tensor], weight_decay: float = 1e-2, *, fault: str | None = None, **settings: Any
    ) -> None:
        self.fault, self.weight_decay = fault, weight_decay
        super().__init__(params, **settings)

    def move_(self, p: Tensor, G: Tensor, group: dict[str, Any]) -> None:
        if not isinstance(p, geoopt.ManifoldParameter):
            p.sub_(group["lr"] * G)
            return
        super().move_(p, G, group)
        if self.fault == "decay applied":
            p.mul_(1 - group["lr"] * self.weight_decay)

    def project(self, W: Tensor, G: Tensor) -> Tensor:
        return G if self.fault == "no projection" else super().project(W, G)

    def floor(self, G: Tensor) -> Tensor:
        return length(G) * 0 - 1 if self.fault == "no noise floor" else super().floor(G)

    def transport(self, W: Tensor, m: Tensor) -> Tensor:
        return m if self.fault == "no transport" else self.project(W, m)

    def mean_square(self, g: Tensor) -> Tensor:
        return g.square() if self.fault == "element-wise moment" else super().mean_square(g)

    def direction(self, W: Tensor, m: Tensor, v: Tensor) -> Tensor:
        if self.fault == "epsilon in the root":
            return m / (v.sqrt() + 1e-8)
        return super().direction(W, m, v)

    def cap(self, xi: Tensor, trust_radius: float) -> Tensor:
        return xi if self.fault == "no cap" else super().cap(xi, trust_radius)

    def retract(self, Y: Tensor) -> Tensor:
        if self.fault == "QR retraction":
            Q, R = torch.linalg.qr(Y)
            frame: Tensor = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
            return frame
        return super().retract(Y)
