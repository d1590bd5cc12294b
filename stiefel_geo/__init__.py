"""Stiefel attention for timm: orthonormal query and key frames, and the optimizer that trains them."""

from .certificates import Certificate, certify
from .groups import param_groups
from .manifold import PolarStiefel
from .optim import ScaleFreeRiemannianAdam
from .patching import PatchReport, frames, patch, plain_state_dict, unpatch

__all__ = [
    "Certificate",
    "PatchReport",
    "PolarStiefel",
    "ScaleFreeRiemannianAdam",
    "certify",
    "frames",
    "param_groups",
    "patch",
    "plain_state_dict",
    "unpatch",
]
__version__ = "0.1.0"
