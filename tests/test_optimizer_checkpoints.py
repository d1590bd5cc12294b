"""State that is saved, loaded, copied, pickled, moved, foreign or stale."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from frame_parameters import (
    SHAPES,
    as_frame,
    assert_same,
    drive,
    entries,
    frame,
    give_gradients,
    mixed,
    optimizer_of,
    values,
)
from torch import nn

from stiefel_geo import ScaleFreeRiemannianAdam

HALVES = [torch.bfloat16, torch.float16]


def restored(params, optimizer, dtype):
    """Equal parameters and an optimizer that loaded the state from bytes, as another process would."""
    buffer = io.BytesIO()
    torch.save({"params": values(params), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again = mixed(dtype)
    for p, value in zip(again, saved["params"], strict=True):
        p.data.copy_(value)
    other = optimizer_of(again)
    other.load_state_dict(saved["optimizer"])
    return again, other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_dtype_and_value_of_every_entry_survive_a_checkpoint(dtype):
    params = mixed(dtype)
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    _, other = restored(params, optimizer, dtype)
    ours, theirs = entries(optimizer), entries(other)
    assert [(i, key, x.dtype, x.shape) for i, key, x in ours] == [(i, key, x.dtype, x.shape) for i, key, x in theirs]
    assert_same([x for *_, x in ours], [x for *_, x in theirs])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_loaded_run_goes_on_bit_for_bit(dtype):
    params = mixed(dtype)
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    again, other = restored(params, optimizer, dtype)
    assert_same(drive(optimizer, params, range(3, 7)), drive(other, again, range(3, 7)))


CHILD = """
import sys; sys.path.insert(0, {tests!r})
import torch
from frame_parameters import drive, mixed, optimizer_of
torch.set_num_threads(1)
saved = torch.load({path!r}, weights_only=True)
params = mixed(torch.float32)
for p, value in zip(params, saved["params"]):
    p.data.copy_(value)
optimizer = optimizer_of(params, lr=1.0)
optimizer.load_state_dict(saved["optimizer"])
torch.save(drive(optimizer, params, range(4, 9)), {path!r})
"""


def test_fresh_process_goes_on_bit_for_bit_from_a_weights_only_file(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        params = mixed(torch.float32)
        optimizer = optimizer_of(params)
        drive(optimizer, params, range(4))
        path = str(tmp_path / "state.pt")
        torch.save({"params": values(params), "optimizer": optimizer.state_dict()}, path)
        code = CHILD.format(tests=str(__file__).rpartition("/")[0], path=path)
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600)
        assert_same(torch.load(path, weights_only=True), drive(optimizer, params, range(4, 9)))
    finally:
        torch.set_num_threads(threads)


def test_state_dict_is_the_same_each_time_and_steps_nothing():
    params = mixed()
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    first, before = entries(optimizer), values(params)
    second = entries(optimizer)
    assert_same([x for *_, x in first], [x for *_, x in second])
    assert [entry[:2] for entry in first] == [entry[:2] for entry in second]
    assert_same(before, values(params))


def test_same_seed_gives_the_same_bits():
    runs = []
    for _ in range(2):
        params = mixed(torch.float32)
        optimizer = optimizer_of(params)
        drive(optimizer, params, range(6))
        runs.append([*values(params), *(x for *_, x in entries(optimizer))])
    assert_same(*runs)


def test_state_dict_holds_plain_tensors_and_numbers_alone():
    params = mixed(torch.bfloat16)
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(2))
    assert all(type(x) is torch.Tensor for *_, x in entries(optimizer))


def test_loading_copies_groups_so_that_later_changes_do_not_leak():
    params, others = mixed(), mixed()
    one, other = optimizer_of(params), optimizer_of(others, lr=0.5)
    other.load_state_dict(one.state_dict())
    assert other.param_groups[0]["lr"] == 1e-2
    other.param_groups[0]["lr"] = 7.0
    assert one.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copied_optimizer_steps_its_own_copies_alike(way):
    params = mixed()[1:]
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    twin = way(optimizer)
    copies = twin.param_groups[0]["params"]
    assert all(p is not q for p, q in zip(params, copies, strict=True))
    assert twin.num_frames == optimizer.num_frames
    moved = drive(twin, copies, range(3, 6))
    assert_same(drive(optimizer, params, range(3, 6)), moved)


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


def test_state_loads_into_parameters_of_another_precision():
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


def test_step_hooks_and_state_dict_hooks_run_in_order():
    params, calls = mixed(), []
    optimizer = optimizer_of(params)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    drive(optimizer, params, range(1))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == ["before", "after", "saved", "loaded"]


def test_load_pre_hook_may_replace_the_state_dict():
    params, others = mixed(), mixed()
    one, other = optimizer_of(params), optimizer_of(others)
    drive(one, params, range(2))
    saved = copy.deepcopy(one.state_dict())
    other.register_load_state_dict_pre_hook(lambda _, __: saved)
    other.load_state_dict({"state": {}, "param_groups": []})
    assert_same([x for *_, x in entries(one)], [x for *_, x in entries(other)])


def test_frames_on_the_meta_device_are_counted_and_not_checked():
    optimizer = ScaleFreeRiemannianAdam([as_frame(torch.empty(SHAPES[0], device="meta"))])
    assert optimizer.num_frames == 3


def test_zero_grad_clears_frames_and_plain_parameters():
    params = mixed()
    give_gradients(params, 0)
    optimizer_of(params).zero_grad()
    assert all(p.grad is None for p in params)


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
