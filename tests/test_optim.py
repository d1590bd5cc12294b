"""ScaleFreeRiemannianAdam as a torch optimizer: plain parameters, groups, state, compilation."""

import io
from typing import Any

import geoopt
import pytest
import torch
from support.cases import frame, gradients

from stiefel_geo import ScaleFreeRiemannianAdam, stiefel
from stiefel_geo.optim.checks import COMPILING_FROM


def plain_pair(seed: int = 0) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in [(7, 5), (5,), (2, 3, 4)]]
    return [torch.nn.Parameter(v.clone()) for v in values], [torch.nn.Parameter(v) for v in values]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("choice", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_plain_parameters_follow_torch_adamw_bit_for_bit(choice: dict[str, Any], maximize: bool) -> None:
    ours, theirs = plain_pair()
    settings = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1, **choice}
    mine = ScaleFreeRiemannianAdam([frame(8, 2), *ours], **settings, maximize=maximize)
    adamw = torch.optim.AdamW(theirs, **settings, maximize=maximize)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(mine.state[p]["exp_avg_sq"], adamw.state[q]["exp_avg_sq"])


def test_repr_and_attribute_tell_how_many_frames_are_driven() -> None:
    optimizer = ScaleFreeRiemannianAdam([frame(2, 3, 8, 2), frame(8, 2), torch.nn.Parameter(torch.zeros(3))])
    assert optimizer.num_frames == 7
    assert "Frames: 7" in repr(optimizer)


def test_joined_batches_equal_one_parameter_at_a_time() -> None:
    joined, apart = [[frame(2, 12, 4, seed=i) for i in range(5)] for _ in range(2)]
    optimizers = [ScaleFreeRiemannianAdam(joined, foreach=True), ScaleFreeRiemannianAdam(apart, foreach=False)]
    for G in gradients((2, 12, 4), 10):
        for p in (*joined, *apart):
            p.grad = G.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert max((p - q).abs().max().item() for p, q in zip(joined, apart, strict=True)) < 1e-14


@pytest.mark.skipif(torch.__version__ < COMPILING_FROM, reason="this torch does not compile the step")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_step_equals_the_eager_one(backend: str) -> None:
    torch._dynamo.reset()
    eager, compiled = [
        [frame(3, 16, 4, dtype=torch.float32), torch.nn.Parameter(torch.ones(5)), frame(2, 16, 4, dtype=torch.float32)]
        for _ in range(2)
    ]
    first, second = ScaleFreeRiemannianAdam(eager, lr=0.01), ScaleFreeRiemannianAdam(compiled, lr=0.01)
    step = torch.compile(second.step, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for p, q in zip(eager, compiled, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        first.step()
        step()
    for p, q in zip(eager, compiled, strict=True):
        assert (p - q).abs().max() < 1e-6
    assert stiefel.defect(compiled[0]).max() < 1e-6


def test_state_round_trip_continues_bit_for_bit() -> None:
    params = [frame(2, 12, 4, dtype=torch.float32), torch.nn.Parameter(torch.ones(3))]
    copies = [frame(2, 12, 4, dtype=torch.float32), torch.nn.Parameter(torch.ones(3))]
    first, second = ScaleFreeRiemannianAdam(params, lr=0.05), ScaleFreeRiemannianAdam(copies, lr=0.05)

    def step(optimizer: ScaleFreeRiemannianAdam, parameters: list[torch.nn.Parameter], k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    for k in range(5):
        step(first, params, k)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    with torch.no_grad():
        for p, q in zip(params, copies, strict=True):
            q.copy_(p)
    for k in range(5, 10):
        step(first, params, k)
        step(second, copies, k)
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


def test_other_manifolds_step_by_their_own_operations() -> None:
    sphere = geoopt.Sphere()
    p = geoopt.ManifoldParameter(sphere.random(4, 7, dtype=torch.float64), manifold=sphere)
    target = sphere.random(4, 7, dtype=torch.float64)
    optimizer = ScaleFreeRiemannianAdam([p], lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        (-(p * target).sum()).backward()
        optimizer.step()
    assert (p.norm(dim=-1) - 1).abs().max() < 1e-12
    assert ((p * target).sum(-1) > 0.99).all()


def test_closure_runs_once_with_gradients_on() -> None:
    p = frame(8, 2)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        loss = p.sum()
        loss.backward()
        return float(loss.detach())

    loss = ScaleFreeRiemannianAdam([p]).step(closure)
    assert calls == [True]
    assert loss is not None


def test_frames_keep_their_storage_and_gradients_their_bits() -> None:
    p = frame(3, 12, 4)
    pointer = p.data_ptr()
    p.grad = gradients((3, 12, 4), 1)[0]
    before = p.grad.clone()
    ScaleFreeRiemannianAdam([p], weight_decay=10.0).step()
    assert p.data_ptr() == pointer
    assert torch.equal(p.grad, before)
