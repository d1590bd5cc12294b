"""FrameRows alone: names, kinds, what it takes and keeps, and how it survives what PyTorch does to modules."""

import copy
import sys

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_geo import PolarStiefel
from stiefel_geo.frames import FrameRows, as_frames, canonical, exact, polar
from stiefel_geo.layouts import Rows, Run

PART_MAJOR = Rows(1, (Run("qqkk", 3), Run("", 6)))
TWO_WIDTHS = Rows(1, (Run("q", 4), Run("k", 7), Run("", 7)))
HEADS_ALONE = Rows(1, (Run("qqqkkk", 3),))


def factors(rows: Rows, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [polar(exact(stack)) for stack in rows.split(weight.detach().flatten(1))[0]]
    return [F for F, _ in pairs], [C for _, C in pairs]


def carried(rows: Rows = PART_MAJOR, core: str = "learn", owner: nn.Module | None = None) -> nn.Module:
    """A projection of 18 rows and 12 columns whose weight is made of frames."""
    owner = owner or nn.Linear(12, 18)
    result = FrameRows(rows, owner.weight, core)
    result.put(*factors(rows, owner.weight), owner.weight)
    parametrize.register_parametrization(owner, "weight", result, unsafe=True)
    return owner


def rows_of(owner: nn.Module) -> FrameRows:
    return owner.parametrizations.weight[0]


def diagonal(core: str = "learn", requires_grad: bool = True) -> nn.Module:
    """The same with diagonal cores, as the canonical factorisation gives them."""
    owner = nn.Linear(12, 18).requires_grad_(requires_grad)
    result = FrameRows(PART_MAJOR, owner.weight, core)
    frames, _ = factors(PART_MAJOR, owner.weight)
    result.put(frames, [torch.arange(1.0, 13).view(4, 3)], owner.weight)
    parametrize.register_parametrization(owner, "weight", result, unsafe=True)
    return owner


@pytest.mark.parametrize(("last", "found"), [(1.1e-6, True), (9e-7, False), (0.0, False)])
def test_canonical_declines_where_the_last_singular_value_is_a_millionth_of_the_first(last: float, found: bool) -> None:
    """For every head and every scale; the second value is far from the first, so neither is taken for the other."""
    spectra = torch.tensor([[1, 1e-3, 1e-3], [1, 1e-3, last]], dtype=torch.float64) * 1e4
    W_Q, W_K = torch.eye(8, 3, dtype=torch.float64) * spectra[:, None], torch.eye(8, 3, dtype=torch.float64)
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert (canonical(W_Q, W_K.expand(2, 8, 3), zero, zero) is not None) == found


def test_largest_entry_of_every_canonical_query_column_is_positive() -> None:
    W_Q, W_K = torch.randn(2, 5, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = canonical(W_Q, W_K, torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64))
    assert found is not None
    assert torch.equal(found.query.amax(1), found.query.abs().amax(1))


def test_frames_are_trained_unless_said_otherwise() -> None:
    data = torch.eye(4, 2)[None]
    assert as_frames(data).requires_grad
    assert not as_frames(data, False).requires_grad
    assert isinstance(as_frames(data).manifold, PolarStiefel)


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
    frames, cores = factors(PART_MAJOR, other)
    rows_of(owner).update(frames, cores, other)
    assert torch.equal(rows_of(owner).frames.detach(), frames[0].float())


@pytest.mark.parametrize("core", ["learn", "freeze"])
def test_frozen_weight_has_frozen_frames_cores_and_rest(core: str) -> None:
    rows = rows_of(carried(core=core, owner=nn.Linear(12, 18).requires_grad_(False)))
    assert not any(p.requires_grad for p in rows.parameters())


def test_frames_are_contiguous_however_the_factorisation_left_them() -> None:
    weight = nn.Parameter(torch.randn(18, 12))
    (F,), (C,) = factors(PART_MAJOR, weight)
    rows = FrameRows(PART_MAJOR, weight, "learn")
    rows.put([F.mT.contiguous().mT], [C], weight)
    assert rows.frames.is_contiguous()


def test_wrong_number_of_stacks_is_refused() -> None:
    weight = nn.Parameter(torch.randn(18, 12))
    (F, G), (C, D) = factors(TWO_WIDTHS, weight)
    with pytest.raises(ValueError, match="zip"):
        FrameRows(TWO_WIDTHS, weight, "learn").put([F], [C, D], weight)
    with pytest.raises(ValueError, match="zip"):
        FrameRows(TWO_WIDTHS, weight, "learn").put([F, G], [C], weight)
    with pytest.raises(ValueError, match="zip"):
        rows_of(carried(TWO_WIDTHS)).update([F], [C, D], weight)


def test_diagonal_core_scales_the_columns_of_the_frames() -> None:
    owner = diagonal()
    rows = rows_of(owner)
    expected = (rows.frames * rows.core[:, None, :]).detach().mT.reshape(12, 12)
    torch.testing.assert_close(owner.weight.detach()[:12], expected)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("core", ["learn", "freeze"])
def test_core_changes_its_form_with_the_weight_and_the_old_one_is_retired(core: str, requires_grad: bool) -> None:
    owner = diagonal(core, requires_grad)
    old, weight, names = rows_of(owner).core, torch.randn(18, 12), list(rows_of(owner).state_dict())
    owner.weight = weight
    new = rows_of(owner).core
    assert new.shape == (4, 3, 3)
    assert isinstance(new, nn.Parameter) == (core == "learn")
    assert new.requires_grad == (core == "learn" and requires_grad)
    torch.testing.assert_close(owner.weight.detach(), weight)
    assert list(rows_of(owner).state_dict()) == names
    assert old._stiefel_geo_retired == (
        "this parameter was replaced by a core of another form, which the new weights need; "
        "build the optimizer after it"
    )


def test_state_dict_of_the_other_form_loads() -> None:
    first, second = carried(), diagonal()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.weight, first.weight)
    first.load_state_dict(diagonal().state_dict())
    assert rows_of(first).core.shape == (4, 3)


def test_core_of_no_possible_form_is_refused_and_the_own_one_kept() -> None:
    owner = diagonal()
    state = owner.state_dict()
    core = rows_of(owner).core
    with pytest.raises(RuntimeError, match="size mismatch"):
        owner.load_state_dict({**state, "parametrizations.weight.0.core": torch.ones(5, 5)})
    assert rows_of(owner).core is core
    with pytest.raises(RuntimeError, match="Missing key"):
        owner.load_state_dict({key: value for key, value in state.items() if not key.endswith("core")})


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
    assert rows.core._stiefel_geo_core is True
    assert not hasattr(rows.frames, "_stiefel_geo_core")
    assert not hasattr(rows.rest, "_stiefel_geo_core")
    assert not hasattr(rows.rest, "manifold")


def test_plain_parameter_put_in_as_frames_is_told_its_manifold() -> None:
    """FSDP2 puts its own in this way; a ManifoldParameter keeps the manifold it came with."""
    rows = rows_of(carried())
    rows.frames = nn.Parameter(rows.frames.detach().clone())
    assert isinstance(rows.frames.manifold, PolarStiefel)
    own = geoopt.EuclideanStiefel()
    rows.frames = geoopt.ManifoldParameter(rows.frames.detach().clone(), manifold=own)
    assert rows.frames.manifold is own


def test_plain_tensors_become_frames_again_unless_they_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(carried())
    rows.frames = nn.Parameter(rows.frames.detach().clone(), False)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[FrameRows.__module__], "is_sharded", lambda value: True)
        rows._apply(lambda tensor: tensor)
        assert type(rows.frames) is nn.Parameter
    rows._apply(lambda tensor: tensor)
    assert isinstance(rows.frames, geoopt.ManifoldParameter)
    assert not rows.frames.requires_grad


def test_assigned_state_dict_leaves_frames_and_cores_what_they_are() -> None:
    owner, state = carried(), carried().state_dict()
    owner.load_state_dict(state, assign=True)
    assert isinstance(rows_of(owner).frames, geoopt.ManifoldParameter)
    assert rows_of(owner).core._stiefel_geo_core is True
    assert torch.equal(owner.weight.detach()[12:], state["parametrizations.weight.0.rest"])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_deep_copy_has_frames_cores_and_marks_of_its_own(requires_grad: bool) -> None:
    owner = carried(owner=nn.Linear(12, 18).requires_grad_(requires_grad))
    weight = owner.weight.detach().clone()
    twin = copy.deepcopy(owner)
    assert isinstance(rows_of(twin), FrameRows)
    assert rows_of(twin).frames.requires_grad == requires_grad
    assert rows_of(twin).core._stiefel_geo_core is True
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
