"""Proposition 4: the update is exactly O(d)-equivariant, and O(r)-equivariant on the right.

Statement. For R ∈ O(d), Q ∈ O(r) the trajectory from RWQ on gradients RG_tQ is R times that of W, times Q.
An element-wise second moment breaks this.

Proof. P_{RWQ}(RGQ) = RGQ − RWQ·sym(QᵀWᵀGQ) = R P_W(G) Q, so g and m turn along; the Frobenius norm, hence v,
the step's length and the cap, do not change; and polar(RYQ) = RYQ(QᵀYᵀYQ)^{−1/2} = R polar(Y) Q. Compose the steps.
Element-wise division by √v turns with coordinate permutations and signs alone.

Checked here. R and Q uniform, once with and once without a reflection (det R = ±1), on a stochastic regression.
Beside it geoopt's RiemannianAdam. On a Stiefel manifold that optimizer has one scalar second moment too, as its
`component_inner` is the inner product of the whole matrix; so it is run on a manifold with the element-wise one, as in
Adam.
"""

import geoopt
import torch
from torch import Tensor

from .. import stiefel
from ..manifold import PolarStiefel
from .certificate import Case, Certificate, worst
from .observing import OptimizerFactory, Regression, distance, parameter, trajectory


class ElementwiseStiefel(PolarStiefel):
    """A Stiefel manifold on which geoopt's RiemannianAdam keeps one second moment per entry."""

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """u∘v, where the manifold's own is ⟨u, v⟩."""
        return u * (u if v is None else v)


def check(case: Case, make: OptimizerFactory) -> list[Certificate]:
    """Three certificates."""
    generator = case.generator(4)
    W, _ = case.frame_and_gradient(generator)
    problem = Regression.draw(case, generator)
    path = trajectory(make, parameter(W), problem)
    left, right = _rotation_and_reflection(case.d, generator), _rotation_and_reflection(case.r, generator)
    one_d, one_r = torch.eye(case.d, dtype=W.dtype), torch.eye(case.r, dtype=W.dtype)

    def apart(R: Tensor, Q: Tensor) -> float:
        turned = trajectory(make, parameter(R @ W @ Q), problem.turned(R, Q))
        return distance(R @ path @ Q, turned)

    return [
        case.at_most(4, "100 steps from (RW, RG), R ∈ O(d): off R·W_t by", worst(apart(R, one_r) for R in left), 1e-12),
        case.at_most(
            4, "100 steps from (WQ, GQ), Q ∈ O(r): off W_t·Q by", worst(apart(one_d, Q) for Q in right), 1e-12
        ),
        case.at_least(
            4, "beside it, an element-wise second moment: off R·W_t by", _elementwise(W, problem, left[0]), 1e-3
        ),
    ]


def _rotation_and_reflection(n: int, generator: torch.Generator) -> list[Tensor]:
    """Two uniform elements of O(n), of determinant 1 and −1."""
    R, S = (stiefel.random_frame(n, n, dtype=torch.float64, generator=generator) for _ in range(2))
    R[:, 0] *= torch.linalg.slogdet(R).sign
    S[:, 0] *= -torch.linalg.slogdet(S).sign
    return [R, S]


def _elementwise(W: Tensor, problem: Regression, R: Tensor) -> float:
    """How far geoopt's RiemannianAdam with element-wise moments is from turning along."""
    make, manifold = geoopt.optim.RiemannianAdam, ElementwiseStiefel()
    path = trajectory(make, parameter(W, manifold), problem)
    turned = trajectory(make, parameter(R @ W, manifold), problem.turned(R, torch.eye(W.shape[1], dtype=W.dtype)))
    return distance(R @ path, turned)
