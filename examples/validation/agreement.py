"""The step on the device against float64 on the CPU, under each of torch's matmul precisions."""

from collections.abc import Iterator

import geoopt
import torch
from torch import Tensor

from stiefel_geo import PolarStiefel, ScaleFreeRiemannianAdam, stiefel

from .rows import Row, Settings, at_most

STEPS, LR = 30, 1e-3
LARGEST_GAP, LARGEST_DEFECT = 1e-5, 1e-5  # of entries; of ‖WᵀW − I‖_F


def rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(0)
    shape = (4, 16, 4) if settings.smoke else (12, 384, 64)
    start = stiefel.random_frame(*shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    reference = path(start, gradients, "cpu", torch.float64)
    yield at_most("movement of a frame over all steps, as a control", length(reference - start), None)
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        found = path(start, gradients, settings.device, torch.float32)
        where = f"{STEPS} steps in float32 at matmul precision {precision}"
        yield at_most(f"{where}: from float64 on the CPU", float((found.double() - reference).abs().max()), LARGEST_GAP)
        yield at_most(f"{where}: largest defect", float(stiefel.defect(found).max()), LARGEST_DEFECT)


def path(start: Tensor, gradients: list[Tensor], device: str, dtype: torch.dtype) -> Tensor:
    """The frames after all steps, on the CPU."""
    frame = geoopt.ManifoldParameter(start.to(device, dtype, copy=True), manifold=PolarStiefel())
    optimizer = ScaleFreeRiemannianAdam([frame], lr=LR)
    for G in gradients:
        frame.grad = G.to(device, dtype)
        optimizer.step()
    end: Tensor = frame.detach().cpu()
    return end


def length(X: Tensor) -> float:
    return float(torch.linalg.matrix_norm(X).max())
