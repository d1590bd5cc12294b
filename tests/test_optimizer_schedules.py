"""Learning rates that change: every torch scheduler, timm's, tensors, groups, and what lr means for a step."""

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from support.frame_parameters import (
    assert_close,
    assert_same,
    drive,
    frame,
    gaussian,
    give_gradients,
    mixed,
    optimizer_of,
    values,
)
from timm.scheduler import CosineLRScheduler
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=9, power=2),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=12, cycle_momentum=True),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=3), lrs.ExponentialLR(o, 0.9)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-4, anneal_epochs=5),
}


def advance(scheduler):
    scheduler.step(*([1.0] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))


def test_every_scheduler_of_torch_is_tried():
    known = {
        n for n, c in inspect.getmembers(lrs, inspect.isclass) if issubclass(c, lrs.LRScheduler) and n in lrs.__all__
    }
    assert known - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_displacement_follows_the_lr_of_the_scheduler(name):
    p = frame(3, 24, 6)
    optimizer = optimizer_of([p], lr=1e-3, betas=(0.0, 0.9))  # without momentum ‖ξ‖ = lr·√(d·r)·‖g‖/√v̂
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for t in range(10):
        group = optimizer.param_groups[0]
        group["betas"] = (0.0, 0.0)  # ‖ξ‖ = lr·√(d·r) exactly; OneCycle and Cyclic wrote β₁ here
        before = p.detach().clone()
        give_gradients([p], t)
        optimizer.step()
        length = torch.linalg.matrix_norm(p.detach() - before).max()
        assert float(length) == pytest.approx(group["lr"] * math.sqrt(24 * 6), rel=2e-3, abs=1e-12)
        seen.append(group["lr"])
        advance(scheduler)
    assert len(set(seen)) > 1


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_momentum_that_a_scheduler_cycles_acts_on_frames(name):
    """The path with cycled β₁ is the path of those β₁ set by hand, and not that of a constant one."""
    p, by_hand, constant = frame(12, 4), frame(12, 4), frame(12, 4)
    one, two, three = (optimizer_of([q]) for q in (p, by_hand, constant))
    scheduler = SCHEDULERS[name](one)
    cycled = set()
    for t in range(8):
        cycled.add(one.param_groups[0]["betas"][0])
        for optimizer in (two, three):
            optimizer.param_groups[0]["lr"] = one.param_groups[0]["lr"]
        two.param_groups[0]["betas"] = one.param_groups[0]["betas"]
        for q in (p, by_hand, constant):
            q.grad = gaussian(q.shape, t)
        for optimizer in (one, two, three):
            optimizer.step()
        advance(scheduler)
    assert len(cycled) > 3
    assert_same(values([p]), values([by_hand]))
    assert (p - constant).norm() > 1e-4


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_and_optimizer_resume_together_bit_for_bit(name):
    params, resumed = mixed(), mixed()
    optimizer = optimizer_of(params)
    scheduler = SCHEDULERS[name](optimizer)

    def step(optimizer, scheduler):
        def both():
            optimizer.step()
            advance(scheduler)

        return both

    drive(optimizer, params, range(4), step(optimizer, scheduler))
    for p, q in zip(params, resumed, strict=True):
        q.data.copy_(p.data)
    again = optimizer_of(resumed)
    again_scheduler = SCHEDULERS[name](again)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own loader shares the tensors
    again_scheduler.load_state_dict(scheduler.state_dict())
    assert_same(
        drive(optimizer, params, range(4, 9), step(optimizer, scheduler)),
        drive(again, resumed, range(4, 9), step(again, again_scheduler)),
    )


def test_timm_cosine_with_warmup_sets_the_displacement():
    p = frame(3, 24, 6)
    optimizer = optimizer_of([p], lr=1e-2, betas=(0.0, 0.0))
    scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=4, warmup_lr_init=1e-5, t_in_epochs=False)
    lengths = []
    for t in range(10):
        scheduler.step_update(t)
        before = p.detach().clone()
        give_gradients([p], t)
        optimizer.step()
        lengths.append(float(torch.linalg.matrix_norm(p.detach() - before).max()))
        assert lengths[-1] == pytest.approx(optimizer.param_groups[0]["lr"] * 12, rel=1e-2)
    assert lengths[0] < lengths[3] > lengths[9]


def test_groups_have_lr_betas_radius_and_decay_of_their_own():
    options: list[dict[str, Any]] = [
        {"lr": 1e-3, "betas": (0.5, 0.9), "trust_radius": 0.01},
        {"lr": 3e-2, "weight_decay": 0.3, "maximize": True},
    ]
    together = [mixed(), mixed()]
    groups = [{"params": params, **each} for params, each in zip(together, options, strict=True)]
    optimizer = optimizer_of(groups)
    joined = drive(optimizer, [p for params in together for p in params], range(6))
    apart = []
    for at, each in enumerate(options):
        params = mixed()
        alone = optimizer_of(params, **each)
        for t in range(6):
            for i, p in enumerate(params):
                p.grad = gaussian(p.shape, 1000 * (t + 1) + i + at * len(params)).to(p)
            alone.step()
        apart += values(params)
    assert_close(joined, apart, 1e-14)


@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_tensor_lr_steps_as_the_number(lr):
    params, usual = mixed(), mixed()
    tensor_lr = torch.tensor(lr, dtype=torch.float64)
    assert_close(
        drive(optimizer_of(params, lr=tensor_lr), params, range(5)),
        drive(optimizer_of(usual, lr=lr), usual, range(5)),
        1e-12,
    )


def test_tensor_lr_written_in_place_acts_on_the_next_step():
    p = frame(3, 24, 6)
    lr = torch.tensor(1e-3)
    optimizer = optimizer_of([p], lr=lr, betas=(0.0, 0.0))
    for value in (1e-3, 1e-2, 0.0):
        lr.fill_(value)
        before = p.detach().clone()
        give_gradients([p], 1)
        optimizer.step()
        moved = float(torch.linalg.matrix_norm(p.detach() - before).max())
        assert moved == pytest.approx(value * 12, rel=1e-2)


def test_scheduler_writes_into_a_tensor_lr():
    params, usual = mixed(), mixed()
    optimizer, other = optimizer_of(params, lr=torch.tensor(1e-2, dtype=torch.float64)), optimizer_of(usual)
    schedulers = [lrs.ExponentialLR(each, 0.5) for each in (optimizer, other)]
    for t in range(5):
        give_gradients(params, t)
        give_gradients(usual, t)
        optimizer.step()
        other.step()
        for scheduler in schedulers:
            scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert_close(values(params), values(usual), 1e-12)


def test_group_added_midway_starts_at_its_own_first_step():
    params, late, fresh = mixed(), frame(3, 12, 4, seed=8), frame(3, 12, 4, seed=8)
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(5))
    optimizer.add_param_group({"params": [late], "lr": 1e-3})
    alone = optimizer_of([fresh], lr=1e-3)
    for t in range(4):
        give_gradients([late], t)
        give_gradients([fresh], t)
        optimizer.step()
        alone.step()
    assert_close(values([late]), values([fresh]), 1e-14)
    assert optimizer.state[late]["step"].tolist() == [4, 4, 4]
    assert optimizer.state[params[0]]["step"].tolist() == [9, 9, 9]
