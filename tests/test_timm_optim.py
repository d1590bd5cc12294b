"""timm's factory, schedulers, averages, scaler, checkpoints and recipe around a patched model."""

import math
from typing import Any, ClassVar

import pytest
import timm
import torch
from support.tiny_vit import batch, frame_values, gap, largest_defect, tiny_vit, train
from timm.layers import Attention
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.optim._param_groups import auto_group_layers
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
from torch import nn
from torch.optim.swa_utils import AveragedModel

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam
from stiefel_geo.attention.patching import cores
from stiefel_geo.averaging import project_frames_
from stiefel_geo.groups import scale_lr_
from stiefel_geo.integrations.timm_optim import register_optimizer
from stiefel_geo.layers import layer_numbers

DECAY = 0.5

register_optimizer()


def movements(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """‖W_after − W_before‖_F of each block's frames over one step."""
    before = frame_values(model)
    train(model, optimizer, range(1))
    return [float((b - a).norm()) for a, b in zip(before, frame_values(model), strict=True)]


def test_the_factory_builds_the_optimizer_by_name():
    optimizer = create_optimizer_v2(tiny_vit(), opt="scalefreeradam", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    assert type(optimizer) is ScaleFreeRiemannianAdam
    assert optimizer.num_frames == 12


def test_layer_decay_of_the_factory_shows_in_the_movement_of_each_block():
    model = tiny_vit()
    optimizer = create_optimizer_v2(model, opt="scalefreeradam", lr=1e-3, layer_decay=DECAY)
    create_scheduler_v2(optimizer, sched="cosine", num_epochs=5)
    first, second, third = movements(model, optimizer)
    assert [first / second, second / third] == pytest.approx([DECAY, DECAY], rel=0.05)


def test_layer_decay_without_a_scheduler_shows_in_the_movement_of_each_block():
    model = tiny_vit()
    optimizer = ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05, layer_decay=DECAY), lr=1e-3)
    scale_lr_(optimizer)
    first, second, third = movements(model, optimizer)
    assert [first / second, second / third] == pytest.approx([DECAY, DECAY], rel=0.05)


def test_layer_scales_that_nothing_applies_are_refused():
    model = tiny_vit()
    optimizer = ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05, layer_decay=DECAY), lr=1e-3)
    with pytest.raises(RuntimeError, match="different lr_scale; build one of timm's schedulers, or call"):
        train(model, optimizer, range(1))


def test_cores_are_not_decayed_by_the_factory():
    model = tiny_vit()
    optimizer = create_optimizer_v2(model, opt="scalefreeradam", lr=1.0, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = [core.detach().clone() for _, core in cores(model)]
    optimizer.step()
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, cores(model), strict=True))


def test_other_weights_are_decayed_by_the_factory():
    model = tiny_vit()
    optimizer = create_optimizer_v2(model, opt="scalefreeradam", lr=1.0, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model.get_parameter("head.weight").detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.get_parameter("head.weight").detach(), before / 2)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")  # by timm, and used all the same
@pytest.mark.parametrize("schedule", ["cosine", "step", "multistep", "plateau", "poly", "tanh"])
def test_the_movement_of_frames_follows_every_scheduler(schedule):
    model = tiny_vit(depth=1)
    optimizer = create_optimizer_v2(model, opt="scalefreeradam", lr=3e-3, betas=(0.0, 0.0))
    settings: dict[str, Any] = {"decay_epochs": 1, "decay_milestones": (2,), "patience_epochs": 0, "decay_rate": 0.1}
    try:
        scheduler, _ = create_scheduler_v2(
            optimizer, sched=schedule, num_epochs=4, warmup_epochs=1, warmup_lr=1e-4, min_lr=1e-5, **settings
        )
    except TypeError as error:  # timm 1.0.20 hands torch's ReduceLROnPlateau an option that torch 2.7 dropped
        pytest.skip(f"timm {timm.__version__} does not fit torch {torch.__version__}: {error}")
    lrs = []
    for epoch in range(4):
        lrs.append(optimizer.param_groups[0]["lr"])
        (moved,) = movements(model, optimizer)
        assert moved / math.sqrt(4 * 32 * 16) == pytest.approx(lrs[-1], rel=0.01)
        scheduler.step(epoch + 1, metric=1.0)
    assert max(lrs) > 2 * min(lrs)


def averages(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """timm's EMA and torch's running mean of the model over 20 steps."""
    ema, mean = ModelEmaV3(model, decay=0.9), AveragedModel(model)
    optimizer = ScaleFreeRiemannianAdam(model.parameters(), lr=1e-2)

    def average() -> None:
        ema.update(model)
        mean.update_parameters(model)

    train(model, optimizer, range(20), after=average)
    return ema, mean


def test_averages_leave_the_manifold_and_one_call_puts_them_back():
    for average in averages(tiny_vit()):
        defect = largest_defect(average)
        assert defect > 1e-2
        assert project_frames_(average) == defect
        assert largest_defect(average) < 1e-6


def test_putting_an_average_back_leaves_the_model_alone():
    model = tiny_vit()
    ema, _ = averages(model)
    before = frame_values(model)
    project_frames_(ema)
    assert all(torch.equal(a, b) for a, b in zip(before, frame_values(model), strict=True))


def test_the_step_repairs_what_lookahead_averaged():
    model = tiny_vit()
    optimizer = create_optimizer_v2(model, opt="lookahead_scalefreeradam", lr=1e-2)
    train(model, optimizer, range(12))  # the first of its averages, after six steps, is a copy
    assert largest_defect(model) > 1e-3
    train(model, optimizer, range(1))
    assert largest_defect(model) < 1e-5


def test_native_scaler_with_clipping_trains_in_float16():
    model = tiny_vit()
    optimizer, scaler = create_optimizer_v2(model, opt="scalefreeradam", lr=1e-3), NativeScaler("cpu")
    before = frame_values(model)
    for index in range(2):
        images, labels = batch(index)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
    assert all(float((b - a).norm()) > 1e-3 for a, b in zip(before, frame_values(model), strict=True))
    assert largest_defect(model) < 1e-5


def test_a_run_resumed_from_timms_checkpoint_is_bit_equal(tmp_path):
    def start() -> tuple[nn.Module, torch.optim.Optimizer, ModelEmaV3]:
        model = tiny_vit()
        optimizer = create_optimizer_v2(model, opt="scalefreeradam", lr=1e-3, weight_decay=0.05)
        return model, optimizer, ModelEmaV3(model, decay=0.9)

    model, optimizer, ema = start()
    train(model, optimizer, range(3), after=lambda: ema.update(model))
    CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path)).save_checkpoint(0, metric=1.0)
    train(model, optimizer, range(3, 6), after=lambda: ema.update(model))

    resumed, again, ema_again = start()
    last = str(tmp_path / "last.pth.tar")
    resume_checkpoint(resumed, last, again)
    load_checkpoint(ema_again.module, last, use_ema=True)
    train(resumed, again, range(3, 6), after=lambda: ema_again.update(resumed))
    assert gap(model, resumed) == gap(ema, ema_again) == 0


def test_timms_registry_lists_the_optimizer_once():
    assert timm.optim.list_optimizers("scalefree*") == ["scalefreeradam"]


class Ungrouped(nn.Module):
    """A model of timm's parts that does not say how its layers are grouped: timm takes twelve parameters a layer."""

    pretrained_cfg: ClassVar = {"classifier": "head"}

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Attention(32, num_heads=2) for _ in range(30))
        self.head = nn.Linear(32, 3)


def test_layers_of_a_model_without_groups_are_timms_own_before_the_patch() -> None:
    model = Ungrouped()
    plain = auto_group_layers(model)
    stiefel_geo.patch(model)
    found = layer_numbers(model)
    frames = {found[name] for name, _ in stiefel_geo.frames(model) if name.startswith("blocks.20.")}
    assert frames == {plain["blocks.20.qkv.weight"]}
    assert frames.isdisjoint({0, max(plain.values())})
    kept = found.keys() & plain.keys()
    assert {name: found[name] for name in kept} == {name: plain[name] for name in kept}
    assert set(found) == {name for name, _ in model.named_parameters()}
