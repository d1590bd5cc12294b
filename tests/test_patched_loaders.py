"""A patched model under those that make its parameters again: loaders, constructors and quantisers."""

import copy
import importlib
from typing import Any

import pytest
import torch
from support.optional import needs
from support.patch_cases import VIT, each_core, images, pair
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam


def remade_by_accelerate(model: nn.Module) -> None:
    put = needs("accelerate.utils").set_module_tensor_to_device
    for name, p in list(model.named_parameters()):
        put(model, name, "cpu", value=p.detach().clone())


def remade_by_hand(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = type(p)(p.detach().clone(), requires_grad=p.requires_grad)


@each_core
@pytest.mark.parametrize("remake", [remade_by_accelerate, remade_by_hand])
def test_parameters_that_others_make_again_are_driven_as_frames_and_cores(core: str, remake) -> None:
    model, _ = pair(core)
    before = model(images(model))
    remake(model)
    assert torch.equal(model(images(model)), before)
    optimizer = ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05), lr=1e-2)
    assert optimizer.num_frames == 8
    for _ in range(5):
        model(images(model)).square().sum().backward()
        optimizer.step()
    assert max(float(stiefel_geo.stiefel.defect(F).max()) for _, F in stiefel_geo.frames(model)) < 1e-5


def test_checkpoint_dispatched_by_accelerate_gives_frames(tmp_path) -> None:
    accelerate = needs("accelerate")
    model, _plain = pair("learn")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with accelerate.init_empty_weights():
        empty = VisionTransformer(**VIT).eval()
    stiefel_geo.patch(empty)
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
    assert torch.equal(loaded(images(model)), model(images(model)))
    assert ScaleFreeRiemannianAdam(loaded.parameters()).num_frames == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_from_pretrained_of_a_class_that_patches_in_its_constructor_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    needs("transformers")
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )

    class Patching(transformers.ViTForImageClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            stiefel_geo.patch(self)

    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "plain")
    with pytest.raises(RuntimeError, match="found memory that holds none"):
        Patching.from_pretrained(tmp_path / "plain")
    trained = Patching(config).eval()
    trained.save_pretrained(tmp_path / "patched")
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Patching.from_pretrained(tmp_path / "patched").eval()(x).logits, trained(x).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("how", ["quantize_dynamic", "torchao"])
def test_unpatched_model_quantises_as_the_plain_one_and_a_patched_one_is_refused(how: str) -> None:
    def quantised(model: nn.Module) -> nn.Module:
        if how == "quantize_dynamic":
            dynamic: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
            return dynamic
        torchao = importlib.import_module("torchao.quantization")
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return model

    if how == "torchao":
        needs("torchao")
    model, plain = pair("learn")
    patched = copy.deepcopy(model)
    before = patched(images(model))
    with pytest.raises((AssertionError, KeyError), match=r"Linear|already exists"):
        quantised(patched)
    assert torch.equal(patched(images(model)), before)
    stiefel_geo.unpatch(model)
    assert torch.equal(quantised(model)(images(plain)), quantised(plain)(images(plain)))
