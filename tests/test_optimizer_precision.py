"""Precision settings of the caller: none leaks into the step, and the step leaks into none of them."""

import pytest
import torch
from support.frame_parameters import (
    assert_same,
    drive,
    frame,
    gaussian,
    give_gradients,
    mixed,
    optimizer_of,
    values,
    watched,
    worst_defect,
)
from support.matmul_settings import SETTINGS, needs_fp32_precision, read, settings, usual_settings, write

from stiefel_geo import stiefel
from stiefel_geo.optim import batching

PRECISIONS = ["highest", "high", "medium"]


@pytest.fixture(autouse=True)
def _usual():
    yield
    usual_settings()


@pytest.fixture
def seen(monkeypatch):
    """The settings under which the step's products ran."""
    return watched(monkeypatch, lambda batches: settings())


def run(steps=20):
    params = [frame(4, 64, 16, dtype=torch.float32)]
    drive(optimizer_of(params, lr=0.05), params, range(steps))
    return params


@pytest.mark.parametrize("name", SETTINGS)
def test_products_of_the_step_are_in_full_precision_and_the_two_interfaces_of_torch_agree(name, seen):
    SETTINGS[name]()
    run(2)
    assert [(each["legacy"], each["allow_tf32"], each["full"]) for each in seen] == [("highest", False, True)] * 2


@pytest.mark.parametrize("name", SETTINGS)
def test_step_leaves_the_settings_as_the_caller_made_them(name):
    SETTINGS[name]()
    before = settings()
    run(2)
    assert settings() == before
    assert not before["full"]


@needs_fp32_precision
@pytest.mark.parametrize("backend", ["generic", "cuda"])
def test_a_setting_that_follows_another_one_follows_it_after_the_step_too(backend):
    write(backend, "all", "tf32")
    run(1)
    write(backend, "all", "ieee")
    assert read("cuda", "matmul") == "ieee"


@needs_fp32_precision
def test_a_setting_equal_to_the_one_it_would_follow_stays_its_own():
    write("generic", "all", "tf32")
    write("cuda", "matmul", "tf32")
    run(1)
    write("generic", "all", "ieee")
    assert read("cuda", "matmul") == "tf32"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_matmul_precision_does_not_reach_the_step(precision, seen):
    usual = values(run())
    torch.set_float32_matmul_precision(precision)
    assert_same(values(run()), usual)
    assert settings()["legacy"] == precision
    assert {each["legacy"] for each in seen} == {"highest"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_defect_stays_small_under_every_matmul_precision(precision):
    torch.set_float32_matmul_precision(precision)
    assert worst_defect(run(100)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_step(dtype):
    usual = values(run())
    with torch.autocast("cpu", dtype):
        assert_same(values(run()), usual)


def test_settings_come_back_after_an_error_within_the_step(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("stop")

    torch.set_float32_matmul_precision("medium")
    before = settings()
    monkeypatch.setattr(batching, "step_", fail)
    with pytest.raises(RuntimeError, match="stop"):
        run(1)
    assert settings() == before


def test_step_within_inference_of_gradients_records_no_graph():
    params = mixed()
    optimizer = optimizer_of(params)
    with torch.enable_grad():
        drive(optimizer, params, range(2))
    assert all(p.grad_fn is None and p.requires_grad for p in params)
    assert all(not value.requires_grad for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_does_not_reach_the_step(default):
    usual = values(run())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        assert_same(values(run()), usual)
    finally:
        torch.set_default_dtype(before)


def test_deterministic_algorithms_are_enough():
    torch.use_deterministic_algorithms(True)
    try:
        params = mixed()
        drive(optimizer_of(params), params, range(2))
    finally:
        torch.use_deterministic_algorithms(False)


def spoiled_by_bf16(W):
    return W.bfloat16().float()


def spoiled_by_clipping(W):
    return W.clamp(-0.4, 0.4)


def spoiled_by_ema(W):
    other = frame(4, 64, 16, dtype=torch.float32, seed=0).detach()
    return 0.9 * W + 0.1 * other


def spoiled_by_lookahead(W):
    other = frame(4, 64, 16, dtype=torch.float32, seed=0).detach()
    return other + 0.5 * (W - other)


def spoiled_by_noise(W):
    return W + 0.01 * gaussian(W.shape, 5, torch.float32)


@pytest.mark.parametrize(
    "spoil", [spoiled_by_bf16, spoiled_by_clipping, spoiled_by_ema, spoiled_by_lookahead, spoiled_by_noise]
)
@pytest.mark.parametrize("lr", [1e-1, 1e-3])
def test_frames_that_something_else_moved_are_repaired_by_the_next_steps(spoil, lr):
    params = [frame(4, 64, 16, dtype=torch.float32)]
    optimizer = optimizer_of(params, lr=lr)
    drive(optimizer, params, range(10))
    with torch.no_grad():
        params[0].copy_(spoil(params[0]))
    assert worst_defect(params) > 1e-4
    drive(optimizer, params, range(10, 20))
    assert worst_defect(params) < 1e-5


def test_half_precision_frame_takes_what_is_written_into_it():
    p = frame(2, 24, 6, dtype=torch.bfloat16)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(3))
    other = frame(2, 24, 6, dtype=torch.bfloat16, seed=7).detach()
    with torch.no_grad():
        p.copy_(other)
    give_gradients([p], 3)
    optimizer.step()
    assert (p - other).norm() < 0.5
    assert float(stiefel.defect(optimizer.state[p]["master"]).max()) < 1e-5
