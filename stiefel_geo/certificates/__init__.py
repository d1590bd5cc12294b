"""The paper's propositions, checked numerically in float64 on this library's own optimizer.

    python -m stiefel_geo.certificates [--json FILE] [--seed N]

One file per proposition: its statement, a short proof, and below them the check.
"""

from collections.abc import Iterable

from ..optim import ScaleFreeRiemannianAdam
from . import conditioning, decay, equivariance, gauge, scale, steepest_descent
from .certificate import Case, Certificate, markdown
from .observing import OptimizerFactory

__all__ = ["Certificate", "certify", "markdown"]

SHAPES = ((16, 4), (64, 16), (192, 64), (768, 64), (64, 64))
CHECKS = {
    1: steepest_descent.check,
    2: scale.check,
    3: conditioning.check,
    4: equivariance.check,
    5: decay.check,
    6: gauge.check,
}


def certify(
    shapes: Iterable[tuple[int, int]] = SHAPES,
    seed: int = 0,
    *,
    propositions: Iterable[int] = tuple(CHECKS),
    optimizer: OptimizerFactory = ScaleFreeRiemannianAdam,
) -> list[Certificate]:
    """Certificates of the given propositions on frames of the given shapes (d, r), in that order.

    Args:
        shapes: d has to be a multiple of r: propositions 5 and 6 look at an attention layer with d/r heads.
        seed: of everything that is drawn.
        propositions: their numbers; 5 and 6 need timm.
        optimizer: what is certified: called as `ScaleFreeRiemannianAdam(params, lr=…, …)` and read through its
            parameters and its documented state `exp_avg`.
    """
    cases = [Case(d, r, seed) for d, r in shapes]
    return [c for number in propositions for case in cases for c in CHECKS[number](case, optimizer)]
