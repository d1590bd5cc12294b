"""What patch leaves alone or refuses, reason by reason, and how the report says it."""

import pytest
import torch
import torch.distributed as dist
from support.patch_cases import randomise_, small_vit
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stiefel_geo
from stiefel_geo import diagnostics
from stiefel_geo.attention.layouts import Layout, LayoutError
from stiefel_geo.attention.patching import unpatched
from stiefel_geo.attention.projections import projections_of


class Split(nn.Module):
    """A user's attention, as far as its projection goes."""

    def __init__(self, projection: nn.Module | None, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qk = heads, projection


stiefel_geo.register_attention(Split, Layout({"qk": "(q k)"}, heads="heads"))

REASONS = {
    "no projection": (lambda: Split(None), "none of the projections qk"),
    "3×3 convolution": (lambda: Split(nn.Conv2d(16, 16, 3)), "not 1×1 in one group"),
    "grouped convolution": (lambda: Split(nn.Conv2d(16, 16, 1, groups=2)), "not 1×1 in one group"),
    "wide heads": (lambda: Split(nn.Linear(4, 32)), "8 rows of 4 columns; a frame needs d ≥ r"),
    "uneven heads": (
        lambda: Split(nn.Linear(16, 32), heads=3),
        "32 rows of {'q': 3, 'k': 3, 'v': 3} heads do not divide into 3 equal groups",
    ),
    "buffer": (lambda: Split(without_parameter(nn.Linear(16, 32))), "holds its weight as Tensor"),
}


def without_parameter(linear: nn.Linear) -> nn.Linear:
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    return linear


@pytest.mark.parametrize(("make", "reason"), REASONS.values(), ids=REASONS)
def test_module_that_cannot_carry_frames_is_skipped_with_the_reason_and_left_as_it_was(make, reason: str) -> None:
    model = nn.ModuleDict({"vit": small_vit(), "odd": make()})
    before = {name: value.clone() for name, value in model["odd"].state_dict().items()}
    report = stiefel_geo.patch(model)
    (skipped,) = report.skipped
    assert reason in skipped.reason
    assert f"skipped 1\n  1 × {skipped.cls}: {skipped.reason}" in str(report)
    after = model["odd"].state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_diagnostics_pass_over_attention_that_cannot_be_patched() -> None:
    alone, beside = small_vit(), nn.ModuleDict({"vit": small_vit(), "odd": Split(nn.Linear(4, 32))})
    expected = {f"vit.{name}": value for name, value in diagnostics.spectrum(alone).items()}
    assert diagnostics.spectrum(beside).keys() == expected.keys()


def test_class_without_a_layout_has_no_plan() -> None:
    with pytest.raises(LayoutError, match="no layout is registered"):
        projections_of(nn.Linear(2, 2))


def test_model_that_is_wrapped_in_ddp_already_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(small_vit())
        names = [name for name, _ in wrapped.named_parameters()]
        with pytest.raises(ValueError, match="wrapped in DistributedDataParallel already"):
            stiefel_geo.patch(wrapped)
        assert [name for name, _ in wrapped.named_parameters()] == names
    finally:
        dist.destroy_process_group()


def test_projections_rebuilt_beyond_recognition_stay_plain_with_a_warning() -> None:
    model = small_vit()
    stiefel_geo.patch(model)
    attention = model.get_submodule("blocks.0.attn")
    with pytest.warns(RuntimeWarning, match="was rebuilt and is plain now"), unpatched(model):
        attention.qkv = nn.Linear(32, 95)
    assert {name.split(".")[1] for name, _ in stiefel_geo.frames(model)} == {"1"}


def test_unpatched_on_meta_comes_back_patched() -> None:
    model = randomise_(small_vit())
    stiefel_geo.patch(model)
    before = [name for name, _ in model.named_parameters()]
    model.to("meta")
    with unpatched(model):
        assert "blocks.0.attn.qkv.weight" in model.state_dict()
    assert [name for name, _ in model.named_parameters()] == before
