"""FrameRows alone: names, kinds, what it takes and keeps, and how it survives what PyTorch does to modules."""

import copy

import geoopt
import pytest
import torch
from support.parts import Projection, rows_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_geo import PolarStiefel
from stiefel_geo.attention.factorisation import exact
from stiefel_geo.attention.layouts import Rows, Run
from stiefel_geo.attention.parametrization import FrameRows

PART_MAJOR = Rows(1, (Run("qqkk", 3), Run("", 6)))
TWO_WIDTHS = Rows(1, (Run("q", 4), Run("k", 7), Run("", 7)))
HEADS_ALONE = Rows(1, (Run("qqqkkk", 3),))


def carried(rows: Rows = PART_MAJOR, core: str = "learn", owner: Projection | None = None) -> Projection:
    """A projection of 18 rows and 12 columns whose weight is made of frames."""
    owner = owner or nn.Linear(12, 18)
    parametrize.register_parametrization(owner, "weight", FrameRows(rows, owner.weight, core), unsafe=True)
    return owner


def test_exact_is_a_float64_copy_on_the_cpu() -> None:
    value = exact(nn.Parameter(torch.ones(2)))
    assert (value.dtype, value.device.type, value.requires_grad) == (torch.float64, "cpu", False)


@pytest.mark.parametrize("rows", [PART_MAJOR, TWO_WIDTHS, HEADS_ALONE], ids=["one width", "two widths", "heads alone"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(12, 18), lambda: nn.Conv2d(12, 18, 1)], ids=["linear", "conv"])
def test_weight_is_carried_and_assigned_in_its_own_shape(rows: Rows, make) -> None:
    plain = make()
    owner = carried(rows, owner=copy.deepcopy(plain))
    torch.testing.assert_close(owner.weight.detach(), plain.weight.detach())
    other = torch.randn_like(plain.weight)
    owner.weight = other
    assert owner.weight.shape == other.shape
    torch.testing.assert_close(owner.weight.detach(), other)


def test_stacks_of_several_widths_are_numbered_and_one_is_not() -> None:
    names = {name for name, _ in rows_of(carried(TWO_WIDTHS)).named_parameters()}
    assert names == {"frames0", "frames1", "core0", "core1", "rest"}
    assert {name for name, _ in rows_of(carried()).named_parameters()} == {"frames", "core", "rest"}


@pytest.mark.parametrize(("core", "trained"), [("learn", {"frames", "core", "rest"}), ("freeze", {"frames", "rest"})])
def test_cores_are_parameters_or_buffers(core: str, trained: set[str]) -> None:
    rows = rows_of(carried(core=core))
    assert {name for name, p in rows.named_parameters() if p.requires_grad} == trained
    assert [name for name, _ in rows.named_cores()] == ["core"]
    assert set(rows.state_dict()) == {"frames", "core", "rest"}


def test_identity_has_no_core_and_its_rows_are_the_frames() -> None:
    owner = carried(core="identity")
    assert rows_of(owner).named_cores() == []
    frames = rows_of(owner).frames.detach()
    assert torch.equal(owner.weight.detach()[:12], frames.mT.reshape(12, 12))


def test_identity_takes_the_frames_of_another_weight_and_leaves_its_cores() -> None:
    owner, other = carried(core="identity"), torch.randn(18, 12)
    rows_of(owner).take(rows_of(owner).factors(other))
    assert torch.equal(rows_of(owner).frames, rows_of(carried(owner=linear(other))).frames)


def linear(weight: Tensor) -> nn.Linear:
    owner = nn.Linear(12, 18)
    owner.weight.data.copy_(weight)
    return owner


@pytest.mark.parametrize("core", ["learn", "freeze"])
def test_frozen_weight_has_frozen_frames_cores_and_rest(core: str) -> None:
    rows = rows_of(carried(core=core, owner=nn.Linear(12, 18).requires_grad_(False)))
    assert not any(p.requires_grad for p in rows.parameters())


def test_frames_and_cores_are_contiguous_however_the_factorisation_left_them() -> None:
    rows = rows_of(carried(TWO_WIDTHS, owner=nn.Linear(12, 18, dtype=torch.float64)))
    assert all(p.is_contiguous() for p in rows.parameters())


@pytest.mark.parametrize("core", ["learn", "freeze"])
@pytest.mark.parametrize("weight", [torch.zeros(18, 12), torch.ones(18, 12)], ids=["zero", "rank one"])
def test_identity_and_shape_of_every_parameter_outlive_every_weight(core: str, weight: Tensor) -> None:
    owner = carried(core=core)
    before = {name: (id(value), value.shape) for name, value in owner.state_dict(keep_vars=True).items()}
    owner.weight = weight
    assert {n: (id(value), value.shape) for n, value in owner.state_dict(keep_vars=True).items()} == before
    torch.testing.assert_close(owner.weight.detach(), weight)


def test_core_of_another_shape_is_refused_and_the_own_one_kept() -> None:
    owner = carried()
    state, core = owner.state_dict(), rows_of(owner).core
    with pytest.raises(RuntimeError, match="size mismatch"):
        owner.load_state_dict({**state, "parametrizations.weight.0.core": torch.ones(4, 3)})
    assert rows_of(owner).core is core


def test_weight_of_another_shape_is_refused_by_its_own_message() -> None:
    with pytest.raises(ValueError, match=r"The weight has shape \(18, 12\); got \(12, 18\)"):
        carried().weight = torch.ones(12, 18)


def test_assigning_or_loading_forgets_a_lost_write() -> None:
    owner, state = carried(), carried().state_dict()
    nn.init.zeros_(owner.weight)
    owner.weight = torch.ones(18, 12)
    owner(torch.ones(1, 12))
    nn.init.zeros_(owner.weight)
    owner.load_state_dict(state)
    owner(torch.ones(1, 12))


def test_half_precision_frames_assemble_in_half_precision() -> None:
    """As FSDP2's mixed precision hands them out, whatever the weight is stored in."""
    owner = carried()
    for p in rows_of(owner).parameters():
        p.data = p.data.bfloat16()
    assert rows_of(owner).dtype == torch.float32
    assert owner.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_of_the_weight_survives_moves_that_are_no_casts(dtype: torch.dtype) -> None:
    owner = carried(owner=nn.Linear(12, 18, dtype=dtype)).to("cpu")
    assert owner.weight.dtype == dtype
    assert owner.to("meta").weight.dtype == dtype


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cast_modules_assemble_weights_of_the_new_dtype(dtype: torch.dtype, to: torch.dtype) -> None:
    owner = carried(owner=nn.Linear(12, 18, dtype=dtype)).to(to)
    assert owner.weight.dtype == to
    assert rows_of(owner).to(to) is rows_of(owner)


def test_moves_and_loads_keep_the_parameters_that_an_optimizer_holds() -> None:
    owner, state = carried(), carried().state_dict()
    before = [id(p) for p in owner.parameters()]
    owner.to("cpu").double().float().load_state_dict(state)
    assert [id(p) for p in owner.parameters()] == before


def test_weight_on_meta_has_its_shape_and_device() -> None:
    weight = carried().to("meta").weight
    assert (weight.shape, weight.device.type) == ((18, 12), "meta")


def test_cores_are_marked_and_frames_are_not() -> None:
    rows = rows_of(carried())
    assert vars(rows.core)["_stiefel_geo_core"] is True
    assert not hasattr(rows.frames, "_stiefel_geo_core")
    assert not hasattr(rows.rest, "_stiefel_geo_core")
    assert not hasattr(rows.rest, "manifold")


def put_by_assignment(rows: FrameRows, value: nn.Parameter) -> None:
    rows.frames = value


def put_into_the_dictionary(rows: FrameRows, value: nn.Parameter) -> None:
    rows._parameters["frames"] = value  # as FSDP2 and accelerate do


@pytest.mark.parametrize("put", [put_by_assignment, put_into_the_dictionary])
@pytest.mark.parametrize("cls", [nn.Parameter, geoopt.ManifoldParameter])
def test_parameter_put_in_as_frames_is_the_same_object_and_a_frame(put, cls) -> None:
    rows = rows_of(carried())
    value = cls(rows.frames.detach().clone(), requires_grad=False)
    put(rows, value)
    assert rows.frames is value
    assert isinstance(value, geoopt.ManifoldParameter)
    assert isinstance(value.manifold, PolarStiefel)
    assert not value.requires_grad


def test_frames_keep_a_stiefel_manifold_that_they_came_with() -> None:
    rows, own = rows_of(carried()), geoopt.EuclideanStiefel()
    rows.frames = geoopt.ManifoldParameter(rows.frames.detach().clone(), manifold=own)
    assert rows.frames.manifold is own


def test_assigned_state_dict_leaves_frames_and_cores_what_they_are() -> None:
    owner, state = carried(), carried().state_dict()
    owner.load_state_dict(state, assign=True)
    assert isinstance(rows_of(owner).frames, geoopt.ManifoldParameter)
    assert vars(rows_of(owner).core)["_stiefel_geo_core"] is True
    assert torch.equal(owner.weight.detach()[12:], state["parametrizations.weight.0.rest"])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_deep_copy_has_frames_cores_and_marks_of_its_own(requires_grad: bool) -> None:
    owner = carried(owner=nn.Linear(12, 18).requires_grad_(requires_grad))
    weight = owner.weight.detach().clone()
    twin = copy.deepcopy(owner)
    assert rows_of(twin).frames.requires_grad == requires_grad
    assert vars(rows_of(twin).core)["_stiefel_geo_core"] is True
    assert isinstance(rows_of(twin).frames.manifold, PolarStiefel)
    for p in rows_of(twin).parameters():
        p.data.zero_()
    assert torch.equal(owner.weight.detach(), weight)
    assert not twin.weight.any()


@pytest.mark.parametrize("where", ["meta", torch.float16, torch.bfloat16], ids=str)
def test_deep_copy_works_on_meta_and_in_half_precision(where: str | torch.dtype) -> None:
    owner = carried().to(where)
    twin = copy.deepcopy(owner)
    assert isinstance(rows_of(twin).frames, geoopt.ManifoldParameter)
    assert (twin.weight.device, twin.weight.dtype) == (owner.weight.device, owner.weight.dtype)


def test_representation_names_frames_core_and_weight() -> None:
    assert repr(rows_of(carried(TWO_WIDTHS))) == (
        "FrameRows(frames=(1, 12, 4), (1, 12, 7), core=learn, weight=(18, 12))"
    )
