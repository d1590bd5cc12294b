"""Stiefel attention for timm: orthonormal query and key frames, and the optimizer that trains them."""

from .attention.layouts import Layout, register_attention
from .attention.patching import PatchReport, frames, patch, plain_state_dict, unpatch, unpatched
from .averaging import project_frames_
from .certificates import Certificate, certify
from .groups import param_groups, scale_lr_
from .integrations import timm_attention, transformers_attention, transformers_rule  # noqa: F401  # known attention
from .manifold import PolarStiefel
from .optim import ScaleFreeRiemannianAdam

__all__ = [
    "Certificate",
    "Layout",
    "PatchReport",
    "PolarStiefel",
    "ScaleFreeRiemannianAdam",
    "certify",
    "frames",
    "param_groups",
    "patch",
    "plain_state_dict",
    "project_frames_",
    "register_attention",
    "scale_lr_",
    "unpatch",
    "unpatched",
]
__version__ = "0.2.0"
