"""A patched model compiled, exported, traced, transformed and checkpointed by PyTorch."""

import pytest
import torch
from support.patch_cases import FORMS, built, images, relative, small_vit
from torch import Tensor

import stiefel_geo
from stiefel_geo.attention.parametrization import ONE_GRAPH_FROM


@pytest.mark.parametrize("name", ["fused, bias", "eva, q_bias and zero k_bias"])
@pytest.mark.skipif(torch.__version__ < ONE_GRAPH_FROM, reason="this torch's compiler breaks at each frame's weight")
def test_compiled_without_graph_breaks(name: str) -> None:
    model = built(FORMS[name], torch.float32)
    stiefel_geo.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(images(model)), model(images(model))) < 1e-5


@pytest.mark.parametrize("name", ["fused, bias", "eva, q_bias and zero k_bias"])
def test_exported_program_computes_the_same(name: str) -> None:
    model = built(FORMS[name], torch.float32)
    stiefel_geo.patch(model)
    program = torch.export.export(model, (images(model),), strict=False)
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
    from timm.models import create_feature_extractor

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
        output: Tensor = torch.func.functional_call(model, values, (images(model),))
        return output.square().sum()

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
