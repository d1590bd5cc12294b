"""patch, unpatch and frames keep the function of small models of every form of projection."""

import copy

import geoopt
import pytest
import torch
from support.parts import projection
from support.patch_cases import (
    Build,
    attentions,
    built,
    each_form,
    images,
    relative,
    small_vit,
)

import stiefel_geo
from stiefel_geo.attention.patching import cores


@each_form
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_patch_keeps_the_function(build: Build, dtype: torch.dtype, tolerance: float) -> None:
    model = built(build, dtype)
    before = model(images(model))
    stiefel_geo.patch(model)
    assert relative(model(images(model)), before) < tolerance


@each_form
def test_unpatch_keeps_function_classes_keys_and_their_order(build: Build) -> None:
    model = built(build)
    plain = copy.deepcopy(model)
    stiefel_geo.patch(model)
    stiefel_geo.unpatch(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert relative(model(images(model)), plain(images(plain))) < 1e-10


@each_form
def test_a_process_without_the_package_loads_what_unpatch_leaves(build: Build) -> None:
    model = built(build)
    stiefel_geo.patch(model)
    stiefel_geo.unpatch(model)
    fresh = build().double().eval()
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert relative(fresh(images(fresh)), model(images(model))) < 1e-10


@pytest.mark.parametrize("rows", [slice(0, 32), slice(32, 64), slice(0, 64)], ids=["W_Q", "W_K", "both"])
@pytest.mark.parametrize("kind", ["zero", "rank-deficient"])
def test_patch_keeps_the_function_of_singular_weights(rows: slice, kind: str) -> None:
    model = small_vit().double()
    for attention in attentions(model):
        weight = projection(attention, "qkv").weight.data
        weight[rows] = 0 if kind == "zero" else weight[rows][:1]
    before = model(images(model))
    stiefel_geo.patch(model)
    assert relative(model(images(model)), before) < 1e-10


@pytest.mark.parametrize("fused", [True, False], ids=["fused attention", "explicit attention"])
def test_patch_keeps_the_function_on_both_attention_paths(fused: bool) -> None:
    model = small_vit()
    for attention in attentions(model):
        vars(attention)["fused_attn"] = fused
    before = model(images(model))
    stiefel_geo.patch(model)
    assert relative(model(images(model)), before) < 1e-5


@each_form
def test_every_frame_gets_a_gradient(build: Build) -> None:
    model = built(build)
    stiefel_geo.patch(model)
    model(images(model)).square().sum().backward()
    for name, frame in stiefel_geo.frames(model):
        assert torch.linalg.matrix_norm(frame.grad).min() > 0, name


@each_form
def test_value_rows_are_bit_identical(build: Build) -> None:
    model = built(build)
    plain = copy.deepcopy(model)
    stiefel_geo.patch(model)
    for patched, old in zip(attentions(model), attentions(plain), strict=True):
        fused = getattr(old, "qkv", None) is not None
        now, before = (projection(each, "qkv" if fused else "v_proj").weight for each in (patched, old))
        values = slice(2 * len(before) // 3 if fused else 0, None)
        assert torch.equal(now[values], before[values])


@each_form
def test_frames_are_orthonormal_manifold_parameters(build: Build) -> None:
    model = built(build)
    stiefel_geo.patch(model)
    for _, frame in stiefel_geo.frames(model):
        assert isinstance(frame, geoopt.ManifoldParameter)
        assert isinstance(frame.manifold, stiefel_geo.PolarStiefel)
        assert stiefel_geo.stiefel.defect(frame).max() < 1e-12


def test_frames_and_cores_have_the_names_of_named_parameters() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    named = dict(model.named_parameters())
    for name, value in [*stiefel_geo.frames(model), *cores(model)]:
        assert named[name] is value


@each_form
def test_meta_model_gets_the_shapes_of_the_real_one(build: Build) -> None:
    real, meta = build(), build().to("meta")
    stiefel_geo.patch(real)
    stiefel_geo.patch(meta)
    shapes = {name: (type(p), p.shape) for name, p in real.named_parameters()}
    assert {name: (type(p), p.shape) for name, p in meta.named_parameters()} == shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model_keeps_its_function(dtype: torch.dtype) -> None:
    model = small_vit().to(dtype)
    x = images(model, batch=256)  # rounding errors of a few logits vary too much to be compared
    reference = copy.deepcopy(model).double()(x.double())
    error = relative(model(x).double(), reference)
    stiefel_geo.patch(model)
    assert relative(model(x).double(), reference) < 1.6 * error


@pytest.mark.cuda
def test_cuda_model_gets_the_frames_of_the_cpu_one() -> None:
    model = small_vit()
    twin = copy.deepcopy(model).cuda()
    stiefel_geo.patch(model)
    stiefel_geo.patch(twin)
    for (_, a), (_, b) in zip(stiefel_geo.frames(model), stiefel_geo.frames(twin), strict=True):
        assert torch.equal(a, b.cpu())
