"""Frames, plain weights and streams of gradients that the optimizer's tests share."""

from collections.abc import Callable, Sequence
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor, nn

from stiefel_geo import PolarStiefel, ScaleFreeRiemannianAdam, stiefel
from stiefel_geo.optim import batching
from stiefel_geo.optim.step import Batch, Scalars, Settings, step_

SHAPES = ((3, 12, 4), (3, 12, 4), (8, 1), (2, 2, 6, 6), (1, 9, 5))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_frame(data: Tensor) -> geoopt.ManifoldParameter:
    """`data` (..., d, r) as a parameter; geoopt's constructor would refuse half precision."""
    parameter = torch.Tensor._make_subclass(geoopt.ManifoldParameter, data, True)
    parameter.manifold = PolarStiefel()
    return parameter


def frame(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> geoopt.ManifoldParameter:
    return as_frame(stiefel.random_frame(*shape, dtype=dtype, generator=seeded(seed)))


def gaussian(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def mixed(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Frames of several shapes, and a matrix and a vector that are plain."""
    frames = [frame(*shape, dtype=dtype, seed=i) for i, shape in enumerate(SHAPES)]
    return [*frames, nn.Parameter(gaussian((5, 3), 100, dtype)), nn.Parameter(gaussian((7,), 101, dtype))]


def give_gradients(params: Sequence[Tensor], step: int) -> None:
    """The gradients of that step, the same for every call."""
    for i, p in enumerate(params):
        p.grad = gaussian(p.shape, 1000 * (step + 1) + i).to(p)


def drive(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    steps: range,
    step: Callable[[], object] | None = None,
) -> list[Tensor]:
    """Take the steps of that range, and return copies of the parameters."""
    for t in steps:
        give_gradients(params, t)
        (step or optimizer.step)()
    return values(params)


def values(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def entries(optimizer: torch.optim.Optimizer) -> list[tuple[int, str, Tensor]]:
    """Every tensor of the state with its place and name."""
    state = optimizer.state_dict()["state"]
    return [(i, key, state[i][key].clone()) for i in sorted(state) for key in sorted(state[i])]


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Equal bit for bit."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), float((a.double() - b.double()).abs().max())


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def watched(monkeypatch: pytest.MonkeyPatch, look: Callable[[Sequence[Batch]], Any]) -> list[Any]:
    """What `look` finds in the batches of every call of the optimizer's step from now on."""
    found: list[Any] = []

    def watching(batches: Sequence[Batch], scalars: Scalars, settings: Settings) -> None:
        found.append(look(batches))
        step_(batches, scalars, settings)

    monkeypatch.setattr(batching, "step_", watching)
    return found


def assert_close(one: Sequence[Tensor], other: Sequence[Tensor], atol: float) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def worst_defect(params: Sequence[Tensor]) -> float:
    frames = (p for p in params if isinstance(p, geoopt.ManifoldParameter) and p.numel())
    return max(float(stiefel.defect(p).max()) for p in frames)


def optimizer_of(params: Any, **options: Any) -> ScaleFreeRiemannianAdam:
    """With steps large enough that every test sees them."""
    return ScaleFreeRiemannianAdam(params, **{"lr": 1e-2, **options})
