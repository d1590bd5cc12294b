"""Parts of a model by their types, which attribute access on a Module forgets."""

from torch import nn

from stiefel_geo.attention.parametrization import FrameRows
from stiefel_geo.attention.projections import frame_rows

Projection = nn.Linear | nn.Conv2d


def projection(model: nn.Module, path: str) -> Projection:
    found = model.get_submodule(path)
    assert isinstance(found, Projection)
    return found


def qkv(model: nn.Module, block: int = 0) -> Projection:
    """The fused projection of a vision transformer's block."""
    return projection(model, f"blocks.{block}.attn.qkv")


def rows_of(owner: nn.Module) -> FrameRows:
    """What a patched projection makes its weight of."""
    found = frame_rows(owner, "weight")
    assert found is not None
    return found
