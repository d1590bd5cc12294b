"""Shapes, seeds and small makers shared by the optimizer's tests."""

from collections.abc import Sequence

import geoopt
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stiefel_geo import PolarStiefel
from stiefel_geo.stiefel import random_frame

from . import reference

STIEFEL = PolarStiefel()

# (..., d, r): tall, square, one column, a column of one entry, two leading dimensions, several heads, real widths.
SHAPES = [
    (16, 4),
    (8, 8),
    (9, 1),
    (1, 1),
    (2, 3, 10, 3),
    (5, 12, 4),
    (2, 192, 64),
]


def frame(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> geoopt.ManifoldParameter:
    """A uniformly drawn ManifoldParameter on PolarStiefel."""
    generator = torch.Generator().manual_seed(seed)
    return geoopt.ManifoldParameter(random_frame(*shape, dtype=dtype, generator=generator), manifold=STIEFEL)


def gradients(shape: Sequence[int], steps: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Tensor]:
    """Gradients with a steady part and a random one, as training gives them."""
    generator = torch.Generator().manual_seed(seed)
    steady = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return [
        (steady + 2 * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype) for _ in range(steps)
    ]


def matrices(p: Tensor) -> list[NDArray[np.float64]]:
    """The d×r matrices of a parameter, as float64 arrays of their own."""
    flat = p.detach().double().reshape(-1, *p.shape[-2:])
    return [matrix.numpy().copy() for matrix in flat]


def twins(p: Tensor) -> list[reference.Frame]:
    """The literal twin of every frame of `p`, at its start."""
    return [reference.Frame(W) for W in matrices(p)]
