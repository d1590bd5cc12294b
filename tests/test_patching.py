"""patch, unpatch, frames, plain_state_dict on small models of every form of projection."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import geoopt
import pytest
import timm
import torch
from patch_cases import FORMS, images, randomise_, relative, small_vit
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.layouts import find
from stiefel_geo.patching import cores, unpatched

each_form = pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())
Build = Callable[[], nn.Module]


def built(build: Build, dtype: torch.dtype = torch.float64) -> nn.Module:
    return randomise_(build().to(dtype)).eval()


def attentions(model: nn.Module) -> list[nn.Module]:
    stiefel_geo.patching.load_table()
    return [module for module in model.modules() if find(module) is not None]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- the same function ---------------------------------------------------------------------------


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
        weight = attention.qkv.weight.data
        weight[rows] = 0 if kind == "zero" else weight[rows][:1]
    before = model(images(model))
    stiefel_geo.patch(model)
    assert relative(model(images(model)), before) < 1e-10


@pytest.mark.parametrize("fused", [True, False], ids=["fused attention", "explicit attention"])
def test_patch_keeps_the_function_on_both_attention_paths(fused: bool) -> None:
    model = small_vit()
    for attention in attentions(model):
        attention.fused_attn = fused
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
        if patched.qkv is not None:
            third = len(old.qkv.weight) // 3
            assert torch.equal(patched.qkv.weight[2 * third :], old.qkv.weight[2 * third :])
        else:
            assert torch.equal(patched.v_proj.weight, old.v_proj.weight)


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


def test_plain_logits_are_canonical_and_normed_ones_polar() -> None:
    plain = stiefel_geo.patch(small_vit())
    normed = stiefel_geo.patch(small_vit(qk_norm=True))
    assert {entry.factorisation for entry in plain.patched} == {"canonical"}
    assert {entry.factorisation for entry in normed.patched} == {"polar"}


def test_a_subclass_with_its_own_forward_is_polar() -> None:
    class Rotated(timm.layers.Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(-1))

    attention = Rotated(32, num_heads=2)
    assert stiefel_geo.patch(attention).patched[0].factorisation == "polar"


# --- patch: checks, select, report ---------------------------------------------------------------


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


SELECTIONS = {
    "glob": "blocks.0.*",
    "globs": ["blocks.0.attn", "nothing"],
    "function": lambda name, module: name.startswith("blocks.0"),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_select_patches_what_it_names_alone(select: object) -> None:
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
    spoil(model.blocks[0].attn)
    report = stiefel_geo.patch(model)
    assert [entry.module for entry in report.patched] == ["blocks.1.attn"]
    assert reason in report.skipped[0].reason


def test_a_weight_shared_by_two_modules_is_skipped() -> None:
    model = small_vit()
    model.blocks[0].attn.qkv.weight = model.blocks[1].attn.qkv.weight
    with pytest.raises(ValueError, match="shared with another module"):
        stiefel_geo.patch(model)


def test_report_reads_as_one_line_per_kind_of_module() -> None:
    report = str(stiefel_geo.patch(small_vit()))
    assert report.splitlines()[0] == "patched 2 attention modules, 8 frames"
    assert "2 × timm.layers.attention.Attention: canonical, core learn, 4 × St(32, 16)" in report


def test_identity_reports_the_change_of_the_logits() -> None:
    model = small_vit().double()
    old = copy.deepcopy(model)
    report = stiefel_geo.patch(model, core="identity")
    for entry, new, plain in zip(report.patched, attentions(model), attentions(old), strict=True):
        products = []
        for weight in (new.qkv.weight, plain.qkv.weight):
            q, k, _ = weight.view(3, 2, 16, 32).unbind()
            products.append(q.mT @ k)
        assert relative(*products) == pytest.approx(entry.change)
    assert "W_Q W_Kᵀ changed by" in str(report)


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
    old = model.blocks[0].attn.qkv.weight
    stiefel_geo.patch(model)
    frame = model.blocks[0].attn.qkv.parametrizations.weight[0].frames
    stiefel_geo.unpatch(model)
    assert "replaced by patch(model)" in old._stiefel_geo_retired
    assert "replaced by unpatch(model)" in frame._stiefel_geo_retired


def test_requires_grad_survives_patch_and_unpatch() -> None:
    model = small_vit()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    stiefel_geo.patch(model)
    assert not any(p.requires_grad for p in model.blocks[0].attn.qkv.parametrizations.parameters())
    stiefel_geo.unpatch(model)
    assert [block.attn.qkv.weight.requires_grad for block in model.blocks] == [False, True]


# --- devices and dtypes --------------------------------------------------------------------------


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_model_gets_the_frames_of_the_cpu_one() -> None:
    model = small_vit()
    twin = copy.deepcopy(model).cuda()
    stiefel_geo.patch(model)
    stiefel_geo.patch(twin)
    for (_, a), (_, b) in zip(stiefel_geo.frames(model), stiefel_geo.frames(twin), strict=True):
        assert torch.equal(a, b.cpu())


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


def test_patched_checkpoint_loads_into_a_module_with_cores_of_the_other_form() -> None:
    source, model = small_vit(), small_vit()
    source.blocks[0].attn.qkv.weight.data[:32] = 0  # polar, its cores are not diagonal
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
    copy.deepcopy(model).init_weights()
    assert torch.equal(model(images(model)), before)


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
        model.blocks[0].attn.qkv = nn.Linear(32, 96)
    assert stiefel_geo.patch(model).patched[0].module == "blocks.0.attn"


# --- PyTorch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fused, bias", "eva, q_bias and zero k_bias"])
def test_compiled_without_graph_breaks(name: str) -> None:
    model = built(FORMS[name], torch.float32)
    stiefel_geo.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(images(model)), model(images(model))) < 1e-5


@pytest.mark.parametrize("name", ["fused, bias", "eva, q_bias and zero k_bias"])
def test_exported_program_computes_the_same(name: str) -> None:
    model = built(FORMS[name], torch.float32)
    stiefel_geo.patch(model)
    program = torch.export.export(model, (images(model),))
    assert relative(program.module()(images(model)), model(images(model))) < 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning", "ignore::torch.jit.TracerWarning")
def test_traced_model_computes_the_same() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, images(model))
    assert relative(traced(images(model)), model(images(model))) < 1e-5


@pytest.mark.parametrize("name", ["fused, bias", "eva, no bias"])
def test_fx_traced_features_train_the_frames(name: str) -> None:
    from timm.models import create_feature_extractor  # type: ignore[attr-defined]

    model = built(FORMS[name], torch.float32)
    stiefel_geo.patch(model)
    extractor = create_feature_extractor(model, ["fc_norm"])
    extractor(images(model))["fc_norm"].square().sum().backward()
    assert all(frame.grad is not None for _, frame in stiefel_geo.frames(model))


def test_functional_transforms_see_the_frames() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (images(model),)).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    assert all(gradients[name].abs().sum() > 0 for name, _ in stiefel_geo.frames(model))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = small_vit().train()
    stiefel_geo.patch(model)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(model)).square().sum().backward()
        gradients.append([frame.grad.clone() for _, frame in stiefel_geo.frames(model)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_import_of_the_package_does_not_import_timm() -> None:
    code = "import sys, stiefel_geo; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
