"""Checkpoints into and out of a patched model, its copies, and code that writes its weights."""

import copy
from pathlib import Path

import geoopt
import pytest
import torch
from support.parts import qkv
from support.patch_cases import (
    Build,
    built,
    each_form,
    images,
    randomise_,
    relative,
    small_vit,
    weights,
)
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.patching import unpatched

# --- checkpoints ---------------------------------------------------------------------------------


@each_form
def test_plain_checkpoint_loads_into_a_patched_model(build: Build) -> None:
    source, model = built(build), built(build)
    randomise_(source, seed=7)
    stiefel_geo.patch(model)
    model.load_state_dict(source.state_dict(), strict=True)
    assert relative(model(images(model)), source(images(source))) < 1e-10


@each_form
def test_patched_checkpoint_loads_bit_for_bit(build: Build) -> None:
    source, model = built(build), build().double().eval()
    stiefel_geo.patch(source)
    stiefel_geo.patch(model)
    model.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(model(images(model)), source(images(source)))


def test_patched_checkpoint_with_a_dead_head_loads_bit_for_bit() -> None:
    source, model = small_vit(), small_vit()
    qkv(source).weight.data[:32] = 0
    stiefel_geo.patch(source)
    stiefel_geo.patch(model)
    model.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(model(images(model)), source(images(source)))


@each_form
def test_plain_state_dict_has_plain_keys_in_plain_order_and_the_same_function(build: Build) -> None:
    model, fresh = built(build), build().double().eval()
    stiefel_geo.patch(model)
    plain = stiefel_geo.plain_state_dict(model)
    assert list(plain) == list(fresh.state_dict())
    fresh.load_state_dict(plain, strict=True)
    assert relative(fresh(images(fresh)), model(images(model))) < 1e-10


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "patched"])
def test_assigned_checkpoint_materialises_a_patched_meta_model(plain: bool) -> None:
    source, model = small_vit(), small_vit().to("meta")
    stiefel_geo.patch(model)
    patched = copy.deepcopy(source)
    stiefel_geo.patch(patched)
    model.load_state_dict((source if plain else patched).state_dict(), strict=True, assign=True)
    assert all(isinstance(p, geoopt.ManifoldParameter) for _, p in stiefel_geo.frames(model))
    assert relative(model(images(source)), source(images(source))) < 1e-5


def test_checkpoint_of_another_width_is_refused_by_name() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.attn\.qkv\.weight"):
        model.load_state_dict(small_vit(embed_dim=16).state_dict(), strict=False)


def test_state_dict_holds_plain_tensors_that_load_with_weights_only(tmp_path: Path) -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {type(value) for value in state.values()} == {Tensor}


def test_pickling_a_patched_model_names_the_state_dict(tmp_path: Path) -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with pytest.raises(RuntimeError, match="state_dict"):
        torch.save(model, tmp_path / "model.pt")


# --- copies and code that writes weights ---------------------------------------------------------


def test_unpatching_a_deep_copy_leaves_the_original_patched() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    before = model(images(model))
    twin = copy.deepcopy(model)
    stiefel_geo.unpatch(twin)
    assert torch.equal(model(images(model)), before)
    assert relative(twin(images(twin)), before) < 1e-5


def test_init_weights_after_patch_does_what_it_does_to_a_plain_model() -> None:
    model = small_vit()
    plain = copy.deepcopy(model)
    stiefel_geo.patch(model)
    for each in (plain, model):
        torch.manual_seed(3)
        each.init_weights()
    assert relative(model(images(model)), plain(images(plain))) < 1e-5


def test_init_weights_of_a_deep_copy_writes_the_copy_alone() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    before = model(images(model))
    twin = copy.deepcopy(model)
    twin.init_weights()
    assert torch.equal(model(images(model)), before)
    assert not torch.equal(twin(images(model)), before)


def test_unpatched_block_that_writes_nothing_gives_the_same_frames_back() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    parameters, before = dict(model.named_parameters()), weights(model)
    with unpatched(model):
        assert "blocks.0.attn.qkv.weight" in model.state_dict()
    assert dict(model.named_parameters()) == parameters
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_unpatched_block_factorises_what_it_leaves_into_the_same_parameters() -> None:
    model, other = small_vit(), randomise_(small_vit(), seed=5)
    stiefel_geo.patch(model)
    parameters = list(model.parameters())
    with unpatched(model):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data.copy_(q)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(hasattr(p, "_stiefel_geo_retired") for p in parameters)
    assert relative(model(images(model)), other(images(other))) < 1e-5


def test_projections_that_a_block_replaces_stay_plain_with_a_warning() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with pytest.warns(RuntimeWarning, match="plain now"), unpatched(model):
        model.get_submodule("blocks.0.attn").qkv = nn.Linear(32, 96)
    assert stiefel_geo.patch(model).patched[0].module == "blocks.0.attn"
