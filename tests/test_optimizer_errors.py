"""Wrong calls of the optimizer: each is refused with the rule, the value found and a remedy, and changes nothing."""

import math
from typing import Any

import geoopt
import pytest
import torch
from support.frame_parameters import (
    as_frame,
    assert_same,
    drive,
    entries,
    frame,
    give_gradients,
    grad_of,
    mixed,
    optimizer_of,
    values,
)
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam

NAN, INF = math.nan, math.inf
OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1e-3}, "lr = -0.001"),
    ({"lr": NAN}, "lr = nan"),
    ({"lr": INF}, "lr = inf"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, r"found shape \(2,\)"),
    ({"betas": (1.0, 0.9)}, r"betas = \(1.0, 0.9\)"),
    ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\)"),
    ({"betas": (-0.1, 0.9)}, r"betas = \(-0.1, 0.9\)"),
    ({"betas": (0.9, NAN)}, r"betas = \(0.9, nan\)"),
    ({"eps": -1e-8}, "eps = -1e-08"),
    ({"eps": NAN}, "eps = nan"),
    ({"weight_decay": -0.1}, "weight_decay = -0.1"),
    ({"weight_decay": NAN}, "weight_decay = nan"),
    ({"trust_radius": 0.0}, "trust_radius = 0.0"),
    ({"trust_radius": -1.0}, "trust_radius = -1.0"),
    ({"trust_radius": NAN}, "trust_radius = nan"),
    ({"trust_radius": INF, "betas": (0.99, 0.9)}, "β₁² < β₂"),
    ({"trust_radius": INF, "lr": torch.tensor(1e-3)}, "a float lr"),
]
LABELS = [" ".join(f"{key}={value}" for key, value in options.items()) for options, _ in OUT_OF_RANGE]


@pytest.mark.parametrize(("options", "found"), OUT_OF_RANGE, ids=LABELS)
def test_setting_out_of_range_is_refused_with_rule_and_value(options, found):
    with pytest.raises(ValueError, match=f"rule: .*found.*{found}|rule: .*{found}"):
        ScaleFreeRiemannianAdam(mixed(), **options)


@pytest.mark.parametrize(("options", "found"), OUT_OF_RANGE, ids=LABELS)
def test_setting_out_of_range_is_refused_in_a_group_and_adds_none(options, found):
    optimizer = optimizer_of(mixed())
    with pytest.raises(ValueError, match=found):
        optimizer.add_param_group({"params": [frame(12, 4, seed=9)], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", [{"trust_radius": INF}, {"lr": 0}, {"lr": 0.0}, {"eps": 0.0}, {"betas": (0.0, 0.0)}])
def test_settings_on_the_edge_of_their_range_are_taken(option):
    params = mixed()
    drive(optimizer_of(params, **option), params, range(2))
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("unknown", ["amsgrad", "momentum", "differentiable", "trust_ratio"])
def test_option_that_would_have_no_effect_is_refused(unknown):
    with pytest.raises(TypeError, match=unknown):
        optimizer_of(mixed(), **{unknown: True})


@pytest.mark.parametrize("wrong", ["1e-3", None, 1e-3 + 0j])
def test_lr_of_a_wrong_type_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="lr"):
        ScaleFreeRiemannianAdam(mixed(), lr=wrong)


@pytest.mark.parametrize("wrong", [0.9, (0.9,), (0.9, 0.99, 0.999), "09"])
def test_betas_that_are_no_pair_of_numbers_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="betas"):
        ScaleFreeRiemannianAdam(mixed(), betas=wrong)


def test_empty_list_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        ScaleFreeRiemannianAdam([])


def test_tensor_in_place_of_a_list_is_refused():
    with pytest.raises(TypeError, match="iterable"):
        ScaleFreeRiemannianAdam(frame(3, 12, 4))


def test_set_of_parameters_is_refused():
    optimizer = optimizer_of(mixed())
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {frame(12, 4)}})


def test_duplicate_within_a_group_is_warned_of_as_torch_does():
    p = frame(12, 4)
    with pytest.warns(UserWarning, match="duplicate"):
        ScaleFreeRiemannianAdam([p, p])


def test_duplicate_in_two_groups_is_refused():
    p = frame(12, 4)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ScaleFreeRiemannianAdam([{"params": [p]}, {"params": [p]}])


def test_things_that_are_no_parameters_are_refused():
    with pytest.raises(TypeError, match="optimize"):
        optimizer_of([1.0])
    with pytest.raises(ValueError, match="non-leaf"):
        ScaleFreeRiemannianAdam([frame(12, 4) * 2])


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="view_as_real"):
        ScaleFreeRiemannianAdam([nn.Parameter(torch.ones(3, dtype=torch.complex64))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spoil", [lambda W: 1.2 * W, lambda W: W + 0.2, lambda W: W * NAN, torch.zeros_like])
def test_frame_off_the_manifold_is_refused_with_its_defect(dtype, spoil):
    p = as_frame(spoil(frame(3, 12, 4, dtype=dtype).detach()))
    with pytest.raises(ValueError, match=r"rule: .*found .*shape \(3, 12, 4\); project it first"):
        ScaleFreeRiemannianAdam([p])


def test_remedy_for_a_frame_off_the_manifold_works():
    p = as_frame(1.2 * frame(3, 12, 4).detach())
    p.data.copy_(p.manifold.projx(p.data))
    assert ScaleFreeRiemannianAdam([p]).num_frames == 3


def test_frame_wider_than_tall_is_refused():
    with pytest.raises(ValueError, match="rule: "):
        ScaleFreeRiemannianAdam([as_frame(frame(12, 4).detach().mT.contiguous())])


def test_group_with_a_frame_off_the_manifold_is_not_added():
    optimizer = optimizer_of(mixed())
    bad = as_frame(2 * frame(12, 4).detach())
    with pytest.raises(ValueError, match="project it first"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [frame(12, 4, seed=3)]})
    assert optimizer.num_frames == optimizer_of(mixed()).num_frames + 1


@pytest.mark.parametrize(
    "make", [lambda: frame(12, 4), lambda: nn.Parameter(torch.ones(12, 4))], ids=["frame", "plain"]
)
def test_sparse_gradient_is_refused_and_moves_nothing(make):
    p = make()
    before = p.detach().clone()
    optimizer = optimizer_of([p])
    p.grad = torch.ones_like(p).detach().to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(p, before)


def test_refused_gradient_leaves_parameters_before_it_as_they_were():
    params = mixed()
    optimizer = optimizer_of([{"params": params[:-1]}, {"params": params[-1:]}])
    drive(optimizer, params, range(2))
    before, state = values(params), entries(optimizer)
    give_gradients(params, 2)
    params[-1].grad = grad_of(params[-1]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_same(values(params), before)
    assert_same([x for *_, x in entries(optimizer)], [x for *_, x in state])


REFUSED_BY_ADAMW = [
    ({"capturable": True}, "on cpu and its counter on cpu"),
    ({"capturable": True, "foreach": True}, "on cpu and its counter on cpu"),
    ({"foreach": True, "lr": torch.tensor(1e-2)}, "leave foreach out"),
]
REFUSED_LABELS = ["capturable", "capturable foreach", "foreach tensor lr"]


@pytest.mark.parametrize(("options", "found"), REFUSED_BY_ADAMW, ids=REFUSED_LABELS)
def test_option_that_adamw_refuses_of_plain_parameters_is_refused_before_a_frame_moves(options, found):
    params = mixed()
    optimizer = optimizer_of(params, **options)
    with pytest.raises(RuntimeError, match=f"rule: .*{found}"):
        drive(optimizer, params, range(1))
    assert_same(values(params), values(mixed()))
    assert not any(state["step"].any() for state in optimizer.state.values())


def test_counter_that_capturable_cannot_use_is_refused_before_a_frame_moves():
    """Switched on after a step, as code does that captures a graph late."""
    params = mixed()
    optimizer = optimizer_of(params)
    drive(optimizer, params, range(1))
    before = values(params)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(RuntimeError, match="found a parameter on cpu"):
        drive(optimizer, params, range(1, 2))
    assert_same(values(params), before)


def small_vit():
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3)


def backward(model):
    model(torch.ones(2, 3, 16, 16)).square().sum().backward()


@pytest.mark.parametrize("change", [stiefel_geo.patch, stiefel_geo.unpatch])
def test_optimizer_built_before_patch_or_unpatch_is_refused_by_name(change):
    model = small_vit()
    if change is stiefel_geo.unpatch:
        stiefel_geo.patch(model)
    optimizer = ScaleFreeRiemannianAdam(model.parameters())
    change(model)
    backward(model)
    with pytest.raises(ValueError, match=rf"found this parameter was replaced by {change.__name__}\(model\)"):
        optimizer.step()


def test_optimizer_built_from_retired_parameters_is_refused():
    model = small_vit()
    old = list(model.parameters())
    stiefel_geo.patch(model)
    with pytest.raises(ValueError, match="build the optimizer after it"):
        ScaleFreeRiemannianAdam(old)


def test_layer_scales_that_nothing_applied_are_refused():
    params = mixed()
    groups = [{"params": [p], "lr_scale": 0.5**i} for i, p in enumerate(params)]
    optimizer = optimizer_of(groups)
    with pytest.raises(RuntimeError, match="lr_scale"):
        drive(optimizer, params, range(1))


def test_groups_whose_frames_a_wrapper_flattened_are_refused():
    """DeepSpeed's ZeRO puts one flat tensor in the place of a group's parameters, which AdamW would move."""
    optimizer = optimizer_of([{"params": [frame(2, 8, 4)]}, {"params": [nn.Parameter(torch.ones(3))]}])
    flat = nn.Parameter(torch.ones(64))
    optimizer.param_groups[0]["params"] = [flat]
    before = flat.detach().clone()
    with pytest.raises(RuntimeError, match=r"found none of its \d+ frames"):
        drive(optimizer, [flat], range(1))
    assert_same([flat], [before])


def test_manifold_parameter_of_a_subclassed_stiefel_is_stepped_by_its_own_operations():
    """A user's own retraction is not replaced by ours without a word."""

    class Own(geoopt.EuclideanStiefel):  # type: ignore[misc]  # geoopt has no types
        calls = 0

        def retr(self, x, u):
            Own.calls += 1
            return super().retr(x, u)

    p = geoopt.ManifoldParameter(frame(12, 4).detach().clone(), manifold=Own())
    drive(optimizer_of([p]), [p], range(2))
    assert Own.calls == 2
