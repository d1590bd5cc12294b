"""The step without reads by the host, as an accelerator and torch.compile run it: here on the CPU, and on CUDA."""

import math
import os
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import SHAPES, frame, gradients
from support.example_scripts import validation
from support.fake_device import HELD, VITS
from support.frame_parameters import (
    as_frame,
    grad_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stiefel_geo import ScaleFreeRiemannianAdam, stiefel
from stiefel_geo.optim import bounds, norms, step

cuda = pytest.mark.cuda


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bounds, norms, step):
        monkeypatch.setattr(module, "reads_are_free", lambda X: False)


def path(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, **settings) -> torch.Tensor:
    p = frame(*shape, dtype=dtype)
    optimizer = ScaleFreeRiemannianAdam([p], **settings)
    for k, G in enumerate(gradients(shape, 30, dtype)):
        p.grad = G * scale
        if k == 7:
            p.grad.view(-1)[0] = math.nan
        optimizer.step()
    end: torch.Tensor = p.detach()
    return end


@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 1.0}, {"lr": 1e-3, "trust_radius": math.inf}])
@pytest.mark.parametrize("shape", SHAPES)
def test_path_without_reads_equals_the_path_with_them(
    shape: tuple[int, ...], settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with_reads = path(shape, torch.float64, **settings)
    request.getfixturevalue("no_reads")
    assert (path(shape, torch.float64, **settings) - with_reads).abs().max() < 1e-12


def test_bound_without_a_trust_region_counts_the_entries_of_square_frames(request: pytest.FixtureRequest) -> None:
    settings = {"lr": 1.0, "trust_radius": math.inf}
    with_reads = path((2, 24, 24), torch.float64, **settings)
    request.getfixturevalue("no_reads")
    assert (path((2, 24, 24), torch.float64, **settings) - with_reads).abs().max() < 1e-9


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
    counts: Counter[str] = calls.counts
    return counts


def products(counts: Counter[str]) -> int:
    return sum(number for name, number in counts.items() if "bmm" in name)


def test_arithmetic_of_a_step_does_not_grow_with_layers_of_equal_shape() -> None:
    few, many = calls_of_a_step(3), calls_of_a_step(12)
    views = ("view", "slice", "select", "detach", "split")
    assert products(few) >= 5
    grown = {name for name in many if many[name] > few[name] and not any(view in name for view in views)}
    assert not grown


@pytest.mark.usefixtures("no_reads")
def test_a_step_reads_no_value_on_the_host() -> None:
    counts = calls_of_a_step(3)
    assert products(counts) >= 5
    assert not [name for name in counts if "local_scalar_dense" in name or "nonzero" in name]


@pytest.mark.parametrize(("markers", "seen"), [("", ""), ("core", ""), ("slow and not cuda", ""), ("cuda", "0")])
def test_a_run_of_the_cuda_tests_alone_sees_gpus(
    markers: str, seen: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest is not None
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=markers)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def cuda_frames() -> list[torch.Tensor]:
    frames = [frame(24, 768, 64, dtype=torch.float32, seed=i) for i in range(3)]
    return [type(p)(p.detach().cuda(), manifold=p.manifold) for p in frames]


def started(params: list[torch.Tensor]) -> ScaleFreeRiemannianAdam:
    """An optimizer after its first step."""
    optimizer = ScaleFreeRiemannianAdam(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


@cuda
def test_a_step_on_cuda_never_waits_for_the_device() -> None:
    params = cuda_frames()
    optimizer = started(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert max(stiefel.defect(p).max().item() for p in params) < 1e-5


def copies(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Frames and plain parameters of their own, with the same gradients."""
    found = [p.detach().clone() for p in params]
    made = [as_frame(V) if hasattr(p, "manifold") else nn.Parameter(V) for p, V in zip(params, found, strict=True)]
    for p, q in zip(params, made, strict=True):
        q.grad = grad_of(p).clone()
    return made


@cuda
def test_a_captured_step_of_frames_and_plain_parameters_replays_as_the_eager_one_at_every_lr() -> None:
    eager = [*cuda_frames(), nn.Parameter(torch.randn(50, 30, device="cuda"))]
    for p in eager:
        p.grad = torch.randn_like(p)
    captured, lrs = copies(eager), [torch.tensor(1e-3, device="cuda") for _ in range(2)]
    sides = zip((eager, captured), lrs, strict=True)
    optimizers = [ScaleFreeRiemannianAdam(params, lr=lr, capturable=True) for params, lr in sides]
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    before = [p.detach().clone() for p in captured]
    for lr in (1e-3, 1e-2, 0.0, 3e-3):
        for each in lrs:
            each.fill_(lr)
        optimizers[0].step()
        graph.replay()
    assert max((p - q).abs().max().item() for p, q in zip(eager, captured, strict=True)) < 1e-6
    assert min((p - q).abs().max().item() for p, q in zip(before, captured, strict=True)) > 1e-3


@cuda
def test_a_step_captured_without_capturable_is_refused() -> None:
    params = cuda_frames()
    optimizer = started(params)
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@cuda
@pytest.mark.parametrize("vit", ["Ti", "S", "B", "L"])
def test_a_step_holds_what_was_counted_on_fake_tensors(vit: str) -> None:
    d, layers, heads = VITS[vit]
    drawn = [frame(2 * heads, d, 64, dtype=torch.float32, seed=i) for i in range(layers)]
    params = [as_frame(p.detach().cuda()) for p in drawn]
    optimizer = started(params)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= HELD[vit] * sum(4 * p.numel() for p in params)


@cuda
def test_ddp_and_fsdp2_over_nccl_train_the_frames_of_one_process(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"it needs two GPUs, torch sees {torch.cuda.device_count()}")
    rows = list(validation["several_gpus"].rows(validation["rows"].Settings("cuda", False, tmp_path)))
    assert {row.check.partition(":")[0] for row in rows} == {"DDP", "FSDP2"}
    assert [row for row in rows if row.holds is not True] == []
