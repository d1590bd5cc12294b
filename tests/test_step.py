"""The update against its literal twin, and the laws that the method promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import SHAPES, frame, gradients, matrices, twins

from stiefel_geo import ScaleFreeRiemannianAdam, stiefel

SETTINGS = [
    {"lr": 1e-3},
    {"lr": 0.3},  # the trust region binds
    {"lr": 0.05, "betas": (0.5, 0.9), "trust_radius": 0.03},
    {"lr": 0.02, "betas": (0.0, 0.99), "trust_radius": math.inf},
    {"lr": 0.1, "betas": (0.9, 0.5), "trust_radius": 10.0},  # old momentum outlives the second moment
]


def run(p, grads, **settings):
    optimizer = ScaleFreeRiemannianAdam([p], **settings)
    for G in grads:
        p.grad = G.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_the_literal_twin(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    p = frame(*shape)
    expected = twins(p)
    optimizer = ScaleFreeRiemannianAdam([p], **settings)
    for k, G in enumerate(gradients(shape, 50)):
        p.grad = G * (0.0 if 20 <= k < 24 else 1.0)  # gradients that vanish for a while
        optimizer.step()
        for twin, grad in zip(expected, matrices(p.grad), strict=True):
            twin.step(grad, **settings)
        for twin, W in zip(expected, matrices(p), strict=True):
            assert np.abs(twin.W - W).max() < 1e-10
    state = optimizer.state[p]
    assert np.allclose([twin.v for twin in expected], state["exp_avg_sq"].numpy(), rtol=1e-10, atol=0)
    for twin, m in zip(expected, matrices(state["exp_avg"]), strict=True):
        assert np.abs(twin.m - m).max() < 1e-10 * max(1, np.abs(twin.m).max())
    assert state["step"].tolist() == [twin.t for twin in expected]


@pytest.mark.parametrize("k", [-80, -40, -13, 1, 40, 80])
def test_powers_of_two_leave_the_path_bit_identical(k: int) -> None:
    plain, scaled = (frame(3, 16, 4, dtype=torch.float32) for _ in range(2))
    grads = gradients((3, 16, 4), 60, torch.float32)
    run(plain, grads, lr=1e-2)
    run(scaled, [G * 2.0**k for G in grads], lr=1e-2)
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-8, 1e8, 1e22, 1e30])
def test_any_scale_gives_the_same_path_in_float32(scale: float) -> None:
    plain, scaled = (frame(3, 16, 4, dtype=torch.float32) for _ in range(2))
    grads = gradients((3, 16, 4), 60, torch.float32)
    run(plain, grads, lr=1e-2)
    run(scaled, [G * scale for G in grads], lr=1e-2)
    assert (plain - scaled).abs().max() < 2e-5
    assert (plain - frame(3, 16, 4, dtype=torch.float32)).abs().max() > 0.05


@pytest.mark.parametrize("steps", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lr", [1e-1, 1e-3])
def test_float32_frames_do_not_drift(lr: float, steps: int) -> None:
    p = frame(2, 12, 4, dtype=torch.float32)
    optimizer = ScaleFreeRiemannianAdam([p], lr=lr)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for k in range(steps):
        p.grad = torch.randn(2, 12, 4, generator=generator)
        optimizer.step()
        if k % 100 == 99:
            worst = max(worst, stiefel.defect(p).max().item())
    assert worst < 1e-5


def test_path_rotates_with_the_data_on_both_sides() -> None:
    R = stiefel.random_frame(16, 16, dtype=torch.float64)
    Q = stiefel.random_frame(4, 4, dtype=torch.float64)
    plain, turned = frame(16, 4), frame(16, 4)
    turned.data = R @ turned.data @ Q
    grads = gradients((16, 4), 100)
    run(plain, grads, lr=1e-2)
    run(turned, [R @ G @ Q for G in grads], lr=1e-2)
    assert (R @ plain @ Q - turned).abs().max() < 1e-12


def test_frames_of_one_parameter_do_not_see_each_other() -> None:
    together = frame(4, 12, 3)
    apart = [frame(4, 12, 3)[i].detach() for i in range(4)]
    apart = [type(together)(W.clone(), manifold=together.manifold) for W in apart]
    grads = gradients((4, 12, 3), 30)
    for G in grads:
        G[2] *= 100
    run(together, grads, lr=0.1)
    for i, p in enumerate(apart):
        run(p, [G[i] for G in grads], lr=0.1)
        assert (together[i] - p).abs().max() < 1e-13


def test_step_follows_the_steepest_descent_direction() -> None:
    p = frame(16, 4)
    before = p.detach().clone()
    G = gradients((16, 4), 1)[0]
    run(p, [G], lr=1e-6)
    g = stiefel.project(before, G)
    direction = -g / torch.linalg.matrix_norm(g) * math.sqrt(g.numel())
    assert ((p - before) / 1e-6 - direction).abs().max() < 1e-4


def test_lr_is_the_rms_change_of_the_entries() -> None:
    p = frame(64, 16)
    before = p.detach().clone()
    run(p, gradients((64, 16), 1), lr=1e-4)
    assert (p - before).square().mean().sqrt().item() == pytest.approx(1e-4, rel=1e-4)


def test_trust_radius_bounds_a_step_and_is_reached() -> None:
    p = frame(3, 16, 4)
    before = p.detach().clone()
    optimizer = run(p, gradients((3, 16, 4), 1), lr=1e3, trust_radius=0.25)
    # ‖ξ‖ = Δ and the polar retraction shortens the chord a little: σ of the new point is 1.
    xi = stiefel.project(before, p - before)
    assert torch.all(torch.linalg.matrix_norm(p - before) < 0.25)
    assert torch.all(torch.linalg.matrix_norm(xi) > 0.23)
    assert optimizer.state[p]["capped"].tolist() == [1, 1, 1]
