"""The geometry of St(d, r), against its definitions."""

import pytest
import torch
from support.cases import SHAPES

from stiefel_geo import stiefel


def draw(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    W = stiefel.random_frame(*shape, dtype=torch.float64, generator=generator)
    return W, torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_projection_is_tangent(shape: tuple[int, ...]) -> None:
    W, G = draw(shape)
    xi = stiefel.project(W, G)
    assert (W.mT @ xi + xi.mT @ W).abs().max() < 1e-13


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_projection_removes_is_normal(shape: tuple[int, ...]) -> None:
    W, G = draw(shape)
    xi = stiefel.project(W, torch.randn_like(G))
    assert ((G - stiefel.project(W, G)) * xi).sum().abs() < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_random_frames_are_orthonormal(shape: tuple[int, ...]) -> None:
    W, _ = draw(shape)
    assert stiefel.defect(W).max() < 1e-13
    assert stiefel.defect(W).shape == shape[:-2]


def test_random_frames_are_uniform() -> None:
    """Uniform columns have E[W_ij²] = 1/d, E[W_ij⁴] = 3/(d(d+2)) for every entry; a QR with fixed signs has not."""
    d = 3
    W = stiefel.random_frame(20_000, d, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (W.square().mean(0) - 1 / d).abs().max() < 0.01
    assert (W.pow(4).mean(0) - 3 / (d * (d + 2))).abs().max() < 0.01
    assert W.mean(0).abs().max() < 0.02


def test_defect_is_the_frobenius_distance_of_the_gram_matrix() -> None:
    W, _ = draw((16, 4))
    assert stiefel.defect(1.1 * W).item() == pytest.approx(0.21 * 2, rel=1e-12)


@pytest.mark.parametrize("d", [5, 96, 193, 384, 768])
def test_blocked_cross_product_is_the_product(d: int) -> None:
    X, Y = torch.randn(2, 3, d, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (stiefel.cross(X, Y) - X.mT @ Y).abs().max() < 1e-12


def test_blocks_lower_the_error_of_a_gram_matrix_in_float32() -> None:
    W = stiefel.random_frame(8, 768, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    exact = W.double().mT @ W.double()
    blocked, whole = (torch.linalg.matrix_norm(gram - exact).max() for gram in (stiefel.cross(W, W), W.mT @ W))
    assert blocked < 0.9 * whole


def test_polar_factor_is_nearer_than_any_other_frame() -> None:
    _, Y = draw((10, 3))
    nearest = stiefel.polar(Y)
    others = stiefel.random_frame(500, 10, 3, dtype=torch.float64)
    nearby = stiefel.polar(nearest + 1e-2 * torch.randn(500, 10, 3, dtype=torch.float64))
    distance = torch.linalg.matrix_norm(Y - nearest)
    assert torch.linalg.matrix_norm(Y - others).min() > distance
    assert torch.linalg.matrix_norm(Y - nearby).min() > distance


def test_row_block_is_the_largest_divisor_from_64_to_128_or_d_itself() -> None:
    for d in [*range(1, 1100), 64 * 131, 128 * 131]:
        divisors = [rows for rows in range(64, 129) if d % rows == 0]
        assert stiefel._row_block(d) == max(divisors, default=d), d


def test_defect_is_measured_in_float64_without_a_graph() -> None:
    W = stiefel.random_frame(2, 48, 16, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    found = stiefel.defect(W.requires_grad_())
    assert torch.equal(found, stiefel.defect(W.detach().double()))
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_random_frame_has_the_asked_dtype_and_torchs_default_without(dtype: torch.dtype | None) -> None:
    assert stiefel.random_frame(4, 2, dtype=dtype).dtype == (dtype or torch.get_default_dtype())


def test_random_frame_follows_from_its_generator_alone() -> None:
    one, other = (stiefel.random_frame(4, 2, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, other)


def test_frames_are_drawn_and_measured_on_the_device_asked_for() -> None:
    W = stiefel.random_frame(2, 5, 4, 3, device="meta")
    assert (W.device.type, stiefel.defect(W).device.type) == ("meta", "meta")
