"""How parameters lie in memory: strides, dtypes, masters of half-precision frames."""

import pytest
import torch
from support.frame_parameters import (
    as_frame,
    assert_close,
    assert_same,
    drive,
    frame,
    gaussian,
    mixed,
    optimizer_of,
    values,
)

from stiefel_geo import stiefel

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def transposed(p):
    """The same frame in memory of swapped strides."""
    return as_frame(p.detach().mT.contiguous().mT)


def strided(p):
    """The same frame in every second place of a larger storage."""
    larger = torch.zeros(*p.shape[:-1], 2 * p.shape[-1], dtype=p.dtype)
    larger[..., ::2] = p.detach()
    return as_frame(larger[..., ::2])


@pytest.mark.parametrize("layout", [transposed, strided])
@pytest.mark.parametrize("dtype", DTYPES)
def test_frames_in_other_memory_step_as_contiguous_ones(layout, dtype):
    usual, other = frame(3, 12, 4, dtype=dtype), layout(frame(3, 12, 4, dtype=dtype))
    strides, place = other.stride(), other.data_ptr()
    assert not other.is_contiguous()
    assert_same(drive(optimizer_of([usual]), [usual], range(7)), drive(optimizer_of([other]), [other], range(7)))
    assert (other.stride(), other.data_ptr()) == (strides, place)


def test_memory_between_the_entries_of_a_strided_frame_stays():
    larger = torch.full((12, 8), 7.0)
    larger[..., ::2] = frame(12, 4, dtype=torch.float32).detach()
    p = as_frame(larger[..., ::2])
    drive(optimizer_of([p]), [p], range(3))
    assert (larger[..., 1::2] == 7).all()


@pytest.mark.parametrize("shape", [(12, 4), (3, 12, 4)])
def test_expanded_and_transposed_gradients_act_as_contiguous_ones(shape):
    p, q = frame(*shape), frame(*shape)
    one, other = optimizer_of([p]), optimizer_of([q])
    for t in range(4):
        row = gaussian((*shape[:-2], 1, shape[-1]), t)
        p.grad = row.expand(shape)
        q.grad = row.expand(shape).contiguous()
        one.step()
        other.step()
    p.grad = gaussian((*shape[:-2], shape[-1], shape[-2]), 9).mT
    q.grad = p.grad.contiguous()
    one.step()
    other.step()
    assert_same(values([p]), values([q]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_keeps_dtype_shape_and_storage(dtype):
    params = mixed(dtype)
    places = [p.data_ptr() for p in params]
    drive(optimizer_of(params), params, range(3))
    assert [p.data_ptr() for p in params] == places
    assert all(p.dtype == dtype for p in params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_of_half_frames_stays_orthonormal_over_1000_steps(dtype):
    p = frame(2, 24, 6, dtype=dtype)
    optimizer = optimizer_of([p])
    drive(optimizer, [p], range(1000))
    master = optimizer.state[p]["master"]
    assert master.dtype == torch.float32
    assert float(stiefel.defect(master).max()) < 1e-6
    assert torch.equal(master.to(dtype), p)


def test_half_frame_follows_the_float32_path():
    half, full = frame(2, 24, 6, dtype=torch.bfloat16), frame(2, 24, 6, dtype=torch.float32)
    one, other = optimizer_of([half]), optimizer_of([full])
    full.data.copy_(half.data)  # off the manifold by the rounding of bfloat16, which the first step repairs
    for t in range(50):
        half.grad = gaussian(half.shape, t).to(torch.bfloat16)
        full.grad = half.grad.float()
        one.step()
        other.step()
    assert_close([one.state[half]["master"]], [full.detach()], 1e-5)


def test_steps_below_the_resolution_of_bfloat16_add_up():
    p = frame(2, 24, 6, dtype=torch.bfloat16)
    before, G = p.detach().clone(), gaussian(p.shape, 1, torch.bfloat16)
    optimizer = optimizer_of([p], lr=1e-5)  # an entry of 0.2 resolves 8e-4
    for _ in range(1000):
        p.grad = G
        optimizer.step()
    assert (p - before).float().pow(2).mean().sqrt() > 5e-3


def test_dtypes_of_one_call_step_each_as_alone():
    together = [frame(3, 12, 4, dtype=dtype) for dtype in DTYPES]
    optimizer = optimizer_of(together)
    alone = [frame(3, 12, 4, dtype=dtype) for dtype in DTYPES]
    others = [optimizer_of([p]) for p in alone]
    for t in range(7):
        for p in (*together, *alone):
            p.grad = gaussian(p.shape, t).to(p)
        for each in (optimizer, *others):
            each.step()
    assert_same(values(together), values(alone))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch gives gradients their tensor's dtype")
def test_gradient_in_a_dtype_of_its_own_is_taken_in_the_parameters():
    p, q = frame(12, 4, dtype=torch.float32), frame(12, 4, dtype=torch.float32)
    one, other = optimizer_of([p]), optimizer_of([q])
    G = gaussian(p.shape, 1).bfloat16()
    p.grad_dtype = None
    p.grad, q.grad = G, G.float()
    one.step()
    other.step()
    assert_same(values([p]), values([q]))
