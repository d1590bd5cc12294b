"""The step and the patch as a device runs them: the CPU takes the same operations, without reads, and CUDA itself.

So the CPU proves the bodies that `-m cuda` runs. What has a meaning on CUDA alone is in test_device_path.py; the laws
on the CPU's own path have files of their own.
"""

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.cases import frame, gradients, matrices, twins
from support.frame_parameters import (
    as_frame,
    assert_close,
    assert_same,
    drive,
    grad_of,
    mixed,
    optimizer_of,
    values,
    watched,
    worst_defect,
)
from support.matmul_settings import SETTINGS, settings, usual_settings
from support.tiny_vit import batch, largest_defect, tiny_vit
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam, precision, stiefel
from stiefel_geo.attention.parametrization import ONE_GRAPH_FROM
from stiefel_geo.optim import bounds, norms, step
from stiefel_geo.optim.checks import COMPILING_FROM

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
LARGE = (40, 256, 64)  # 2.6 MB: too large to be joined by a copy on any device


@pytest.fixture(params=["cpu", CUDA])
def device(request, monkeypatch):
    """Name of a device on which the step reads no value on the host."""
    if request.param == "cpu":
        for module in (bounds, norms, step):
            monkeypatch.setattr(module, "reads_are_free", lambda X: False)
    yield request.param
    usual_settings()


def moved(params: Sequence[Tensor], device: str) -> list[Tensor]:
    """Copies of frames and plain parameters on the device."""
    return [
        as_frame(p.detach().to(device, copy=True)) if hasattr(p, "manifold") else nn.Parameter(p.detach().to(device))
        for p in params
    ]


def parameters(device: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return moved(mixed(dtype), device)


@pytest.mark.parametrize("options", [{"lr": 0.01}, {"lr": 1.0}, {"lr": 1e-4}], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 10, 3), (2, 192, 64), (9, 1)], ids=str)
def test_thirty_steps_follow_the_literal_twin(device, shape, options):
    start = frame(*shape)
    (p,), expected = moved([start], device), twins(start)
    optimizer = ScaleFreeRiemannianAdam([p], **options)
    for G in gradients(shape, 30):
        p.grad = G.to(device)
        optimizer.step()
        for twin, grad in zip(expected, matrices(G), strict=True):
            twin.step(grad, **options)
    assert max(np.abs(twin.W - W).max() for twin, W in zip(expected, matrices(p.cpu()), strict=True)) < 1e-12
    state = {key: value.cpu().numpy() for key, value in optimizer.state[p].items()}
    np.testing.assert_allclose(state["exp_avg_sq"], [twin.v for twin in expected], rtol=1e-10)
    assert np.abs(state["exp_avg"] - np.stack([twin.m for twin in expected])).max() < 1e-12


def path(device: str, scale: float, spoil: float | None = None) -> tuple[list[Tensor], ScaleFreeRiemannianAdam]:
    """Small frames that are joined and large ones that stay where they lie, after six steps in float32."""
    params = moved([frame(3, 16, 4, dtype=torch.float32), frame(*LARGE, dtype=torch.float32)], device)
    optimizer = ScaleFreeRiemannianAdam(params, lr=0.01)
    for k in range(6):
        for p in params:
            p.grad = (gradients(p.shape, 1, torch.float32, seed=k)[0] * scale).to(device)
            if k == 3 and spoil is not None:
                p.grad[0, 1, 2] = spoil
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("k", [-80, -20, 60])
def test_powers_of_two_leave_the_path_bit_identical(device, k):
    assert_same(values(path(device, 2.0**k)[0]), values(path(device, 1.0)[0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_frame_of_a_bad_gradient_rests_for_a_step_and_its_neighbours_do_not_notice(device, bad):
    usual, spoilt = path(device, 1.0)[0], path(device, 1.0, bad)
    for p, q in zip(usual, spoilt[0], strict=True):
        assert torch.equal(p[1:], q[1:])
        assert not torch.equal(p[0], q[0])
        state = spoilt[1].state[q]
        assert state["skipped"].tolist() == [1] + [0] * (len(q) - 1)
        assert state["step"].tolist() == [5] + [6] * (len(q) - 1)
    assert worst_defect(spoilt[0]) < 1e-5


def test_a_bad_gradient_leaves_its_frame_and_state_bit_for_bit(device):
    params = parameters(device)[:5]
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    kept = {key: [optimizer.state[p][key].clone() for p in params] for key in ("exp_avg", "exp_avg_sq", "step")}
    before = values(params)
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert_same(values(params), before)
    for key, entries in kept.items():
        assert_same([optimizer.state[p][key] for p in params], entries)


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_gradients_whose_squares_leave_float32_move_frames_as_usual_ones_do(device, scale):
    assert_close(values(path(device, scale)[0]), values(path(device, 1.0)[0]), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_frames_are_their_masters_rounded(device, dtype):
    params = parameters(device, dtype)[:5]
    optimizer = optimizer_of(params)
    before = values(params)
    drive(optimizer, params, range(20))
    masters = [optimizer.state[p]["master"] for p in params]
    assert_same(values(params), [master.to(dtype) for master in masters])
    assert max(float(stiefel.defect(master).max()) for master in masters) < 1e-5
    assert all(not torch.equal(p, q) for p, q in zip(params, before, strict=True))


def step_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module, index: int) -> None:
    device = next(model.parameters()).device
    images, labels = (x.to(device) for x in batch(index))
    scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()


def test_grad_scaler_leaves_model_and_state_alone_in_a_step_of_infinite_gradients(device):
    model = tiny_vit().to(device)
    optimizer, scaler = ScaleFreeRiemannianAdam(model.parameters()), torch.amp.GradScaler(device, init_scale=4.0)
    for index, expected in ((0, True), (1, False), (2, True)):
        before = values(list(model.parameters()))
        moments = values([state["exp_avg"] for state in optimizer.state.values()])
        step_of(scaler, optimizer, model, index)
        if not expected:
            grad_of(next(iter(model.parameters())))[...] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) is expected
        if not expected:
            assert_same([state["exp_avg"] for state in optimizer.state.values()], moments)
    assert scaler.get_scale() == 2.0
    assert largest_defect(model) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast_moves_frames_and_stays_on_the_manifold(device, dtype):
    model = tiny_vit().to(device)
    before = values([W for _, W in stiefel_geo.frames(model)])
    optimizer = ScaleFreeRiemannianAdam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    for index in range(10):
        with torch.autocast(device, dtype):
            step_of(scaler, optimizer, model, index)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    after = values([W for _, W in stiefel_geo.frames(model)])
    assert all(float((b - a).norm()) > 0.1 for a, b in zip(before, after, strict=True))
    assert largest_defect(model) < 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_to_tf32_leaves_the_step_exact_and_is_itself_left_alone(device, name, monkeypatch):
    usual = values(path(device, 1.0)[0])
    seen = watched(monkeypatch, lambda batches: precision.is_full())
    SETTINGS[name]()
    before = settings()
    params, _ = path(device, 1.0)
    assert settings() == before
    assert (before["full"], set(seen)) == (False, {True})
    assert_same(values(params), usual)
    assert worst_defect(params) < 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_no_way_to_tf32_reaches_the_weights_that_unpatching_and_checkpoints_give(device, name):
    model = tiny_vit(patched=False, embed_dim=192).to(device)
    weights = {key: value.double().clone() for key, value in model.state_dict().items()}
    SETTINGS[name]()
    stiefel_geo.patch(model)
    saved = stiefel_geo.plain_state_dict(model)
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    stiefel_geo.unpatch(model)
    for found in (saved, model.state_dict()):
        assert found.keys() == weights.keys()
        assert max(float((found[k].double() - W).norm() / W.norm().clamp(min=1)) for k, W in weights.items()) < 1e-7


def test_the_outputs_of_a_patched_model_are_those_of_the_plain_one(device):
    plain = tiny_vit(patched=False).double().to(device).eval()
    patched = copy.deepcopy(plain)
    stiefel_geo.patch(patched)
    images = batch(0)[0].double().to(device)
    assert_close([patched(images)], [plain(images)], 1e-12)


def test_a_run_goes_on_from_its_state_dict_on_the_cpu_and_back(device):
    whole, params = parameters(device), parameters(device)
    drive(optimizer_of(whole), whole, range(9))
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(3))
    for place, steps in (("cpu", range(3, 6)), (device, range(6, 9))):
        params, saved = moved(params, place), copy.deepcopy(optimizer.state_dict())
        optimizer = optimizer_of(params)
        optimizer.load_state_dict(saved)
        entries = [value for p in params[:5] for value in optimizer.state[p].values()]
        assert {entry.device.type for entry in entries} == {place}
        assert {entry.dtype for entry in entries} == {torch.float64}
        drive(optimizer, params, steps)
    assert_close(values(params), values(whole), 1e-12)


@pytest.mark.skipif(torch.__version__ < COMPILING_FROM, reason="this torch does not compile the step")
@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(1e-2)}], ids=["number", "tensor lr"])
def test_a_compiled_step_follows_the_eager_one(device, options):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    eager, compiled = parameters(device, torch.float32)[-3:], parameters(device, torch.float32)[-3:]
    one, other = (optimizer_of(params, capturable=device == "cuda", **options) for params in (eager, compiled))
    drive(one, eager, range(4))
    drive(other, compiled, range(4), torch.compile(other.step, backend=backend, fullgraph=True))
    assert_close(values(compiled), values(eager), 1e-5)


def test_a_compiled_model_trains_as_the_eager_one(device):
    torch._dynamo.reset()
    eager, model = tiny_vit(depth=1).to(device), tiny_vit(depth=1).to(device)
    whole, backend = torch.__version__ >= ONE_GRAPH_FROM, "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=whole, backend=backend)
    for trained, running in ((eager, eager), (model, compiled)):
        optimizer = ScaleFreeRiemannianAdam(trained.parameters(), lr=1e-3)
        for index in range(3):
            images, labels = (x.to(device) for x in batch(index))
            nn.functional.cross_entropy(running(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(values(list(model.parameters())), values(list(eager.parameters())), 1e-5)
