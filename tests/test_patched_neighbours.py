"""A patched model under what others put on it: adapters, second parametrizations, wrappers."""

import copy
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from support.optional import needs
from support.parts import qkv
from support.patch_cases import each_core, images, pair, randomise_, relative, seeded_vit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrize

import stiefel_geo
from stiefel_geo.attention.patching import unpatched

# --- PEFT ----------------------------------------------------------------------------------------


def with_lora(model: nn.Module) -> Any:
    peft = needs("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["qkv"])).eval()
    for index, (name, p) in enumerate(sorted(adapted.named_parameters())):
        if "lora_" in name:
            nn.init.normal_(p.data, std=0.1, generator=torch.Generator().manual_seed(index))
    return adapted


def lora_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}


@each_core
def test_lora_of_peft_on_a_patched_projection_is_that_on_the_plain_one(core: str) -> None:
    patched, plain = (with_lora(model) for model in pair(core))
    plain.load_state_dict(lora_values(patched), strict=False)
    assert relative(patched(images(plain)), plain(images(plain))) < 1e-5
    assert list(stiefel_geo.plain_state_dict(patched)) == list(plain.state_dict())
    assert len(stiefel_geo.patch(patched, core=core).patched) == 2
    patched(images(plain)).sum().backward()
    assert all(p.grad is not None for name, p in patched.named_parameters() if "lora_" in name)


@each_core
def test_adapters_load_and_plain_checkpoints_under_them(core: str) -> None:
    patched, plain = (with_lora(model) for model in pair(core))
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(1.1) if core != "identity" else p
    patched.load_state_dict(plain.state_dict(), strict=True)
    assert relative(patched(images(plain)), plain(images(plain))) < 1e-5


def test_merging_and_unmerging_an_adapter_keeps_the_function() -> None:
    patched = with_lora(pair("learn")[0])
    frames, before = [id(F) for _, F in stiefel_geo.frames(patched)], patched(images(patched))
    patched.merge_adapter()
    assert relative(patched(images(patched)), before) < 1e-5
    patched.unmerge_adapter()
    assert relative(patched(images(patched)), before) < 1e-5
    merged = patched.merge_and_unload(safe_merge=True)
    assert relative(merged(images(merged)), before) < 1e-5
    assert [id(F) for _, F in stiefel_geo.frames(merged)] == frames


def test_merging_into_pure_frames_is_refused_and_changes_nothing() -> None:
    patched = with_lora(pair("identity")[0])
    before = patched(images(patched))
    with pytest.raises(RuntimeError, match='core="identity" leaves frames alone'):
        patched.merge_adapter()
    assert torch.equal(patched(images(patched)), before)


def test_unpatching_under_an_adapter_leaves_the_adapted_plain_model() -> None:
    patched, plain = (with_lora(model) for model in pair("learn"))
    before = patched(images(patched))
    stiefel_geo.unpatch(patched)
    assert relative(patched(images(patched)), before) < 1e-5
    assert list(patched.state_dict()) == list(plain.state_dict())


# --- other parametrizations on the same weight ---------------------------------------------------


class LowRank(nn.Module):
    """LoRA as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.B = nn.Parameter(0.1 * torch.randn(96, 2, generator=generator))
        self.A = nn.Parameter(0.1 * torch.randn(2, 32, generator=generator))

    def forward(self, W: Tensor) -> Tensor:
        return W + self.B @ self.A


def put_low_rank(qkv: nn.Module) -> None:
    parametrize.register_parametrization(qkv, "weight", LowRank())


def put_spectral_norm(qkv: nn.Module) -> None:
    torch.manual_seed(1)
    nn.utils.parametrizations.spectral_norm(qkv)


@each_core
@pytest.mark.parametrize("put", [put_low_rank, put_spectral_norm])
def test_a_second_parametrization_stays_through_saving_loading_and_unpatching(
    core: str, put: Callable[[nn.Module], None]
) -> None:
    model, plain = pair(core)
    for each in (model, plain):
        for block in range(len(each.blocks)):
            put(qkv(each, block))
        each.eval()
    x, keys = images(plain), list(plain.state_dict())
    expected = plain(x)
    assert relative(model(x), expected) < 1e-5
    assert list(stiefel_geo.plain_state_dict(model)) == keys
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    other.load_state_dict(plain.state_dict(), strict=True)
    assert relative(other(x), expected) < 1e-5
    before = model(x)
    with unpatched(model):
        assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)
    stiefel_geo.unpatch(model)
    assert list(model.state_dict()) == keys
    assert relative(model(x), expected) < 1e-5


def test_a_linear_that_merges_its_adapter_through_data_keeps_its_merge() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Self:
            if self.training and not mode:
                self.weight.data += 0.1
            return super().train(mode)

    model = seeded_vit().train()
    qkv(model).__class__ = Merging
    plain = copy.deepcopy(model)
    stiefel_geo.patch(model)
    assert relative(model.eval()(images(model)), plain.eval()(images(plain))) < 1e-5


# --- wrappers ------------------------------------------------------------------------------------


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: "Attention" in type(module).__name__)
    return model


WRAPPERS = {
    "checkpoint_wrapper": checkpointed,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "Sequential": nn.Sequential,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_plain_names_under_a_wrapper_are_those_of_the_wrapped_plain_model(wrap: Callable[[nn.Module], Any]) -> None:
    model, plain = pair("learn")
    patched, wrapped = wrap(model), wrap(plain)
    state = stiefel_geo.plain_state_dict(patched)
    assert list(state) == list(wrapped.state_dict())
    wrapped.load_state_dict(state, strict=True)
    patched.load_state_dict(wrapped.state_dict(), strict=True)
    x = images(plain)
    assert relative(patched(x), wrapped(x)) < 1e-5


def doubled() -> VisionTransformer:
    """A model whose blocks are one, and whose attention hangs under a second name."""
    model = seeded_vit()
    model.blocks[1] = model.blocks[0]
    model.again = model.get_submodule("blocks.0.attn")
    return model


def test_plain_names_of_shared_blocks_and_second_names_are_the_plain_models() -> None:
    model, plain = doubled(), doubled()
    stiefel_geo.patch(model)
    state = stiefel_geo.plain_state_dict(model)
    assert list(state) == list(plain.state_dict())
    randomise_(plain, seed=5)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert relative(model(images(plain)), plain(images(plain))) < 1e-5


@each_core
def test_tensors_of_a_plain_state_dict_are_copies(core: str) -> None:
    model, _ = pair(core)
    state = stiefel_geo.plain_state_dict(model)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)


def test_plain_state_dict_of_a_sharded_model_is_whole() -> None:
    from torch.distributed.fsdp import fully_shard

    model, plain = pair("learn")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for part in (*model.blocks, model):
            fully_shard(part)
        state = stiefel_geo.plain_state_dict(model)
    finally:
        dist.destroy_process_group()
    assert {type(value) for value in state.values()} == {Tensor}
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
