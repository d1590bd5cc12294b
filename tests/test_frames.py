"""The two factorisations and the parametrization that carries them, without any library's modules."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_geo import PolarStiefel, stiefel
from stiefel_geo.frames import FrameRows, canonical, polar
from stiefel_geo.layouts import Layout, LayoutError, Rows, Run

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


@pytest.mark.parametrize("shape", SHAPES)
def test_canonical_keeps_every_logit_with_biases(shape: tuple[int, int, int]) -> None:
    h, d, r = shape
    W_Q, W_K, x, y = heads(shape), heads(shape, 1), heads((h, 7, d), 2), heads((h, 7, d), 3)
    b_Q, b_K = heads((h, 1, r), 4)[:, 0], heads((h, 1, r), 5)[:, 0]
    found = canonical(W_Q, W_K, b_Q, b_K)
    assert found is not None
    logits = (x @ W_Q + b_Q[:, None]) @ (y @ W_K + b_K[:, None]).mT
    root = found.root[:, None]
    query = x @ (found.query * root) + found.query_bias[:, None]
    key = y @ (found.key * root) + found.key_bias[:, None]
    torch.testing.assert_close(query @ key.mT, logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_canonical_frames_are_orthonormal(shape: tuple[int, int, int]) -> None:
    zero = torch.zeros(shape[0], shape[2], dtype=torch.float64)
    found = canonical(heads(shape), heads(shape, 1), zero, zero)
    assert found is not None
    assert max(stiefel.defect(found.query).max(), stiefel.defect(found.key).max()) < 1e-12


def test_canonical_signs_do_not_depend_on_the_gauge_of_the_weights() -> None:
    W_Q, W_K, zero = heads((2, 12, 4)), heads((2, 12, 4), 1), torch.zeros(2, 4, dtype=torch.float64)
    first = canonical(W_Q, W_K, zero, zero)
    gauge = heads((2, 4, 4), 2)
    second = canonical(W_Q @ gauge, W_K @ torch.linalg.inv(gauge).mT, zero, zero)
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first.query, second.query, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["zero", "rank-deficient"])
def test_canonical_declines_near_singular_products(kind: str) -> None:
    zero = torch.zeros(3, 8, dtype=torch.float64)
    assert canonical(defective(kind, (3, 24, 8)), heads((3, 24, 8)), zero, zero) is None


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
    (stack,), _ = rows.rows.split(linear.weight.detach().double())
    F, C = polar(stack)
    rows.put([F], [C], linear.weight)
    parametrize.register_parametrization(linear, "weight", rows, unsafe=True)
    return linear


def rows_of(linear: nn.Linear) -> FrameRows:
    return linear.parametrizations.weight[0]  # type: ignore[union-attr, index, return-value]


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


def test_setting_data_of_an_assembled_weight_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="a write into it is lost"):
        carried().weight.data = torch.ones(18, 12)


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
