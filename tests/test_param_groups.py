"""param_groups: who is decayed, who learns how fast, on patched and unpatched models."""

from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import stiefel_geo
from stiefel_geo.attention.patching import cores
from stiefel_geo.groups import scale_lr_
from stiefel_geo.integrations.coverage import Timm

ARCHITECTURES = ("vit_tiny_patch16_224", "beit_base_patch16_224", "cait_xxs24_224")


def build(name: str = ARCHITECTURES[0]) -> Any:
    return Timm().build(name)  # on the meta device


def by_parameter(groups: list[dict[str, Any]], *keys: str) -> dict[int, tuple[Any, ...]]:
    return {id(p): tuple(group.get(key) for key in keys) for group in groups for p in group["params"]}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_unpatched_model_gets_the_decay_that_timm_gives_it(name):
    model = build(name)
    ours = by_parameter(stiefel_geo.param_groups(model, 0.05), "weight_decay")
    assert ours == by_parameter(
        param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay()), "weight_decay"
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_unpatched_model_gets_the_layer_scales_that_timm_gives_it(name):
    model = build(name)
    theirs = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.75)
    ours = stiefel_geo.param_groups(model, 0.05, layer_decay=0.75)
    assert by_parameter(ours, "lr_scale", "weight_decay") == by_parameter(theirs, "lr_scale", "weight_decay")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_in_one_group(name):
    model = build(name)
    stiefel_geo.patch(model)
    listed = [id(p) for group in stiefel_geo.param_groups(model, 0.05, layer_decay=0.7) for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_patched_weight_keeps_its_layer(name):
    model, patched = build(name), build(name)
    stiefel_geo.patch(patched)
    before = by_parameter(stiefel_geo.param_groups(model, 0.05, layer_decay=0.7), "lr_scale")
    after = by_parameter(stiefel_geo.param_groups(patched, 0.05, layer_decay=0.7), "lr_scale")
    scales = {n: before[id(p)] for n, p in model.named_parameters()}
    for n, p in patched.named_parameters():
        plain = n.rpartition(".0.")[0].replace("parametrizations.", "") if "parametrizations" in n else n
        assert after[id(p)] == scales[plain], n


def test_frames_and_cores_are_never_decayed():
    model = build()
    stiefel_geo.patch(model)
    decay = by_parameter(stiefel_geo.param_groups(model, 0.05), "name", "weight_decay")
    assert {decay[id(p)] for _, p in stiefel_geo.frames(model)} == {("frames", 0.0)}
    assert {decay[id(p)] for _, p in cores(model)} == {("cores", 0.0)}


def test_value_rows_are_decayed_as_the_weight_was():
    model = build()
    stiefel_geo.patch(model)
    decay = by_parameter(stiefel_geo.param_groups(model, 0.05), "weight_decay")
    assert {decay[id(p)] for n, p in model.named_parameters() if n.endswith(".rest")} == {(0.05,)}


def test_a_pattern_in_no_weight_decay_holds_for_the_patched_weight():
    model = build()
    model.no_weight_decay = lambda: {"blocks.0.attn.qkv.weight"}
    stiefel_geo.patch(model)
    decay = by_parameter(stiefel_geo.param_groups(model, 0.05), "weight_decay")
    rest = {n: decay[id(p)][0] for n, p in model.named_parameters() if n.endswith(".rest")}
    assert [n for n, value in rest.items() if value == 0] == ["blocks.0.attn.qkv.parametrizations.weight.0.rest"]


def test_frozen_parameters_are_in_no_group():
    model = build()
    stiefel_geo.patch(model)
    model.patch_embed.requires_grad_(False)
    listed = by_parameter(stiefel_geo.param_groups(model, 0.05), "name")
    assert [n for n, p in model.named_parameters() if id(p) not in listed] == [
        "patch_embed.proj.weight", "patch_embed.proj.bias",
    ]  # fmt: skip


def test_a_model_inside_a_wrapper_is_grouped_as_by_itself():
    model = build()
    stiefel_geo.patch(model)
    alone = by_parameter(stiefel_geo.param_groups(model, 0.05, layer_decay=0.7), "name", "lr_scale", "weight_decay")
    wrapper = nn.ModuleDict({"inner": model, "head": nn.Linear(2, 2)})
    wrapped = by_parameter(stiefel_geo.param_groups(wrapper, 0.05, layer_decay=0.7), "name", "lr_scale", "weight_decay")
    assert {key: wrapped[key] for key in alone} == alone
    assert wrapped[id(wrapper["head"].weight)] == ("layer 13 decayed", 1.0, 0.05)


def test_scale_lr_moves_the_scales_into_the_learning_rates():
    model = build()
    optimizer = torch.optim.SGD(stiefel_geo.param_groups(model, 0.0, layer_decay=0.5), lr=0.8)
    scale_lr_(optimizer)
    lrs = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert (lrs["layer 13 undecayed"], lrs["layer 12 undecayed"]) == (0.8, 0.4)
    assert not any("lr_scale" in group for group in optimizer.param_groups)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_frame_lr_scale_multiplies_the_lr_of_frames_alone(layer_decay):
    model = build()
    stiefel_geo.patch(model)
    usual = by_parameter(stiefel_geo.param_groups(model, 0.05, layer_decay=layer_decay), "name", "lr_scale")
    raised = stiefel_geo.param_groups(model, 0.05, layer_decay=layer_decay, frame_lr_scale=10.0)
    frames = {id(p) for _, p in stiefel_geo.frames(model)}
    for key, (name, scale) in by_parameter(raised, "name", "lr_scale").items():
        assert (name, scale) == (usual[key][0], (usual[key][1] or 1.0) * (10.0 if key in frames else 1.0))


def test_a_step_before_the_lr_of_frames_is_scaled_is_refused():
    model = timm.create_model(ARCHITECTURES[0], img_size=32, patch_size=16, embed_dim=24, depth=1, num_heads=3)
    stiefel_geo.patch(model)
    groups = stiefel_geo.param_groups(model, 0.05, frame_lr_scale=10.0)
    optimizer = stiefel_geo.ScaleFreeRiemannianAdam(groups, lr=1e-3)
    model(torch.ones(2, 3, 32, 32)).square().sum().backward()
    with pytest.raises(RuntimeError, match="multiplies lr by each group's lr_scale"):
        optimizer.step()
    scale_lr_(optimizer)
    optimizer.step()
    assert {group["name"]: group["lr"] for group in optimizer.param_groups}["frames"] == pytest.approx(1e-2)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_frame_lr_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(ValueError, match="frame_lr_scale must be above 0 and finite; got"):
        stiefel_geo.param_groups(build(), 0.05, frame_lr_scale=scale)
