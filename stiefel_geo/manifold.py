"""PolarStiefel: geoopt's embedded-metric Stiefel manifold with the polar retraction."""

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor

from . import stiefel


class PolarStiefel(geoopt.EuclideanStiefel):  # type: ignore[misc]  # geoopt ships no types
    """St(d, r) with the embedded metric and R_W(ξ) = (W + ξ)(I + ξᵀξ)^{−1/2} as its retraction.

    The polar retraction is the metric projection of W + ξ, second order accurate, and commutes with
    O(d) × O(r); geoopt's own `EuclideanStiefel` retracts by QR, which does neither.
    Works with every geoopt optimizer as well as with `ScaleFreeRiemannianAdam`.
    Source: Absil and Malick, "Projection-like retractions on matrix manifolds" (2012), §3.3.
    """

    name = "Stiefel(euclidean, polar)"

    def projx(self, x: Tensor) -> Tensor:
        """Nearest frame to `x` (..., d, r) in the Frobenius norm."""
        return stiefel.polar(x)

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Polar factor of x + u, shapes (..., d, r)."""
        return stiefel.polar(x + u)

    def random(
        self, *size: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> geoopt.ManifoldTensor:
        """Frame of shape `size` = (..., d, r) from the uniform measure (geoopt's own draw is not uniform)."""
        self._assert_check_shape(size2shape(*size), "x")
        frame = stiefel.random_frame(*size2shape(*size), dtype=dtype, device=device)
        return geoopt.ManifoldTensor(frame, manifold=self)
