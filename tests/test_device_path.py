"""The step without reads by the host, as an accelerator and torch.compile run it: here on the CPU, and on CUDA."""

import math
from collections import Counter

import pytest
import torch
from cases import SHAPES, frame, gradients
from torch.utils._python_dispatch import TorchDispatchMode

from stiefel_geo import ScaleFreeRiemannianAdam, step, stiefel

cuda = pytest.mark.cuda


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_reads_are_free", lambda X: False)


def path(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, **settings) -> torch.Tensor:
    p = frame(*shape, dtype=dtype)
    optimizer = ScaleFreeRiemannianAdam([p], **settings)
    for k, G in enumerate(gradients(shape, 30, dtype)):
        p.grad = G * scale
        if k == 7:
            p.grad.view(-1)[0] = math.nan
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 1.0}, {"lr": 1e-3, "trust_radius": math.inf}])
@pytest.mark.parametrize("shape", SHAPES)
def test_path_without_reads_equals_the_path_with_them(
    shape: tuple[int, ...], settings: dict, request: pytest.FixtureRequest
) -> None:
    with_reads = path(shape, torch.float64, **settings)
    request.getfixturevalue("no_reads")
    assert (path(shape, torch.float64, **settings) - with_reads).abs().max() < 1e-12


def test_bound_without_a_trust_region_counts_the_entries_of_square_frames(request: pytest.FixtureRequest) -> None:
    settings = {"lr": 1.0, "trust_radius": math.inf}
    with_reads = path((2, 24, 24), torch.float64, **settings)
    request.getfixturevalue("no_reads")
    assert (path((2, 24, 24), torch.float64, **settings) - with_reads).abs().max() < 1e-9


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("k", [-80, -20, 60])
def test_powers_of_two_leave_the_path_without_reads_bit_identical(k: int) -> None:
    plain = path((3, 16, 4), torch.float32, lr=0.01)
    assert torch.equal(path((3, 16, 4), torch.float32, 2.0**k, lr=0.01), plain)


class Calls(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(layers: int) -> Counter[str]:
    params = [frame(2, 12, 4, seed=i) for i in range(layers)]
    optimizer = ScaleFreeRiemannianAdam(params)
    for p in params:
        p.grad = gradients(p.shape, 1)[0]
    optimizer.step()
    with Calls() as calls:
        optimizer.step()
    return calls.counts


def test_arithmetic_of_a_step_does_not_grow_with_layers_of_equal_shape() -> None:
    few, many = calls_of_a_step(3), calls_of_a_step(12)
    views = ("view", "slice", "select", "detach", "split")
    assert few["aten.bmm.default"] + few["aten.bmm.out"] >= 4
    grown = {name for name in many if many[name] > few[name] and not any(view in name for view in views)}
    assert not grown


@pytest.mark.usefixtures("no_reads")
def test_a_step_reads_no_value_on_the_host() -> None:
    counts = calls_of_a_step(3)
    assert counts["aten.bmm.default"] + counts["aten.bmm.out"] >= 4
    assert not [name for name in counts if "local_scalar_dense" in name or "nonzero" in name]


def cuda_frames() -> list[torch.Tensor]:
    frames = [frame(24, 768, 64, dtype=torch.float32, seed=i) for i in range(3)]
    return [type(p)(p.detach().cuda(), manifold=p.manifold) for p in frames]


@cuda
def test_a_step_on_cuda_never_waits_for_the_device() -> None:
    params = cuda_frames()
    optimizer = ScaleFreeRiemannianAdam(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert max(stiefel.defect(p).max().item() for p in params) < 1e-5


@cuda
def test_a_captured_step_replays_as_the_eager_one() -> None:
    eager, captured = cuda_frames(), cuda_frames()
    optimizers = [ScaleFreeRiemannianAdam(params, capturable=True) for params in (eager, captured)]
    for p, q in zip(eager, captured, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for _ in range(3):
        optimizers[0].step()
        graph.replay()
    assert max((p - q).abs().max().item() for p, q in zip(eager, captured, strict=True)) < 1e-6


@cuda
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_frames_on_cuda_stay_orthonormal_under_every_matmul_precision(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        (p, *_) = cuda_frames()
        optimizer = ScaleFreeRiemannianAdam([p], lr=1e-2)
        for _ in range(50):
            p.grad = torch.randn_like(p)
            optimizer.step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert stiefel.defect(p).max() < 1e-5
