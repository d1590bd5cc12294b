"""The retraction by fitted polynomials, against the singular value decomposition."""

import pytest
import torch
from support.cases import SHAPES

from stiefel_geo import stiefel
from stiefel_geo.retraction import MARGIN, evaluate, polar_plan, retract

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def stepped(shape: tuple[int, ...], length: float, dtype: torch.dtype = torch.float64, *, rank_one: bool = False):
    """Y = W + ξ (n, d, r) with tangent ξ of the given length; rank one puts all of it into one singular value."""
    d, r = shape[-2:]
    generator = torch.Generator().manual_seed(5)
    W = stiefel.random_frame(4, d, r, dtype=torch.float64, generator=generator)
    G = torch.randn(4, d, r, dtype=torch.float64, generator=generator)
    if rank_one:
        G = G[:, :, :1] @ torch.randn(4, 1, r, dtype=torch.float64, generator=generator)
        G = G - W @ (W.mT @ G)  # ξ orthogonal to the span of W keeps its rank
    xi = stiefel.project(W, G)
    size = torch.linalg.matrix_norm(xi, keepdim=True)
    return (W + torch.where(size > 1e-9, xi * (length / size), 0.0)).to(dtype)


@pytest.mark.parametrize("rank_one", [False, True])
@pytest.mark.parametrize("length", [0.0, 1e-6, 0.03, 0.125, 0.5, 1.0, 3.0, 10.0, 1e3])
@pytest.mark.parametrize("shape", SHAPES)
def test_retraction_is_the_polar_factor(shape: tuple[int, ...], length: float, rank_one: bool) -> None:
    Y = stepped(shape, length, rank_one=rank_one)
    tolerance = 1e-13 * max(1.0, length)
    assert (retract(Y, length) - stiefel.polar(Y)).abs().max() < tolerance


@pytest.mark.parametrize("length", [1e-6, 0.03, 0.2, 0.5, 1.0, 10.0])
def test_float32_retraction_is_orthonormal_to_rounding(length: float) -> None:
    Y = stepped((384, 64), length, torch.float32)
    assert stiefel.defect(retract(Y, length)).max() < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [2**-7, 0.25, 1.0, 4.0, 64.0])
def test_plan_reaches_its_target_on_the_whole_interval(bound: float, dtype: torch.dtype) -> None:
    sigma = torch.linspace((1 - MARGIN) ** 0.5, (1 + MARGIN + bound**2) ** 0.5, 1001, dtype=torch.float64).numpy()
    for polynomial in polar_plan(bound, EPS[dtype]):
        sigma = sigma * polynomial(sigma**2)
    assert abs(sigma - 1).max() < max(EPS[dtype] / 4, 4e-15)


def test_short_steps_take_one_small_product_and_long_ones_four() -> None:
    bounds = (2**-7, 2**-4, 2**-3, 1.0)
    degrees = {bound: [len(p.coefficients) - 1 for p in polar_plan(bound, EPS[torch.float32])] for bound in bounds}
    assert degrees == {2**-7: [2], 2**-4: [2], 2**-3: [4], 1.0: [9]}


@pytest.mark.parametrize("bound", [2**-7, 0.125, 0.25, 0.5, 1.0])
def test_polynomial_of_a_matrix_is_the_polynomial_of_its_eigenvalues(bound: float) -> None:
    polynomial = polar_plan(bound, EPS[torch.float32])[0]
    Q = stiefel.random_frame(2, 6, 6, dtype=torch.float64)
    eigenvalues = 1 + bound**2 * torch.rand(2, 6, dtype=torch.float64)
    D = Q @ torch.diag_embed(eigenvalues) @ Q.mT
    expected = Q @ torch.diag_embed(torch.from_numpy(polynomial(eigenvalues.numpy()))) @ Q.mT
    assert (evaluate(polynomial, D) - expected).abs().max() < 1e-14


def test_frames_at_rest_keep_their_bits() -> None:
    Y = stepped((12, 4), 0.1, torch.float32)
    moved = torch.tensor([True, False, True, False])
    new = retract(Y, 0.125, rest=~moved)
    assert torch.equal(new[~moved], Y[~moved])
    assert not torch.equal(new[moved], Y[moved])


@pytest.mark.parametrize(("scale", "steps"), [(0.97, 2), (1.03, 2), (0.5, 4), (1.3, 4)])
def test_frames_that_something_else_moved_come_back(scale: float, steps: int) -> None:
    W = scale * stepped((64, 16), 0.0, torch.float32)
    for _ in range(steps):
        W = retract(W, 0.125)
    assert stiefel.defect(W).max() < 1e-5
