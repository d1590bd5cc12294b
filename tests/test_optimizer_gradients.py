"""Gradients that are missing, zero, normal, tiny or huge: who rests, who steps, how far."""

import math

import pytest
import torch
from support.frame_parameters import (
    assert_close,
    assert_same,
    drive,
    frame,
    gaussian,
    give_gradients,
    grad_of,
    mixed,
    optimizer_of,
    values,
    worst_defect,
)

from stiefel_geo import stiefel


def one_step(p, grad, **options):
    optimizer = optimizer_of([p], **options)
    p.grad = grad
    optimizer.step()
    return optimizer


def test_zero_gradients_from_the_start_move_nothing():
    p = frame(3, 12, 4)
    before = p.detach().clone()
    optimizer = optimizer_of([p])
    for _ in range(5):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["skipped"].sum() == 0


def test_zero_gradients_for_a_while_leave_a_path_without_nan():
    p = frame(3, 12, 4, dtype=torch.float32)
    optimizer = optimizer_of([p], betas=(0.5, 0.9))  # momentum underflows after 150 steps
    for t in range(250):
        give_gradients([p], t)
        p.grad *= float(t < 2 or t > 240)
        optimizer.step()
    assert p.isfinite().all()
    assert worst_defect([p]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradient_without_second_moment_memory_rests(dtype):
    p = frame(3, 12, 4, dtype=dtype)
    optimizer = optimizer_of([p], lr=0.1, betas=(0.9, 0.0))
    drive(optimizer, [p], range(5))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["exp_avg_sq"].tolist() == [0, 0, 0]


def test_frame_of_zero_gradient_rests_while_the_others_step_alike():
    p, q = frame(3, 12, 4), frame(3, 12, 4)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(5):
        give_gradients([p], t)
        give_gradients([q], t)
        p.grad[1] = 0
        one.step()
        other.step()
    assert torch.equal(p[1], frame(3, 12, 4)[1])
    assert_same([p.detach()[[0, 2]]], [q.detach()[[0, 2]]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_purely_normal_gradient_moves_nothing(dtype, scale):
    p = frame(4, 768, 64, dtype=dtype) if dtype == torch.float32 else frame(8, 48, 16)
    before = p.detach().clone()
    optimizer = optimizer_of([p])
    for t in range(3):
        p.grad = scale * (p.detach() @ stiefel.sym(gaussian((p.shape[-1], p.shape[-1]), t, dtype)))
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_purely_normal_gradient_counts_as_zero_in_the_second_moment(dtype):
    p = frame(3, 48, 16, dtype=dtype)
    optimizer = one_step(p, p.detach() @ stiefel.sym(gaussian((16, 16), 1, dtype)))
    assert optimizer.state[p]["exp_avg_sq"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_small_tangent_part_of_a_normal_gradient_is_a_direction(dtype, share):
    p = frame(3, 48, 16, dtype=dtype)
    before = p.detach().clone()
    normal = before @ stiefel.sym(gaussian((3, 16, 16), 1, dtype))
    tangent = stiefel.project(before, gaussian(p.shape, 2, dtype))
    tangent *= share * normal.norm() / tangent.norm()
    one_step(p, normal + tangent, lr=1e-3)
    moved = p.detach() - before
    assert_close([moved.square().mean((-2, -1)).sqrt()], [torch.full((3,), 1e-3, dtype=dtype)], 1e-5)
    cosine = -(moved * tangent).sum((-2, -1)) / (moved.norm(dim=(-2, -1)) * tangent.norm(dim=(-2, -1)))
    assert cosine.min() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_that_is_rounding_noise_moves_nothing(dtype):
    p = frame(3, 48, 16, dtype=dtype)
    optimizer = one_step(p, gaussian(p.shape, 1, dtype), betas=(0.0, 0.999))  # v is above 0 from now on
    before = p.detach().clone()
    p.grad = 1e6 * (before @ stiefel.sym(gaussian((3, 16, 16), 2, dtype)))
    optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1e8, 1e30])
def test_path_is_the_same_for_gradients_of_any_scale(scale):
    p, q = frame(3, 12, 4, dtype=torch.float32), frame(3, 12, 4, dtype=torch.float32)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(20):
        give_gradients([p], t)
        q.grad = (gaussian(q.shape, 1000 * (t + 1)) * scale).float()
        one.step()
        other.step()
    assert (p - frame(3, 12, 4, dtype=torch.float32)).norm() > 0.1
    assert_close(values([p]), values([q]), 1e-5 if scale > 1e-37 else 1e-3)


@pytest.mark.parametrize("scale", [1e-45, 1e-42, 3e38])
def test_denormal_and_largest_gradients_leave_a_finite_orthonormal_frame(scale):
    p = frame(3, 12, 4, dtype=torch.float32)
    optimizer = optimizer_of([p])
    for t in range(20):
        p.grad = (gaussian(p.shape, t).sign() * scale).float()
        optimizer.step()
    assert p.isfinite().all()
    assert worst_defect([p]) < 1e-5


def test_scales_in_one_batch_do_not_reach_each_other():
    p = frame(4, 12, 4, dtype=torch.float32)
    alone = [frame(4, 12, 4, dtype=torch.float32) for _ in range(4)]
    scales = torch.tensor([1e-30, 1.0, 1e12, 1e30])
    one, others = optimizer_of([p]), [optimizer_of([q]) for q in alone]
    for t in range(10):
        give_gradients([p], t)
        p.grad *= scales[:, None, None]
        for i, q in enumerate(alone):
            give_gradients([q], t)
            others[i].step()
        one.step()
    for i, q in enumerate(alone):
        torch.testing.assert_close(p[i], q[i], rtol=0, atol=1e-6)


def test_parameter_without_gradient_keeps_bits_and_gets_no_state():
    params = mixed()
    optimizer = optimizer_of(params)
    give_gradients(params, 0)
    params[0].grad, params[-1].grad = None, None
    before = values(params)
    optimizer.step()
    assert_same([params[0].detach(), params[-1].detach()], [before[0], before[-1]])
    assert params[0] not in optimizer.state
    assert params[-1] not in optimizer.state


def test_step_without_any_gradient_does_nothing():
    params = mixed()
    optimizer = optimizer_of(params)
    optimizer.step()
    assert_same(values(params), values(mixed()))
    assert not optimizer.state


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 10.0])
def test_step_leaves_grad_bit_identical(weight_decay):
    params = mixed(torch.float32)
    optimizer = optimizer_of(params, weight_decay=weight_decay)
    for t in range(3):
        give_gradients(params, t)
        grads = [grad_of(p) for p in params]
        before = values(grads)
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert_same(grads, before)


def test_weight_decay_never_touches_a_frame():
    paths = []
    for decay in (0.0, 10.0):
        params = mixed()
        paths.append(drive(optimizer_of(params, weight_decay=decay), params, range(5))[:-2])
    assert_same(*paths)


def test_lr_zero_moves_nothing_at_all():
    params = mixed(torch.float32)
    drive(optimizer_of(params, lr=0.0), params, range(3))
    assert_same(values(params), values(mixed(torch.float32)))


def test_parameter_frozen_midway_keeps_its_bits():
    params = mixed()
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(2))
    before = params[0].detach().clone()
    params[0].requires_grad_(False)
    for t in range(2, 4):
        give_gradients(params[1:], t)
        params[0].grad = None
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("lr", [1e-12, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("radius", [0.05, 1.0])
def test_step_is_never_longer_than_the_trust_radius(lr, scale, radius):
    p = frame(3, 12, 4)
    before = p.detach().clone()
    optimizer = one_step(p, scale * gaussian(p.shape, 1), lr=lr, trust_radius=radius)
    # the polar retraction of a step ξ of length Δ moves a frame by Δ at the most
    moved = torch.linalg.matrix_norm(p.detach() - before)
    wanted = lr * math.sqrt(12 * 4)
    assert (moved <= min(radius, wanted) * (1 + 1e-9) + 1e-14).all()  # and the rounding of W
    assert (moved >= 0.7 * min(radius, wanted)).all() or wanted < 1e-9
    assert bool(optimizer.state[p]["capped"].all()) == (wanted > radius)


def test_moments_do_not_see_the_trust_region():
    states = []
    for radius in (1e-3, math.inf):
        p = frame(3, 12, 4)
        optimizer = one_step(p, gaussian(p.shape, 1), lr=1.0, trust_radius=radius)
        states.append([optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")])
    assert_same(*states)
