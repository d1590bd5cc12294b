"""Patched models under timm's own machinery: loaders, rewriters, feature extraction, and torch's MultiheadAttention."""

import copy
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.patch_cases import VIT, images, randomise_, relative, small_vit
from timm.models import nextvit, xcit
from timm.models.nextvit import NextViT
from timm.models.vision_transformer import VisionTransformer
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo.attention.patching import unpatched
from stiefel_geo.attention.report import PatchReport, Skipped
from stiefel_geo.integrations import coverage

SHARED = Path(os.environ.get("STIEFEL_GEO_SHARED", Path(__file__).parents[2] / "shared"))
DINO = SHARED / "pretrained" / "vit_small_patch14_dinov2.fp16.safetensors"


def model_of(name: str, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return randomise_(timm.create_model(name, num_classes=4, **overrides)).double().eval()


def pixels(size: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)


def small_nextvit() -> nn.Module:
    torch.manual_seed(0)
    model = NextViT(3, num_classes=4, stem_chs=(8, 8, 8), depths=(1, 1, 5, 1))
    return randomise_(model).double().eval()


# --- code that rewrites weights ------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [True, False])
def test_nextvit_reparameterizes_to_the_same_function(inplace: bool) -> None:
    model = small_nextvit()
    stiefel_geo.patch(model)
    before = model(pixels(64))
    merged = reparameterize_model(model, inplace=inplace)
    assert relative(merged(pixels(64)), before) < 1e-9
    assert len(list(stiefel_geo.frames(merged))) > 0


@pytest.mark.parametrize("name", ["levit_128s", "efficientvit_m0", "shvit_s1"])
def test_fused_convolutions_are_plain_and_compute_the_same(name: str) -> None:
    model = model_of(name) if name == "shvit_s1" else model_of(name, img_size=64)
    model, x = model.float(), pixels(64).float()  # fuse() makes float32 layers
    stiefel_geo.patch(model)
    with torch.no_grad():  # levit keeps its attention biases otherwise, with a graph that deepcopy refuses
        before = model(x)
        fused = reparameterize_model(model)
        assert relative(fused(x), before) < 1e-5
        assert torch.equal(model(x), before)


def jax_weights(model: nn.Module) -> dict[str, Any]:
    """The npz file that `load_pretrained` reads into these weights."""
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    file = {"cls": state["cls_token"], "Transformer/posembed_input/pos_embedding": state["pos_embed"]}
    file["embedding/kernel"] = state["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    file["embedding/bias"] = state["patch_embed.proj.bias"]
    file["Transformer/encoder_norm/scale"] = state["norm.weight"]
    file["Transformer/encoder_norm/bias"] = state["norm.bias"]
    file |= {"head/kernel": state["head.weight"].T, "head/bias": state["head.bias"]}
    for i in range(VIT["depth"]):
        block, old = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            file[f"{block}/{theirs}/scale"] = state[f"{old}.{ours}.weight"]
            file[f"{block}/{theirs}/bias"] = state[f"{old}.{ours}.bias"]
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part, name in enumerate(("query", "key", "value")):
            rows = slice(32 * part, 32 * part + 32)
            file[f"{attention}/{name}/kernel"] = state[f"{old}.attn.qkv.weight"][rows].T.reshape(32, 2, 16)
            file[f"{attention}/{name}/bias"] = state[f"{old}.attn.qkv.bias"][rows].reshape(2, 16)
        file[f"{attention}/out/kernel"] = state[f"{old}.attn.proj.weight"].T.reshape(2, 16, 32)
        file[f"{attention}/out/bias"] = state[f"{old}.attn.proj.bias"]
        for layer in (0, 1):
            file[f"{block}/MlpBlock_3/Dense_{layer}/kernel"] = state[f"{old}.mlp.fc{layer + 1}.weight"].T
            file[f"{block}/MlpBlock_3/Dense_{layer}/bias"] = state[f"{old}.mlp.fc{layer + 1}.bias"]
    return file


def test_npz_weights_load_into_a_patched_model(tmp_path: Path) -> None:
    source, model = randomise_(small_vit(), seed=4), small_vit()
    np.savez(tmp_path / "weights.npz", **jax_weights(source))
    stiefel_geo.patch(model)
    timm.models.load_checkpoint(model, str(tmp_path / "weights.npz"))
    assert relative(model(images(model)), source(images(source))) < 1e-5


def test_filter_that_splits_by_the_models_keys_works_unpatched(tmp_path: Path) -> None:
    source, model = model_of("xcit_nano_12_p8_224", depth=1), model_of("xcit_nano_12_p8_224", depth=1)
    randomise_(source, seed=3)
    original: OrderedDict[str, Tensor] = OrderedDict()
    for key, value in source.state_dict().items():  # the original code has one qkv in its class attention
        fused = ".attn.q." in key and "cls_attn" in key
        parts = [source.state_dict()[key.replace(".attn.q.", f".attn.{p}.")] for p in "qkv"] if fused else []
        if fused or not ("cls_attn" in key and (".attn.k." in key or ".attn.v." in key)):
            original[key.replace(".attn.q.", ".attn.qkv.") if fused else key] = torch.cat(parts) if fused else value
    torch.save(original, tmp_path / "original.pth")
    stiefel_geo.patch(model)
    with unpatched(model):
        timm.models.load_checkpoint(model, str(tmp_path / "original.pth"), filter_fn=xcit.checkpoint_filter_fn)
    assert relative(model(pixels(32)), source(pixels(32))) < 1e-9


def test_filter_that_zips_keys_by_order_works_unpatched(tmp_path: Path) -> None:
    source, model = randomise_(small_nextvit(), seed=3), small_nextvit()
    original = OrderedDict((f"original.{i}", value) for i, value in enumerate(source.state_dict().values()))
    torch.save(original, tmp_path / "original.pth")
    stiefel_geo.patch(model)
    with unpatched(model):
        timm.models.load_checkpoint(model, str(tmp_path / "original.pth"), filter_fn=nextvit.checkpoint_filter_fn)
    assert relative(model(pixels(64)), source(pixels(64))) < 1e-9


# --- the rest of timm's machinery ----------------------------------------------------------------


def changed_alike(change: Callable[[VisionTransformer], object], size: int = 16) -> None:
    """`change` does to a patched model what it does to a plain one."""
    plain = small_vit(dynamic_img_size=True).double()
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    for each in (plain, model):
        torch.manual_seed(5)
        change(each)
    x = images(plain, size=(3, size, size))
    assert relative(model(x), plain(x)) < 1e-10


def test_reset_classifier_keeps_the_frames() -> None:
    def reset(model: VisionTransformer) -> None:
        model.reset_classifier(7)
        model.double()

    changed_alike(reset)


def test_set_input_size_keeps_the_frames() -> None:
    changed_alike(lambda model: model.set_input_size(img_size=(24, 24)), size=24)


def test_dynamic_image_size_works() -> None:
    changed_alike(lambda model: None, size=32)


def test_forward_intermediates_are_the_same() -> None:
    plain = small_vit().double()
    model = copy.deepcopy(plain)
    stiefel_geo.patch(model)
    ours: Any = model.forward_intermediates(images(plain))  # one of three types
    theirs: Any = plain.forward_intermediates(images(plain))
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert relative(a, b) < 1e-10


def test_features_only_models_are_patched() -> None:
    plain = model_of("test_vit", features_only=True, img_size=64)
    model = copy.deepcopy(plain)
    assert len(stiefel_geo.patch(model).patched) > 0
    for a, b in zip(model(pixels(64)), plain(pixels(64)), strict=True):
        assert relative(a, b) < 1e-10


# --- torch.nn.MultiheadAttention -----------------------------------------------------------------

MHA = {
    "bias": {},
    "no bias": {"bias": False},
    "separate weights": {"kdim": 20, "vdim": 12},
    "extra key": {"add_bias_kv": True},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", MHA.values(), ids=MHA.keys())
def test_multihead_attention_keeps_its_function_and_keys(options: dict[str, object], training: bool) -> None:
    attention = randomise_(nn.MultiheadAttention(24, 3, batch_first=True, **options)).double().train(training)
    q, k, v = (torch.randn(2, 5, width, dtype=torch.float64) for width in (24, attention.kdim, attention.vdim))
    q, k, v = (q, k, v) if "kdim" in options else (q, q, q)
    keys = list(attention.state_dict())
    with torch.no_grad():
        before = attention(q, k, v)[0]
        stiefel_geo.patch(attention)
        assert relative(attention(q, k, v)[0], before) < 1e-12
        assert list(stiefel_geo.plain_state_dict(attention)) == keys
        stiefel_geo.unpatch(attention)
        assert relative(attention(q, k, v)[0], before) < 1e-12
    assert list(attention.state_dict()) == keys


def test_torchvision_vit_keeps_its_function_and_trains_its_frames() -> None:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(16, 4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
    model = randomise_(model).double().eval()
    plain = copy.deepcopy(model)
    report = stiefel_geo.patch(model)
    assert len(report.patched) == 2
    output = model(images(model))
    output.square().sum().backward()
    assert relative(output, plain(images(plain))) < 1e-12
    assert all(frame.grad.abs().sum() > 0 for _, frame in stiefel_geo.frames(model))


# --- a real model, and the coverage command ------------------------------------------------------


@pytest.fixture(scope="module")
def dino() -> nn.Module:
    if not DINO.exists():
        pytest.skip(f"needs {DINO}; STIEFEL_GEO_SHARED names its folder")
    from safetensors.torch import load_file

    model = timm.create_model("vit_small_patch14_dinov2.lvd142m", img_size=70, num_classes=0)
    assert isinstance(model, VisionTransformer)
    state = timm.models.vision_transformer.checkpoint_filter_fn(load_file(DINO), model)
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patched_dinov2_errs_no_more_under_autocast(dino: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 70, 70, generator=torch.Generator().manual_seed(0))
    patched = copy.deepcopy(dino)
    stiefel_geo.patch(patched)
    with torch.no_grad():
        reference = dino(x)
        with torch.autocast("cpu", dtype):
            errors = [relative(model(x).float(), reference) for model in (dino, patched)]
    assert errors[1] < 1.6 * errors[0]


def test_coverage_counts_architectures_by_family(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert coverage.main(["--family", "test_v*", "--json", str(tmp_path / "coverage.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "vision_transformer 4 0 0" in [" ".join(line.split()) for line in lines]
    assert (tmp_path / "coverage.json").exists()


def test_coverage_of_no_architecture_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["--family", "no_such_*"]) == 2
    assert "matches 'no_such_*'" in capsys.readouterr().err


def test_coverage_builds_models_that_read_their_drop_rates_from_linspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As older timm does, by `item` and by `tolist`."""
    rates: list[float] = []

    def create(name: str, **_: object) -> nn.Module:
        rates.extend([x.item() for x in torch.linspace(0, 0.5, 3)] + torch.linspace(0, 0.5, 3).tolist())
        return nn.Linear(2, 2)

    monkeypatch.setattr(timm, "create_model", create)
    assert coverage.Timm().build("any").weight.is_meta
    assert rates == [0.0, 0.25, 0.5] * 2


def test_coverage_tells_a_model_without_attention_from_one_that_is_left_out() -> None:
    without = coverage.cover("resnet10t")
    assert (without.status, without.patched, without.error) == ("without attention", {}, "")


def test_coverage_exits_with_1_where_an_architecture_is_left_out(monkeypatch, capsys) -> None:
    left_out = coverage.Coverage("some_vit", "vit", "not at all", error="no layout")
    monkeypatch.setattr(coverage, "cover", lambda name, library: left_out)
    assert coverage.main(["--family", "test_vit"]) == 1
    assert "some_vit: no layout" in capsys.readouterr().out


def test_coverage_counts_a_module_without_a_reason_against_the_architecture() -> None:
    known = Skipped("a", "A", "no query or key projection")
    assert coverage._status(PatchReport([], [known])) == "wholly"
    assert coverage._status(PatchReport([], [known, Skipped("b", "B", "not selected")])) == "in part"
