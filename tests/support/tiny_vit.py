"""A model small enough to train in a test, its data, and a loop."""

from collections.abc import Callable, Iterable
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import stiefel_geo
from stiefel_geo import stiefel

SHAPE: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 10,
}


def tiny_vit(*, patched: bool = True, **changes: Any) -> VisionTransformer:
    """timm's VisionTransformer, the same weights at every call; four frames of St(32, 16) in each of three blocks."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**SHAPE, **changes})
    assert isinstance(model, VisionTransformer)
    if patched:
        stiefel_geo.patch(model)
    return model


def batch(index: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.randint(10, (size,), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    images, labels = batch(index)
    return nn.functional.cross_entropy(model(images.to(dtype)), labels)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], after: Callable[[], object] = lambda: None
) -> None:
    """One step for each batch index."""
    dtype = next(model.parameters()).dtype
    for index in steps:
        loss_of(model, index, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def frame_values(model: nn.Module) -> list[Tensor]:
    return [frame.detach().clone() for _, frame in stiefel_geo.frames(model)]


def largest_defect(model: nn.Module) -> float:
    return max(float(stiefel.defect(frame).max()) for frame in frame_values(model))


def gap(one: nn.Module, other: nn.Module) -> float:
    """Largest difference between the parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)
