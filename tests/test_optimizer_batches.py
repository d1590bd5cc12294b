"""Frames in batches: foreach, capturable, odd shapes, one parameter and many, maximize."""

import math

import geoopt
import pytest
import torch
from support.frame_parameters import (
    SHAPES,
    as_frame,
    assert_close,
    assert_same,
    drive,
    entries,
    frame,
    gaussian,
    give_gradients,
    grad_of,
    mixed,
    optimizer_of,
    values,
    watched,
    worst_defect,
)
from torch import nn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_foreach_on_off_and_unset_agree_in_parameters_and_state(dtype):
    paths, states = [], []
    for foreach in (None, True, False):
        params = mixed(dtype)
        optimizer = optimizer_of(params, foreach=foreach)
        paths.append(drive(optimizer, params, range(9)))
        states.append([entry for *_, entry in entries(optimizer)])
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    for path, state in zip(paths[1:], states[1:], strict=True):
        assert_close(path, paths[0], tolerance)
        assert_close(state, states[0], tolerance)


@pytest.mark.parametrize(("foreach", "calls"), [(None, 4), (True, 4), (False, 5)])
def test_foreach_false_steps_one_parameter_at_a_time(foreach, calls, monkeypatch):
    seen = watched(monkeypatch, len)
    params = mixed()
    drive(optimizer_of(params, foreach=foreach), params, range(1))
    assert len(seen) == calls  # five parameters of four shapes


def test_capturable_changes_no_frame():
    params, usual = mixed()[:-2], mixed()[:-2]
    assert_same(
        drive(optimizer_of(params, capturable=True), params, range(7)),
        drive(optimizer_of(usual), usual, range(7)),
    )


@pytest.mark.parametrize("leading", [(5,), (2, 3), (1,), (2, 1, 2)])
@pytest.mark.parametrize("size", [(12, 4), (6, 6), (9, 1), (1, 1)])
def test_frames_of_one_parameter_step_as_parameters_of_their_own(leading, size):
    batch = frame(*leading, *size)
    flat = batch.detach().reshape(-1, *size)
    singles = [as_frame(W.clone()) for W in flat]
    one, other = optimizer_of([batch], foreach=False), optimizer_of(singles, foreach=False)
    for t in range(7):
        give_gradients([batch], t)
        batch.grad.view(-1, *size)[0] *= 100
        for p, G in zip(singles, batch.grad.reshape(-1, *size), strict=True):
            p.grad = G.clone()
        one.step()
        other.step()
    assert_close(list(batch.detach().reshape(-1, *size)), values(singles), 1e-14)
    assert_close([one.state[batch]["exp_avg_sq"]], [torch.cat([other.state[p]["exp_avg_sq"] for p in singles])], 1e-9)


def test_parameter_without_frames_is_harmless():
    empty, p, q = frame(0, 12, 4), frame(2, 12, 4), frame(2, 12, 4)
    optimizer = optimizer_of([empty, p])
    assert optimizer.num_frames == 2
    assert_same(drive(optimizer, [p], range(3)), drive(optimizer_of([q]), [q], range(3)))
    give_gradients([empty, p], 3)
    optimizer.step()
    assert optimizer.state[empty]["exp_avg"].shape == (0, 12, 4)
    assert_same([optimizer.state_dict()["state"][0]["step"]], [torch.zeros(0)])


def test_square_and_single_column_frames_stay_orthonormal():
    params = [frame(6, 6), frame(9, 1), frame(4, 1, 1)]
    before = values(params)
    drive(optimizer_of(params, lr=0.1), params, range(100))
    assert worst_defect(params) < 1e-12
    assert (params[0] - before[0]).norm() > 0.5
    assert (params[1] - before[1]).norm() > 0.5
    assert torch.equal(params[2], before[2])  # St(1, 1) = {±1} has no tangent direction


def test_columns_of_st_d_1_follow_the_sphere():
    p = frame(9, 1)
    optimizer = optimizer_of([p], lr=1e-2)
    p.grad = G = gaussian(p.shape, 1)
    w = p.detach().clone()
    optimizer.step()
    g = G - w * (w * G).sum()
    y = w - 1e-2 * 3 * g / g.norm()  # lr·√(d·r) along the tangent
    assert_close([p.detach()], [y / y.norm()], 1e-14)


def test_frames_of_geoopts_own_stiefel_step_as_polar_ones():
    ours = frame(3, 12, 4)
    theirs = geoopt.ManifoldParameter(ours.detach().clone(), manifold=geoopt.EuclideanStiefel())
    assert_same(drive(optimizer_of([ours]), [ours], range(5)), drive(optimizer_of([theirs]), [theirs], range(5)))


@pytest.mark.parametrize("maximize", [False, True])
def test_maximize_ascends_where_the_default_descends(maximize):
    target = gaussian((3, 12, 4), 7)
    p = frame(3, 12, 4)
    optimizer = optimizer_of([p], lr=0.02, maximize=maximize)
    before = float((p.detach() * target).sum())
    for _ in range(50):
        optimizer.zero_grad()
        (p * target).sum().backward()
        optimizer.step()
    change = float((p.detach() * target).sum()) - before
    assert change > 1 if maximize else change < -1


def test_maximize_equals_descent_along_negated_gradients():
    params, mirrored = mixed(), mixed()
    one, other = optimizer_of(params, maximize=True), optimizer_of(mirrored)
    for t in range(5):
        give_gradients(params, t)
        give_gradients(mirrored, t)
        for p in mirrored:
            grad_of(p).neg_()
        one.step()
        other.step()
    assert_same(values(params), values(mirrored))


def test_more_frames_than_a_batch_holds_step_as_few_do(monkeypatch):
    monkeypatch.setattr("stiefel_geo.optim.batching.CPU_BATCH_BYTES", (1, 2 * 12 * 4 * 8))
    cut = [frame(7, 12, 4, seed=1), frame(1, 12, 4, seed=2)]
    cut_path = drive(optimizer_of(cut), cut, range(4))
    monkeypatch.undo()
    whole = [frame(7, 12, 4, seed=1), frame(1, 12, 4, seed=2)]
    assert_close(cut_path, drive(optimizer_of(whole), whole, range(4)), 1e-14)


@pytest.mark.parametrize("leadings", [[(3,), (), (2, 2), (1,)], [(3,), (2, 2)]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("broken", [None, float("nan"), 1e-30])
def test_parameters_that_go_through_a_batch_as_views_step_as_alone(leadings, dtype, broken, monkeypatch):
    monkeypatch.setattr("stiefel_geo.optim.batching.CPU_JOIN_BYTES", 0)
    paths, states = [], []
    for foreach in (None, False):
        params = [frame(*leading, 12, 4, seed=n, dtype=dtype) for n, leading in enumerate(leadings)]
        optimizer = optimizer_of(params, foreach=foreach)
        path = drive(optimizer, params, range(3))
        give_gradients(params, 3)
        if broken is not None:  # one frame of one parameter, so that the batch takes the careful way
            max(params, key=lambda p: p.ndim).grad[1, 0] = broken
        optimizer.step()
        paths.append([*path, *values(params)])
        states.append([entry for *_, entry in entries(optimizer)])
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    assert_close(paths[0], paths[1], tolerance)
    assert_close(states[0], states[1], tolerance)
    skipped = sum(int(entry["skipped"].sum()) for entry in optimizer.state.values())
    assert skipped == (1 if broken is not None and math.isnan(broken) else 0)


def test_parameters_as_views_share_one_update(monkeypatch):
    monkeypatch.setattr("stiefel_geo.optim.batching.CPU_JOIN_BYTES", 0)
    seen = watched(monkeypatch, lambda batches: [batch.sizes for batch in batches])
    params = [frame(n, 12, 4) for n in (3, 1, 2)]
    drive(optimizer_of(params), params, range(1))
    assert seen == [[[3, 1, 2]]]


def test_number_of_frames_counts_every_leading_dimension():
    optimizer = optimizer_of(mixed())
    assert optimizer.num_frames == sum(math.prod(shape[:-2]) for shape in SHAPES)


def test_plain_twin_of_a_frame_is_not_driven_as_one():
    p = nn.Parameter(frame(12, 4).detach())
    optimizer = optimizer_of([p])
    assert optimizer.num_frames == 0
    assert "Frames: 0" in repr(optimizer)
