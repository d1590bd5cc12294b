"""State that is saved, loaded, copied and pickled: the run goes on bit for bit."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from support.frame_parameters import (
    assert_same,
    drive,
    entries,
    give_gradients,
    mixed,
    optimizer_of,
    values,
)

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
from support.frame_parameters import drive, mixed, optimizer_of
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


def test_zero_grad_clears_frames_and_plain_parameters():
    params = mixed()
    give_gradients(params, 0)
    optimizer_of(params).zero_grad()
    assert all(p.grad is None for p in params)
