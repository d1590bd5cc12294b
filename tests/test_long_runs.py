"""Long runs: what a job of days leaves of orthonormality, on one thread."""

import pytest
import torch
from support.frame_parameters import frame, gaussian, optimizer_of

from stiefel_geo import stiefel

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 100_000


def run(dtype, lr, steps):
    """A long walk; the largest defect at a hundred looks, once the rounding of a bfloat16 start is repaired."""
    p = frame(2, 48, 12, dtype=dtype)
    optimizer = optimizer_of([p], lr=lr)
    pool = [gaussian(p.shape, seed).to(dtype) for seed in range(97)]
    worst = 0.0
    for t in range(steps):
        p.grad = pool[t % 97]
        optimizer.step()
        if t % (steps // 100) == 9:
            worst = max(worst, float(stiefel.defect(optimizer.state[p].get("master", p)).max()))
    return worst, p


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [1e-1, 1e-3])
def test_no_drift_in_100000_steps(dtype, lr):
    worst, p = run(dtype, lr, STEPS)
    print(f"{dtype} lr {lr:g}: largest defect {worst:.1e} in {STEPS} steps")
    assert worst < 1e-5
    assert p.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_drift_in_1000_steps(dtype):
    worst, _ = run(dtype, 1e-2, 1000)
    assert worst < 1e-5


def test_two_runs_of_one_seed_give_the_same_bits():
    assert torch.equal(run(torch.float32, 1e-2, 300)[1], run(torch.float32, 1e-2, 300)[1])


def test_gradients_of_every_size_in_one_run_leave_it_finite():
    p = frame(4, 24, 6, dtype=torch.float32)
    optimizer = optimizer_of([p])
    extremes = [0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, 1e38, float("inf"), float("nan")]
    for t in range(300):
        p.grad = gaussian(p.shape, t, torch.float32)
        for i in range(4):
            p.grad[i] *= extremes[(t * 7 + i * i) % len(extremes)]
        optimizer.step()
    assert p.isfinite().all()
    assert float(stiefel.defect(p).max()) < 1e-5
    assert all(value.isfinite().all() for value in optimizer.state[p].values())
