"""What patch checks, selects, replaces and reports."""

import copy

import pytest
import timm
import torch
from support.parts import projection, qkv, rows_of
from support.patch_cases import (
    attentions,
    images,
    relative,
    small_vit,
    weights,
)
from torch import nn

import stiefel_geo
from stiefel_geo.attention.patching import Select, cores


def test_equal_weights_give_equal_frames() -> None:
    model = small_vit()
    twin = copy.deepcopy(model)
    stiefel_geo.patch(model)
    stiefel_geo.patch(twin)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(stiefel_geo.frames(model), stiefel_geo.frames(twin), strict=True)
    )


def test_patching_twice_changes_nothing_and_reports_the_same() -> None:
    model = small_vit()
    first = stiefel_geo.patch(model)
    before = list(model.parameters())
    assert stiefel_geo.patch(model) == first
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_patching_with_another_core_is_refused() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with pytest.raises(ValueError, match="unpatch"):
        stiefel_geo.patch(model, core="freeze")


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 4), timm.create_model("resnet10t"), nn.Sequential()], ids=["Linear", "ResNet", "empty"]
)
def test_a_model_without_attention_is_refused_and_untouched(model: nn.Module) -> None:
    before = weights(model)
    with pytest.raises(ValueError, match=r"Nothing in this .* can be patched"):
        stiefel_geo.patch(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class UnknownAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qk = nn.Linear(8, 16)


def test_unknown_attention_is_skipped_by_name_with_its_class() -> None:
    report = stiefel_geo.patch(nn.ModuleDict({"known": small_vit(), "unknown": UnknownAttention()}))
    (skipped,) = report.skipped
    assert skipped.module == "unknown"
    assert skipped.cls.endswith("UnknownAttention")
    assert "register_attention" in skipped.reason


SELECTIONS: dict[str, Select] = {
    "glob": "blocks.0.*",
    "globs": ["blocks.0.attn", "nothing"],
    "function": lambda name, module: name.startswith("blocks.0"),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_select_patches_what_it_names_alone(select: Select) -> None:
    report = stiefel_geo.patch(small_vit(), select=select)
    assert [entry.module for entry in report.patched] == ["blocks.0.attn"]
    assert [(entry.module, entry.reason) for entry in report.skipped] == [("blocks.1.attn", "not selected")]


def test_select_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"(?s)matches none.*blocks\.0\.attn"):
        stiefel_geo.patch(small_vit(), select="block.*")


def test_selecting_what_cannot_be_patched_is_refused_and_changes_nothing() -> None:
    model = nn.ModuleDict({"known": small_vit(), "unknown": UnknownAttention()})
    before = list(model.state_dict())
    with pytest.raises(ValueError, match="no layout is registered"):
        stiefel_geo.patch(model, select="*")
    assert list(model.state_dict()) == before


SPOILERS = {
    "NaN": (lambda a: a.qkv.weight.data.fill_(float("nan")), "NaN or infinity"),
    "parametrized": (lambda a: nn.utils.parametrizations.weight_norm(a.qkv), "already has a parametrization"),
    "another class": (lambda a: setattr(a, "qkv", nn.Sequential(nn.Linear(32, 96))), "not an nn.Linear"),
    "rows": (lambda a: setattr(a, "qkv", nn.Linear(32, 95)), "95 rows"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILERS.values(), ids=SPOILERS.keys())
def test_a_module_that_is_not_what_its_layout_says_is_skipped_with_the_reason(spoil, reason: str) -> None:
    model = small_vit()
    spoil(model.get_submodule("blocks.0.attn"))
    report = stiefel_geo.patch(model)
    assert [entry.module for entry in report.patched] == ["blocks.1.attn"]
    assert reason in report.skipped[0].reason


def test_a_weight_shared_by_two_modules_is_skipped() -> None:
    model = small_vit()
    qkv(model).weight = qkv(model, 1).weight
    with pytest.raises(ValueError, match="shared with another module"):
        stiefel_geo.patch(model)


def test_report_reads_as_one_line_per_kind_of_module() -> None:
    report = str(stiefel_geo.patch(small_vit()))
    assert report.splitlines()[0] == "patched 2 attention modules, 8 frames"
    assert "2 × timm.layers.attention.Attention: core learn, 4 × St(32, 16)" in report


def test_identity_reports_the_change_of_the_projections() -> None:
    model = small_vit().double()
    old = copy.deepcopy(model)
    report = stiefel_geo.patch(model, core="identity")
    for entry, new, plain in zip(report.patched, attentions(model), attentions(old), strict=True):
        assert relative(*(projection(each, "qkv").weight[:64] for each in (new, plain))) == pytest.approx(entry.change)
    assert "the projections changed by" in str(report)


@pytest.mark.parametrize("core", ["learn", "freeze"])
def test_lossless_cores_report_no_change(core: str) -> None:
    assert {entry.change for entry in stiefel_geo.patch(small_vit(), core=core).patched} == {0.0}


def test_freeze_keeps_the_function_and_has_no_trained_core() -> None:
    model = small_vit()
    before = model(images(model))
    stiefel_geo.patch(model, core="freeze")
    assert relative(model(images(model)), before) < 1e-5
    assert list(cores(model)) == []


def test_unknown_core_is_refused() -> None:
    with pytest.raises(ValueError, match="core must be one of"):
        stiefel_geo.patch(small_vit(), core="diagonal")


def test_replaced_parameters_say_that_they_are() -> None:
    model = small_vit()
    old = qkv(model).weight
    stiefel_geo.patch(model)
    frame = rows_of(qkv(model)).frames
    stiefel_geo.unpatch(model)
    assert "replaced by patch(model)" in vars(old)["_stiefel_geo_retired"]
    assert "replaced by unpatch(model)" in vars(frame)["_stiefel_geo_retired"]


def test_requires_grad_survives_patch_and_unpatch() -> None:
    model = small_vit()
    qkv(model).weight.requires_grad_(False)
    stiefel_geo.patch(model)
    assert not any(p.requires_grad for p in rows_of(qkv(model)).parameters())
    stiefel_geo.unpatch(model)
    assert [qkv(model, block).weight.requires_grad for block in (0, 1)] == [False, True]
