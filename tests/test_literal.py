"""The literal step that is shipped, against the optimizer, state included, and against the numpy reference of tests."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import frame, gradients, matrices, twins

from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.optim.literal import LiteralStep

SHAPES = [(3, 16, 4), (8, 8), (9, 1)]
SETTINGS = [{"lr": 1e-3}, {"lr": 0.3}, {"lr": 0.05, "betas": (0.5, 0.9), "trust_radius": 0.03}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_literal_step_equals_the_optimizer_state_included(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    p, q = frame(*shape), frame(*shape)
    optimizer, literal = ScaleFreeRiemannianAdam([p], **settings), LiteralStep([q], **settings)
    for k, G in enumerate(gradients(shape, 30)):
        if k == 7:
            G.view(-1, *shape[-2:])[0, 0, 0] = math.nan
        if k in (12, 13):
            G.zero_()
        p.grad, q.grad = G, G.clone()
        optimizer.step()
        literal.step()
        assert (p - q).abs().max() < 1e-12
    for key in ("exp_avg", "exp_avg_sq", "step"):
        ours, theirs = optimizer.state[p][key].flatten(), literal.state[q][key].flatten()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_literal_step_equals_the_reference_that_shares_nothing_with_it() -> None:
    p = frame(3, 16, 4)
    literal, expected = LiteralStep([p], lr=0.1), twins(p)
    for G in gradients(p.shape, 20):
        p.grad = G
        literal.step()
        for twin, grad in zip(expected, matrices(G), strict=True):
            twin.step(grad, lr=0.1)
    assert max(np.abs(twin.W - W).max() for twin, W in zip(expected, matrices(p), strict=True)) < 1e-12
