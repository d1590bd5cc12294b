"""The host's bound on a step without a trust region, against Cauchy–Schwarz written out in sums."""

import math

import numpy as np
import pytest

from stiefel_geo.optim.bounds import largest_ratio


def ratio(betas, t):
    """‖m̂_t‖/√v̂_t for the worst gradients: √Σ aᵢ²/bᵢ with the weights a and b of the two means."""
    i = np.arange(t)
    a, b = (beta**i for beta in betas)
    a, b = a / a.sum(), b / b.sum()
    seen = b > 0
    return math.sqrt((a[seen] ** 2 / b[seen]).sum())


@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.0, 0.5), (0.9, 0.85), (0.7, 0.5), (0.3, 0.1)]
)
def test_bound_is_the_supremum_over_all_gradients(betas):
    highest = max(ratio(betas, t) for t in [*range(1, 500), 20_000])
    assert largest_ratio(*betas) == pytest.approx(highest, rel=1e-6)


def test_without_memory_every_step_has_the_unit_length():
    assert largest_ratio(0.0, 0.0) == 1.0


@pytest.mark.parametrize("betas", [(0.9, 0.81), (0.9, 0.5), (0.5, 0.25), (0.5, 0.0)])
def test_momentum_that_outlives_the_second_moment_has_no_bound(betas):
    assert largest_ratio(*betas) == math.inf


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.9, 0.85)])
def test_no_sequence_of_gradients_beats_the_largest_ratio(betas: tuple[float, float]) -> None:
    """Gradients that grow as fast as Cauchy–Schwarz wants reach the bound, and none exceeds it."""
    beta1, beta2 = betas
    ratios = []
    for growth in [1.0, beta2 / beta1 if beta1 else 2.0, 1.05, 1.5]:
        m = v = 0.0
        for t in range(1, 400):
            g = growth ** (t - 400)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            ratios.append(m / (1 - beta1**t) / math.sqrt(v / (1 - beta2**t)))
    assert max(ratios) <= largest_ratio(beta1, beta2) * (1 + 1e-9)
    assert max(ratios) > 0.5 * largest_ratio(beta1, beta2)
