"""State that is foreign, old, stale, moved or cast: taken where it fits, refused by name where it does not."""

import copy
import math

import pytest
import torch
from support.frame_parameters import (
    SHAPES,
    as_frame,
    assert_same,
    drive,
    entries,
    frame,
    mixed,
    optimizer_of,
)
from torch import nn

from stiefel_geo import ScaleFreeRiemannianAdam


def test_state_of_adamw_is_refused_for_frames_and_changes_nothing():
    params = mixed()
    foreign = [nn.Parameter(p.detach().clone()) for p in params]
    adamw = torch.optim.AdamW(foreign, lr=0.3)
    drive(adamw, foreign, range(2))
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(2))
    before = entries(optimizer)
    with pytest.raises(ValueError, match=r"rule: .*skipped.*; found"):
        optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert_same([x for *_, x in entries(optimizer)], [x for *_, x in before])


def test_state_of_frames_of_another_shape_is_refused_and_changes_nothing():
    params, others = [frame(3, 12, 4)], [frame(2, 12, 4)]
    one, other = optimizer_of(params), optimizer_of(others)
    drive(one, params, range(2))
    with pytest.raises(ValueError, match=r"rule: .*\(2, 12, 4\).*; found .*\(3, 12, 4\)"):
        other.load_state_dict(one.state_dict())
    assert not other.state


def test_state_of_plain_parameters_of_another_shape_is_refused():
    params, others = [nn.Parameter(torch.ones(4))], [nn.Parameter(torch.ones(5))]
    one, other = optimizer_of(params), optimizer_of(others)
    drive(one, params, range(2))
    with pytest.raises(ValueError, match=r"rule: .*\(5,\).*found .*\(4,\)"):
        other.load_state_dict(one.state_dict())


def test_adamw_state_of_plain_parameters_alone_is_taken():
    params, ours = [nn.Parameter(torch.ones(4))], [nn.Parameter(torch.ones(4))]
    adamw, optimizer = torch.optim.AdamW(params, lr=1e-2), optimizer_of(ours)
    drive(adamw, params, range(3))
    ours[0].data.copy_(params[0].data)
    saved = copy.deepcopy(adamw.state_dict())
    optimizer.load_state_dict(saved)
    assert_same(drive(adamw, params, range(3, 6)), drive(optimizer, ours, range(3, 6)))


def test_state_dict_without_the_newest_options_takes_the_defaults():
    """A file from before an option existed, as torch's own optimizers accept in __setstate__."""
    params, usual = mixed(), mixed()
    optimizer, other = optimizer_of(params), optimizer_of(usual)
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("capturable", "foreach", "maximize", "trust_radius"):
        del saved["param_groups"][0][key]
    optimizer.load_state_dict(saved)
    assert_same(drive(optimizer, params, range(3)), drive(other, usual, range(3)))


def test_loaded_settings_out_of_range_are_refused():
    params = mixed()
    optimizer = optimizer_of(params)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["trust_radius"] = math.nan
    with pytest.raises(ValueError, match="trust_radius"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["trust_radius"] == 1.0


def test_other_number_of_parameters_is_refused():
    optimizer = optimizer_of(mixed())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(optimizer_of(mixed()[:3]).state_dict())


def test_state_of_parameters_of_another_precision_is_refused():
    params, halves = mixed(torch.float32), mixed(torch.bfloat16)
    one, other = optimizer_of(params), optimizer_of(halves)
    drive(one, params, range(3))
    with pytest.raises(ValueError, match=r"rule: .*master.*found"):
        other.load_state_dict(one.state_dict())


def test_groups_replaced_after_a_step_are_named_by_state_dict():
    params = mixed()
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(2))
    optimizer.param_groups[0]["params"] = mixed()
    with pytest.raises(RuntimeError, match="build a new optimizer"):
        optimizer.state_dict()


def test_model_moved_after_the_first_step_is_named():
    p = frame(3, 12, 4)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(1))
    state = optimizer.state[p]
    optimizer.state[p] = {key: value.to("meta") for key, value in state.items()}
    with pytest.raises(RuntimeError, match="the model was moved"):
        optimizer.step()


@pytest.mark.parametrize("make", [lambda dtype: frame(3, 12, 4, dtype=dtype), lambda dtype: mixed(dtype)[-1]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_cast_after_the_first_step_are_named(make, dtype):
    p = make(torch.float32)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(2))
    p.grad = None
    p.data = p.data.to(dtype)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=f"rule: .*{dtype}; found .*float32.*was cast"):
        drive(optimizer, [p], range(2, 3))
    assert torch.equal(p, before)


def test_frames_on_the_meta_device_are_counted_and_not_checked():
    optimizer = ScaleFreeRiemannianAdam([as_frame(torch.empty(SHAPES[0], device="meta"))])
    assert optimizer.num_frames == 3


def test_old_files_with_a_step_that_is_a_number_go_on():
    params, ours = [nn.Parameter(torch.ones(4))], [nn.Parameter(torch.ones(4))]
    adamw, optimizer = torch.optim.AdamW(params, lr=1e-2), optimizer_of(ours)
    drive(adamw, params, range(3))
    ours[0].data.copy_(params[0].data)
    saved = copy.deepcopy(adamw.state_dict())
    saved["state"][0]["step"] = 3.0
    optimizer.load_state_dict(saved)
    assert_same(drive(adamw, params, range(3, 6)), drive(optimizer, ours, range(3, 6)))


@pytest.mark.parametrize("foreign", [{}, {"model": {}}, {"state": {}}])
def test_file_around_the_state_dict_is_refused_by_name(foreign):
    with pytest.raises(ValueError, match="not the file around it"):
        optimizer_of(mixed()).load_state_dict(foreign)
