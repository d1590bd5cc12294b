"""An optimizer seen from outside: frames and gradients in, frames and the documented `exp_avg` out.

Nothing here knows the method. `make` is `ScaleFreeRiemannianAdam`, or what a test puts in its place.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import geoopt
import torch
from torch import Tensor

from ..manifold import PolarStiefel
from ..stiefel import sym
from .certificate import Case, gaussian

OptimizerFactory = Callable[..., torch.optim.Optimizer]
STEPS = 100  # length of a trajectory
BATCHES = 7  # mini-batches of a Regression, used in turn


class Regression(NamedTuple):
    """A stochastic problem for a frame: mini-batches of ½‖X_t W − Y_t‖²."""

    X: Tensor  # (batches, samples, d)
    Y: Tensor  # (batches, samples, r)

    @classmethod
    def draw(cls, case: Case, generator: torch.Generator) -> Self:
        samples = 2 * case.r
        X = gaussian(BATCHES, samples, case.d, generator=generator)
        return cls(X, gaussian(BATCHES, samples, case.r, generator=generator))

    def turned(self, R: Tensor, Q: Tensor) -> "Regression":
        """The same problem for RWQ: its gradient there is RGQ."""
        return Regression(self.X @ R.mT, self.Y @ Q)

    def gradient(self, W: Tensor, t: int) -> Tensor:
        X, Y = self.X[t % BATCHES], self.Y[t % BATCHES]
        return X.mT @ (X @ W - Y)


def parameter(W: Tensor, manifold: geoopt.Manifold | None = None) -> geoopt.ManifoldParameter:
    """A parameter of its own that starts at W (..., d, r), on PolarStiefel unless said otherwise."""
    return geoopt.ManifoldParameter(W.clone(), manifold=manifold or PolarStiefel())


def one_step(make: OptimizerFactory, W: Tensor, G: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
    """Frames after the first step from W with gradient G, and their momentum; shapes (..., d, r) as W."""
    p = parameter(W)
    p.grad = G.clone()
    optimizer = make([p], **settings)
    optimizer.step()
    return p.detach(), optimizer.state[p]["exp_avg"].view(W.shape)


def tangent_part(make: OptimizerFactory, W: Tensor, X: Tensor) -> Tensor:
    """P_W(X) as the optimizer forms it: with β₁ = 0 the momentum is the projected gradient."""
    return one_step(make, W, X, lr=0.0, betas=(0.0, 0.999))[1]


def step_of_length(make: OptimizerFactory, W: Tensor, G: Tensor, length: float) -> Tensor:
    """The frame (d, r) after a first step of ‖ξ‖_F = `length`, without a trust region: lr is the RMS of ξ."""
    return one_step(make, W, G, lr=length / W.numel() ** 0.5, trust_radius=float("inf"))[0]


def trajectory(
    make: OptimizerFactory, p: geoopt.ManifoldParameter, problem: Regression, scale: float = 1.0, **settings: object
) -> Tensor:
    """The frame after each of STEPS steps from p on the gradients of `problem` times `scale`, (steps, d, r)."""
    optimizer = make([p], lr=1e-2, **settings)
    path = []
    for t in range(STEPS):
        p.grad = scale * problem.gradient(p.detach(), t)
        optimizer.step()
        path.append(p.detach().clone())
    return torch.stack(path)


def distance(path: Tensor, other: Tensor) -> float:
    """The largest ‖W_t − V_t‖_F/√r along two trajectories; a frame has ‖W‖_F = √r."""
    lengths = torch.linalg.matrix_norm(path - other) / path.shape[-1] ** 0.5
    return float(lengths.max())


def tangent_between(W: Tensor, V: Tensor) -> Tensor:
    """The tangent ξ at W with polar(W + ξ) = V, for frames less than about 1 apart.

    W + ξ = VS with symmetric S, and Wᵀξ is skew: so S solves sym(WᵀV·S) = I. The fixed-point iteration
    contracts by ‖I − WᵀV‖.
    """
    identity = torch.eye(W.shape[-1], dtype=W.dtype)
    S = identity
    for _ in range(64):
        S = S + identity - sym(W.mT @ V @ S)
    return V @ S - W


def slope(x: Tensor, y: Tensor) -> float:
    """Slope of log y over log x by least squares."""
    u, v = x.log() - x.log().mean(), y.log()
    return float((u @ v) / (u @ u))
