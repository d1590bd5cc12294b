"""Copies whose weights are averages: an average of orthonormal frames is not orthonormal, and can be made so."""

import torch
from torch import nn

from . import stiefel
from .attention.patching import frames
from .sharding import local


@torch.no_grad()
def project_frames_(model: nn.Module) -> float:
    """Put every frame of `model` back on the manifold, in place; returns the largest defect ‖WᵀW − I‖_F found.

    For copies that something averaged: timm's `ModelEmaV3`, torch's `AveragedModel`, weights under timm's
    `Lookahead` after the last step. Call it before the copy is evaluated or saved, not between updates (it does no
    harm there, but an average needs no manifold).
    The nearest frame in the Frobenius norm is taken (the polar factor, in float64); everything else stays.

    Where the path ran over a wide arc the average is short: its singular values are the cosines of half the
    angles. Projection undoes that for the frames, so the logits of the copy grow by as much.
    """
    largest = 0.0
    for _, parameter in frames(model):
        W = local(parameter.detach())
        if W.numel():
            largest = max(largest, float(stiefel.defect(W).max()))
            W.copy_(stiefel.polar(W.double()))
    return largest
