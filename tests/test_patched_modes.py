"""Torch's modes and transforms on a patched model: what the plain model gives, or a refusal that changes nothing."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parts import qkv
from support.patch_cases import FORMS, images, randomise_, relative, small_vit
from support.tiny_vit import tiny_vit, train
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import ScaleFreeRiemannianAdam

CORES = ("learn", "freeze", "identity")
each_core = pytest.mark.parametrize("core", CORES)
each_form = pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@each_core
@each_form
def test_inference_mode_gives_what_no_grad_gives_and_training_goes_on(
    build: Callable[[], nn.Module], core: str
) -> None:
    model = randomise_(build()).eval()
    stiefel_geo.patch(model, core=core)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    model(x).square().sum().backward()
    assert all(frame.grad is not None for _, frame in stiefel_geo.frames(model))


@each_core
def test_model_patched_under_inference_mode_can_be_trained(core: str) -> None:
    model = small_vit()
    with torch.inference_mode():
        stiefel_geo.patch(model, core=core)
    model(images(model)).sum().backward()
    with torch.inference_mode():
        stiefel_geo.unpatch(model)
    model(images(model)).sum().backward()


@each_core
@each_form
def test_patch_load_assign_and_unpatch_do_not_look_at_the_default_device(
    build: Callable[[], nn.Module], core: str
) -> None:
    model, x = randomise_(build()).eval(), images(build())
    twin, other = copy.deepcopy(model), randomise_(build(), seed=5)
    for each, device in ((model, "cpu"), (twin, "meta")):
        with torch.device(device):
            stiefel_geo.patch(each, core=core)
            each.load_state_dict(other.state_dict(), strict=True)
            stiefel_geo.plain_state_dict(each)
    assert unchanged(twin, model.state_dict())
    for each, device in ((model, "cpu"), (twin, "meta")):
        with torch.device(device):
            stiefel_geo.unpatch(each)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("spoil", ["autocast", "matmul precision"])
def test_folded_weights_do_not_depend_on_the_precision_of_products(spoil: str) -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    expected, before = stiefel_geo.plain_state_dict(model), torch.get_float32_matmul_precision()
    try:
        if spoil == "matmul precision":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16, enabled=spoil == "autocast"):
            found = stiefel_geo.plain_state_dict(model)
            stiefel_geo.unpatch(model)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert unchanged(model, expected)


def test_functional_call_with_plain_values_computes_with_them_and_leaves_the_model() -> None:
    model, other = small_vit(), randomise_(small_vit(), seed=7)
    stiefel_geo.patch(model)
    before, values = state_of(model), {name: p.detach() for name, p in other.named_parameters()}
    output = torch.func.functional_call(model, values, (images(model),))
    assert relative(output, other(images(model))) < 1e-5
    assert unchanged(model, before)


GRAPHS = {
    "parameters": lambda call, values: call({name: nn.Parameter(W) for name, W in values.items()}),
    "graph": lambda call, values: call({name: W.clone().requires_grad_() * 1 for name, W in values.items()}),
    "grad": lambda call, values: torch.func.grad(lambda given: call(given).sum())(values),
    "vmap": lambda call, values: torch.vmap(call)({name: W[None] for name, W in values.items()}),
}


NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop because")  # torch's, of attention


@NO_BATCHING_RULE
@pytest.mark.parametrize("transform", GRAPHS.values(), ids=GRAPHS)
def test_functional_call_that_would_lose_the_gradient_of_plain_weights_is_refused(transform) -> None:
    model = small_vit()
    values, x = {name: p.detach() for name, p in model.named_parameters()}, images(model)
    stiefel_geo.patch(model)
    before = state_of(model)
    with pytest.raises((RuntimeError, KeyError), match=r"found a weight with a graph|already exists"):
        transform(lambda given: torch.func.functional_call(model, given, (x,)), values)
    assert unchanged(model, before)


@NO_BATCHING_RULE
def test_stacked_patched_models_are_evaluated_by_vmap() -> None:
    models = [small_vit(), randomise_(small_vit(), seed=3)]
    for model in models:
        stiefel_geo.patch(model)
    x, base = images(models[0]), copy.deepcopy(models[0]).to("meta")
    parameters, buffers = torch.func.stack_module_state(models)
    outputs = torch.vmap(lambda *state: torch.func.functional_call(base, state, (x,)))(parameters, buffers)
    assert max(relative(output, model(x)) for output, model in zip(outputs, models, strict=True)) < 1e-5


@each_core
@pytest.mark.parametrize("folded", [False, True], ids=["patched", "unpatched"])
def test_model_is_freed_when_its_last_name_goes(core: str, folded: bool) -> None:
    model = small_vit()
    stiefel_geo.patch(model, core=core)
    model(images(model)).sum().backward()
    if folded:
        stiefel_geo.unpatch(model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_tools_that_look_at_the_input_of_every_module_work() -> None:
    model, seen = small_vit(), []
    stiefel_geo.patch(model)
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList | nn.Sequential):  # as torchsummary has it
            module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    model(images(model))
    assert len(seen) > 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_with_the_remedy() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    with pytest.raises(RuntimeError, match="TorchScript compiles plain weights"):
        torch.jit.script(model)


# --- checkpoints that mean what they meant -------------------------------------------------------


@each_form
def test_average_of_a_model_with_its_own_patch_and_unpatch_is_the_model(build: Callable[[], nn.Module]) -> None:
    model = randomise_(build()).eval()
    twin = copy.deepcopy(model)
    stiefel_geo.patch(twin)
    stiefel_geo.unpatch(twin)
    soup = copy.deepcopy(model)
    soup.load_state_dict({name: (value + twin.state_dict()[name]) / 2 for name, value in model.state_dict().items()})
    assert relative(soup(images(model)), model(images(model))) < 1e-5


@each_core
@each_form
def test_biases_loaded_again_change_nothing(build: Callable[[], nn.Module], core: str) -> None:
    model = randomise_(build()).eval()
    biases = {name: value.clone() for name, value in model.state_dict().items() if "bias" in name}
    stiefel_geo.patch(model, core=core)
    before = model(images(model))
    model.load_state_dict(biases, strict=False)
    assert torch.equal(model(images(model)), before)


def with_a_dead_head(**options: Any) -> nn.Module:
    model = tiny_vit(patched=False)
    qkv(model).weight.data[:16] = 0
    qkv(model, 1).weight.data[32:48] = qkv(model, 1).weight.data[32:33]  # of rank one
    stiefel_geo.patch(model, **options)
    return model


@each_core
@pytest.mark.parametrize("first", ["optimizer", "checkpoint"])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit_with_dead_heads(core: str, first: str) -> None:
    def optimizer_of(model: nn.Module) -> ScaleFreeRiemannianAdam:
        return ScaleFreeRiemannianAdam(stiefel_geo.param_groups(model, 0.05), lr=1e-3)

    model = with_a_dead_head(core=core)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    fresh = tiny_vit(patched=False)
    nn.init.normal_(qkv(fresh).weight)
    stiefel_geo.patch(fresh, core=core)
    early = optimizer_of(fresh) if first == "optimizer" else None
    fresh.load_state_dict(saved[0])
    resumed = early or optimizer_of(fresh)
    resumed.load_state_dict(saved[1])
    train(fresh, resumed, range(2, 4))
    assert unchanged(fresh, model.state_dict())


@each_core
def test_plain_checkpoint_with_dead_heads_trains_alike_in_both_orders(core: str) -> None:
    source, models = with_a_dead_head(core=core), [tiny_vit(patched=False) for _ in range(2)]
    plain = stiefel_geo.plain_state_dict(source)
    models[0].load_state_dict(plain)
    for model in models:
        stiefel_geo.patch(model, core=core)
    optimizers = [ScaleFreeRiemannianAdam(model.parameters(), lr=1e-3) for model in models]
    models[1].load_state_dict(plain)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    assert unchanged(models[1], models[0].state_dict())
