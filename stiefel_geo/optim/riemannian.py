"""The same step for a parameter on any geoopt manifold, by the manifold's own operations.

    g = egrad2rgrad(x, G)        m ← β₁ m + (1−β₁) g        v ← β₂ v + (1−β₂) ⟨g, g⟩_x / D
    ξ = −lr · m̂/√v̂, shortened to ‖ξ‖_x ≤ Δ                  (x, m) ← retr_transp(x, ξ, m)

v is one scalar per point, D the number of coordinates of a point. A point with a non-finite gradient stays.
"""

import math
from typing import Any

import geoopt
import torch
from torch import Tensor

from ..precision import full_precision
from .norms import NOISE
from .step import Scalars, Settings, advance_second_moment_, cap_, step_scale


def step_(p: geoopt.ManifoldParameter, state: dict[str, Any], settings: Settings) -> None:
    """Step every point of `p`, in place."""
    with full_precision(p.device.type):
        _step_(p.manifold, p.detach(), p.grad.detach(), state, settings)


def _step_(manifold: geoopt.Manifold, x: Tensor, G: Tensor, state: dict[str, Any], settings: Settings) -> None:
    m, scalars = state["exp_avg"], Scalars(*(state[key] for key in Scalars._fields))
    v = scalars.exp_avg_sq
    g, size_g = _gradient(manifold, x, G, v)
    g_sq = size_g.square()
    finite = torch.isfinite(g_sq)
    advance_second_moment_(
        scalars, torch.where(finite, g_sq, 0.0), m.numel() // max(v.numel(), 1), finite, settings.beta2
    )
    m.lerp_(torch.where(finite, g, 0.0), finite.to(m.dtype) * (1 - settings.beta1))
    length = _size(manifold, x, m, v)
    a = cap_(scalars, step_scale(scalars, settings, finite), length, finite, settings.trust_radius)

    sign = 1.0 if settings.maximize else -1.0
    y, transported = manifold.retr_transp(x, (sign * a).to(m.dtype) * m, m)
    moved = a * length > 0
    m.copy_(torch.where(moved, transported, m))
    x.copy_(torch.where(moved, y, x))


def _size(manifold: geoopt.Manifold, x: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """‖u‖_x of each point, shaped `like` the state's scalars, in float64.

    Formed from u divided by its largest entry, point by point, so that squares neither overflow nor underflow.
    """
    within = [at for at, size in enumerate(like.shape) if size == 1]
    peak = u.abs().amax(within, keepdim=True) if within else u.abs()
    unit = torch.where((peak > 0) & torch.isfinite(peak), peak, 1.0)
    inner: Tensor = manifold.inner(x, u / unit, keepdim=True)
    return inner.double().clamp(min=0).sqrt() * unit.double()


def _gradient(manifold: geoopt.Manifold, x: Tensor, G: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Riemannian gradient and its length; a length that is rounding noise beside G counts as zero."""
    g = manifold.egrad2rgrad(x, G.clone())  # geoopt's Lorentz writes into what it is given
    size_g, size_G = _size(manifold, x, g, like), _size(manifold, x, G, like)
    noise = size_g <= NOISE * math.sqrt(2) * torch.finfo(x.dtype).eps * size_G
    return g, torch.where(noise & torch.isfinite(size_G), 0.0, size_g)
