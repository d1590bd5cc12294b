"""Gradients that are not finite: the frame rests, state and all, and is counted; others step on as usual."""

import math

import pytest
import torch
from support.frame_parameters import (
    assert_same,
    drive,
    entries,
    frame,
    give_gradients,
    grad_of,
    mixed,
    optimizer_of,
    values,
    worst_defect,
)
from torch import nn

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_frame_with_one_bad_entry_rests_with_its_state_and_is_counted(bad, dtype):
    p = frame(3, 12, 4, dtype=dtype)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(3))
    before, state = p.detach().clone(), entries(optimizer)
    give_gradients([p], 3)
    p.grad[1, 2, 3] = bad
    optimizer.step()
    assert torch.equal(p[1], before[1])
    for (_, key, now), (_, _, then) in zip(entries(optimizer), state, strict=True):
        assert torch.equal(now[1], then[1] + 1 if key == "skipped" else then[1]), key
    assert optimizer.state[p]["skipped"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", BAD)
def test_neighbours_of_a_bad_frame_step_as_if_it_were_not_there(bad):
    p, q = frame(3, 12, 4), frame(3, 12, 4)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(8):
        give_gradients([p], t)
        give_gradients([q], t)
        if t % 3 == 1:
            p.grad[1] = bad
        one.step()
        other.step()
    assert_same([p.detach()[[0, 2]]], [q.detach()[[0, 2]]])


def test_frame_whose_squares_overflow_float64_rests_with_its_momentum_and_the_others_step_on():
    p, q = frame(3, 12, 4), frame(3, 12, 4)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(3):
        give_gradients([p], t)
        give_gradients([q], t)
        if t == 2:
            before, momentum = p.detach()[1].clone(), one.state[p]["exp_avg"][1].clone()
            p.grad[1] *= 1e160
            v = one.state[p]["exp_avg_sq"].clone()
        one.step()
        other.step()
    assert torch.equal(p[1], before)
    assert torch.equal(one.state[p]["exp_avg"][1], momentum)
    assert one.state[p]["exp_avg_sq"][1] == v[1]
    assert one.state[p]["skipped"].tolist() == [0, 1, 0]
    assert one.state[p]["step"].tolist() == [3, 2, 3]
    assert_same([p.detach()[[0, 2]]], [q.detach()[[0, 2]]])


def test_normal_gradient_whose_square_overflows_float64_is_skipped_and_no_zero_gradient():
    p = frame(12, 4)
    optimizer = optimizer_of([p], betas=(0.0, 0.9))
    p.grad = 1e160 * p.detach().clone()
    optimizer.step()
    assert optimizer.state[p]["skipped"].tolist() == [1]
    assert optimizer.state[p]["step"].tolist() == [0]


def test_bad_frame_goes_on_afterwards_as_if_that_step_had_not_been():
    p, q = frame(12, 4), frame(12, 4)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(6):
        give_gradients([p], t)
        give_gradients([q], t)
        if t == 2:
            p.grad[0, 0] = math.nan
        one.step()
        if t != 2:
            other.step()
    assert_same(values([p]), values([q]))


@pytest.mark.parametrize("bad", BAD)
def test_defect_stays_small_with_bad_gradients_now_and_then(bad):
    p = frame(4, 24, 8, dtype=torch.float32)
    optimizer = optimizer_of([p])
    for t in range(60):
        give_gradients([p], t)
        if t % 7 == 3:
            p.grad[t % 4, 0, 0] = bad
        optimizer.step()
    assert worst_defect([p]) < 1e-5


@pytest.mark.parametrize("bad", BAD)
def test_clip_grad_norm_spreads_a_bad_gradient_and_every_frame_rests(bad):
    p = frame(3, 12, 4, dtype=torch.float32)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(2))
    before = p.detach().clone()
    give_gradients([p], 2)
    p.grad[0, 0, 0] = bad
    nn.utils.clip_grad_norm_([p], 1.0)
    optimizer.step()
    resting = optimizer.state[p]["skipped"].bool()
    assert resting[0]
    assert torch.equal(p[resting], before[resting])
    drive(optimizer, [p], range(3, 6))
    assert p.isfinite().all()
    assert worst_defect([p]) < 1e-5


def test_grad_scaler_skips_a_step_bit_for_bit():
    params = mixed(torch.float32)
    optimizer = optimizer_of(params)
    scaler = torch.amp.GradScaler("cpu")
    drive(optimizer, params, range(2))
    before, state = values(params), entries(optimizer)
    scaler.scale(torch.ones(()))
    give_gradients(params, 2)
    grad_of(params[0])[0, 0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(values(params), before)
    assert_same([x for *_, x in entries(optimizer)], [x for *_, x in state])


def test_grad_scaler_scale_does_not_move_the_path():
    plain, scaled = frame(12, 4, dtype=torch.float32), frame(12, 4, dtype=torch.float32)
    one, other = optimizer_of([plain]), optimizer_of([scaled])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    drive(one, [plain], range(4))
    for t in range(4):
        give_gradients([scaled], t)
        scaled.grad = scaler.scale(scaled.grad)
        scaler.step(other)
        scaler.update()
    assert_same(values([plain]), values([scaled]))
