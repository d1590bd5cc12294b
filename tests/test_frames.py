"""The factorisation and the parametrization that holds it, without any library's modules."""

import pytest
import torch
from support.parts import rows_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_geo import PolarStiefel, stiefel
from stiefel_geo.attention.factorisation import polar
from stiefel_geo.attention.layouts import Layout, LayoutError, Rows, Run
from stiefel_geo.attention.parametrization import ONE_GRAPH_FROM, FrameRows

SHAPES = [(3, 24, 8), (2, 8, 8), (4, 16, 1), (1, 5, 3)]


def heads(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def defective(kind: str, shape: tuple[int, int, int]) -> Tensor:
    W = heads(shape)
    return torch.zeros_like(W) if kind == "zero" else W * torch.linspace(0, 1, shape[-1], dtype=W.dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_factors_multiply_to_the_weight(shape: tuple[int, int, int]) -> None:
    W = heads(shape)
    F, C = polar(W)
    torch.testing.assert_close(F @ C, W, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_core_is_symmetric_positive(shape: tuple[int, int, int]) -> None:
    _, C = polar(heads(shape))
    assert torch.equal(C, C.mT)
    assert torch.linalg.eigvalsh(C).min() > 0


@pytest.mark.parametrize("kind", ["zero", "rank-deficient"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_polar_is_lossless_and_orthonormal_for_singular_weights(kind: str, shape: tuple[int, int, int]) -> None:
    W = defective(kind, shape)
    F, C = polar(W)
    assert stiefel.defect(F).max() < 1e-12
    torch.testing.assert_close(F @ C, W, rtol=1e-13, atol=1e-13)


ROWS = {
    "part-major": Rows(1, (Run("qqkk", 3), Run("", 6))),
    "per head": Rows(2, (Run("qk", 3), Run("", 4))),
    "rows ahead": Rows(1, (Run("", 5), Run("qqkk", 3), Run("", 6))),
    "two widths": Rows(1, (Run("q", 1), Run("k", 7), Run("", 7))),
    "heads alone": Rows(1, (Run("qq", 4),)),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_join_is_the_inverse_of_split(rows: Rows) -> None:
    weight = torch.randn(rows.groups * sum(run.rows for run in rows.runs), 9)
    stacks, rest = rows.split(weight)
    assert torch.equal(rows.join([stack.mT for stack in stacks], rest), weight)


def test_layout_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(LayoutError, match=r"40 rows are not q \+ k \+ v"):
        Layout({"qkv": "q k v"}, heads=2, width=30).arrange("q k v", 40, nn.Identity())


def carried(core: str = "learn", dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = nn.Linear(12, 18, dtype=dtype)
    rows = FrameRows(ROWS["part-major"], linear.weight, core)
    parametrize.register_parametrization(linear, "weight", rows, unsafe=True)
    return linear


WRITES = {
    "nn.init": lambda linear: nn.init.zeros_(linear.weight),
    "copy_": lambda linear: linear.weight.detach().copy_(torch.ones(18, 12)),
    "a slice": lambda linear: linear.weight[:2].detach().zero_(),
    ".data": lambda linear: linear.weight.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_into_an_assembled_weight_raises_at_the_next_use(write) -> None:
    linear = carried()
    write(linear)
    with pytest.raises(RuntimeError, match="a write into it is lost"):
        linear(torch.ones(1, 12))


def test_write_into_an_assembled_weight_raises_when_saving() -> None:
    linear = carried()
    nn.init.zeros_(linear.weight)
    with pytest.raises(RuntimeError, match="a write into it is lost"):
        linear.state_dict()


def test_setting_data_of_an_assembled_weight_assigns_it() -> None:
    linear, weight = carried(), torch.randn(18, 12)
    linear.weight.data = weight
    torch.testing.assert_close(linear.weight.detach(), weight)
    linear.weight.data += 1.0
    torch.testing.assert_close(linear.weight.detach(), weight + 1)


SETTINGS = {
    "grad": lambda weight: setattr(weight, "grad", torch.ones(18, 12)),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "register_hook": lambda weight: weight.register_hook(lambda grad: grad),
    "post hook": lambda weight: weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS.keys())
def test_what_would_be_lost_with_an_assembled_weight_is_refused(change, grad) -> None:
    linear = carried()
    with grad(), pytest.raises(RuntimeError, match="assembled anew at every use, and what is set on it goes with it"):
        change(linear.weight)
    assert linear.weight.requires_grad


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_under_inference_mode_raises_at_the_next_use(write) -> None:
    linear = carried()
    with torch.inference_mode():
        write(linear)
        with pytest.raises(RuntimeError, match="a write into it is lost"):
            linear(torch.ones(1, 12))


def test_weight_that_is_part_of_a_graph_is_refused_and_nothing_changes() -> None:
    linear = carried()
    before = linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match="found a weight with a graph"):
        linear.weight = torch.ones(18, 12, requires_grad=True)
    assert torch.equal(linear.weight, before)


def test_assigned_weight_is_what_the_module_holds() -> None:
    linear, weight = carried(), torch.randn(18, 12)
    linear.weight = weight
    torch.testing.assert_close(linear.weight.detach(), weight)


def test_assigned_weight_keeps_the_parameters_that_an_optimizer_holds() -> None:
    linear = carried()
    before = [id(parameter) for parameter in linear.parameters()]
    linear.weight = torch.randn(18, 12)
    assert [id(parameter) for parameter in linear.parameters()] == before


def test_assigning_to_an_identity_core_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unpatch"):
        carried("identity").weight = torch.randn(18, 12)


def test_half_precision_weights_have_float32_frames_and_a_half_precision_product() -> None:
    linear = carried(dtype=torch.bfloat16)
    assert rows_of(linear).frames.dtype == torch.float32
    assert linear.weight.dtype == torch.bfloat16


def test_a_model_cast_to_bfloat16_computes_in_bfloat16() -> None:
    linear = carried().to(torch.bfloat16)
    assert linear(torch.ones(1, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_frames_stay_manifold_parameters_through_meta_and_back() -> None:
    linear = carried().to("meta").to_empty(device="cpu")
    assert isinstance(rows_of(linear).frames.manifold, PolarStiefel)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_does_not_touch_the_product_of_frame_and_core(compiled: bool) -> None:
    if compiled and torch.__version__ < ONE_GRAPH_FROM:
        pytest.skip("this torch's compiler leaves the product of frame and core to Python")
    rows = rows_of(carried())
    assemble = torch.compile(rows, fullgraph=True, backend="eager") if compiled else rows
    with torch.autocast("cpu", torch.bfloat16):
        weight = assemble()
    assert torch.equal(weight, rows())


def test_frozen_core_stays_frozen_when_the_model_is_thawed() -> None:
    linear = carried("freeze").requires_grad_(True)
    assert not rows_of(linear).core.requires_grad


def test_polar_core_stays_symmetric_however_it_is_trained() -> None:
    linear = carried()
    rows = rows_of(linear)
    before = linear.weight.detach().clone()
    skew = torch.randn(4, 3, 3)
    rows.core.data.add_(skew - skew.mT)
    torch.testing.assert_close(linear.weight.detach(), before)
