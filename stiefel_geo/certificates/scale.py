"""Proposition 2: the update does not depend on the scale of the gradients.

Statement. Gradients cG_t in place of G_t, one c > 0 for all t, give the same frames. A fixed-step Riemannian
update is homogeneous of degree one instead: its first displacement grows like c.

Proof. Projection and momentum are linear, so g and m become cg and cm; v becomes c²v. The step −lr·m̂/√v̂ is
their quotient, in which c cancels: it does so exactly when there is no epsilon beside √v̂. For c a power of two
every one of these operations is exact in floating point up to the same rounding, so not one bit changes.
The fixed step −η·cg is c times as long.

Checked here. Trajectories on a stochastic regression whose gradients are scaled from 1e-30 to 1e30 and by powers
of two; geoopt's RiemannianSGD, one step from the same frame, beside it.
"""

import geoopt
import torch
from torch import Tensor

from .certificate import Case, Certificate, worst
from .observing import OptimizerFactory, Regression, distance, parameter, slope, trajectory

SCALES = (1e-30, 1e-15, 1e-6, 3.0, 1e15, 1e30)
POWERS_OF_TWO = (2.0**-100, 2.0**-1, 2.0**7, 2.0**100)


def check(case: Case, make: OptimizerFactory) -> list[Certificate]:
    """Three certificates."""
    generator = case.generator(2)
    W, _ = case.frame_and_gradient(generator)
    problem = Regression.draw(case, generator)
    path = trajectory(make, parameter(W), problem)

    def apart(scale: float) -> float:
        return distance(path, trajectory(make, parameter(W), problem, scale))

    degree = _degree_of_fixed_step(W, problem.gradient(W, 0))
    return [
        case.at_most(2, "100 steps on gradients × 1e-30 … 1e30: frames apart", worst(map(apart, SCALES)), 1e-12),
        case.at_most(2, "100 steps on gradients × powers of two: frames apart", worst(map(apart, POWERS_OF_TWO)), 0.0),
        case.at_most(2, "beside it, degree of the fixed-step Riemannian update: off 1 by", abs(degree - 1), 0.01),
    ]


def _degree_of_fixed_step(W: Tensor, G: Tensor) -> float:
    """Slope of log ‖W' − W‖ over log c for geoopt's RiemannianSGD on cG."""
    scales = torch.logspace(-4, 0, 9, dtype=torch.float64)
    moved = []
    for scale in scales.tolist():
        p = parameter(W)
        p.grad = scale * G / torch.linalg.matrix_norm(G)
        geoopt.optim.RiemannianSGD([p], lr=0.1).step()
        moved.append(torch.linalg.matrix_norm(p.detach() - W))
    return slope(scales, torch.stack(moved))
