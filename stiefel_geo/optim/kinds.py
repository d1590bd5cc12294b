"""Kinds of parameters, which the optimizer steps each in its own way."""

import geoopt
import torch
from torch import Tensor

from ..manifold import PolarStiefel


def is_frame(p: Tensor) -> bool:
    """Whether `p` steps as a batch of frames: a ManifoldParameter on St(d, r) with the embedded metric.

    FSDP2 makes other parameters of it, to which `FrameRows` gives the attribute `manifold` again.
    """
    return type(getattr(p, "manifold", None)) in (PolarStiefel, geoopt.EuclideanStiefel)


def is_core(p: Tensor) -> bool:
    """Whether `p` is the trained core of a patched projection, which is never decayed."""
    return getattr(p, "_stiefel_geo_core", False)


def is_other_point(p: Tensor) -> bool:
    """Whether `p` steps by the operations of its own geoopt manifold."""
    return isinstance(p, geoopt.ManifoldParameter) and not is_frame(p)


def is_half(p: Tensor) -> bool:
    """Whether `p` is stored in less than float32, so that its frames need a master."""
    return p.dtype in (torch.bfloat16, torch.float16)
