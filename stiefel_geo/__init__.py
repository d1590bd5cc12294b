"""Stiefel attention for timm: orthonormal query and key frames, and the optimizer that trains them."""

from .manifold import PolarStiefel

__all__ = ["PolarStiefel"]
__version__ = "0.1.0"
