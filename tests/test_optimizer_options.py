"""Options for accelerators, as far as a CPU can tell: fused, capturable, and groups that step as one batch."""

import copy
from typing import Any

import pytest
import torch
from support.frame_parameters import (
    assert_close,
    assert_same,
    drive,
    frame,
    give_gradients,
    mixed,
    optimizer_of,
    values,
    watched,
)


def test_fused_changes_no_frame() -> None:
    params, usual = mixed(), mixed()
    fused = drive(optimizer_of(params, fused=True), params, range(5))
    assert_same(fused[:-2], drive(optimizer_of(usual), usual, range(5))[:-2])


def test_fused_and_foreach_together_are_refused() -> None:
    with pytest.raises(ValueError, match="rule: fused and foreach exclude each other"):
        optimizer_of(mixed(), fused=True, foreach=True)


@pytest.mark.parametrize("fused", [True, None])
def test_fused_run_goes_on_from_a_fused_file_and_from_another(fused: bool | None) -> None:
    params, others = mixed(torch.float32), mixed(torch.float32)
    one, other = optimizer_of(params, fused=fused), optimizer_of(others, fused=True)
    drive(one, params, range(3))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    saved = copy.deepcopy(one.state_dict())  # torch's own loader shares the tensors
    saved["param_groups"][0]["fused"] = True
    other.load_state_dict(saved)
    assert_close(drive(other, others, range(3, 5)), drive(one, params, range(3, 5)), 1e-6)


class Stream:
    """A stream of an accelerator that is not there."""

    def __init__(self, capturing: bool) -> None:
        self.capturing = capturing

    def is_capturing(self) -> bool:
        return self.capturing


def pretend_capture(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """What torch's check asks: until 2.11 torch.cuda, then the accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: Stream(capturing))


@pytest.mark.parametrize("capturing", [True, False])
def test_a_step_captured_without_capturable_is_refused_as_torchs_adamw_refuses_it(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = mixed()[:-2]
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(1))
    before = values(params)
    pretend_capture(monkeypatch, capturing)
    give_gradients(params, 1)
    if capturing:
        with pytest.raises(RuntimeError, match="capturable is False"):
            optimizer.step()
        assert_same(values(params), before)
    else:
        optimizer.step()


LRS = {
    "numbers": [1e-3, 3e-2, 0.5],
    "tensors": [torch.tensor(lr, dtype=torch.float64) for lr in (1e-3, 3e-2, 0.5)],
    "both": [1e-3, torch.tensor([3e-2], dtype=torch.float64), 0.5],
}


def grouped(**changes: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Six parameters in three groups, of which each has what `changes` says for it."""
    params = [frame(2, 12, 4, seed=i) for i in range(6)]
    groups = [{"params": params[2 * i : 2 * i + 2], **{k: v[i] for k, v in changes.items()}} for i in range(3)]
    return params, groups


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Frames of every call of the step."""
    return watched(monkeypatch, lambda batches: batches[0].n)


@pytest.mark.parametrize("lrs", LRS.values(), ids=LRS)
def test_groups_that_differ_in_lr_step_in_one_batch_each_with_its_own(lrs: list[Any], batches: list[int]) -> None:
    params, groups = grouped(lr=lrs)
    together = drive(optimizer_of(groups), params, range(5))
    assert batches == [12] * 5
    alone = [frame(2, 12, 4, seed=i) for i in range(6)]
    optimizers = [optimizer_of(alone[2 * i : 2 * i + 2], lr=float(lrs[i])) for i in range(3)]

    def step() -> None:
        for each in optimizers:
            each.step()

    assert_close(together, drive(optimizers[0], alone, range(5), step), 1e-13)


@pytest.mark.parametrize(
    ("option", "values_"),
    [
        ("betas", [(0.9, 0.99), (0.5, 0.99), (0.9, 0.9)]),
        ("trust_radius", [1.0, 0.1, 2.0]),
        ("maximize", [False, True, False]),
    ],
)
def test_groups_that_differ_in_more_step_apart(option: str, values_: list[Any], batches: list[int]) -> None:
    params, groups = grouped(**{option: values_})
    drive(optimizer_of(groups), params, range(1))
    assert sum(batches) == 12
    assert len(batches) == len(set(values_))
