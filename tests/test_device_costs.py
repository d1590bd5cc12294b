"""The step on a CUDA device that is not there: it runs whole on fake tensors, and what it costs is counted exactly.

`python -m pytest tests/test_device_costs.py -s` prints the table. Before the batches of all groups (adba787) it read:
ViT-S 108 launches, 47.5 × the parameters moved, 6.7 × held; with layer decay 1140 launches; with bfloat16 frames 192;
ViT-B 111, 43.3 ×, 6.3 ×; ViT-L 113, 42.2 ×, 6.3 ×.
"""

from collections.abc import Iterator
from typing import Any

import geoopt
import pytest
import torch
from support.fake_device import Costs, costs, fake_frames
from support.tiny_vit import tiny_vit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.optim import checks


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """No memory, so no defect to check when the optimizer is built."""
    monkeypatch.setattr(checks, "check_on_manifold", lambda p: None)
    with FakeTensorMode() as mode:
        yield mode


def decayed(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 1e-3 * 0.9**i} for i, p in enumerate(params)]


def measured(
    label: str, params: list[nn.Parameter], groups: list[dict[str, Any]] | None = None, **options: Any
) -> Costs:
    counted = costs(ScaleFreeRiemannianAdam(groups or params, **options), params)
    size = sum(p.numel() * 4 for p in params)
    launches, moved, held = counted.launches.total(), counted.bytes / size, counted.peak / size
    print(f"| {label} | {launches} | {counted.bytes / 1e6:.0f} ({moved:.1f} ×) | {held:.2f} × |")
    return counted


def test_launches_of_vit_s() -> None:
    full = measured("ViT-S", fake_frames("S"))
    short = measured("ViT-S, lr 1e-4", fake_frames("S"), lr=1e-4)
    assert full.launches.total() <= 73
    assert short.launches.total() <= 67


def test_groups_that_differ_in_lr_cost_two_launches_more() -> None:
    one, params = measured("ViT-S", fake_frames("S")), fake_frames("S")
    many = measured("ViT-S, layer decay", params, decayed(params))
    assert many.launches.total() == one.launches.total() + 2


def test_half_precision_costs_a_tenth_of_the_launches_more() -> None:
    one = measured("ViT-S", fake_frames("S"))
    half = measured("ViT-S, bfloat16", fake_frames("S", torch.bfloat16))
    assert half.launches.total() <= 1.12 * one.launches.total()


def test_products_of_the_retraction_follow_from_lr() -> None:
    def small(lr: float | Tensor) -> int:
        products = costs(ScaleFreeRiemannianAdam(params := fake_frames("S"), lr=lr), params).launches
        return products["bmm"] + products["baddbmm"] - 5  # WᵀG, Wᵀm, W·S, YᵀY and the new frames

    assert [small(lr) for lr in (1e-3, 1e-4, 1e-5, 0.0)] == [4, 2, 1, 1]
    assert small(torch.tensor(1e-5)) == 4  # a tensor is not read


@pytest.mark.parametrize("vit", ["B", "L"])
def test_large_frames_go_through_in_parts(vit: str) -> None:
    params = fake_frames(vit)
    counted = measured(f"ViT-{vit}", params)
    size = sum(p.numel() * 4 for p in params)
    assert counted.peak <= 1.0 * size
    assert counted.bytes <= 34 * size


def stepped(params: list[nn.Parameter], lr: float | Tensor = 1e-3, **options: Any) -> ScaleFreeRiemannianAdam:
    optimizer = ScaleFreeRiemannianAdam(params, **options)
    optimizer.param_groups[0]["lr"] = lr
    for _ in range(2):
        optimizer.step()
    return optimizer


def state_devices(optimizer: ScaleFreeRiemannianAdam) -> set[str]:
    return {value.device.type for state in optimizer.state.values() for value in state.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"maximize": True}], ids=str)
def test_whole_step_stays_on_the_device_and_reads_nothing(dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert state_devices(stepped(fake_frames("S", dtype, layers=2), **options)) == {"cuda"}


def plain() -> nn.Parameter:
    """A Euclidean parameter; torch's AdamW reads counters on the host unless capturable."""
    p = nn.Parameter(torch.empty(5, 3, device="cuda"))
    p.grad = torch.empty_like(p)
    return p


def test_step_of_frames_and_plain_parameters_that_a_graph_can_capture_reads_nothing() -> None:
    assert state_devices(stepped([*fake_frames("S", layers=2), plain()], capturable=True)) == {"cuda"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensor_lr_of_one_element_serves_frames_on_the_device(shape: tuple[int, ...], device: str) -> None:
    params, lr = fake_frames("S", layers=2), torch.full(shape, 1e-3, device=device)
    stepped(params + [plain()] * (device == "cuda"), lr, capturable=True)


def test_a_patched_model_runs_on_the_device_and_so_does_the_step_of_all_its_parameters() -> None:
    with unset_fake_temporarily():
        model = tiny_vit(depth=1)
    own = dict(model.named_parameters())
    params = {name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda")) for name, p in own.items()}
    values: dict[str, Tensor] = {**params}
    with torch.no_grad():  # torch's engine of gradients asks for a device that is there
        logits = torch.func.functional_call(model, values, (torch.empty(2, 3, 16, 16, device="cuda"),))
    assert (logits.device.type, logits.shape) == ("cuda", (2, 10))
    for name, p in params.items():
        p.grad = torch.empty_like(p)
        if isinstance(own[name], geoopt.ManifoldParameter):
            vars(p)["manifold"] = vars(own[name])["manifold"]
    optimizer = stepped(list(params.values()), capturable=True)
    assert len(optimizer.state) == len(params)
    assert optimizer.num_frames == 4
    assert state_devices(optimizer) == {"cuda"}


def test_frames_on_mps_are_refused_in_one_sentence_when_the_optimizer_is_built() -> None:
    with pytest.raises(ValueError, match=r"rule: frames and points keep scalars in float64, which MPS has not"):
        ScaleFreeRiemannianAdam(fake_frames("S", layers=1, device="mps"))
