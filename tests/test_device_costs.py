"""The step on a CUDA device that is not there: it runs whole on fake tensors, and what it costs is counted exactly.

`python -m pytest tests/test_device_costs.py -s` prints the table of `docs/speed.md`, and what each launch is.
"""

from collections.abc import Iterator
from typing import Any

import geoopt
import pytest
import torch
from support.fake_device import FREE, HELD, Costs, costs, fake_frames
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


def measured(vit: str, dtype: torch.dtype = torch.float32, *, layer_decay: bool = False, **options: Any) -> Costs:
    params = fake_frames(vit, dtype)
    counted = costs(ScaleFreeRiemannianAdam(decayed(params) if layer_decay else params, **options), params)
    counted.size = sum(p.numel() * 4 for p in params)
    row = f"{counted.launches.total()} | {counted.moved:.1f} × | {counted.transient:.2f} ×"
    print(f"\nViT-{vit} {dtype}, layer decay {layer_decay}, {options}: {row} = {dict(counted.launches)}")
    return counted


# Launches, bytes moved over the parameters' in float32, and the most memory held beside them over theirs.
COUNTED = [
    ("Ti", {}, 60, 55.4),
    ("S", {}, 60, 47.2),
    ("S", {"lr": 1e-4}, 55, 44.2),
    ("S", {"layer_decay": True}, 63, 47.2),
    ("S", {"dtype": torch.bfloat16}, 68, 55.7),
    ("B", {}, 211, 35.1),
    ("B", {"dtype": torch.bfloat16}, 248, 41.6),
    ("L", {}, 295, 34.1),
    ("L", {"dtype": torch.bfloat16}, 368, 40.6),
]


@pytest.mark.parametrize(("vit", "options", "launches", "moved"), COUNTED, ids=str)
def test_a_step_launches_moves_and_holds_what_is_written(
    vit: str, options: dict[str, Any], launches: int, moved: float
) -> None:
    counted = measured(vit, **options)
    assert counted.launches.total() == launches
    assert counted.moved == pytest.approx(moved, abs=0.05)
    assert counted.transient <= HELD[vit]


@pytest.mark.parametrize(("vit", "launches"), [("Ti", 684), ("S", 684), ("B", 684), ("L", 1368)])
def test_one_parameter_at_a_time_holds_under_a_third_of_the_frames(vit: str, launches: int) -> None:
    counted = measured(vit, foreach=False)
    assert counted.launches.total() == launches
    assert counted.transient < 1 / 3


@pytest.mark.parametrize("name", sorted(FREE - {"_unsafe_view"}))  # a view, but its schema does not say so
def test_what_is_counted_as_free_is_a_view_or_an_allocation(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if not overload.endswith("out")]
    of_tensors = [schema for schema in schemas if str(schema.arguments[0].type) == "Tensor"]  # others are of lists
    views = [each for each in of_tensors if each.returns[0].alias_info and not each.returns[0].alias_info.is_write]
    assert "empty" in name or views == of_tensors != []


def test_products_of_the_retraction_follow_from_lr() -> None:
    def small(lr: float | Tensor) -> int:
        counted = costs(ScaleFreeRiemannianAdam(params := fake_frames("S"), lr=lr), params).launches
        return sum(n for name, n in counted.items() if "bmm" in name) - 5  # WᵀG, Wᵀm, W·S, YᵀY and the new frames

    assert [small(lr) for lr in (1e-3, 1e-4, 1e-5, 0.0)] == [4, 2, 1, 1]
    assert small(torch.tensor(1e-5)) == 4  # a tensor is not read


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
